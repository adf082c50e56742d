"""A Plan as Hydra overrides for verl 0.9.1 (verl/trainer/config/ppo_trainer.yaml)."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.emit.settings import (
    loadable_model,
    max_model_len,
    refuse_cpu,
    replicas_note,
    risk_notes,
    shared_gpu_note,
    vllm_env,
    workload_tokens,
)
from fp8plan.model.risk.budget import LEVELS

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Choice, Plan

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_CORRECTION: Final = "algorithm.rollout_correction"
_PLAIN_TEXT: Final = re.compile(r"[A-Za-z/][\w./-]*")  # what Hydra's grammar takes without quotes
_RESERVED: Final = {"null", "true", "false", "inf", "nan"}


def verl_overrides(plan: Plan, choice: Choice) -> list[str]:
    """Overrides in Hydra's own syntax, not quoted for a shell. Raises ConfigError for what verl cannot do."""
    refuse_cpu(plan, "verl")
    _refuse_parts_of_blocks(plan, choice)
    settings = {**_model_settings(plan), **_rollout_settings(plan, choice), **_correction(plan.thresholds)}
    for name, value in vllm_env(plan, choice).items():
        # Ray starts the engine's processes elsewhere: a variable of the launching shell need not reach them.
        settings[f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}"] = value
    return [f"{key}={_hydra(value)}" for key, value in settings.items()]


def emit_verl(plan: Plan, choice: Choice, kv_scales: str) -> str:
    """The overrides as shell words, a continuation after each but the last, so that all of it pastes behind
    `python -m verl.trainer.main_ppo \\`. The comments come last: bash would drop what follows them on such a line."""
    prompts, samples = workload_tokens(plan, "prompts"), workload_tokens(plan, "samples")
    notes = [
        f"fp8plan: {plan.model} on {plan.gpu}, {choice.precision}; the end of: python -m verl.trainer.main_ppo ...",
        f"planned for {prompts} prompts x {samples} samples per rollout: data.train_batch_size is yours to set",
        replicas_note(choice, "trainer.nnodes * trainer.n_gpus_per_node decides it"),
        shared_gpu_note(plan),
        *risk_notes(plan, choice, "verl", kv_scales),
    ]
    words = " \\\n".join(map(shlex.quote, verl_overrides(plan, choice)))
    return "\n".join([words, *(f"# {' '.join(note.split())}" for note in notes)])


def _refuse_parts_of_blocks(plan: Plan, choice: Choice) -> None:
    """Raises ConfigError for FP8 weights that verl cannot cut as the choice wants, naming the next best choice."""
    if "verl" not in choice.refused_by:
        return
    known = [(i, c) for i, c in enumerate(plan.choices) if c.available and "verl" not in c.refused_by]
    safe = [x for x in known if _riskiness(x[1]) <= _riskiness(choice)]
    way_out = "plan again with --emit verl, which looks for another layout"
    if safe:
        index, best = min(safe, key=lambda x: x[1].seconds)
        way_out = (
            f"the next best is choice {index}, {best.precision} at tensor_parallel_size {best.tensor_parallel} with "
            f"{best.data_parallel} replica(s): --choice {index} (in Python choice={index}), or plan again with --emit "
            "verl"
        )
    raise ConfigError(f"verl cannot start {choice.precision} of {plan.model}: {choice.refused_by['verl']}; {way_out}")


def _riskiness(choice: Choice) -> int:
    return LEVELS.index(choice.risk) if choice.risk in LEVELS else 0


def _model_settings(plan: Plan) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": loadable_model(plan),
        "data.max_prompt_length": workload_tokens(plan, "max_prompt_tokens"),
        "data.max_response_length": workload_tokens(plan, "max_response_tokens"),
    }


def _rollout_settings(plan: Plan, choice: Choice) -> dict[str, Any]:
    limits, preset = plan.limits, choice.preset
    settings: dict[str, Any] = {
        "name": "vllm",
        "dtype": "bfloat16",
        # verl's "fp8" is FP8_BLOCK: 128x128 weights, dynamic activations, `mlp.gate` left out, and its own weight
        # sync (verl/workers/rollout/vllm_rollout/vllm_async_server.py, _apply_quantization).
        "quantization": "fp8" if preset.weights == "fp8_block" else None,
        "n": workload_tokens(plan, "samples"),
        "tensor_model_parallel_size": choice.tensor_parallel,
        # verl's replicas are the GPUs divided by the tensor-parallel size; this key is vLLM's own data parallelism.
        "data_parallel_size": 1,
        "gpu_memory_utilization": limits.gpu_memory_utilization,
        "max_model_len": max_model_len(plan),
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "enable_prefix_caching": limits.enable_prefix_caching,
        "enforce_eager": limits.enforce_eager,
        "calculate_log_probs": True,
        "logprobs_mode": "processed_logprobs",
    }
    engine: dict[str, Any] = {
        "block_size": limits.block_size,
        "async_scheduling": limits.async_scheduling,
        "scheduler_reserve_full_isl": limits.scheduler_reserve_full_isl,
    }
    if preset.kv == "fp8":
        engine["kv_cache_dtype"] = "fp8"
    if limits.num_gpu_blocks is not None:
        engine["num_gpu_blocks_override"] = limits.num_gpu_blocks + 1  # and the null block, as in emit.vllm_kwargs
    return {f"{_ROLLOUT}.{key}": value for key, value in settings.items()} | {
        f"+{_ROLLOUT}.engine_kwargs.vllm.{key}": value for key, value in engine.items()
    }


def _correction(thresholds: dict[str, Any]) -> dict[str, Any]:
    weights = [name for name in ("token_tis", "sequence_tis", "token_mis") if name in thresholds]
    if len(weights) > 1:
        raise ConfigError(
            f"verl applies one importance weight, the plan asks for {' and '.join(weights)}; keep one of them"
        )
    settings: dict[str, Any] = {"rollout_is": None, "rollout_rs": None}
    for name in weights:
        settings["rollout_is"] = name.split("_")[0]
        bound = thresholds[name]
        settings["rollout_is_threshold"] = _band(*bound) if name == "token_mis" else float(bound)
    rejections = {"seq_sum_k1": "sequence_mis", "seq_mean_k1": "geometric_mis"}
    bands = {mode: thresholds[name] for mode, name in rejections.items() if name in thresholds}
    if bands:
        settings["rollout_rs"] = ",".join(bands)
        # verl's k1 is -log(ratio): its bounds are on pi_rollout / pi_train, so ours are inverted and swapped.
        settings["rollout_rs_threshold"] = ",".join(_band(1 / high, 1 / low) for low, high in bands.values())
    return {f"{_CORRECTION}.{key}": value for key, value in settings.items()}


def _band(low: float, high: float) -> str:
    return f"{low:.12g}_{high:.12g}"


def _hydra(value: Any) -> str:
    """`value` in the grammar of Hydra overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    # A backslash is only special before a quote, where it doubles; "${" would start an interpolation.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value).replace("${", "\\${")
    return f"'{escaped}'"
