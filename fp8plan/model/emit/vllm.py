"""A planned engine as settings of vLLM, and the parts that vLLM's, verl's and TRL's settings share.

A setting that the target does not support is an error, never a line that it ignores.

Linears that stay in BF16 are patterns of the `ignore` list of vLLM's online quantisation. vLLM matches a pattern with a
module's full name from its start (should_ignore_layer). A fused module is ignored if its own name matches, and
otherwise if the names of all its parts do (find_matching_patterns, 0.30). A pattern names both.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.held import MODULES
from fp8plan.model.architecture.kept import OUTPUTS, ends_of, kept_numbers
from fp8plan.model.architecture.parts import parts
from fp8plan.model.attention_backend import named_backend
from fp8plan.model.configs import find_config
from fp8plan.model.configs.fields import NESTED
from fp8plan.model.emit.concurrent import concurrent_notes
from fp8plan.model.emit.trainers import ENGINE_E8M0, GRIDS, in_all_words, two_grids
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.plan import CPU_KV_CACHE_GIB
from fp8plan.model.plan.choice import Choice
from fp8plan.model.precision import Precision, Stored
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import BLOCK, POW2
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import left_in_bf16

# A quantised router picks other experts, so it stays in BF16. vLLM quantises any linear that gets the quantisation
# config. In 0.30 (vllm/model_executor/models) Qwen3-MoE and LFM2-MoE give it to `gate`, and the Transformers backend to
# Hunyuan's `gate.wg`. Other families give their routers none: `gate`, `router` (gpt-oss, Llama 4), `router.proj` (Gemma
# 4). A later version may, so the pattern has them too, and the gate of Qwen's shared expert. Dense models have no such
# modules.
ROUTER_PATTERN: Final = r"re:.*\.(gate|router|shared_expert_gate)(\.(wg|proj|layer|classifier))?$"


def is_router(module: str) -> bool:
    """True if a module of this full name is a router, or the gate of a shared expert."""
    return re.fullmatch(ROUTER_PATTERN.removeprefix("re:"), module) is not None


def ignored(setup: EngineSetup) -> list[str]:
    """The patterns for an engine: routers, linears whose inputs on a rank are no whole blocks, and kept ones.

    Raises ConfigError if as many layers are to be kept as there are, or if nothing says how many there are.
    """
    patterns, shape = [ROUTER_PATTERN], setup.known_shape
    if shape is not None:
        patterns += _without_whole_blocks(shape, setup.limits.tensor_parallel_size)
    return patterns + kept_patterns(setup)


def kept_patterns(setup: EngineSetup) -> list[str]:
    """The patterns of the linears that the user keeps. Raises ConfigError as `ignored` does."""
    patterns, kept = [], setup.remedies.keep_bf16
    if any(ends_of(kept)):
        shape = setup.known_shape
        layers = _layers_in_config(setup) if shape is None else shape.num_layers
        numbers = "|".join(map(str, kept_numbers(kept, layers)))
        patterns.append(rf"re:.*\.layers\.({numbers})\..*")
    if OUTPUTS in kept:
        patterns.append(rf"re:.*\.{MODULES[OUTPUTS]}$")
    return patterns


def _layers_in_config(setup: EngineSetup) -> int:
    """The layers of a model that the cost model does not know. Raises ConfigError if its config.json does not say."""
    config = find_config(setup.path)[0]
    for fields in (config, *(config.get(name) for name in NESTED)):
        if isinstance(fields, Mapping) and isinstance(layers := fields.get("num_hidden_layers"), int):
            return layers
    raise ConfigError(
        f"keep_bf16 is {setup.remedies.keep_bf16}, and config.json of {setup.path} has no num_hidden_layers; leave it "
        "out"
    )


def _without_whole_blocks(shape: ModelShape, tp: int) -> Iterable[str]:
    """One pattern for each name of a linear. It lists its layers if other layers have it in FP8."""
    having, left = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for number, layer in enumerate(shape.layers):
        linears = (linear for part in parts(layer) for linear in part.linears(shape.hidden_size, tp))
        for linear in linears:
            if linear.stored:  # kept
                continue
            having[linear.name].add(number)
            if linear.left_in_bf16:
                left[linear.name].add(number)
    for name, numbers in left.items():
        listed = "|".join(map(str, sorted(numbers)))
        where = "" if numbers == having[name] else rf"layers\.({listed})\.(.*\.)?"
        yield rf"re:.*\.{where}{MODULES.get(name, name)}$"


UNWRITTEN: Final = "plan.json"  # in settings of a plan that has no file yet
MEASURED: Final = "fp8plan measures the K and V scales after each weight sync"
FIXED: Final = "K and V scales stay at 1.0; after each weight sync fp8plan warns of layers that they clip"


@dataclass(frozen=True, slots=True)
class Job:
    """The input of a trainer's settings.

    setup:      the engine, with max_model_len filled in; data_parallel_size: the number of them that the trainer starts
    picked:     the plan's choice, with the expected mismatch
    counted:    the plan counts on K and V scales that are calibrated
    budget:     the plan's
    workload:   prompts, samples, max_prompt_tokens, max_response_tokens, and other facts on the rollout
    thresholds: the correction's, as in Plan
    kv_scales:  one of KV_SCALES: the K and V scales of the engine that the settings start
    choice:     the plan's name for the engine: its precision, or its number if several layouts have that precision
    plan_file:  full path of the plan; None: it has not been written
    refused:    target -> the reason why it cannot start this engine though vLLM can, and the way out
    """

    setup: EngineSetup
    workload: Mapping[str, Any]
    thresholds: Mapping[str, Any]
    picked: Choice
    counted: bool
    budget: RiskBudget
    kv_scales: str
    choice: int | str
    plan_file: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> str:
        """The plan's file in the settings."""
        return self.plan_file or UNWRITTEN

    @property
    def plan_note(self) -> str:
        """A note on the path of the plan's file."""
        if self.plan_file is None:
            return f"save the plan with --json {UNWRITTEN}, and give its full path where the trainer runs"
        return "the plan's path is this machine's; where the trainer runs elsewhere, give that of a copy there"

    def tokens(self, key: str) -> int:
        """One of the workload's counts. Raises ConfigError if the workload does not have it."""
        return workload_tokens(self.workload, key)


def workload_tokens(workload: Mapping[str, Any], key: str) -> int:
    """One of a workload's counts as a whole number. Raises ConfigError if the workload does not have it."""
    value = workload.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"workload[{key!r}] is {value!r}; to emit a configuration it must be a whole number above 0")
    return value


def measured_scales(setup: EngineSetup) -> str:
    """The K and V scales in verl and TRL, where fp8plan's engines calibrate those of an FP8 cache if they can."""
    return "unit" if setup.why_fixed_kv_scales else "calibrated"


def vllm_kwargs(setup: EngineSetup) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one replica. Data-parallel replicas are separate engines that the trainer starts."""
    limits, preset, stored = setup.limits, setup.precision, _stored_as(setup)
    arguments = limits.vllm_arguments()
    unset = [name for name in ("enable_expert_parallel", "enable_return_routed_experts") if not arguments[name]]
    left_out = ["data_parallel_size", *unset]
    if setup.gpu.is_cpu:
        left_out.append("gpu_memory_utilization")  # VLLM_CPU_KVCACHE_SPACE takes its place
    # vLLM enlarges its default block size: to 64 for FP8 MLA, where 16 would mean a slower kernel, and to the size of a
    # recurrent state.
    if limits.block_size == EngineLimits.for_gpu(setup.gpu).block_size:
        left_out.append("block_size")
    kwargs: dict[str, Any] = {
        "model": setup.path,
        "dtype": "bfloat16",
        "kv_cache_dtype": _kv_cache_dtype(setup),
        **{name: value for name, value in arguments.items() if name not in left_out},
        # Log-probs as sampled, temperature included: the ratio to the trainer's needs these.
        "logprobs_mode": "processed_logprobs",
    }
    if (kernel := named_backend(setup.gpu, preset, setup.known_shape)) is not None:
        kwargs["attention_backend"] = kernel.value
    if preset.in_blocks:
        kwargs |= (_online_quantisation(setup) if stored is None else {}) | _expert_kernels(setup)
    return kwargs


def _kv_cache_dtype(setup: EngineSetup) -> str:
    """vLLM's word for the KV cache's dtype.

    Its "auto" is FP8 for checkpoints that ask for it. On compute capability 10.x it is FP8 for latents whose tokens an
    indexer picks, too (GlmMoeDsaForCausalLM in vllm/model_executor/models/config.py). For others it is BF16.
    """
    if setup.precision.kv == "fp8":
        return "fp8"
    stored, shape = _stored_as(setup), setup.known_shape
    indexed = shape is not None and shape.indexed
    return "bfloat16" if indexed or (stored is not None and stored.kv_fp8) else "auto"


def _online_quantisation(setup: EngineSetup) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for blockwise FP8, with the linears that stay in BF16."""
    config = {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": ignored(setup)}
    return {"quantization": "online", "quantization_config": config}


def _expert_kernels(setup: EngineSetup) -> dict[str, Any]:
    """The argument of `vllm.LLM` that keeps Triton's kernels for FP8 experts, which were measured.

    With expert parallelism on Hopper vLLM prefers FlashInfer's CUTLASS kernels (fused_moe/oracle/fp8.py).
    FlashInfer probably compiles them first: two H200s were not ready after seven minutes.
    """
    limits, capability = setup.limits, setup.gpu.compute_capability
    return {"moe_backend": "triton"} if limits.expert_ranks > 1 and capability == (9, 0) else {}


def _stored_as(setup: EngineSetup) -> Stored | None:
    """The format of an FP8 checkpoint, which vLLM reads from its config; None for one in BF16."""
    shape = setup.known_shape
    return None if shape is None else shape.stored


def vllm_env(setup: EngineSetup) -> dict[str, str]:
    """Environment variables of the engine's processes.

    VLLM_USE_DEEP_GEMM_E8M0 is on by default, on Hopper too. DeepGEMM then quantises the block-quantised weights a
    second time, to power-of-two scales, and the weight error grows from 2.6% to 3.7% RMS on Gaussian weights. Off keeps
    the FP32 scales. It is on where `e8m0` of the setup says so. A checkpoint with such scales would switch it on, too
    (get_config in vllm/transformers_utils/config.py). On a CPU a variable sets the size of the KV pool.
    """
    if setup.gpu.is_cpu:
        return {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB)}
    if not setup.precision.in_blocks:
        return {}
    return {ENGINE_E8M0: "1" if setup.e8m0 else "0"}


def grid_notes(job: Job) -> list[str]:
    """A note on an FP8 trainer whose numbers are not the engine's; [] without one."""
    setup, trainer = job.setup, job.setup.remedies.trainer_precision
    grid: str = setup.precision.weights
    if setup.precision.in_blocks:
        grid = POW2 if setup.e8m0 else BLOCK
    note = two_grids(trainer, grid) if grid in GRIDS else ""
    return [f"{note}; plan again with --trainer-precision {grid}"] if note else []


def serve_command(kwargs: dict[str, Any], env: dict[str, str], extra: tuple[str, ...] = ()) -> str:
    """The shell command that serves the same engine."""
    return shlex.join([*_assignments(env), "vllm", "serve", str(kwargs["model"]), *_flags(kwargs), *extra])


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]


def _flags(kwargs: Mapping[str, Any]) -> Iterable[str]:
    """The words of `vllm serve` for arguments of `vllm.LLM`."""
    for name, value in kwargs.items():
        flag = name.replace("_", "-")
        if name == "model":
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))


def precision_words(setup: EngineSetup, other: Precision) -> str:
    """The command of `vllm serve` with the variables and flags that an engine needs beyond those of another precision.

    Empty if it needs none, as the checkpoint itself says its precision.
    """
    engine = replace(setup, precision=other)
    kwargs = _beyond(vllm_kwargs(setup), vllm_kwargs(engine))
    env = _beyond(vllm_env(setup), vllm_env(engine))
    return serve_command({"model": setup.path, **kwargs}, env) if kwargs or env else ""


def _beyond(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the others do not have, or have with another value."""
    return {name: value for name, value in settings.items() if name not in others or others[name] != value}


def emit_vllm(job: Job) -> str:
    """The settings as JSON {"engine_args", "env", "command", "notes"}."""
    setup, kwargs, env = job.setup, vllm_kwargs(job.setup), vllm_env(job.setup)
    notes = [replicas_note(setup, "start this engine once per replica")] if setup.limits.data_parallel_size > 1 else []
    if (shape := setup.known_shape) is not None:
        notes += filter(None, [left_in_bf16(shape, setup.precision, setup.limits.tensor_parallel_size)])
    notes += [
        *concurrent_notes(job.workload, "vllm"),
        *_risk_notes(job),
        *grid_notes(job),
        *(f"in the trainer: {words}" for words in in_all_words(setup.remedies)),
    ]
    settings = {"engine_args": kwargs, "env": env, "command": serve_command(kwargs, env), "notes": notes}
    return json.dumps(settings, indent=2)


def check_risk(job: Job) -> None:
    """Raise ConfigError if the plan accepts the risk of calibrated K and V scales, but not that of scales of 1.0."""
    at_one, budget, risk = job.picked.unit_kv_scales, job.budget, job.picked.risk
    if at_one is None or risk is None or job.kv_scales == "calibrated":
        return
    if not budget.accepts(risk) or budget.accepts(at_one["risk"]):
        return
    raise ConfigError(
        f"vLLM leaves the K and V scales of {job.setup.precision.name} at 1.0: there the risk is "
        f"{at_one['risk']} (KL k3 up to {at_one['kl_k3_high']:.2g}), and the plan, made for calibrated scales, accepts "
        f"{budget.accept} at most; plan again with --kv-scales unit or --accept {at_one['risk']}, emit another choice, "
        "or say --kv-scales calibrated if you calibrate them after each weight sync"
    )


def _risk_notes(job: Job) -> list[str]:
    """Notes on the expected mismatch of vLLM's own engine, and on the K and V scales that it assumes."""
    planned = (job.picked.kl_k3, job.picked.kl_k3_high, job.picked.risk)
    if job.setup.precision.kv != "fp8":
        return _risk_note("expected mismatch", *planned)
    stored = _stored_as(job.setup)
    if stored is not None and stored.kv_fp8:
        return ["K and V scales are those of the checkpoint", *_risk_note("expected mismatch", *planned)]
    stay, counted = "vLLM leaves K and V scales at 1.0", job.counted
    if job.kv_scales == "calibrated":
        role = "and the plan counts on it" if counted else "and the plan, made for scales of 1.0, does not count on it"
        expected = _risk_note("expected mismatch" if counted else "expected mismatch at 1.0", *planned)
        return [f"{stay}: calibrating them after each weight sync is yours, {role}", *expected]
    fixed = job.setup.why_fixed_kv_scales
    advice = f"{stay}: {fixed}" if fixed else f"{stay}; fp8plan.RolloutEngine measures them after each weight sync"
    if (at_one := job.picked.unit_kv_scales) is None:
        return [advice]
    expected = _risk_note("expected mismatch at 1.0", at_one["kl_k3"], at_one["kl_k3_high"], at_one["risk"])
    return [advice, *expected, *(_risk_note("the plan's own, for calibrated scales", *planned) if counted else [])]


def measured_notes(job: Job) -> list[str]:
    """Notes on the expected mismatch in verl and TRL, where fp8plan measures the K and V scales if it can."""
    planned = (job.picked.kl_k3, job.picked.kl_k3_high, job.picked.risk)
    if job.setup.precision.kv != "fp8":
        return _risk_note("expected mismatch", *planned)
    fixed = job.setup.why_fixed_kv_scales
    scales = [MEASURED] if fixed is None else [fixed, FIXED]
    return [*scales, *_risk_note("expected mismatch" if job.counted else "expected mismatch at 1.0", *planned)]


def _risk_note(subject: str, kl: float | None, kl_high: float | None, risk: str | None) -> list[str]:
    return [] if kl is None else [f"{subject}: KL k3 {kl:.2g}, up to {kl_high:.2g}, risk {risk}"]


def refuse_for(job: Job, trainer: str) -> None:
    """Raise ConfigError for an engine that a trainer cannot start: one on a CPU, or one that `job.refused` names."""
    setup, stored = job.setup, _stored_as(job.setup)
    if setup.gpu.is_cpu:
        raise ConfigError(f"{trainer} runs vLLM on GPUs, and this plan is for a CPU; allowed: --emit vllm")
    if reason := stored.not_synced if stored else job.refused.get(trainer.lower()):
        raise ConfigError(f"{trainer} cannot start {setup.precision.name} of {model_name(setup)}: {reason}")


def model_name(setup: EngineSetup) -> str:
    """The model as a message names it."""
    return setup.model if isinstance(setup.model, str) else setup.model.name


def shared_gpu_note(setup: EngineSetup) -> str:
    """A note for trainers whose processes hold the engine."""
    return (
        f"the trainer shares these GPUs, and gpu_memory_utilization is {setup.limits.gpu_memory_utilization:g}: unless "
        "that much is free for the engine, plan again with --gpu-memory-utilization at what it may take, or neither "
        "the planned KV pool nor the predicted speed-up is reached"
    )


def replicas_note(setup: EngineSetup, how: str) -> str:
    """A note on the number of planned replicas, and `how` they come about."""
    ranks, replicas = setup.limits.tensor_parallel_size, setup.limits.data_parallel_size
    return f"planned for {replicas} replica(s) of {ranks} GPU(s), {ranks * replicas} in all: {how}"
