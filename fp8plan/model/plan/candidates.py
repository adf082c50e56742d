"""The candidates of a plan: every precision on every layout, with the reasons why some of them cannot run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8plan.errors import CapacityError, ConfigError, Fp8PlanError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.model.kv_cache.layers import why_not_kept
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory import MemoryPlan, check_pool
from fp8plan.model.precision import PRESETS, Precision, presets_of
from fp8plan.model.precision import precision as find_precision
from fp8plan.model.risk.expected import MismatchRisk
from fp8plan.model.rollout import Rollout
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import why_not_shardable


@dataclass(frozen=True, slots=True)
class Candidate:
    """One precision on one layout, with what is predicted of it or the reason why it cannot run."""

    setup: EngineSetup
    reason: str | None = None
    unfit: bool = False  # the reason is that memory is too small
    memory: MemoryPlan | None = None
    rollout: Rollout | None = None
    extrapolated: bool = False
    risk: MismatchRisk | None = None
    unit_risk: MismatchRisk | None = None  # with K and V scales left at 1.0; None without an FP8 KV cache
    step_s: float | None = None  # of the whole RL step; None without trainer figures
    layout_doubt: float = 0.0  # Profile.layout_doubt of its layout

    @property
    def timed(self) -> Rollout:
        """The rollout of a candidate that can run."""
        assert self.rollout is not None
        return self.rollout

    @property
    def expected(self) -> MismatchRisk:
        """The mismatch risk of a candidate that can run."""
        assert self.risk is not None
        return self.risk

    @property
    def seconds(self) -> float:
        """Seconds of the RL step if the trainer's times are known, else of the rollout: the time that is minimised."""
        return self.timed.makespan_s if self.step_s is None else self.step_s

    @property
    def cautious_s(self) -> float:
        """`seconds`, with a rollout that is slower by what its layout is in doubt. The rest of an RL step is not."""
        return self.seconds + math.expm1(self.layout_doubt) * self.timed.makespan_s


def candidates(
    shape: ModelShape,
    gpu: Gpu,
    limits: EngineLimits,
    *,
    gpus: int | None,
    precisions: Sequence[str] | None,
    requests: int,
    target: str,
) -> list[Candidate]:
    """Every layout of `gpus` in every precision, each with its memory or the reason why it cannot run.

    Raises ConfigError for a precision that was asked for by name and that this GPU does not have, and the first reason
    if none of them can run.
    """
    found = [
        _placed(EngineSetup(shape, gpu, wanted, layout), requests, target, explicit=precisions is not None)
        for layout in _layouts(shape, limits, gpus, gpu)
        for wanted in _precisions(precisions, shape)
    ]
    if all(c.memory is None for c in found):
        raise _nothing_runs([c for c in found if shape.why_not(c.setup.precision) is None] or found)
    return found


def _layouts(shape: ModelShape, limits: EngineLimits, gpus: int | None, gpu: Gpu) -> list[EngineLimits]:
    if gpus is None:
        shape.check_tensor_parallel(limits.tensor_parallel_size, limits.enable_expert_parallel)
        return [limits.on(gpu)]
    within = min(gpus, gpu.gpus_per_node)
    cuts = [(tp, False) for tp in shape.allowed_tensor_parallel(within)]
    if shape.parts_of(Experts):
        cuts += [(tp, True) for tp in shape.allowed_tensor_parallel(within, expert_parallel=True) if tp > 1]
    even = sorted((tp, whole) for tp, whole in cuts if gpus % tp == 0 and within % tp == 0)
    return [
        replace(
            limits, tensor_parallel_size=tp, data_parallel_size=gpus // tp, enable_expert_parallel=whole_experts
        ).on(gpu)
        for tp, whole_experts in even
    ]


def _precisions(names: Sequence[str] | None, shape: ModelShape) -> list[Precision]:
    if names is None:
        stored = shape.stored.precisions if shape.stored is not None else presets_of("fp8_block")
        return [x for pair in zip(presets_of("bf16"), stored, strict=True) for x in pair]
    found = [find_precision(name) for name in dict.fromkeys([names] if isinstance(names, str) else names)]
    if not found:
        raise ConfigError(f"precisions is []; allowed: some of {', '.join(PRESETS)}, or None for all")
    return found


def _placed(setup: EngineSetup, requests: int, target: str, explicit: bool) -> Candidate:
    """The candidate with its memory, or with the reason why it cannot run."""
    if reason := setup.shape.why_not(setup.precision):
        if explicit:
            raise ConfigError(f"{setup.precision.name} was asked for: {reason}")
        return Candidate(setup, reason)
    if reason := setup.gpu.why_not(setup.precision):
        stored = setup.shape.stored
        instead = "use bf16" if stored is None else f"plan {stored.bf16_model}"
        if explicit:
            raise ConfigError(f"{setup.precision.name} was asked for: {reason}; {instead}, or another GPU")
        return Candidate(setup, reason if stored is None else f"{reason}; {instead}, or another GPU")
    size, whole_experts = setup.limits.cut
    shardable = why_not_shardable(setup.shape, setup.precision, size, target, whole_experts, setup.gpu)
    if reason := _idle(setup.limits, requests) or _no_fp8_kv(setup) or shardable:
        return Candidate(setup, reason)
    try:
        memory = setup.memory()
        check_pool(memory, setup.gpu, setup.limits)
        return Candidate(setup, memory=memory)
    except CapacityError as error:
        return Candidate(setup, str(error), unfit=True)


def _no_fp8_kv(setup: EngineSetup) -> str | None:
    """The reason why vLLM has no FP8 for what this model caches; None if it has, or is not asked for it."""
    gpu = setup.gpu
    reason = why_not_kept(setup.shape, setup.precision, gpu.is_cpu, gpu.compute_capability)
    known = [x for x in _precisions(None, setup.shape) if x.kv == "bf16" and setup.shape.why_not(x) is None]
    return reason and f"{reason}; allowed: {', '.join(x.name for x in known if gpu.why_not(x) is None)}"


def _idle(limits: EngineLimits, requests: int) -> str | None:
    """The reason why there are too many replicas for the requests; None if there are not."""
    replicas = limits.data_parallel_size
    if replicas <= requests:
        return None
    return (
        f"{replicas} replicas for {requests} requests leave {replicas - requests} without any; allowed: at most "
        f"{requests} replicas (data_parallel_size; of --gpus what tensor parallelism leaves)"
    )


def _nothing_runs(found: Sequence[Candidate]) -> Fp8PlanError:
    """The error for candidates that all have a reason why not."""
    unfit = [c for c in found if c.unfit]
    return CapacityError(unfit[0].reason) if unfit else ConfigError(found[0].reason)
