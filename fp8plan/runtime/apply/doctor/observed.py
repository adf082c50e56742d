"""The observations behind all checks, as plain data, and the finding of one check.

Missing observations are None, and `unseen` has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.watch.guard.prefix_cache import Lost
from fp8plan.schemas import KlPart

NOTHING: Final = "nothing tells"


@dataclass(frozen=True, slots=True)
class Compared:
    """Log-probs of the same tokens from two ways through one engine.

    tokens:   their number
    mean_abs: mean |difference|, in nats
    k3:       mean k3 per token
    cached:   number of the prompts' tokens from the prefix cache; None: not known
    """

    tokens: int
    mean_abs: float
    k3: float
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Temperatures:
    """The trainer's log-probs beside the engine's of the same tokens, at two temperatures.

    sampled: that of the rollouts
    fitted:  that at which the engine's log-probs are nearest to the trainer's
    mean_abs, mean_abs_fitted: mean |difference| at both, in nats
    """

    sampled: float
    fitted: float
    mean_abs: float
    mean_abs_fitted: float


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The live weights of one rank.

    unsound, changed: findings of `fp8plan_examine`; changed is None without an earlier look
    differ:   tensors that are not the trainer's; None: the trainer's are not known
    compared: number of compared tensors: only those that are written in place can be compared
    of:       number of all tensors
    apart:    pairs of the trainer's tensors that differ, and share one storage in the engine
    """

    unsound: Mapping[str, str] = field(default_factory=dict)
    changed: Sequence[str] | None = None
    differ: Sequence[str] | None = None
    compared: int | None = None
    of: int | None = None
    apart: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Figures and alarms that a run logged.

    step:      number of its last step
    k3:        mean k3 per token between trainer and rollout, from the last step that has the figure: NaN if logged as
               null, NaN or infinite; None: no step has it
    k3_step:   number of that step
    limit:     the run's limit of the KL
    tokens, invalid: numbers of the last step's tokens with finite log-probs on both sides, and without; None: not known
    steps:     numbers of all steps; None: a log without alarms
    alarms:    alarm -> numbers of its steps
    causes:    the parts of the last step's KL
    differing: share of its tokens that trainer and engine route differently; None: not known
    """

    step: int
    k3: float | None
    k3_step: int | None
    limit: float | None = None
    tokens: float | None = None
    invalid: float | None = None
    steps: Sequence[int] | None = None
    alarms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    causes: Sequence[KlPart] = ()
    differing: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of one engine.

    target:    the engine, server or file, in words
    gpu:       name in fp8plan.model.hardware
    precision: planned preset
    trainer_precision: one of TRAINER_PRECISIONS; None: not known
    runs:      preset that runs; None: not known, or none of fp8plan's
    ranks:     facts of each worker (runtime.apply.worker.facts), as far as a server or a file has them
    kernels:   a profile's name of a kernel -> vLLM's name of its implementation
    measured_kernels: the same in the profile of this GPU and version
    kv_scales: layer -> scales in use, on the device ("k") and on the host ("k_host")
    kv_amax:   layer -> largest |q|, |k|, |v| of some prompts
    preemptions, requests: their numbers since `since`
    prefix_cache_queries, prefix_cache_hits: as in Observation, since `since`
    lost_prefixes: those of the last rollout, by its guard; None: it names none
    version:   number of the weights that should serve
    refusal:   the reason why the engine does not generate; None: it does
    weights:   those of each rank
    decode:    log-probs of a decode beside those of a prefill of the same tokens
    prefix:    the next token's log-prob with the prefix cache beside that without
    temperatures: the trainer's log-probs beside the engine's
    log:       that of a run
    unseen:    field, or "counts" for those since `since` -> the reason why it is missing, and the remedy
    """

    target: str
    gpu: str | None = None
    precision: str | None = None
    trainer_precision: str | None = None
    runs: str | None = None
    ranks: Sequence[Mapping[str, Any]] = ()
    kernels: Mapping[str, str] | None = None
    measured_kernels: Mapping[str, str] | None = None
    kv_scales: Mapping[str, Mapping[str, float]] | None = None
    kv_amax: Mapping[str, Sequence[float]] | None = None
    preemptions: int | None = None
    requests: int | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    lost_prefixes: Lost | None = None
    since: str = "the engine's start"
    version: int | None = None
    refusal: str | None = None
    weights: Sequence[RankWeights] | None = None
    decode: Compared | None = None
    prefix: Compared | None = None
    temperatures: Temperatures | None = None
    log: Logged | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of the first rank; ranks run the same."""
        return self.ranks[0] if self.ranks else {}

    @property
    def weights_format(self) -> str | None:
        """The format of quantised weights; "": not quantised; None: not known."""
        layers, name = self.facts.get("layers"), self.facts.get("quantization")
        if self.runs is not None:
            return "" if PRESETS[self.runs].weights == "bf16" else PRESETS[self.runs].weights
        if "quantization" in self.facts or layers is None:
            return name or ("" if "quantization" in self.facts else None)
        return "FP8" if any("Fp8" in kind for kind in layers) else ""

    @property
    def fp8_kv(self) -> bool | None:
        """True for an FP8 KV cache; None: not known."""
        if self.runs is not None:
            return PRESETS[self.runs].kv == "fp8"
        dtype = self.facts.get("kv_cache_dtype")
        return None if dtype is None else str(dtype).startswith("fp8")

    @property
    def cpu(self) -> bool:
        return self.gpu == "cpu" or self.facts.get("device") == "cpu"


def needs_e8m0(seen: Observed) -> bool:
    """True if the GPU or the checkpoint has power-of-two scales of FP8 blocks; False if neither is known to."""
    try:
        return seen.gpu is not None and find_gpu(seen.gpu).has_e8m0(bool(seen.facts.get("held_e8m0")))
    except ConfigError:
        return False


class State(StrEnum):
    """The outcome of a check. WARNING: a risk, which need not be a fault. UNKNOWN: an observation is missing."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's finding.

    check: its name
    state: its outcome
    says:  a description of what runs, with the evidence; for UNKNOWN the reason
    fault: name of the fault or risk, such as "kv_scales_unit"; None without one
    todo:  the remedy, or the way to the missing observation
    """

    check: str
    state: State
    says: str
    fault: str | None = None
    todo: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"state": self.state.value}


def ok(check: str, says: str) -> Finding:
    return Finding(check, State.OK, says)


def fault(check: str, name: str, says: str, todo: str) -> Finding:
    return Finding(check, State.FAULT, says, name, todo)


def warning(check: str, name: str, says: str, todo: str) -> Finding:
    return Finding(check, State.WARNING, says, name, todo)


def unknown(check: str, why: str) -> Finding:
    """Nothing is known. why: "REASON; type: REMEDY", or the reason alone"""
    says, _, todo = why.partition("; type: ")
    return Finding(check, State.UNKNOWN, says, None, todo or None)
