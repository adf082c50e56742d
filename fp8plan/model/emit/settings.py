"""A Plan in the words of vLLM, verl or TRL. What a target cannot do is an error, never a line it ignores."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import gpu
from fp8plan.model.memory import CPU_KV_CACHE_GIB
from fp8plan.model.shards import TARGETS as TARGETS
from fp8plan.model.shards import check_target

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Choice, Plan

# vLLM quantises any linear that is given the quantisation config, and Qwen3-MoE gives it to the router
# (vllm/model_executor/models/qwen3_moe.py, 0.25 to 0.33). A quantised router picks other experts, so it is left out.
# A dense model has no module of this name.
ROUTER_PATTERN: Final = r"re:.*\.gate$"


def workload_tokens(plan: Plan, key: str) -> int:
    """One of WORKLOAD_KEYS as a whole number. Raises ConfigError where the plan does not carry it."""
    value = plan.workload.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"workload[{key!r}] is {value!r}; to emit a configuration it must be a whole number above 0")
    return value


def loadable_model(plan: Plan) -> str:
    """What the engine loads. A folder is given in full, because the engine may be started somewhere else."""
    folder = Path(plan.model)
    return str(folder.resolve()) if (folder / "config.json").is_file() else plan.model


def max_model_len(plan: Plan) -> int:
    """Longest prompt + response: the limit that was set, or just enough for the workload."""
    longest = workload_tokens(plan, "max_prompt_tokens") + workload_tokens(plan, "max_response_tokens")
    return plan.limits.max_model_len or longest


def vllm_kwargs(plan: Plan, choice: Choice) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one replica; data-parallel replicas are separate engines that the trainer starts."""
    limits, preset = plan.limits, choice.preset
    kwargs: dict[str, Any] = {
        "model": loadable_model(plan),
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8" if preset.kv == "fp8" else "auto",
        "tensor_parallel_size": choice.tensor_parallel,
        "gpu_memory_utilization": limits.gpu_memory_utilization,
        "max_model_len": max_model_len(plan),
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "enable_prefix_caching": limits.enable_prefix_caching,
        "enforce_eager": limits.enforce_eager,
        "async_scheduling": limits.async_scheduling,
        "scheduler_reserve_full_isl": limits.scheduler_reserve_full_isl,
        # Log-probs as sampled, temperature included: the ratio to the trainer's needs these.
        "logprobs_mode": "processed_logprobs",
    }
    if gpu(plan.gpu).is_cpu:
        del kwargs["gpu_memory_utilization"]  # VLLM_CPU_KVCACHE_SPACE takes its place
    if preset.weights == "fp8_block":
        kwargs["quantization"] = "online"
        kwargs["quantization_config"] = {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": [ROUTER_PATTERN]}
    if limits.num_gpu_blocks is not None:
        # One block of vLLM's pool is its null block, which no request can use (vllm/v1/core/block_pool.py).
        kwargs["num_gpu_blocks_override"] = limits.num_gpu_blocks + 1
    return kwargs


def vllm_env(plan: Plan, choice: Choice) -> dict[str, str]:
    """Environment of the engine's processes.

    VLLM_USE_DEEP_GEMM_E8M0 is on by default, on Hopper too: DeepGEMM then quantises the block-quantised weights a
    second time, to power-of-two scales, and the weight error grows from 2.6% to 3.7% RMS (measured with vLLM's own
    functions on Gaussian weights). Off keeps the FP32 scales end to end. Blackwell's kernels take no others, so there
    it stays on. On a CPU the variable that counts is the size of the KV pool.
    """
    if gpu(plan.gpu).is_cpu:
        return {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB)}
    scales_matter = choice.preset.weights == "fp8_block" and not gpu(plan.gpu).e8m0_scales
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if scales_matter else {}


def serve_command(kwargs: dict[str, Any], env: dict[str, str], extra: tuple[str, ...] = ()) -> str:
    """The same engine as one shell line."""
    words = [f"{name}={value}" for name, value in env.items()] + ["vllm", "serve", str(kwargs["model"])]
    for name, value in kwargs.items():
        flag = name.replace("_", "-")
        if name == "model":
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join([*words, *extra])


def emit(plan: Plan, target: str, choice: int | str | None = None, kv_scales: str = "unit") -> str:
    """Text for `fp8plan emit` and `fp8plan plan --emit`.

    vllm: JSON {"engine_args", "env", "command", "notes"}
    verl: Hydra overrides to paste after `python -m verl.trainer.main_ppo \\`, comments behind them
    trl:  JSON {"grpo_config", "command", "env", "notes"}; command is null when vLLM runs inside the trainer

    kv_scales: "unit", as every target leaves the K and V scales of an FP8 cache, or "calibrated" if you calibrate them

    Raises ConfigError for an unknown target, for what the target cannot do, and where K and V scales of 1.0 are riskier
    than the plan accepts.
    """
    check_target(target)
    picked = plan.select(choice)
    check_risk(plan, picked, target, kv_scales)
    if target == "verl":
        from fp8plan.model.emit.verl import emit_verl

        return emit_verl(plan, picked, kv_scales)
    if target == "trl":
        from fp8plan.model.emit.trl import emit_trl

        return emit_trl(plan, picked, kv_scales)
    return _emit_vllm(plan, picked, kv_scales)


def _emit_vllm(plan: Plan, choice: Choice, kv_scales: str) -> str:
    kwargs, env = vllm_kwargs(plan, choice), vllm_env(plan, choice)
    notes = risk_notes(plan, choice, "vllm", kv_scales)
    if choice.data_parallel > 1:
        notes.insert(0, replicas_note(choice, "start this engine once per replica"))
    return json.dumps(
        {"engine_args": kwargs, "env": env, "command": serve_command(kwargs, env), "notes": notes}, indent=2
    )


# Why K and V scales stay at 1.0. vLLM: `calculate_kv_scales` measured them once, on the first batch; it is deprecated
# in 0.26 and gone in 0.28, and each reload of weights puts 1.0 back (vllm/model_executor/layers/attention). verl and
# TRL have no setting for them, and reload weights in every step.
_NAMES: Final = {"vllm": "vLLM", "verl": "verl 0.9.1", "trl": "TRL 1.16"}


def check_risk(plan: Plan, choice: Choice, target: str, kv_scales: str) -> None:
    """Raises ConfigError where a risk that the plan accepts becomes one that it does not, because `target` leaves K and
    V scales at 1.0."""
    from fp8plan.model.plan.plan import check_kv_scales

    check_kv_scales(kv_scales)
    at_one = choice.unit_kv_scales
    if at_one is None or kv_scales == "calibrated" or not plan.accepts(choice.risk) or plan.accepts(at_one["risk"]):
        return
    raise ConfigError(
        f"{_NAMES[target]} leaves the K and V scales of {choice.precision} at 1.0: there the risk is {at_one['risk']} "
        f"(KL k3 up to {at_one['kl_k3_high']:.2g}), and the plan, made for calibrated scales, accepts "
        f"{plan.budget.accept} at most; plan again with --kv-scales unit or --accept {at_one['risk']}, emit another "
        "choice, or say --kv-scales calibrated if you calibrate them after each weight sync"
    )


def risk_notes(plan: Plan, choice: Choice, target: str, kv_scales: str) -> list[str]:
    """The expected mismatch of what is emitted, and what it assumes of the K and V scales."""
    if choice.preset.kv != "fp8":
        return _risk_note("expected mismatch", choice.kl_k3, choice.kl_k3_high, choice.risk)
    stay = f"{_NAMES[target]} leaves K and V scales at 1.0"
    if kv_scales == "calibrated":
        counted = plan.kv_scales == "calibrated"
        role = "and the plan counts on it" if counted else "and the plan, made for scales of 1.0, does not count on it"
        what = "expected mismatch" if counted else "expected mismatch at 1.0"
        expected = _risk_note(what, choice.kl_k3, choice.kl_k3_high, choice.risk)
        return [f"{stay}: calibrating them after each weight sync is yours, {role}", *expected]
    advice = f"{stay}; fp8plan.RolloutEngine measures them after each weight sync"
    at_one = choice.unit_kv_scales
    if at_one is None:
        return [advice]
    expected = _risk_note("expected mismatch at 1.0", at_one["kl_k3"], at_one["kl_k3_high"], at_one["risk"])
    if plan.kv_scales == "calibrated":
        expected += _risk_note("the plan's own, for calibrated scales", choice.kl_k3, choice.kl_k3_high, choice.risk)
    return [advice, *expected]


def _risk_note(what: str, kl: float | None, kl_high: float | None, risk: str | None) -> list[str]:
    return [] if kl is None else [f"{what}: KL k3 {kl:.2g}, up to {kl_high:.2g}, risk {risk}"]


def refuse_cpu(plan: Plan, trainer: str) -> None:
    """Raises ConfigError for a plan that a trainer cannot follow, because it was made for a CPU."""
    if gpu(plan.gpu).is_cpu:
        raise ConfigError(f"{trainer} runs vLLM on GPUs, and this plan is for a CPU; allowed: --emit vllm")


def shared_gpu_note(plan: Plan) -> str:
    """For trainers whose processes hold the engine."""
    return (
        f"the trainer shares these GPUs, and gpu_memory_utilization is {plan.limits.gpu_memory_utilization:g}: unless "
        "that much is free for the engine, plan again with --gpu-memory-utilization at what it may take, or neither "
        "the planned KV pool nor the predicted speed-up is reached"
    )


def replicas_note(choice: Choice, how: str) -> str:
    gpus = choice.tensor_parallel * choice.data_parallel
    return f"planned for {choice.data_parallel} replica(s) of {choice.tensor_parallel} GPU(s), {gpus} in all: {how}"
