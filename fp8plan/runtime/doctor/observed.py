"""All that the checks look at, as plain data. What could not be seen is None, and `unseen` says why.

The finding of one check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from fp8plan.model.precision import PRESETS
from fp8plan.schemas import KlPart


@dataclass(frozen=True, slots=True)
class Compared:
    """Log-probs of the same tokens from two ways through one engine.

    tokens:   how many were compared
    mean_abs: mean |difference|, in nats
    k3:       mean k3 per token
    cached:   of the prompts' tokens, how many came from the prefix cache; None: not known
    """

    tokens: int
    mean_abs: float
    k3: float
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Temperatures:
    """The trainer's log-probs beside the engine's of the same tokens, which can be had at any temperature.

    sampled: temperature of the rollouts
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

    unsound, changed: as runtime.doctor.examine finds them; changed is None where nothing is known of before
    differ, compared, of: tensors that are not the trainer's, of those compared, of all of them; None: nobody gave the
                      trainer's. Only tensors that are written in place can be compared
    """

    unsound: Mapping[str, str] = field(default_factory=dict)
    changed: Sequence[str] | None = None
    differ: Sequence[str] | None = None
    compared: int | None = None
    of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Figures and alarms that a run logged.

    step:      number of its last step
    k3:        mean k3 per token between trainer and rollout, of the last step that has the figure: NaN where it is
               logged as null, NaN or infinite; None: no step has it
    k3_step:   number of that step
    limit:     of the KL in that run
    tokens, invalid: tokens of the last step with a finite log-prob on both sides, and without; None: not logged
    steps:     numbers of all steps; None: a log without alarms
    alarms:    alarm -> numbers of the steps in which it sounded
    causes:    the parts of the last step's KL
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of one engine.

    target:    what was looked at, in words
    gpu:       name in fp8plan.model.hardware
    precision: preset that was planned
    runs:      preset that runs; None: not known, or none of fp8plan's
    ranks:     facts of each worker (runtime.worker.facts); from a server or a file, those that it tells
    kernels:   kernel, as profiles name it -> its implementation, as vLLM names it
    measured_kernels: the same in the profile of this GPU and version
    kv_scales: layer -> scales in use, on the device ("k") and on the host ("k_host")
    kv_amax:   layer -> largest |q|, |k|, |v| of some prompts
    preemptions, requests: since when `since` says
    version:   number of the weights that should serve
    refusal:   why the engine does not generate; None: it does
    weights:   of each rank
    decode:    log-probs of a decode beside those of a prefill of the same tokens
    prefix:    the next token's log-prob with the prefix cache beside that without
    temperatures: the trainer's log-probs
    log:       of a run
    unseen:    field -> why it could not be seen, and what to type to see it
    """

    target: str
    gpu: str | None = None
    precision: str | None = None
    runs: str | None = None
    ranks: Sequence[Mapping[str, Any]] = ()
    kernels: Mapping[str, str] | None = None
    measured_kernels: Mapping[str, str] | None = None
    kv_scales: Mapping[str, Mapping[str, float]] | None = None
    kv_amax: Mapping[str, Sequence[float]] | None = None
    preemptions: int | None = None
    requests: int | None = None
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
        """Name the format of quantised weights; "" for weights that are not quantised; None: not known."""
        layers, name = self.facts.get("layers"), self.facts.get("quantization")
        if self.runs is not None:
            return "" if PRESETS[self.runs].weights == "bf16" else PRESETS[self.runs].weights
        if "quantization" in self.facts or layers is None:
            return name or ("" if "quantization" in self.facts else None)
        return "FP8" if any("Fp8" in kind for kind in layers) else ""

    @property
    def fp8_kv(self) -> bool | None:
        """Tell whether the KV cache is FP8; None: not known."""
        if self.runs is not None:
            return PRESETS[self.runs].kv == "fp8"
        dtype = self.facts.get("kv_cache_dtype")
        return None if dtype is None else str(dtype).startswith("fp8")

    @property
    def cpu(self) -> bool:
        return self.gpu == "cpu" or self.facts.get("device") == "cpu"


class State(StrEnum):
    """The outcome of a check. WARNING: a risk, which need not be a fault. UNKNOWN: what it needs could not be seen."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's finding.

    check: its name
    state: what it came to
    fault: name of the fault, or of what is warned of, such as "kv_scales_unit"; None without one
    says:  what really runs, with the evidence; for UNKNOWN why it could not be seen
    todo:  what to type to mend it, or to see it
    """

    check: str
    state: State
    says: str
    fault: str | None = None
    todo: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"state": self.state.value}


def ok(check: str, says: str) -> Finding:
    return Finding(check, State.OK, says)


def fault(check: str, name: str, says: str, todo: str) -> Finding:
    return Finding(check, State.FAULT, says, name, todo)


def warning(check: str, name: str, says: str, todo: str) -> Finding:
    return Finding(check, State.WARNING, says, name, todo)


def unknown(check: str, why: str) -> Finding:
    """Nothing is known. why: "the reason; type: what to type to see it", or the reason alone"""
    says, _, todo = why.partition("; type: ")
    return Finding(check, State.UNKNOWN, says, None, todo or None)
