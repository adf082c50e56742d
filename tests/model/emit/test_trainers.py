"""Remedies reach vLLM, verl and TRL in their own words, or are refused. Other trainers get them as notes."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import plans
import pytest
from verl_config import composed

from fp8plan.errors import ConfigError
from fp8plan.model.emit.trainers import FP32_SCALES, PRIME_RL, TRAINERS, TRL, in_all_words
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.remedies import TRAINER_PRECISIONS, Remedies

MOE = "Qwen/Qwen3-30B-A3B"
REPLAY = Remedies(router_replay=True)


def plan(remedies: Remedies) -> Plan:
    limits = EngineLimits(enable_return_routed_experts=remedies.router_replay)
    return plans.plan(model=MOE, chosen=plans.index("fp8_block"), remedies=remedies, limits=limits)


@pytest.mark.verl
@pytest.mark.parametrize("precision", TRAINER_PRECISIONS)
@pytest.mark.parametrize("replay", [False, True])
def test_verl_composes_the_remedies(precision: str, replay: bool) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(plan(Remedies(replay, precision)).verl_overrides())
    actor, rollout = config.actor_rollout_ref.actor, omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.enable_rollout_routing_replay is replay
    if not replay and precision == "bf16":
        assert "megatron" not in actor  # verl's own engine stays
        return
    assert actor.strategy == "megatron"
    assert actor.megatron.router_replay.mode == ("R3" if replay else "disabled")
    recipe = {"bf16": None, "fp8_tensor": "tensorwise"}.get(precision, "blockwise")
    assert actor.megatron.override_transformer_config.get("fp8_recipe") == recipe
    assert actor.megatron.override_transformer_config.get("fp8") == (recipe and "e4m3")
    assert actor.optim.override_optimizer_config.get("fp8_recipe") == recipe
    variables = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    scales = {"fp8_block": "1", "fp8_block_pow2": "0"}
    assert variables.get(FP32_SCALES) == scales.get(precision)


def test_a_trainer_with_power_of_two_scales_needs_them_in_the_rollout() -> None:
    for precision, variable in (("bf16", "0"), ("fp8_block", "0"), ("fp8_tensor", "0"), ("fp8_block_pow2", "1")):
        made = plan(Remedies(trainer_precision=precision))
        assert made.env() == {"VLLM_USE_DEEP_GEMM_E8M0": variable}
        assert json.loads(made.emit("vllm"))["env"] == made.env()
        assert made.setup().e8m0 is (variable == "1")
        assert made.env("bf16") == {}
        assert replace(made, gpu="b200").env() == {"VLLM_USE_DEEP_GEMM_E8M0": "1"}  # which has no others
        ada = replace(made, gpu="l40s")  # without DeepGEMM
        assert ada.env() == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
        assert not ada.setup().e8m0


def test_a_note_names_the_trainer_whose_numbers_are_the_engines() -> None:
    for gpu, precision, fits in (
        ("h200_sxm", "fp8_block", None),
        ("h200_sxm", "fp8_block_pow2", None),  # the engine follows
        ("h200_sxm", "fp8_tensor", "fp8_block"),
        ("b200", "fp8_block", "fp8_block_pow2"),
        ("b200", "fp8_block_pow2", None),
        ("l40s", "fp8_block_pow2", "fp8_block"),
    ):
        made = replace(plan(Remedies(trainer_precision=precision)), gpu=gpu)
        for target in ("vllm", "verl"):
            told = made.emit(target)
            assert ("each rounds to numbers that the other does not have" in told) == (fits is not None), (gpu, target)
            assert fits is None or f"plan again with --trainer-precision {fits}" in told
        assert "each rounds" not in made.emit("vllm", "bf16")


def test_trl_refuses_remedies_that_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"does not train in fp8_block; allowed: --trainer-precision bf16$"):
        plan(Remedies(trainer_precision="fp8_block")).trl_config()
    assert plan(Remedies(keep_bf16=(1, 1))).trl_config()


def test_trl_replays_in_fp8plans_trainer_colocated() -> None:
    settings = json.loads(plan(REPLAY).emit("trl"))
    assert settings["grpo_config"]["vllm_mode"] == "colocate"
    assert settings["trainer"].startswith("GRPOTrainer(..., plan=")  # the plan has the remedy
    with pytest.raises(ConfigError, match="server: its route returns no experts"):
        plan(REPLAY).trl_config(mode="server")


def test_notes_have_the_words_of_every_trainer() -> None:
    remedies = Remedies(router_replay=True, trainer_precision="fp8_block_pow2")
    notes = json.loads(plan(remedies).emit("vllm"))["notes"]
    assert [note for note in notes if note.startswith("in the trainer: ")] == [
        f"in the trainer: {words}" for words in in_all_words(remedies)
    ]
    replaying = [words.split(": ")[0] for words in in_all_words(REPLAY)]
    assert replaying == ["verl", "TRL", "NeMo RL", "slime", "SkyRL", "prime-rl"]
    said = dict(words.split(": ", 1) for words in in_all_words(remedies))
    assert said["slime"] == (
        "--use-rollout-routing-replay --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise "
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0"
    )
    # A shell leaves Hydra's quotes, which make it text.
    assert shlex.split(said["verl"])[-1] == f"+ray_kwargs.ray_init.runtime_env.env_vars.{FP32_SCALES}='0'"
    assert said["prime-rl"].endswith('router_replay = true trainer.model.quantization.type = "fp8"  # on Blackwell')
    assert in_all_words(Remedies(keep_bf16=(1, 1))) == []
    assert json.loads(plan(Remedies()).emit("vllm"))["notes"] == []


def test_every_trainer_replays_and_has_a_recipe_for_each_precision_or_says_that_it_does_not() -> None:
    for trainer in TRAINERS:
        assert trainer.router_replay
        assert trainer.words(Remedies()) == ()
        for precision in TRAINER_PRECISIONS[1:]:
            remedies = Remedies(trainer_precision=precision)
            if trainer is TRL or (trainer is PRIME_RL and precision == "fp8_tensor"):
                refusal = f"{trainer.name} does not train in {precision}; allowed: --trainer-precision bf16"
                with pytest.raises(ConfigError, match=refusal):
                    trainer.words(remedies)
                assert any(refusal in words for words in in_all_words(remedies))
            else:
                words = " ".join(trainer.words(remedies))
                assert ("tensorwise" in words) == (precision == "fp8_tensor")
                assert "{" not in words
