"""The remedies in the words of each trainer: router replay, and the precision of its linears.

`emit` writes these words, and the doctor quotes them. Each was read at the place that its comment names.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fp8plan.errors import ConfigError
from fp8plan.model.risk.remedies import BF16, BLOCK, POW2, TENSOR, Remedies
from fp8plan.model.targets import TARGETS

# TransformerEngine's variable: "1" for FP32 scales of blocks, else they are powers of two (Float8BlockScaling in
# transformer_engine/common/recipe/__init__.py).
FP32_SCALES: Final = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
# vLLM's: DeepGEMM rounds the scales of FP8 blocks to powers of two unless it is "0" (vllm/envs.py, 0.33).
ENGINE_E8M0: Final = "VLLM_USE_DEEP_GEMM_E8M0"

# What a side computes its linears in, by the name of a trainer's precision.
GRIDS: Final = {
    BF16: "BF16",
    BLOCK: "FP8 in blocks, with FP32 scales",
    POW2: "FP8 in blocks, with scales that are powers of two",
    TENSOR: "FP8 with one scale for each matrix",
}


def two_grids(trainer: str, engine: str) -> str:
    """A sentence on a trainer and an engine that both round to FP8, but to other numbers; "" for any other pair."""
    if BF16 in (trainer, engine) or trainer == engine:
        return ""
    sides = f"the trainer has {GRIDS[trainer]}, and the engine {GRIDS[engine]}"
    return f"{sides}: each rounds to numbers that the other does not have"


def precision_of(fp8: object, recipe: str | None, fp32_scales: str | None) -> str:
    """The precision of a trainer on TransformerEngine, as one of TRAINER_PRECISIONS.

    fp8, recipe: `fp8` and `fp8_recipe` of Megatron-Core's TransformerConfig; without a recipe it takes "delayed"
    fp32_scales: the value of FP32_SCALES; None: it is not set

    Raises ConfigError for another recipe, such as mxfp8.
    """
    if not fp8:
        return BF16
    if recipe == "blockwise":
        return BLOCK if fp32_scales == "1" else POW2
    if recipe in (None, "delayed", "tensorwise"):
        return TENSOR
    raise ConfigError(f"fp8_recipe is {recipe!r}; allowed: blockwise, as the engine's FP8, or tensorwise, or delayed")


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer and the words for its configuration.

    target:        its target in TARGETS of fp8plan/model/targets.py
    router_replay: those that replay the engine's experts
    precisions:    trainer precision -> its words; a missing one: the trainer does not have it
    """

    target: str
    router_replay: tuple[str, ...]
    precisions: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        """Its name in a sentence."""
        return str(TARGETS[self.target].sender)

    def words(self, remedies: Remedies) -> tuple[str, ...]:
        """The words for these remedies, in their order. Raises ConfigError for a remedy that it does not have."""
        if remedies.router_replay and not self.router_replay:
            raise ConfigError(f"{self.name} does not replay experts; plan again without --router-replay")
        words = self.router_replay if remedies.router_replay else ()
        precision = remedies.trainer_precision
        if precision == BF16:
            return words
        if precision not in self.precisions:
            allowed = ", ".join((BF16, *self.precisions))
            raise ConfigError(f"{self.name} does not train in {precision}; allowed: --trainer-precision {allowed}")
        return (*words, *self.precisions[precision])

    def typed(self, remedies: Remedies) -> str:
        """The words in one line. A word with quotes has a shell's around it. Raises ConfigError as `words` does."""
        return " ".join(shlex.quote(word) if "'" in word else word for word in self.words(remedies))


def _megatron(recipes: tuple[str, ...], scales: str, *more: str) -> dict[str, tuple[str, ...]]:
    """The words of a trainer on Megatron-Core with TransformerEngine.

    Megatron-Core's guide to low-precision training has the recipes. Of them verl's, slime's and SkyRL's pages show
    blockwise alone.

    recipes: texts that end in the name of a recipe (fp8_recipe of Megatron-Core's TransformerConfig)
    scales:  text with {} for the value of FP32_SCALES
    more:    further words, for all recipes
    """
    blocks = (*more, *(f"{recipe}blockwise" for recipe in recipes))
    return {
        BLOCK: (*blocks, scales.format("1")),
        POW2: (*blocks, scales.format("0")),
        TENSOR: (*more, *(f"{recipe}tensorwise" for recipe in recipes)),
    }


# verl 0.9.1: trainer/config/engine/megatron.yaml and examples/router_replay/README.md; docs/low_precision/fp8.md and
# PR 4223. The forward pass is E4M3 in its "hybrid", too. main_ppo.py merges ray_init.runtime_env into that of all
# workers. The keys are those of the Megatron engine.
_ACTOR: Final = "actor_rollout_ref.actor"
VERL: Final = Trainer(
    "verl",
    ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", f"{_ACTOR}.megatron.router_replay.mode=R3"),
    _megatron(
        (
            f"+{_ACTOR}.megatron.override_transformer_config.fp8_recipe=",
            f"+{_ACTOR}.optim.override_optimizer_config.fp8_recipe=",
        ),
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{FP32_SCALES}='{{}}'",
        f"+{_ACTOR}.megatron.override_transformer_config.fp8=e4m3",
    ),
)

# NeMo RL: docs/guides/router-replay.md and PR 2590; docs/fp8.md and examples/configs/grpo_math_8B_megatron_fp8.yaml.
_MEGATRON_CFG: Final = "++policy.megatron_cfg"
_OF_NEMO: Final = _megatron(
    (f"{_MEGATRON_CFG}.fp8_cfg.fp8_recipe=",),
    f"{_MEGATRON_CFG}.env_vars.{FP32_SCALES}='{{}}'",
    f"{_MEGATRON_CFG}.fp8_cfg.enabled=true",
    f"{_MEGATRON_CFG}.fp8_cfg.fp8=e4m3",
)
_POW2_ROLLOUT: Final = tuple(
    f"++policy.generation.vllm_cfg.pow2_{part}_scaling_factors=true" for part in ("weight", "activation")
)
NEMO_RL: Final = Trainer(
    "nemo-rl",
    ("++policy.router_replay.enabled=true",),
    {**_OF_NEMO, POW2: (*_OF_NEMO[POW2], *_POW2_ROLLOUT)},
)

# slime: slime/utils/arguments.py and docs/en/get_started/customization.md; docs/en/advanced/low-precision.md and
# scripts/low_precision, with Megatron-LM's own arguments. Ray actors get FP32_SCALES of the environment, by default 1
# (slime/ray/actor_group.py).
SLIME: Final = Trainer(
    "slime",
    ("--use-rollout-routing-replay",),
    _megatron(("--fp8-recipe ",), f"{FP32_SCALES}={{}}", "--transformer-impl transformer_engine", "--fp8-format e4m3"),
)

# SkyRL 0.3.0: PR 1273, docs/content/docs/algorithms/off_policy_correction.mdx. It hands FP32_SCALES of the environment
# on, by default 1 on Hopper (prepare_runtime_environment).
_TRANSFORMER: Final = "trainer.policy.megatron_config.transformer_config_kwargs"
SKYRL: Final = Trainer(
    "skyrl",
    (
        "generator.inference_engine.enable_return_routed_experts=True",
        "trainer.policy.megatron_config.moe_enable_routing_replay=True",
        "generator.inference_engine.distributed_executor_backend=mp",
    ),
    _megatron(
        (f"{_TRANSFORMER}.fp8_recipe=",),
        f"{FP32_SCALES}={{}}",
        f"{_TRANSFORMER}.fp8=e4m3",
    ),
)

# prime-rl: PRs 2487 and 2808, docs/inference.md; docs/advanced.md. DeepGEMM's blocks have FP32 scales on Hopper, and
# powers of two on Blackwell (src/prime_rl/trainer/models/kernels/fp8_utils.py, ue8m0_for_device): no word changes that.
_QUANTIZATION: Final = 'trainer.model.quantization.type = "fp8"'
PRIME_RL: Final = Trainer(
    "prime-rl",
    ("trainer.enable_router_replay = true",),
    {BLOCK: (f"{_QUANTIZATION}  # on Hopper",), POW2: (f"{_QUANTIZATION}  # on Blackwell",)},
)

# No file of TRL 1.16 names routed experts or a recipe of FP8. fp8plan's trainer replays (fp8plan/integrations/trl).
TRL: Final = Trainer("trl", ("fp8plan.integrations.trl.GRPOTrainer(..., router_replay=True)",), {})

# OpenRLHF 0.11.2: openrlhf/cli/train_ppo_ray.py names neither.
OPENRLHF: Final = Trainer("openrlhf", (), {})

TRAINERS: Final = (VERL, TRL, NEMO_RL, SLIME, SKYRL, PRIME_RL)


def in_all_words(remedies: Remedies) -> list[str]:
    """A sentence for each trainer: its words for these remedies, or the reason why it has none. [] without remedies"""
    if not remedies.router_replay and remedies.trainer_precision == BF16:
        return []
    sentences = []
    for trainer in TRAINERS:
        try:
            sentences.append(f"{trainer.name}: {trainer.typed(remedies)}")
        except ConfigError as error:
            sentences.append(str(error))
    return sentences
