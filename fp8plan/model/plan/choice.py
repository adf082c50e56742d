"""The choices of a plan: every precision on every layout with its predicted figures, and the one that is chosen.

A speed-up is the speed of one rollout, or RL step, divided by that of another. It has a 90% interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.candidates import Candidate, Way
from fp8plan.model.precision import Precision, find_precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.expected import LEAST_GAIN, LEVELS, RiskBudget
from fp8plan.model.rollout import Z90, Rollout
from fp8plan.model.shards import refusals


class SpeedUp(NamedTuple):
    """A ratio of speeds, with the ends of its 90% interval; None where they are not known."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def certain(self) -> bool:
        """True for a choice compared with itself, which has no interval."""
        return self.low == self.high

    @property
    def in_doubt(self) -> bool:
        """True if the printed interval holds 1.00, so that the two may be equally fast."""
        known = self.low is not None and self.high is not None and not self.certain
        return known and round(self.low or 0, 2) <= 1 <= round(self.high or 0, 2)

    @property
    def cell(self) -> str:
        """The words of a table, such as "1.20x (0.88-1.64)"."""
        return f"{self.ratio:.2f}x" + ("" if self.certain else f" ({self.low:.2f}-{self.high:.2f})")

    def over(self, other: str) -> str:
        """The words of a sentence: "1.20x as fast as bf16 (90%: 0.88 to 1.64)", or "3.0% slower than bf16 (...)"."""
        if round(self.ratio, 2) < 1:
            return self.percent(other)
        band = "" if self.certain else f" (90%: {self.low:.2f} to {self.high:.2f})"
        return f"{self.ratio:.2f}x as fast as {other}{band}"

    def percent(self, other: str) -> str:
        """The words of a small gain: "1.5% faster than bf16 (90%: 2.0% slower to 5.1% faster)". Percent of speed."""
        band = "" if self.low is None or self.high is None else f" (90%: {_percent(self.low)} to {_percent(self.high)})"
        return f"{_percent(self.ratio)} than {other}{'' if self.certain else band}"

    def of_step(self, share: float) -> SpeedUp:
        """The speed-up of a step with this share of rollout, whose rest takes as long as before (Amdahl's law)."""
        ratio, *ends = (None if gain is None else 1 / (1 - share + share / gain) for gain in self)
        return SpeedUp(ratio or 1.0, *ends)


def _percent(ratio: float) -> str:
    part = abs(ratio - 1)
    return f"{part:{'.1%' if part < 0.0995 else '.0%'}} {'slower' if ratio < 1 else 'faster'}"


def speed_up(
    baseline: Rollout, other: Rollout, profile: Profile, steps_s: tuple[float | None, float | None] = (None, None)
) -> SpeedUp:
    """The ratio of the speed of `other` to that of `baseline`, by the same profile.

    steps_s: seconds of the RL steps around both, which are compared instead if both are known; the rest of a step
             counts as known

    Coefficients that both use move both, so only the difference of their gradients counts: the paces of GPU and host
    cancel as far as both rollouts depend on them alike. The model errors are independent. The error of a layout that
    both have cancels. In an RL step a rollout's error counts by its share. The errors of sampling a large batch are
    taken as independent.
    """
    both = (baseline, other)
    seconds = (baseline.makespan_s, other.makespan_s)
    if steps_s[0] is not None and steps_s[1] is not None:
        seconds = (steps_s[0], steps_s[1])
    ratio = seconds[0] / seconds[1]
    if other.log_gradient is baseline.log_gradient and ratio == 1:
        return SpeedUp(1.0, 1.0, 1.0)
    names = list(dict.fromkeys((*baseline.log_gradient, *other.log_gradient)))
    shares = [run.makespan_s / whole for run, whole in zip(both, seconds, strict=True)]
    gradients = [
        np.array([share * run.log_gradient.get(name, 0.0) for name in names])
        for run, share in zip(both, shares, strict=True)
    ]
    apart = gradients[0] - gradients[1]
    variance = float(apart @ profile.covariance(names) @ apart)
    for run, share in zip(both, shares, strict=True):
        variance += share**2 * (profile.model_error**2 + run.sampling_sd**2)
    layouts = [share * profile.layout_error(*run.cut) for run, share in zip(both, shares, strict=True)]
    variance += (layouts[0] - layouts[1]) ** 2 if baseline.cut == other.cut else sum(sd**2 for sd in layouts)
    factor = float(np.exp(Z90 * np.sqrt(variance)))
    return SpeedUp(ratio, ratio / factor, ratio * factor)


@dataclass(frozen=True, slots=True)
class Choice:
    """One precision on one parallel layout, predicted. Numbers are None where `available` is false.

    precision:            preset name (fp8plan.model.precision)
    tensor_parallel:      GPUs per replica
    data_parallel:        replicas of the trainer, with the batch split between them before it starts
    available, reason:    true if this GPU can run it; else the reason
    makespan_s:           seconds from the first prompt to the last response, with its 90% interval
    output_tokens_per_s:  response tokens of all replicas / makespan_s
    speedup_over_best:    makespan of the plan's baseline / this makespan, with its 90% interval. The baseline is the
                          best BF16 layout, or the one of observed rollouts. None: no BF16
    step_speedup_over_best: the same ratio for the RL step; None without trainer figures
    speedup:              makespan of BF16 on the same layout / this makespan, with its 90% interval
    rl_step_s:            seconds of a whole RL step; None without trainer figures
    step_speedup:         the same for the RL step, with its interval; None without trainer figures
    kv_cache_tokens:      tokens that the KV pool of one replica holds
    preemptions:          number in all replicas
    tail_fraction:        part of the makespan spent at small batch, in [0, 1]
    kl_k3 to seq_reject_fraction: as in MismatchRisk
    risk:                 "low", "moderate" or "high", by the rules of RiskBudget
    unit_kv_scales:       kl_k3, kl_k3_low, kl_k3_high and risk with K and V scales left at 1.0; None without FP8 KV
    extrapolated:         more than 10% of makespan_s is extrapolated or theory
    refused_by:           target -> the reason why it cannot start this layout, though vLLM can
    expert_parallel:      the GPUs of a replica share out whole experts
    rests_on:             shares of makespan_s: {"shares": ground -> share, "kernels": component -> ground -> share}.
                          Grounds: measured, imported, extrapolated, theory. {}: not known
    max_num_seqs:         its own limit, where its KV pool asks for another than the plan's; None: the plan's
    remedy:               the remedies with which the risk budget allows it. Only the fastest choice of a precision that
                          is ruled out has some; None: it is allowed, or nothing helps
    routed_experts:       bytes of the experts that its engines return: {"token", "device", "host", "rollout"}, as in
                          RouteBytes of fp8plan.model.cost.routes; None: they return none
    turns:                as in Rollout; None: each response has one turn
    """

    precision: str
    tensor_parallel: int
    data_parallel: int
    available: bool
    reason: str | None
    makespan_s: float | None = None
    makespan_low_s: float | None = None
    makespan_high_s: float | None = None
    output_tokens_per_s: float | None = None
    speedup_over_best: float | None = None
    speedup_over_best_low: float | None = None
    speedup_over_best_high: float | None = None
    step_speedup_over_best: float | None = None
    step_speedup_over_best_low: float | None = None
    step_speedup_over_best_high: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    rl_step_s: float | None = None
    step_speedup: float | None = None
    kv_cache_tokens: int | None = None
    preemptions: int | None = None
    tail_fraction: float | None = None
    kl_k3: float | None = None
    kl_k3_low: float | None = None
    kl_k3_high: float | None = None
    ess_raw: float | None = None
    clip_fraction: float | None = None
    seq_reject_fraction: float | None = None
    risk: str | None = None
    unit_kv_scales: dict[str, Any] | None = None
    extrapolated: bool | None = None
    refused_by: dict[str, str] = field(default_factory=dict)
    expert_parallel: bool = False
    step_speedup_low: float | None = None
    step_speedup_high: float | None = None
    rests_on: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_num_seqs: int | None = None
    remedy: Way | None = None
    routed_experts: dict[str, int] | None = None
    turns: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        find_precision(self.precision)

    @property
    def preset(self) -> Precision:
        return find_precision(self.precision)

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
    def best_gain(self) -> SpeedUp | None:
        """The rollout's speed-up over the plan's baseline."""
        return self._speed_up("speedup_over_best")

    @property
    def best_step_gain(self) -> SpeedUp | None:
        """The RL step's speed-up over the plan's baseline, likewise."""
        return self._speed_up("step_speedup_over_best")

    @property
    def gain(self) -> SpeedUp | None:
        """The rollout's speed-up over bf16 on the same layout."""
        return self._speed_up("speedup")

    @property
    def step_gain(self) -> SpeedUp | None:
        """The RL step's speed-up over bf16 on the same layout."""
        return self._speed_up("step_speedup")

    def _speed_up(self, name: str) -> SpeedUp | None:
        ratio, *ends = (getattr(self, f"{name}{end}") for end in ("", "_low", "_high"))
        return None if ratio is None else SpeedUp(ratio, *ends)

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


def seconds(value: float | None) -> str:
    """A number of seconds with at least three digits, such as 1,234 or 98.7 or 0.0123."""
    assert value is not None
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def power(value: float | None) -> str:
    """A number such as 7.4e-4."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def several_layouts(choices: Sequence[Choice]) -> bool:
    """True if the choices have more than one layout, so that a choice's layout must be named."""
    return len({choice.layout for choice in choices}) > 1


def plain_fields(record: Any) -> None:
    """Convert numpy scalars and tuples inside dicts to what JSON gives back, so that a round trip is equal."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, dict):
            object.__setattr__(record, f.name, _plain_dict(value, f.name))
        elif hasattr(value, "item"):
            object.__setattr__(record, f.name, value.item())


def _plain_dict(value: dict[str, Any], name: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=lambda number: number.item()))
    except (ValueError, AttributeError, TypeError) as error:
        allowed = "finite numbers, text, lists, dicts"
        raise ConfigError(f"{name} cannot be written as JSON ({error}); allowed: {allowed}") from None


def choose(candidates: Sequence[Candidate], budget: RiskBudget) -> int:
    """The index of the chosen candidate.

    The budget rules out some candidates. Among the others within LEAST_GAIN of the fastest, the one with the lowest KL
    is chosen. If the budget rules out all, the one with the lowest KL of all is chosen.

    An unmeasured layout counts only if it is faster than the fastest measured one by more than one standard deviation
    of its times. That holds for every kind of profile.
    """
    runnable = [i for i, c in enumerate(candidates) if c.makespan_s is not None]
    accepted = [i for i in runnable if budget.accepts(candidates[i].expected.level)]
    compared = _without_doubtful(candidates, accepted or runnable)
    fastest = min(candidates[i].seconds for i in compared)
    close = [i for i in compared if candidates[i].seconds <= fastest * (1 + LEAST_GAIN)]
    return min(close if accepted else compared, key=lambda i: (candidates[i].expected.kl_k3, candidates[i].seconds))


def _without_doubtful(candidates: Sequence[Candidate], compared: list[int]) -> list[int]:
    """The candidates of `compared` whose layout was measured, or that are faster even at their cautious time."""
    measured = [candidates[i].seconds for i in compared if not candidates[i].layout_doubt]
    best = min(measured, default=math.inf)
    return [i for i in compared if not candidates[i].layout_doubt or candidates[i].cautious_s < best]


def baseline_of(candidates: Sequence[Candidate], observed: Sequence[EngineLimits] = ()) -> int | None:
    """The index of the BF16 candidate that speed-ups are over; None if BF16 cannot run.

    It is the fastest, or the one on the last layout in which BF16 was observed.
    """
    bf16 = [i for i, c in enumerate(candidates) if c.setup.precision.name == "bf16" and c.rollout is not None]
    layouts = {candidates[i].setup.limits.layout: i for i in bf16}
    seen = [layouts[limits.layout] for limits in observed if limits.layout in layouts]
    return seen[-1] if seen else min(bf16, key=lambda i: candidates[i].seconds, default=None)


def as_choices(
    candidates: Sequence[Candidate],
    profile: Profile,
    max_num_seqs: int,
    baseline: int | None = None,
) -> tuple[Choice, ...]:
    """A Choice for each candidate, with its speed-up over the baseline, and over BF16 on the same layout.

    max_num_seqs: the plan's limit
    """
    bf16 = {c.setup.limits.layout: c for c in candidates if c.setup.precision.name == "bf16" and c.rollout is not None}
    best = None if baseline is None else candidates[baseline]
    return tuple(_choice(c, bf16.get(c.setup.limits.layout), best, profile, max_num_seqs) for c in candidates)


OF_ROLLOUT = ("makespan_s", "makespan_low_s", "makespan_high_s", "output_tokens_per_s", "preemptions", "tail_fraction")
_OF_KL = ("kl_k3", "kl_k3_low", "kl_k3_high")
OF_RISK = (*_OF_KL, "ess_raw", "clip_fraction", "seq_reject_fraction")


def _choice(
    candidate: Candidate, bf16: Candidate | None, best: Candidate | None, profile: Profile, max_num_seqs: int
) -> Choice:
    rollout, risk, memory, setup = candidate.rollout, candidate.risk, candidate.memory, candidate.setup
    size, whole_experts = setup.limits.cut
    seqs = int(setup.limits.max_num_seqs)
    choice = Choice(
        setup.precision.name,
        size,
        setup.limits.data_parallel_size,
        available=False,
        reason=candidate.reason,
        expert_parallel=whole_experts,
    )
    if rollout is None or risk is None or memory is None:
        return choice
    at_one = candidate.unit_risk
    choice = replace(
        choice,
        available=True,
        **_named(rollout, (*OF_ROLLOUT, "rests_on", "turns")),
        **_named(risk, OF_RISK),
        risk=risk.level,
        unit_kv_scales=None if at_one is None else _named(at_one, _OF_KL) | {"risk": at_one.level},
        rl_step_s=candidate.step_s,
        kv_cache_tokens=memory.kv_cache_tokens,
        extrapolated=candidate.extrapolated,
        refused_by=refusals(setup.shape, setup.precision, size, whole_experts),
        max_num_seqs=None if seqs == max_num_seqs else seqs,
        remedy=candidate.way,
        routed_experts=None if candidate.routes is None else candidate.routes._asdict(),
    )
    if best is not None:
        choice = replace(choice, **_speedups(best, candidate, profile, "_over_best"))
    if bf16 is not None:
        choice = replace(choice, **_speedups(bf16, candidate, profile, ""))
    return choice


def _named(record: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _speedups(bf16: Candidate, candidate: Candidate, profile: Profile, end: str) -> dict[str, Any]:
    """The fields of a Choice on its speed-up over a BF16 candidate: of the rollout, and of a known RL step."""
    gains = {"speedup": speed_up(bf16.timed, candidate.timed, profile)}
    if bf16.step_s is not None and candidate.step_s is not None:
        steps_s = bf16.step_s, candidate.step_s
        gains["step_speedup"] = speed_up(bf16.timed, candidate.timed, profile, steps_s)
    made = dict[str, Any]()
    for stem, gain in gains.items():
        made |= {f"{stem}{end}": gain.ratio, f"{stem}{end}_low": gain.low, f"{stem}{end}_high": gain.high}
    return made


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan's choices and their rollouts, in the same order; a choice that cannot run has None."""

    choices: Sequence[Choice]
    chosen: int
    rollouts: Sequence[Rollout | None]
    profile: Profile
    budget: RiskBudget = field(default_factory=RiskBudget)
    baseline: int | None = None  # as in Plan; None: the fastest bf16
    observed: bool = False  # the baseline's layout is that of an observed rollout

    @property
    def picked(self) -> Choice:
        return self.choices[self.chosen]

    @property
    def bf16(self) -> Choice | None:
        """BF16 on the layout of the chosen choice; None if it cannot run."""
        alike = (c for c in self.choices if c.precision == "bf16" and c.layout == self.picked.layout and c.available)
        return next(alike, None)

    @property
    def of_the_step(self) -> str:
        """The words for the time by which choices are compared, if that is not the rollout's."""
        return " for the whole RL step" if self.picked.rl_step_s is not None else ""

    def rollout(self, choice: Choice) -> Rollout:
        """The rollout of a choice that can run."""
        rollout = next(rollout for c, rollout in zip(self.choices, self.rollouts, strict=True) if c is choice)
        assert rollout is not None
        return rollout

    def gain(self, choice: Choice, than: Choice) -> SpeedUp:
        """The ratio of a choice's speed to that of `than`. Both can run."""
        steps_s = than.rl_step_s, choice.rl_step_s
        return speed_up(self.rollout(than), self.rollout(choice), self.profile, steps_s)
