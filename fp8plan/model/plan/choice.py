"""One choice of a plan: a precision on a layout, and all that is predicted of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.model.plan.speedup import SpeedUp
from fp8plan.model.precision import Precision, precision
from fp8plan.model.risk.budget import LEVELS


@dataclass(frozen=True, slots=True)
class Choice:
    """One precision on one parallel layout, predicted. Numbers are None where `available` is false.

    precision:            preset name (fp8plan.model.precision)
    tensor_parallel:      GPUs per replica
    data_parallel:        replicas of the trainer, with the batch split between them before it starts
    available, reason:    whether this GPU can run it, and why not
    makespan_s:           seconds from the first prompt to the last response, with its 90% interval
    output_tokens_per_s:  response tokens of all replicas / makespan_s
    speedup:              BF16 makespan / this makespan, same workload, GPU and limits, with its 90% interval
    rl_step_s:            seconds of a whole RL step; None without trainer figures
    step_speedup:         the same ratio for the RL step, with its 90% interval; None without trainer figures
    kv_cache_tokens:      tokens the KV pool of one replica holds
    preemptions:          in all replicas
    tail_fraction:        part of the makespan spent at small batch, in [0, 1]
    kl_k3:                mean k3 per token between trainer and rollout, with its range
    ess_raw:              effective sample size of the untruncated token ratios, a fraction
    clip_fraction:        part of the tokens that token TIS clips
    seq_reject_fraction:  part of the sequences that a sequence-level MIS would drop
    risk:                 "low", "moderate" or "high" (README states the rules)
    unit_kv_scales:       kl_k3, kl_k3_low, kl_k3_high and risk with K and V scales left at 1.0; None without FP8 KV
    extrapolated:         whether the profile was used outside what was measured
    refused_by:           target -> why it cannot start this layout, though vLLM can; {} if all of them can
    expert_parallel:      the GPUs of a replica share out whole experts
    """

    precision: str
    tensor_parallel: int
    data_parallel: int
    available: bool
    reason: str | None
    makespan_s: float | None
    makespan_low_s: float | None
    makespan_high_s: float | None
    output_tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    rl_step_s: float | None
    step_speedup: float | None
    kv_cache_tokens: int | None
    preemptions: int | None
    tail_fraction: float | None
    kl_k3: float | None
    kl_k3_low: float | None
    kl_k3_high: float | None
    ess_raw: float | None
    clip_fraction: float | None
    seq_reject_fraction: float | None
    risk: str | None
    unit_kv_scales: dict[str, Any] | None
    extrapolated: bool | None
    refused_by: dict[str, str]
    expert_parallel: bool = False
    step_speedup_low: float | None = None
    step_speedup_high: float | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        precision(self.precision)

    @property
    def preset(self) -> Precision:
        return precision(self.precision)

    @property
    def layout(self) -> tuple[int, int, bool]:
        """The parallel layout, (tensor_parallel, data_parallel, expert_parallel)."""
        return self.tensor_parallel, self.data_parallel, self.expert_parallel

    @property
    def cut(self) -> tuple[int, bool]:
        """As in EngineLimits."""
        return self.tensor_parallel, self.expert_parallel

    @property
    def layout_label(self) -> str:
        """The layout in a table: "4x2", and "4x2 EP" with expert parallelism."""
        return f"{self.tensor_parallel}x{self.data_parallel}{' EP' if self.expert_parallel else ''}"

    @property
    def replica_label(self) -> str:
        """The layout of one replica: "TP 4", and "TP 4 EP" with expert parallelism."""
        return f"TP {self.tensor_parallel}{' EP' if self.expert_parallel else ''}"

    @property
    def sizes(self) -> str:
        """The layout of one replica in a sentence."""
        whole = " with expert parallelism" if self.expert_parallel else ""
        return f"tensor_parallel_size {self.tensor_parallel}{whole}"

    @property
    def seconds(self) -> float:
        """Seconds of the RL step if the trainer's times are known, else of the rollout. Choices are compared by it."""
        known = self.makespan_s if self.rl_step_s is None else self.rl_step_s
        return float("inf") if known is None else known

    @property
    def gain(self) -> SpeedUp | None:
        """The rollout's speed-up over bf16 on the same layout."""
        return None if self.speedup is None else SpeedUp(self.speedup, self.speedup_low, self.speedup_high)

    @property
    def step_gain(self) -> SpeedUp | None:
        """The RL step's speed-up over bf16 on the same layout. A plan of schema 1.1 does not have its interval."""
        known = self.step_speedup, self.step_speedup_low, self.step_speedup_high
        return None if known[0] is None else SpeedUp(known[0], *known[1:])

    @property
    def rl_step_band_s(self) -> tuple[float | None, float | None]:
        """The 90% interval of rl_step_s. Only the rollout adds doubt: the rest of a step is taken as known."""
        if self.rl_step_s is None or None in (self.makespan_s, self.makespan_low_s, self.makespan_high_s):
            return None, None
        rest = self.rl_step_s - (self.makespan_s or 0.0)
        return rest + (self.makespan_low_s or 0.0), rest + (self.makespan_high_s or 0.0)

    @property
    def riskiness(self) -> int:
        """The index of its risk in LEVELS; 0, the lowest, if the risk is not known."""
        return LEVELS.index(self.risk) if self.risk in LEVELS else 0


def several_layouts(choices: Sequence[Choice]) -> bool:
    """True if the choices have more than one layout, so that a choice's layout must be named."""
    return len({choice.layout for choice in choices}) > 1


def plain_fields(record: Any) -> None:
    """Convert numpy scalars and tuples inside dicts to what JSON gives back, so that a round trip is equal."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, dict):
            plain: Any = _plain_dict(value, f.name)
        elif hasattr(value, "item"):
            plain = value.item()
        else:
            continue
        object.__setattr__(record, f.name, plain)


def _plain_dict(value: dict[str, Any], name: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=lambda x: x.item()))
    except (ValueError, AttributeError, TypeError) as error:
        allowed = "finite numbers, text, lists, dicts"
        raise ConfigError(f"{name} cannot be written as JSON ({error}); allowed: {allowed}") from None
