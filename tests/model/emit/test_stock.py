"""The settings of trainers without fp8plan: their own code parses them, or a dated table has their keys.

`stock_keys.json` was read by tools from the commits that it names. verl's, SkyRL's and OpenRLHF's code is installed.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import sys
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import plans
import pytest
from verl_config import configured

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan as planned
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.targets import TARGETS
from fp8plan.model.workload import Workload

KEYS = json.loads((Path(__file__).parents[2] / "data" / "stock_keys.json").read_text())
STOCK = [target for target, starts in TARGETS.items() if starts.sender and starts.measures != "fp8plan"]
MOE = "Qwen/Qwen3-30B-A3B"
# No limit at its default, so that one that gets lost shows.
LIMITS = EngineLimits(
    gpu_memory_utilization=0.71,
    max_model_len=9000,
    max_num_seqs=777,
    max_num_batched_tokens=2222,
    enable_prefix_caching=False,
    enforce_eager=True,
    tensor_parallel_size=2,
)
BOUND = {"token_tis": 1.75}
AT_ONCE = 13
TURNS = {**plans.WORKLOAD, "turns": {"concurrent": AT_ONCE}}


def layout(precision: str, **changes: Any) -> Plan:
    """A plan of three replicas of two GPUs in this precision."""
    choices = tuple(plans.choice(name, tensor_parallel=2, data_parallel=3) for name in PRESETS)
    given = {"limits": LIMITS, "thresholds": BOUND, "chosen": plans.index(precision)}
    return plans.plan(**{"choices": choices, **given, **changes})


def words(text: str) -> list[str]:
    """The words of settings for a shell, without the comments."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def comments(text: str) -> str:
    return " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))


def settings(text: str) -> dict[str, str]:
    """The value of each `key=value`."""
    return dict(word.split("=", 1) for word in words(text))


def package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let modules below a package be imported without the package's own imports, which need more than is installed."""
    root = find_spec(name.partition(".")[0])
    assert root is not None
    assert root.submodule_search_locations is not None
    module = ModuleType(name)
    module.__path__ = [str(Path(root.submodule_search_locations[0], *name.split(".")[1:]))]
    monkeypatch.setitem(sys.modules, name, module)


# --------------------------------------------------------------------------------------------------- verl


@pytest.mark.verl
@pytest.mark.parametrize("precision", PRESETS)
def test_verl_composes_and_validates_the_settings(precision: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = configured(words(layout(precision).emit("verl-stock")))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (rollout.name, rollout.quantization) == ("vllm", "fp8" if "block" in precision else None)
    passed = dict(rollout.engine_kwargs["vllm"])
    assert passed == ({"kv_cache_dtype": "fp8"} if "kv" in precision else {})
    assert (rollout.tensor_model_parallel_size, rollout.n, rollout.max_model_len) == (2, 8, 9000)
    assert (rollout.max_num_seqs, rollout.max_num_batched_tokens) == (777, 2222)
    assert (rollout.gpu_memory_utilization, rollout.enforce_eager, rollout.enable_prefix_caching) == (0.71, True, False)
    assert rollout.custom is None
    variables = config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {}
    assert variables.get("VLLM_USE_DEEP_GEMM_E8M0") == ("0" if "block" in precision else None)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold, correction.rollout_rs) == ("token", 1.75, None)


@pytest.mark.verl
@pytest.mark.parametrize("target", ["verl", "verl-stock"])
def test_turns_change_no_setting_of_verls(target: str) -> None:
    single, turns = (configured(words(layout("bf16", workload=work).emit(target))) for work in (plans.WORKLOAD, TURNS))
    assert turns == single


# -------------------------------------------------------------------------------------------------- SkyRL


def skyrl(monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    package(monkeypatch, "skyrl.backends")
    package(monkeypatch, "skyrl.backends.skyrl_train.inference_servers")
    from skyrl.train.config import SkyRLTrainConfig

    return SkyRLTrainConfig.from_cli_overrides(words(text))


@pytest.mark.skyrl
@pytest.mark.parametrize("precision", PRESETS)
def test_skyrl_parses_the_settings(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = layout(precision)
    config = skyrl(monkeypatch, plan.emit("skyrl"))
    engine = config.generator.inference_engine
    assert (engine.num_engines, engine.tensor_parallel_size, engine.expert_parallel_size) == (3, 2, 1)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.gpu_memory_utilization) == (777, 2222, 0.71)
    assert (engine.enable_prefix_caching, engine.enforce_eager) == (False, True)
    kwargs, passed = plan.vllm_kwargs(), dict(engine.engine_init_kwargs)
    assert passed == {name: kwargs[name] for name in passed}
    assert ("quantization" in passed, "kv_cache_dtype" in passed) == ("block" in precision, "kv" in precision)
    assert passed["max_model_len"] == 9000
    assert (config.trainer.train_batch_size, config.generator.n_samples_per_prompt) == (4, 8)
    correction = config.trainer.algorithm.off_policy_correction
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 1.75)
    exported = "export VLLM_USE_DEEP_GEMM_E8M0=0" in comments(plan.emit("skyrl"))
    assert exported is ("block" in precision)
    none = skyrl(monkeypatch, replace(plan, thresholds={}).emit("skyrl"))
    assert none.trainer.algorithm.off_policy_correction.tis_ratio_type is None


@pytest.mark.skyrl
def test_skyrl_parses_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    remedies = Remedies(router_replay=True, trainer_precision="fp8_block", keep_bf16=(1, 1))
    limits = replace(LIMITS, enable_prefix_caching=True, enable_return_routed_experts=True)
    text = layout("fp8_block", model=MOE, remedies=remedies, limits=limits).emit("skyrl")
    config = skyrl(monkeypatch, text)
    megatron = config.trainer.policy.megatron_config
    assert (config.trainer.strategy, megatron.moe_enable_routing_replay) == ("megatron", True)
    assert megatron.transformer_config_kwargs["fp8_recipe"] == "blockwise"
    engine = config.generator.inference_engine
    assert engine.enable_return_routed_experts is True
    assert len(engine.engine_init_kwargs["quantization_config"]["ignore"]) == 2  # routers, and the layers
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1" in comments(text)


@pytest.mark.skyrl
def test_skyrl_starts_at_least_a_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fully asynchronous trainer's own assertions on workers, each of which holds the samples of a prompt."""
    plan = layout("bf16", workload=TURNS)
    trainer = skyrl(monkeypatch, plan.emit("skyrl")).trainer
    assert trainer == skyrl(monkeypatch, layout("bf16").emit("skyrl")).trainer
    asserted = [ast.unparse(node.test) for node in ast.walk(skyrl_init()) if isinstance(node, ast.Assert)]
    (workers,) = (test for test in asserted if "num_parallel_generation_workers" in test)
    batch, steps = trainer.train_batch_size, trainer.fully_async.max_staleness_steps

    def accepted(number: int) -> bool:
        own = {"mini_batch_size": batch, "num_parallel_generation_workers": number, "max_staleness_steps": steps}
        return bool(eval(workers, {"self": SimpleNamespace(**own)}))

    most = batch * (steps + 1)
    assert [accepted(number) for number in (batch - 1, batch, most, most + 1)] == [False, True, True, False]
    assert "self.cfg.trainer.train_batch_size == self.cfg.trainer.policy_mini_batch_size" in asserted
    said = "trainer.policy_mini_batch_size, which is its batch, <= trainer.fully_async.num_parallel_generation_workers"
    assert said in comments(plan.emit("skyrl"))


def skyrl_init() -> ast.FunctionDef:
    spec = find_spec("skyrl")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "train" / "fully_async_trainer.py").read_text())
    (trainer,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FullyAsyncRayPPOTrainer"
    )
    return next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")


# ----------------------------------------------------------------------------------------------- OpenRLHF


def openrlhf(monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    """The arguments as the trainer's script reads and checks them. Its imports, which start Ray, are left out."""
    package(monkeypatch, "openrlhf.utils")
    spec = find_spec("openrlhf")
    assert spec is not None
    assert spec.origin is not None
    script = ast.parse((Path(spec.origin).parent / "cli" / "train_ppo_ray.py").read_text())
    (main,) = (node for node in script.body if isinstance(node, ast.If))
    read: list[Any] = []
    needed = ["--reward.remote_url", "http://reward", "--algo.advantage.estimator", "rloo"]
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *needed, *words(text)])
    names = {"argparse": __import__("argparse"), "datetime": __import__("datetime").datetime, "train": read.append}
    exec(compile(ast.Module(main.body, []), "train_ppo_ray", "exec"), names)
    return read[0]


@pytest.mark.openrlhf
def test_openrlhf_parses_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    args = openrlhf(monkeypatch, layout("bf16").emit("openrlhf"))
    assert (args.vllm.num_engines, args.vllm.tensor_parallel_size) == (3, 2)
    assert (args.vllm.gpu_memory_utilization, args.vllm.enforce_eager) == (0.71, True)
    assert args.vllm.enable_prefix_caching is False
    assert (args.data.max_len, args.rollout.max_new_tokens) == (9000, 7168)
    assert (args.rollout.batch_size, args.rollout.n_samples_per_prompt) == (4, 8)
    advantage = args.algo.advantage
    kind = advantage.is_correction_level, advantage.is_correction_mode, advantage.is_correction_gating
    assert kind == ("token", "clip", "ratio")
    assert advantage.is_correction_threshold == [0.0, 1.75]
    none = openrlhf(monkeypatch, layout("bf16", thresholds={}).emit("openrlhf"))
    assert none.algo.advantage.is_correction_level == "off"


@pytest.mark.openrlhf
def test_turns_change_no_argument_of_openrlhfs(monkeypatch: pytest.MonkeyPatch) -> None:
    single, turns = (
        openrlhf(monkeypatch, layout("bf16", workload=work).emit("openrlhf")) for work in (plans.WORKLOAD, TURNS)
    )
    assert turns == single


@pytest.mark.openrlhf
def test_openrlhf_truncates_tokens_at_the_planned_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loss, with the arguments that it was given, is that of a ratio of min(ratio, C)."""
    import torch

    args = openrlhf(monkeypatch, layout("bf16").emit("openrlhf")).algo.advantage
    package(monkeypatch, "openrlhf.models")
    utils = ModuleType("openrlhf.models.utils")  # which needs DeepSpeed
    utils.masked_mean = lambda tensor, mask, dim: (tensor * mask).sum() / mask.sum()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openrlhf.models.utils", utils)
    from openrlhf.models.loss import PolicyLoss

    loss = PolicyLoss(
        is_correction_level=args.is_correction_level,
        is_correction_mode=args.is_correction_mode,
        is_correction_gating=args.is_correction_gating,
        is_correction_threshold=args.is_correction_threshold,
    )
    for ratio in (4.0, 0.25):
        old, ones = torch.zeros(1, 1), torch.ones(1, 1)
        value = loss(old, old, ones, action_mask=ones, rollout_log_probs=old - math.log(ratio))[0]
        assert float(value) == pytest.approx(-min(ratio, 1.75))


def test_openrlhf_runs_no_fp8_and_the_error_has_what_to_type() -> None:
    choices = tuple(
        plans.choice(name, makespan_s=seconds, risk="low") for name, seconds in zip(PRESETS, (8, 7, 6, 5), strict=True)
    )
    plan = plans.plan(choices=choices, chosen=3)
    said = (
        r"^OpenRLHF 0\.11\.2 cannot start fp8_block\+fp8_kv of Qwen/Qwen3-8B: .* allowed: bf16; the next best is "
        r"choice 0, bf16 .*, in 8 s instead of 5 s: --choice 0 \(in Python choice=0\), "
        r"or plan again with --emit openrlhf$"
    )
    with pytest.raises(ConfigError, match=said):
        plan.emit("openrlhf")
    assert plan.emit("openrlhf", 0)
    with pytest.raises(ConfigError, match=r"^OpenRLHF does not replay experts; plan again without --router-replay$"):
        plans.plan(remedies=Remedies(router_replay=True), limits=EngineLimits(enable_return_routed_experts=True)).emit(
            "openrlhf"
        )


# ---------------------------------------------------------------------------------------- trainers by their keys


def known(target: str, key: str) -> bool:
    """True if a setting's key is in the table, or hands an argument to vLLM."""
    table = KEYS[target]
    return key in table["keys"] or any(re.fullmatch(pattern, key) for pattern in table["passed"])


def keys_of(target: str, text: str) -> list[str]:
    match target:
        case "nemo-rl":
            return [key.removeprefix("++") for key in settings(text)]
        case "prime-rl":
            return list(flat(tomllib.loads(text)))
    return [word for word in words(text) if word.startswith("--")]


def flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    found = {}
    for key, value in table.items():
        name = f"{before}{key}"
        inner = isinstance(value, dict) and name != "inference.vllm.quantization_config"
        found |= flat(value, f"{name}.") if inner else {name: value}
    return found


@pytest.mark.parametrize("target", KEYS)
@pytest.mark.parametrize("workload", [plans.WORKLOAD, TURNS], ids=["one turn", "turns"])
@pytest.mark.parametrize("remedies", [Remedies(), Remedies(router_replay=True, trainer_precision="fp8_block")])
def test_every_key_is_one_that_the_trainer_has(target: str, remedies: Remedies, workload: dict[str, Any]) -> None:
    for precision in PRESETS:
        if precision in TARGETS[target].lacks:
            continue
        replay = remedies.router_replay
        limits = replace(LIMITS, enable_prefix_caching=True, enable_return_routed_experts=replay)
        model = MOE if replay else "Qwen/Qwen3-8B"
        plan = layout(precision, model=model, remedies=remedies, limits=limits, workload=workload)
        found = keys_of(target, plan.emit(target))
        assert len(found) > 10
        assert [key for key in found if not known(target, key)] == []


@pytest.mark.parametrize("at_once", [8, AT_ONCE])
def test_prime_rls_bounds_of_the_trajectories_at_once_are_those_that_it_accepts(at_once: int) -> None:
    workload = {**TURNS, "turns": {"concurrent": at_once}}
    found = flat(tomllib.loads(layout("bf16", workload=workload).emit("prime-rl")))
    ends = [found[f"orchestrator.concurrency.{end}_inflight"] for end in ("min", "max")]
    assert ends == [at_once, at_once]
    for low, high in KEYS["prime-rl"]["ascending"]:
        assert found[low] <= found[high]


def test_slimes_engines_hold_the_trajectories_at_once_together() -> None:
    found = words(layout("bf16", workload=TURNS).emit("slime"))
    value = {
        flag: int(found[found.index(flag) + 1]) for flag in ("--rollout-num-gpus", "--rollout-num-gpus-per-engine")
    }
    engines = value["--rollout-num-gpus"] // value["--rollout-num-gpus-per-engine"]
    (flag,) = KEYS["slime"]["times_engines"]
    held = int(found[found.index(flag) + 1]) * engines
    assert AT_ONCE <= held < AT_ONCE + engines


def test_nemo_rl_gets_its_own_words() -> None:
    text = layout("fp8_block+fp8_kv", remedies=Remedies(keep_bf16=(1, 2, "o_proj"))).emit("nemo-rl")
    found = settings(text)
    cfg = "++policy.generation.vllm_cfg"
    assert (found[f"{cfg}.precision"], found[f"{cfg}.kv_cache_dtype"], found[f"{cfg}.use_deep_gemm"]) == (
        "fp8",
        "fp8",
        "true",
    )
    assert (found[f"{cfg}.num_first_layers_in_bf16"], found[f"{cfg}.num_last_layers_in_bf16"]) == ("1", "2")
    assert found[f"{cfg}.quantization_ignored_layer_kws"] == "[o_proj,self_attn.out_proj,self_attn.dense]"
    assert found["++policy.generation.vllm_kwargs.max_num_seqs"] == "777"
    assert (found["++policy.megatron_cfg.enabled"], found["++policy.dtensor_cfg.enabled"]) == ("true", "false")
    assert found["++loss_fn.truncated_importance_sampling_ratio"] == "1.75"
    assert not any("quantization_config" in key for key in found)
    bf16 = settings(layout("bf16", thresholds={}).emit("nemo-rl"))
    assert (bf16[f"{cfg}.precision"], bf16["++loss_fn.use_importance_sampling_correction"]) == ("bfloat16", "false")
    # It measures the scales itself, so a plan that counts on them is kept.
    assert "measures K and V scales itself" in comments(text)


@pytest.mark.verl
def test_hydra_parses_nemo_rls_words() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    text = layout("fp8_block", remedies=Remedies(keep_bf16=(0, 0, "o_proj"))).emit("nemo-rl")
    parsed = {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(words(text))}
    assert parsed["policy.generation.vllm_cfg.quantization_ignored_layer_kws"] == [
        "o_proj",
        "self_attn.out_proj",
        "self_attn.dense",
    ]
    assert parsed["policy.generation.vllm_cfg.gpu_memory_utilization"] == 0.71


def test_nemo_rl_has_no_fp8_cache_beside_bf16_weights() -> None:
    with pytest.raises(ConfigError, match=r"an FP8 cache beside FP8 weights alone; allowed: bf16, fp8_block, "):
        layout("fp8_kv").emit("nemo-rl")


def test_prime_rl_gets_toml() -> None:
    plan = layout("fp8_block+fp8_kv", limits=replace(LIMITS, tensor_parallel_size=2))
    found = tomllib.loads(plan.emit("prime-rl"))
    served, kwargs = found["inference"]["vllm"], plan.vllm_kwargs()
    assert served["quantization_config"] == kwargs["quantization_config"]
    assert (served["kv_cache_dtype"], served["tensor_parallel_size"], served["data_parallel_size"]) == ("fp8", 2, 3)
    assert found["inference"]["use_deep_gemm"] is True
    assert found["inference"]["env_vars"] == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert (found["orchestrator"]["batch_size"], found["orchestrator"]["group_size"]) == (32, 8)
    assert found["deployment"]["num_infer_gpus"] == 6
    assert "it has no bound of the ratio, as token TIS has at 1.75" in comments(plan.emit("prime-rl"))


def test_slime_gets_sglangs_flags_and_says_how_the_fp8_checkpoint_is_made() -> None:
    text = layout("fp8_block+fp8_kv").emit("slime")
    found = words(text)

    def value(flag: str) -> str:
        return found[found.index(flag) + 1]

    assert value("--hf-checkpoint") == "Qwen3-8B-FP8"
    assert "--save-dir Qwen3-8B-FP8 --strategy block --block-size 128 128" in comments(text)
    assert (value("--rollout-num-gpus"), value("--rollout-num-gpus-per-engine")) == ("6", "2")
    assert (value("--sglang-max-running-requests"), value("--sglang-server-concurrency")) == ("777", "777")
    assert (value("--sglang-kv-cache-dtype"), value("--tis-clip")) == ("fp8_e4m3", "1.75")
    assert {"--use-tis", "--sglang-disable-radix-cache", "--sglang-disable-cuda-graph"} <= {*found}
    assert "SGLang leaves K and V scales at 1.0" in comments(text)
    assert value("--use-tis").startswith("--")  # a switch
    bf16 = words(layout("bf16", thresholds={}).emit("slime"))
    assert bf16[bf16.index("--hf-checkpoint") + 1] == "Qwen/Qwen3-8B"
    assert "--use-tis" not in bf16


# ------------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("target", STOCK)
def test_notes_have_the_cost_of_scales_that_stay_at_one(target: str) -> None:
    """From the plan's own figures."""
    at_one = {"kl_k3": 0.008, "kl_k3_low": 0.001, "kl_k3_high": 0.02, "risk": "moderate"}
    figures = {"kl_k3": 0.004, "kl_k3_high": 0.01, "risk": "low", "makespan_s": 5.0, "unit_kv_scales": at_one}
    choices = tuple(plans.choice(name, **figures if "kv" in name else {}) for name in PRESETS)
    plan = plans.plan(choices=choices, chosen=3)
    if TARGETS[target].lacks.get("fp8_block+fp8_kv"):
        with pytest.raises(ConfigError):
            plan.emit(target)
        return
    told = comments(plan.emit(target))
    stays = "expected mismatch at 1.0: KL k3 0.008, up to 0.02, risk moderate" in told
    assert stays is (TARGETS[target].measures == "")
    low = replace(plan, budget=RiskBudget(accept="low"))
    if stays:
        with pytest.raises(ConfigError, match="accepts low at most; plan again with --kv-scales unit"):
            low.emit(target)
    else:
        assert low.emit(target)


@pytest.mark.parametrize("target", STOCK)
def test_a_plan_for_a_target_chooses_what_it_can_run(target: str) -> None:
    found = planned("Qwen/Qwen3-8B", "h200", Workload(8, 8, 512, 2048), target=target)
    assert found.emit(target)
    assert {c.precision for c in found.choices if not c.available} >= set(TARGETS[target].lacks)
    assert found.inside == ("verl-stock" if target == "verl-stock" else "own")


@pytest.mark.parametrize("target", [target for target in STOCK if TARGETS[target].whole_blocks])
def test_a_part_of_a_block_is_refused_with_the_next_best(target: str) -> None:
    plan = plans.plan(
        model="Qwen/Qwen3-4B",
        choices=tuple(plans.choice(name, tensor_parallel=8, makespan_s=5.0, risk="low") for name in PRESETS),
        chosen=plans.index("fp8_block"),
    )
    said = rf"down_proj has 1216 inputs .* with FP8 weights {TARGETS[target].sender} takes .* --choice 0"
    with pytest.raises(ConfigError, match=said):
        plan.emit(target)


@pytest.mark.parametrize("target", STOCK)
def test_an_fp8_checkpoint_is_refused(target: str) -> None:
    stored = "Qwen/Qwen3-8B-FP8"
    assert ModelShape.from_hf(stored).stored is not None
    with pytest.raises(ConfigError, match=r"name .*Qwen3-8B"):
        plans.plan(model=stored, choices=(plans.choice("fp8_block"),)).emit(target)


@pytest.mark.parametrize("target", ["verl-stock", "slime"])
def test_linears_in_bf16_are_refused_where_no_word_keeps_them(target: str) -> None:
    with pytest.raises(ConfigError, match="has no word for linears that stay in BF16; plan again without --keep-bf16"):
        layout("fp8_block", remedies=Remedies(keep_bf16=(1, 1))).emit(target)
    assert layout("bf16", remedies=Remedies(keep_bf16=(1, 1))).emit(target)


@pytest.mark.parametrize("target", ["vllm-serve", "prime-rl", "vllm", "verl-stock", "skyrl"])
def test_settings_of_a_server_say_that_the_plan_leaves_its_front_end_out(target: str) -> None:
    said = [
        "plan again with --inside server-http" in layout("bf16", inside=inside).emit(target)
        for inside in ("own", "server-http")
    ]
    assert said == [target in ("vllm-serve", "prime-rl"), False]


def test_a_trainer_that_keeps_c_gets_the_end_of_the_law() -> None:
    """fp8plan's own trainers begin at the plan's C, and tighten it."""
    plan = layout("bf16", thresholds={"token_tis": 4.0})
    found = words(plan.emit("slime"))
    assert found[found.index("--tis-clip") + 1] == "2.0"
    assert "C of token TIS stays at 2 at any KL" in comments(plan.emit("slime"))
    assert "rollout_is_threshold=4.0" in plan.emit("verl")
