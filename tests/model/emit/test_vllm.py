"""The real vLLM, verl and TRL parse what a Plan emits. Settings that they cannot run are refused."""

from __future__ import annotations

import ast
import json
import math
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installed_vllm import VLLM, serve_parser
from verl_config import composed, configured

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.configs import bundled_configs
from fp8plan.model.emit.trl import _COLOCATED
from fp8plan.model.emit.vllm import serve_command, vllm_kwargs
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan as planned
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import refusals
from fp8plan.model.targets import TARGETS
from fp8plan.model.workload import Workload
from fp8plan.version import LAST, RANGE, at_least

# No field at its default, so that one that gets lost shows.
LIMITS = EngineLimits(
    gpu_memory_utilization=0.71,
    max_model_len=9000,
    max_num_seqs=77,
    max_num_batched_tokens=2222,
    block_size=32,
    enable_prefix_caching=False,
    async_scheduling=False,
    scheduler_reserve_full_isl=False,
    enforce_eager=True,
    num_gpu_blocks=500,
    max_cudagraph_capture_size=96,
)
TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}


def test_no_limit_of_these_tests_stands_at_its_default() -> None:
    """So a limit that is added later must be emitted, or this says so."""
    same = {f.name for f in fields(EngineLimits) if getattr(LIMITS, f.name) == f.default}
    assert same == {
        "tensor_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",  # each Choice carries its own
        "enable_return_routed_experts",  # demands another value of enable_prefix_caching
    }


def layout(tensor_parallel: int, data_parallel: int, **changes: Any) -> Plan:
    """`plans.plan()` with every choice on this layout."""
    choices = tuple(
        plans.choice(name, tensor_parallel=tensor_parallel, data_parallel=data_parallel) for name in PRESETS
    )
    return plans.plan(choices=choices, **changes)


# ---------------------------------------------------------------------------------------------------- vLLM


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny_moe")
    (folder / "config.json").write_text(json.dumps(TINY_MOE))
    return str(folder)


@pytest.mark.vllm
@pytest.mark.parametrize("precision", PRESETS)
def test_vllm_builds_its_engine_config_from_the_kwargs(precision: str, tiny_moe: str) -> None:
    from vllm import EngineArgs

    plan = plans.plan(model=tiny_moe, limits=LIMITS)
    args = EngineArgs(**plan.vllm_kwargs(plans.index(precision)))
    config = args.create_engine_config()
    assert (config.quant_config is not None) == (PRESETS[precision].weights == "fp8_block")
    assert config.cache_config.cache_dtype == ("fp8" if PRESETS[precision].kv == "fp8" else "auto")
    assert config.cache_config.gpu_memory_utilization == 0.71
    assert config.cache_config.block_size == 32
    assert config.cache_config.enable_prefix_caching is False
    assert config.cache_config.num_gpu_blocks_override == 501  # 500 that requests can use, and the null block
    assert config.model_config.max_model_len == 9000
    assert config.model_config.enforce_eager is True
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert str(config.model_config.dtype) == "torch.bfloat16"
    assert config.scheduler_config.max_num_seqs == 77
    assert config.scheduler_config.max_num_batched_tokens == 2222
    assert config.scheduler_config.async_scheduling is False
    assert config.scheduler_config.scheduler_reserve_full_isl is False
    assert config.parallel_config.tensor_parallel_size == 1


@pytest.mark.vllm
def test_vllm_returns_the_experts_of_a_plan_with_router_replay(tiny_moe: str) -> None:
    from vllm import EngineArgs

    for replay in (False, True):
        plan = plans.plan(model=tiny_moe, limits=EngineLimits(enable_return_routed_experts=replay))
        args = EngineArgs(**plan.vllm_kwargs())
        returned = args.aux_output_config if at_least(VLLM, (0, 31)) else args
        assert returned.enable_return_routed_experts is replay
        assert args.enable_prefix_caching is True
        words = shlex.split(plan.emit("vllm-serve"), comments=True)
        assert ("--enable-return-routed-experts" in words) == replay
        served = serve_parser().parse_args(words[words.index("serve") + 2 :])
        assert bool(served.enable_return_routed_experts) == replay


@pytest.mark.vllm
def test_vllm_quantises_linears_by_block_and_leaves_the_router_alone(tiny_moe: str) -> None:
    from vllm import EngineArgs
    from vllm.model_executor.layers.linear import ReplicatedLinear

    plan = plans.plan(model=tiny_moe)
    config = EngineArgs(**plan.vllm_kwargs(plans.index("fp8_block"))).create_engine_config().quant_config
    assert config.get_name() == "online"
    assert config.args.linear.weight.scale.group_shape == (128, 128)
    assert config.args.moe.weight.scale.group_shape == (128, 128)
    # Only its type is looked at, which 0.32 takes itself. A built one needs a process group.
    linear = ReplicatedLinear if at_least(VLLM, (0, 32)) else ReplicatedLinear.__new__(ReplicatedLinear)
    layer = "model.layers.0."
    for name in (
        *("self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj", "mlp.experts.3.gate_proj", "mlp.gate_proj"),
        *("mlp.shared_expert.down_proj", "linear_attn.in_proj_qkvz", "mixer.in_proj", "self_attn.g_a_proj"),
    ):
        assert config.resolve_quant_method_cls(linear, layer + name) is not None, name
    for name in (
        *("mlp.gate", "block_sparse_moe.gate", "feed_forward.gate", "mixer.gate", "mlp.router", "feed_forward.router"),
        *("router.proj", "mlp.gate.wg", "block_sparse_moe.router.layer", "mlp.shared_expert_gate"),
    ):
        assert config.resolve_quant_method_cls(linear, layer + name) is None, name


@pytest.mark.vllm
def test_the_serve_command_says_the_same_as_the_kwargs(tiny_moe: str) -> None:
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plan = layout(2, 1, model=tiny_moe, limits=LIMITS, chosen=plans.index("fp8_block+fp8_kv"))
    told = json.loads(plan.emit("vllm"))
    words = shlex.split(plan.emit("vllm-serve"), comments=True)
    assert words[:4] == ["VLLM_USE_DEEP_GEMM_E8M0=0", "vllm", "serve", tiny_moe]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = EngineArgs.from_cli_args(parser.parse_args(["--model", tiny_moe, *words[4:]]))
    direct = EngineArgs(**told["engine_args"])
    assert {name: getattr(parsed, name) for name in told["engine_args"]} == {
        name: getattr(direct, name) for name in told["engine_args"]
    }


@pytest.mark.parametrize(("gpu", "expected"), [("h200", "triton"), ("b200", None)])
def test_fp8_experts_in_parallel_keep_the_kernels_that_were_measured(gpu: str, expected: str | None) -> None:
    """On Hopper, where vLLM would take others; without expert parallelism or in BF16 it takes Triton's by itself."""
    limits = EngineLimits(tensor_parallel_size=2, enable_expert_parallel=True)

    def backend(precision: str, limits: EngineLimits) -> Any:
        return vllm_kwargs(EngineSetup("Qwen/Qwen3-30B-A3B", find_gpu(gpu), precision, limits)).get("moe_backend")

    assert backend("fp8_block", limits) == expected
    assert backend("bf16", limits) is backend("fp8_block", EngineLimits(tensor_parallel_size=2)) is None
    kwargs = vllm_kwargs(EngineSetup("Qwen/Qwen3-30B-A3B", find_gpu(gpu), "fp8_block", limits))
    assert ("--moe-backend triton" in serve_command(kwargs, {})) is (expected is not None)


def test_fp8_weights_keep_their_fp32_scales() -> None:
    plan = plans.plan()
    for name, preset in PRESETS.items():
        expected = {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if preset.weights == "fp8_block" else {}
        assert plan.env(plans.index(name)) == expected
        blackwell = dict.fromkeys(expected, "1")  # its kernels take power-of-two scales only
        assert replace(plan, gpu="b200").env(plans.index(name)) == blackwell


def test_max_model_len_is_just_enough_where_it_is_not_set() -> None:
    assert plans.plan().vllm_kwargs()["max_model_len"] == 1024 + 7168


def test_replicas_are_told_in_words_not_as_vllm_data_parallelism() -> None:
    told = json.loads(layout(2, 4).emit("vllm"))
    assert "data_parallel_size" not in told["engine_args"]
    assert "4 replica(s) of 2 GPU(s), 8 in all" in told["notes"][0]


# ---------------------------------------------------------------------------------------------------- verl


@pytest.mark.verl
@pytest.mark.parametrize("precision", PRESETS)
def test_verl_composes_and_validates_the_overrides(precision: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    plan = layout(2, 4, limits=LIMITS, thresholds={"token_tis": 2.0})
    config = composed(plan.verl_overrides(plans.index(precision)))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.name == "fp8plan"
    assert rollout.custom["fp8plan"] == {"plan": "plan.json", "choice": precision}
    assert (rollout.quantization, dict(rollout.engine_kwargs["vllm"])) == (None, {})
    assert (rollout.tensor_model_parallel_size, rollout.data_parallel_size) == (2, 1)
    assert (rollout.n, rollout.prompt_length, rollout.response_length) == (8, 1024, 7168)
    assert config.data.train_batch_size == 4
    assert (rollout.gpu_memory_utilization, rollout.max_model_len) == (0.71, 9000)
    assert (rollout.max_num_seqs, rollout.max_num_batched_tokens) == (77, 2222)
    assert (rollout.enable_prefix_caching, rollout.enforce_eager) == (False, True)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-8B"


def verl_keeps(thresholds: dict[str, Any], log_ratios: list[list[float]]) -> tuple[Any, Any]:
    """Weights and mask that verl's own correction, configured by the emitted overrides, gives for these log-ratios."""
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    told = configured(plans.plan(thresholds=thresholds).verl_overrides()).algorithm.rollout_correction
    keys = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    ratios = torch.tensor(log_ratios)
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=ratios - 3.0,
        rollout_log_prob=torch.full_like(ratios, -3.0),
        response_mask=torch.ones_like(ratios),
        **{key: told[key] for key in keys},
    )
    return (None if weights is None else weights.batch["rollout_is_weights"].tolist()), mask.tolist()


@pytest.mark.verl
def test_verl_truncates_tokens_at_the_planned_bound() -> None:
    weights, mask = verl_keeps({"token_tis": 2.5}, [[math.log(4), math.log(0.25)]])
    assert weights[0] == pytest.approx([2.5, 0.25])
    assert mask == [[1.0, 1.0]]


@pytest.mark.verl
@pytest.mark.parametrize(
    "path", ["/models/a b", "/m/x=1,2", "/m/it's", "null", "8", r"C:\m", r"C:\'m", "C:\\", "/m/[x]{y}", "/m/${x}"]
)
def test_a_strange_model_path_reaches_verl_unchanged(path: str) -> None:
    assert configured(plans.plan(model=path).verl_overrides()).actor_rollout_ref.model.path == path


def pasted(settings: str, folder: Path, behind: str) -> list[list[str]]:
    """Paste `settings` into bash after the line `behind`. Returns the arguments of every call of `python`."""
    fake = folder / "python"
    record = f"import json, sys; print(json.dumps(sys.argv[1:]), file=open({str(folder / 'calls')!r}, 'a'))"
    fake.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(record)} "$@"\n')
    fake.chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash"], input=f"{behind}\n{settings}\necho pasted\n", env=path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("pasted\n", "")
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.verl
@pytest.mark.parametrize("name", ["plain", 'it\'s $HOME `id` \\ "a" #1 [x]{y}', "two\nlines"])
def test_the_verl_text_pastes_into_a_shell_and_reaches_verl(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(bundled_configs()["Qwen/Qwen3-8B"]))
    model = str(tmp_path / name)
    plan = layout(2, 4, model=model, chosen=plans.index("fp8_block+fp8_kv"), thresholds={"token_tis": 2.5})
    text = plan.emit("verl")
    (tmp_path / "verl.args").write_text(text + "\n")
    (words,) = pasted(f'eval "python $(cat {tmp_path}/verl.args)"', tmp_path, "")
    assert words == plan.verl_overrides()
    (tmp_path / "calls").unlink()
    (words,) = pasted(text, tmp_path, "python -m verl.trainer.main_ppo data.train_files=a.parquet \\")
    assert words == ["-m", "verl.trainer.main_ppo", "data.train_files=a.parquet", *plan.verl_overrides()]
    config = configured(words[2:])
    assert config.actor_rollout_ref.model.path == model
    assert config.actor_rollout_ref.rollout.custom.fp8plan.choice == "fp8_block+fp8_kv"
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    assert any("8 in all" in line for line in comments)


def test_the_vllm_command_pastes_into_a_shell(tmp_path: Path) -> None:
    plan = plans.plan(model="/m/it's #1", chosen=plans.index("fp8_block"))
    command = plan.emit("vllm-serve").splitlines()[0].replace(" vllm serve ", " python serve ")
    (words,) = pasted(command, tmp_path, "")
    assert words[:2] == ["serve", "/m/it's #1"]
    assert json.loads(words[-1]) == plan.vllm_kwargs()["quantization_config"]


# What the K and V scales of an FP8 cache are in the engine that is started


def scaled(risk: str = "moderate", at_one: str = "moderate", gpus: int = 2, **changes: Any) -> Plan:
    """A plan for TRL_LIMITS that chose fp8_kv, of these risks with calibrated scales and with 1.0."""
    known = {"kl_k3": 2e-3, "kl_k3_high": 8e-3, "risk": risk, "tensor_parallel": gpus}
    figures = {"kl_k3": 3e-3, "kl_k3_low": 1e-3, "kl_k3_high": 4.5e-2, "risk": at_one}
    kv = plans.choice("fp8_kv", **known, unit_kv_scales=figures)
    choices = (plans.choice("bf16", **known | {"risk": "low"}), kv)
    return plans.plan(**{"limits": plans.TRL_LIMITS, "choices": choices, "chosen": 1, **changes})


def test_what_is_emitted_says_that_kv_scales_stay_at_one_and_what_that_costs() -> None:
    target = "vllm"
    text = scaled().emit(target)
    assert "vLLM leaves K and V scales at 1.0; fp8plan.RolloutEngine measures them" in text
    assert "expected mismatch at 1.0: KL k3 0.003, up to 0.045, risk moderate" in text
    assert "the plan's own, for calibrated scales: KL k3 0.002, up to 0.008, risk moderate" in text
    assert "calibrated" not in scaled(kv_scales="unit").emit(target)
    theirs = scaled(kv_scales="unit").emit(target, kv_scales="calibrated")
    assert "is yours, and the plan, made for scales of 1.0, does not count on it" in theirs
    assert "expected mismatch at 1.0: KL k3 0.002, up to 0.008, risk moderate" in theirs
    theirs = scaled().emit(target, kv_scales="calibrated")
    assert "is yours, and the plan counts on it" in theirs
    assert "calibrating them after each weight sync is yours" in theirs
    assert "expected mismatch: KL k3 0.002, up to 0.008, risk moderate" in theirs
    bf16 = scaled().emit(target, "bf16")
    assert "scales" not in bf16
    assert "expected mismatch: KL k3 0.002, up to 0.008, risk low" in bf16


def test_scales_of_one_that_the_plan_does_not_accept_are_refused() -> None:
    target, plan = "vllm", scaled(at_one="high")
    ways_out = (
        r"risk is high \(KL k3 up to 0\.045\).* accepts moderate.*--kv-scales unit or --accept high.*calibrated if"
    )
    with pytest.raises(ConfigError, match=f"leaves the K and V scales of fp8_kv at 1.0.*{ways_out}"):
        plan.emit(target)
    plan.emit(target, "bf16")
    plan.emit(target, kv_scales="calibrated")
    replace(plan, budget=RiskBudget(accept="high")).emit(target)
    risky = scaled(risk="high", at_one="high")
    risky.emit(target, "fp8_kv")  # asked for by name: no news
    with pytest.raises(ConfigError, match="no precision stays within the risk budget; allowed: low or moderate"):
        risky.emit(target)
    with pytest.raises(ConfigError, match="kv_scales is 'none'; allowed: calibrated, unit"):
        plan.emit(target, kv_scales="none")


@pytest.mark.parametrize("gpus", [1, 2])
def test_for_trl_the_scales_are_measured_colocated_and_in_a_server(gpus: int) -> None:
    told = json.loads(scaled(at_one="high", gpus=gpus).emit("trl"))
    assert told["grpo_config"]["vllm_mode"] == ("colocate", "server")[gpus - 1]
    assert told["trainer"] == (
        'GRPOTrainer(..., plan="plan.json", choice="fp8_kv")  # from fp8plan.integrations.trl import GRPOTrainer'
    )
    assert "fp8plan measures the K and V scales after each weight sync" in told["notes"]
    assert "expected mismatch: KL k3 0.002, up to 0.008, risk moderate" in told["notes"]
    assert not [note for note in told["notes"] if "1.0" in note]
    assert "scales" not in scaled(gpus=gpus).emit("trl", "bf16")
    assert scaled(at_one="high", gpus=gpus).trl_config(mode="server")
    with pytest.raises(ConfigError, match="kv_scales is 'none'"):
        scaled(gpus=gpus).emit("trl", kv_scales="none")


@pytest.mark.vllm
def test_vllm_still_begins_with_scales_of_one_and_has_no_setting_that_measures_them() -> None:
    """The notes on KV scales in what a plan emits rest on this."""
    from torch import nn
    from vllm import EngineArgs
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer = nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    assert float(layer._k_scale) == float(layer._v_scale) == 1.0
    assert not [f.name for f in fields(EngineArgs) if "kv_scale" in f.name]


@pytest.mark.verl
def test_verl_still_has_no_word_for_kv_scales() -> None:
    from omegaconf import OmegaConf

    assert "kv_scale" not in OmegaConf.to_yaml(configured([]).actor_rollout_ref.rollout)


@pytest.mark.trl
def test_trl_still_has_no_word_for_kv_scales() -> None:
    from trl import GRPOConfig
    from trl.scripts.vllm_serve import ScriptArguments

    assert not [f.name for kind in (GRPOConfig, ScriptArguments) for f in fields(kind) if "kv_scale" in f.name]


def test_for_verl_the_scales_are_measured() -> None:
    plan = scaled(at_one="high")
    told = plan.emit("verl")
    assert "# fp8plan measures the K and V scales after each weight sync" in told
    assert "# expected mismatch: KL k3 0.002, up to 0.008, risk moderate" in told
    assert "1.0" not in told.partition("# fp8plan measures")[2]
    assert plan.verl_overrides()
    assert "scales" not in plan.emit("verl", "bf16")
    with pytest.raises(ConfigError, match="kv_scales is 'none'"):
        plan.emit("verl", kv_scales="none")


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "layer", "size"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", 8, "down_proj", 3696),
        ("Qwen/Qwen3-30B-A3B", 4, "experts_w2", 192),
        ("Qwen/Qwen3-4B", 8, "down_proj", 1216),
        ("Qwen/Qwen3-235B-A22B", 8, "experts_w2", 192),
    ],
)
def test_a_layout_that_verl_cannot_start_is_refused(model: str, tensor_parallel: int, layer: str, size: int) -> None:
    plan = with_refusals(layout(tensor_parallel, 1, model=model, chosen=plans.index("fp8_block")))
    with pytest.raises(ConfigError) as error:
        plan.emit("verl")
    words = str(error.value)
    assert f"{layer} has {size} inputs on each GPU at tensor_parallel_size {tensor_parallel}" in words
    assert "multiples of 128" in words
    best = plans.index("bf16")
    assert f"the next best is choice {best}, bf16 at tensor_parallel_size {tensor_parallel}" in words
    assert plan.emit("verl", choice=best)


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_an_fp8_cache_of_latent_attention_is_refused_where_its_scales_would_be_measured(trainer: str) -> None:
    plan = with_refusals(layout(1, 1, model="deepseek-ai/DeepSeek-V2-Lite", chosen=plans.index("fp8_kv")))
    with pytest.raises(
        ConfigError, match=r"cannot start fp8_kv of .*: .* no kernel of latent attention .*allowed: bf16"
    ):
        plan.emit(trainer)
    assert plan.emit("vllm", kv_scales="calibrated")
    assert plan.emit(trainer, choice="bf16")
    found = planned(plan.model, "h200", Workload(4, 4, 64, 128), target=trainer)
    assert not any(c.available for c in found.choices if c.preset.kv == "fp8")


def with_refusals(plan: Plan) -> Plan:
    """The plan with what the planner knows of its layouts."""
    shape = ModelShape.from_hf(plan.model)
    known = (replace(c, refused_by=refusals(shape, c.preset, c.tensor_parallel)) for c in plan.choices)
    return replace(plan, choices=tuple(known))


def test_the_next_best_for_verl_is_the_fastest_that_is_no_riskier() -> None:
    rows = [
        plans.choice("fp8_block", tensor_parallel=8, makespan_s=5.0, risk="moderate"),
        plans.choice("bf16", tensor_parallel=8, makespan_s=9.0, risk="low"),
        plans.choice("fp8_block", tensor_parallel=4, makespan_s=7.0, risk="moderate"),
        plans.choice("fp8_kv", tensor_parallel=4, makespan_s=6.0, risk="high"),
    ]
    way_out = r"the next best is choice 2, fp8_block at tensor_parallel_size 4 .*: --choice 2 \(in Python choice=2\)"
    with pytest.raises(ConfigError, match=way_out):
        with_refusals(plans.plan(model="Qwen/Qwen3-4B", choices=tuple(rows), chosen=0)).emit("verl")
    with pytest.raises(ConfigError, match="plan again with --emit verl, which looks for another layout"):
        with_refusals(plans.plan(model="Qwen/Qwen3-4B", choices=tuple(rows[:1]), chosen=0)).emit("verl")


# ---------------------------------------------------------------------------------------------------- TRL


def grpo(config: dict[str, Any], folder: Path) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, **config)


@pytest.mark.trl
def test_trl_accepts_the_config_and_runs_it_colocated(tmp_path: Path) -> None:
    limits = replace(plans.TRL_LIMITS, gpu_memory_utilization=0.33)
    plan = layout(2, 4, limits=limits, thresholds={"token_tis": 1.75})
    config = grpo(plan.trl_config(), tmp_path)
    assert (config.use_vllm, config.vllm_mode) == (True, "colocate")
    assert (config.num_generations, config.generation_batch_size) == (8, 32)
    assert (config.max_completion_length, config.vllm_max_model_length) == (7168, 8192)
    assert (config.vllm_gpu_memory_utilization, config.vllm_tensor_parallel_size) == (0.33, 2)
    assert config.vllm_importance_sampling_correction is True
    clips = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    assert (config.vllm_importance_sampling_mode, *clips) == ("token_truncate", None, 1.75)
    # The C of a law that tightens is a constant in TRL's own trainer, and a start in fp8plan's.
    own, ours = (layout(tp, 4, limits=limits, thresholds={"token_tis": 4.0}).trl_config() for tp in (2, 1))
    assert [x["vllm_importance_sampling_clip_max"] for x in (own, ours)] == [2.0, 4.0]


@pytest.mark.trl
def test_no_threshold_switches_trl_s_own_correction_off(tmp_path: Path) -> None:
    config = grpo(plans.plan(limits=plans.TRL_LIMITS).trl_config(), tmp_path)
    assert config.vllm_importance_sampling_correction is False


@pytest.mark.trl
def test_trl_s_colocated_engine_still_fixes_what_the_plan_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that emit_trl takes for granted, read off the engine that TRL really builds."""
    from trl.generation import vllm_generation
    from vllm import EngineArgs

    built: dict[str, Any] = {}
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: built.update(kwargs), raising=False)
    monkeypatch.setattr(vllm_generation, "ensure_master_addr_port", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # TRL sets them; monkeypatch puts them back
    engine = object.__new__(vllm_generation.VLLMGeneration)
    options = dict.fromkeys(("max_model_length", "max_num_seqs", "model_impl"))
    process = {"num_processes": 1, "process_index": 0, "local_process_index": 0, "wait_for_everyone": lambda: None}
    model = SimpleNamespace(name_or_path="m", named_modules=lambda: ())
    for name, value in {
        "mode": "colocate",
        "model": model,
        "accelerator": SimpleNamespace(**process),
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "enable_sleep_mode": False,
        "trust_remote_code": False,
        **options,
    }.items():
        setattr(engine, name, value)
    engine._init_vllm()
    fixed = {"quantization": None, "max_num_batched_tokens": 4096, "logprobs_mode": "processed_logprobs"}
    assert {key: built[key] for key in fixed} == fixed
    left_to_vllm = ("kv_cache_dtype", "num_gpu_blocks_override", *(_COLOCATED.keys() - fixed.keys()))
    assert not set(left_to_vllm) & set(built)
    assert EngineArgs.scheduler_reserve_full_isl is True
    assert EngineArgs.kv_cache_dtype == "auto"
    assert EngineArgs.enforce_eager is False


@pytest.mark.trl
@pytest.mark.vllm
@pytest.mark.parametrize("precision", ["fp8_kv", "fp8_block+fp8_kv"])
def test_what_trl_s_engine_cannot_hold_goes_through_a_server_that_vllm_can_start(
    tmp_path: Path, tiny_moe: str, precision: str
) -> None:
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    plan = layout(2, 1, model=tiny_moe, limits=LIMITS, chosen=plans.index(precision), thresholds={"token_tis": 2.0})
    told = json.loads(plan.emit("trl"))
    assert f'plan="plan.json", choice="{precision}"' in told["trainer"]
    config = grpo(told["grpo_config"], tmp_path)
    assert config.vllm_mode == "server"
    words = shlex.split(told["command"])
    start = words.index("vllm")
    assert {"VLLM_SERVER_DEV_MODE=1", "VLLM_PLUGINS=fp8plan"} <= set(words[:start])
    assert words[start : start + 3] == ["vllm", "serve", tiny_moe]
    args = serve_parser().parse_args(words[start + 3 :])
    assert (args.quantization == "online") == (precision != "fp8_kv")
    assert args.kv_cache_dtype == "fp8"
    assert args.logprobs_mode == "processed_logprobs"
    assert args.max_num_batched_tokens == 2222
    assert args.max_logprobs == -1
    assert args.weight_transfer_config.backend == "fp8plan"
    trl_s_own = build_command(ScriptArguments(model=tiny_moe))
    imposed = trl_s_own[trl_s_own.index("--weight-transfer-config") :]
    assert set(imposed) - set(words) == {'{"backend": "nccl"}'}


@pytest.mark.parametrize("precision", ["fp8_block", "fp8_block+fp8_kv"])
def test_trl_runs_fp8_weights_in_fp8plans_trainer_or_in_a_server_with_its_backend(precision: str) -> None:
    chosen = plans.index(precision)
    ours = json.loads(plans.plan(limits=plans.TRL_LIMITS, chosen=chosen).emit("trl"))
    assert (ours["grpo_config"]["vllm_mode"], ours["command"]) == ("colocate", None)
    assert f'plan="plan.json", choice="{precision}"' in ours["trainer"]
    assert plans.plan(limits=plans.TRL_LIMITS, chosen=chosen).trl_config(mode="server")["vllm_mode"] == "server"
    beside = json.loads(layout(2, 1, limits=plans.TRL_LIMITS, chosen=chosen).emit("trl"))
    assert beside["trainer"] == ours["trainer"]
    assert """--weight-transfer-config '{"backend": "fp8plan"}'""" in beside["command"]
    assert any("it takes no FP8 weights" in note for note in beside["notes"])
    with pytest.raises(ConfigError, match="it takes no FP8 weights"):
        layout(2, 1, limits=plans.TRL_LIMITS, chosen=chosen).trl_config(mode="colocate")


def pasted_into_python(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments that `text` gives to GRPOConfig when it runs, and the environment that it sets. Something stands in
    for TRL."""
    names: dict[str, Any] = {}
    environment: dict[str, str] = {}
    stand_ins = {"trl": SimpleNamespace(GRPOConfig=dict), "os": SimpleNamespace(environ=environment)}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        exec(text, names)
    return names["training_args"], environment


ODD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(PRESETS)),
    st.sampled_from([1, 2]),
    st.sampled_from([{}, {"token_tis": 2.0}, {"token_tis": 4 / 3}]),
    ODD | st.just("two\nlines") | st.just('it\'s "a" \\ # \r x'),
    st.none() | ODD,
)
def test_pasted_python_says_what_the_json_says(
    precision: str, gpus: int, thresholds: dict[str, Any], model: str, plan_file: str | None
) -> None:
    """Whatever the model's folder and the plan's file are called: comments end where they should."""
    plan = layout(gpus, 1, model=model, limits=plans.TRL_LIMITS, chosen=plans.index(precision), thresholds=thresholds)
    told = json.loads(plan.emit("trl", plan_file=plan_file))
    text = plan.emit("trl", plan_file=plan_file, python=True)
    config, environment = pasted_into_python(text)
    assert config == told["grpo_config"]
    assert environment == ({} if told["command"] else told["env"])  # a server's command sets its own
    comments = " ".join(text.partition("training_args")[2].replace("\n# ", " ").split())
    for note in (*told["notes"], told["command"] or ""):
        assert " ".join(note.split()) in comments
    if told["trainer"]:
        assert told["trainer"].partition("(..., ")[2].partition("  #")[0] in text


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([(1, 1), (2, 4), (1, 8)]))
def test_verl_gets_the_batch_that_was_planned(prompts: int, samples: int, gpus: tuple[int, int]) -> None:
    """verl repeats data.train_batch_size prompts rollout.n times, in a whole step on all replicas."""
    plan = layout(*gpus, workload=plans.WORKLOAD | {"prompts": prompts, "samples": samples})
    said = dict(word.partition("=")[::2] for word in plan.verl_overrides())
    assert said["data.train_batch_size"] == str(prompts)
    assert said["actor_rollout_ref.rollout.n"] == str(samples)
    assert f"ppo_mini_batch_size is yours to set: at most {prompts}, " in plan.emit("verl")


@pytest.mark.trl
def test_fp8plans_trainer_has_the_arguments_of_the_line_that_names_it() -> None:
    import inspect

    line = json.loads(plans.plan(limits=plans.TRL_LIMITS).emit("trl"))["trainer"]
    call, _, imported = line.partition("  # ")
    names: dict[str, Any] = {}
    exec(imported, names)
    words = [word.arg for word in ast.parse(call, mode="eval").body.keywords]  # type: ignore[attr-defined]
    assert words == ["plan", "choice"]
    assert set(words) <= set(inspect.signature(names["GRPOTrainer"].__init__).parameters)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_num_batched_tokens": 16384}, "max_num_batched_tokens is 4096 there, the plan has 16384"),
        ({"block_size": 32}, "block_size"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"enforce_eager": True}, "enforce_eager"),
        ({"async_scheduling": False}, "async_scheduling"),
        ({"scheduler_reserve_full_isl": False}, "scheduler_reserve_full_isl"),
        ({"num_gpu_blocks": 100}, "num_gpu_blocks"),
        ({"max_num_seqs": 31}, "runs all 32 responses"),
    ],
)
def test_limits_that_trl_s_colocated_engine_cannot_keep_are_refused(change: dict[str, Any], named: str) -> None:
    plan = layout(2, 1, limits=replace(plans.TRL_LIMITS, **change))
    with pytest.raises(ConfigError, match=named):
        plan.trl_config(mode="colocate")
    assert plan.trl_config()["vllm_mode"] == "server"
    ours = plans.plan(limits=replace(plans.TRL_LIMITS, **change))
    assert ours.trl_config()["vllm_mode"] == "colocate"  # fp8plan's trainer starts the planned engine


def test_trl_refuses_what_neither_of_its_modes_can_do() -> None:
    plan = layout(2, 4, limits=plans.TRL_LIMITS, chosen=plans.index("fp8_kv"))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype \| server: it is one replica, the plan has 4"):
        plan.trl_config()


def test_trl_needs_two_samples_per_prompt() -> None:
    with pytest.raises(ConfigError, match="at least 2 samples"):
        plans.plan(limits=plans.TRL_LIMITS, workload={**plans.WORKLOAD, "samples": 1}).trl_config()


# ---------------------------------------------------------------------------------------------------- all


def test_an_engine_inside_the_trainer_is_told_that_it_shares_the_gpu() -> None:
    def told(target: str, **changes: Any) -> str:
        return plans.plan(**{"limits": replace(plans.TRL_LIMITS, gpu_memory_utilization=0.83), **changes}).emit(target)

    for text in (told("verl"), told("trl")):
        (line,) = [line for line in text.splitlines() if "shares these GPUs" in line]
        assert "0.83" in line
        assert "--gpu-memory-utilization" in line
    assert next(line for line in told("verl").splitlines() if "shares these GPUs" in line).startswith("# ")
    assert "shares" not in told("vllm")
    beside = layout(2, 1, limits=plans.TRL_LIMITS, chosen=plans.index("fp8_kv")).emit("trl")
    assert "shares" not in beside  # a server has GPUs of its own


def test_a_relative_folder_is_emitted_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be started in another folder than the plan was made in."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    plan, full = plans.plan(model="my-model"), str(tmp_path.resolve() / "my-model")
    assert plan.vllm_kwargs()["model"] == full
    assert shlex.split(plan.emit("vllm-serve"))[2] == full
    assert f"actor_rollout_ref.model.path={full}" in plan.verl_overrides()
    assert plans.plan(model="no-such-folder").vllm_kwargs()["model"] == "no-such-folder"


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sglang'; allowed: vllm, verl, trl"):
        plans.plan().emit("sglang")


@pytest.mark.parametrize("target", TARGETS)
def test_a_workload_without_lengths_is_refused(target: str) -> None:
    plan = plans.plan(limits=plans.TRL_LIMITS, workload={"prompts": 4, "samples": 8})
    with pytest.raises(ConfigError, match=r"max_prompt_tokens|max_response_tokens"):
        plan.emit(target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_of_an_older_vllm_has_no_settings(target: str) -> None:
    """Its numbers stay, to be compared with what was measured."""
    older = replace(planned("Qwen/Qwen3-0.6B", "h200", Workload(2, 2, 16, 32)), engine_version="0.26.0")
    read = Plan.from_json(older.to_json())
    for plan in (older, read):
        said = f"the plan is of vLLM 0.26.0, .*; allowed: {RANGE}; plan again with --engine-version {LAST}$"
        with pytest.raises(ConfigError, match=said):
            plan.emit(target)
        for settings_of in (plan.vllm_kwargs, plan.verl_overrides, plan.trl_config):
            with pytest.raises(ConfigError, match=said):
                settings_of()
