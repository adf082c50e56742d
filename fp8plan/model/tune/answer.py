"""The answer of `fp8plan tune`: the levers in one table, what limits the rollout, and what no lever changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import seconds
from fp8plan.model.plan.explain import COMPONENTS
from fp8plan.model.plan.planner import Prediction
from fp8plan.model.plan.scene import Lever, Scene
from fp8plan.model.plan.syncs import sync_in_the_step
from fp8plan.model.plan.turn_sentences import turn_limit
from fp8plan.model.precision import BF16
from fp8plan.model.risk.expected import LEAST_GAIN
from fp8plan.model.rollout import TAIL_SHARE, least_seconds, step_batch
from fp8plan.model.tune.levers import levers
from fp8plan.model.tune.search import WORTH_A_CHANGE, Tuned, in_words

MUCH: Final = 0.25  # share of the time from which waiting for the host counts as the limit
NOT_MODELLED: Final = "Not modelled: other engines, and a trainer that overlaps with the sync."
NO_DRAFTS: Final = (
    "Speculative decoding: for its row, type --acceptance 0.6 --num-speculative-tokens 3; vLLM logs the first as its "
    "per-position acceptance rate."
)


class Level(NamedTuple):
    """A rollout's seconds at one point of the way from before the search to the physical limit.

    name:      the change that leads there, or the plan or limit itself
    low, high: 90% interval of a plan; None for a change and for the limit
    """

    name: str
    seconds: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The way of a rollout from BF16 before the search to the tuned plan, and on to the physical limit.

    before, tuned, limit: BF16 under the limits before (the plan's choice there, if BF16 cannot run), the tuned plan,
              and its steps at the datasheet's bandwidth and peak
    changes:  one after the other, from `before` to `tuned`: the precision of the plan before, limits, precision
    beyond:   parts that no lever changes, from `tuned` to `limit`
    longest_alone_s: the longest response alone on a replica of the tuned plan
    """

    before: Level
    changes: tuple[Level, ...]
    tuned: Level
    beyond: tuple[Level, ...]
    limit: Level
    longest_alone_s: float

    @classmethod
    def of(cls, tuned: Tuned, scene: Scene) -> Waterfall:
        """The way of a tuned plan."""
        first, after = _first(tuned.base), _plan("tuned", tuned.best.chosen)
        limit = min(_at_the_datasheet(scene), after.seconds)
        parts, beyond, left = scene.base.rollout.parts, list[Level](), after.seconds
        for part in ("tools", "host", "front"):
            if parts.get(part, 0.0) >= WORTH_A_CHANGE:
                left -= parts[part] * after.seconds
                beyond.append(Level(COMPONENTS[part], left))
        beyond.append(Level("kernels slower than the datasheet", limit))
        return cls(
            before=_plan("before", first),
            changes=tuple(_changes(first, tuned)),
            tuned=after,
            beyond=tuple(beyond),
            limit=Level("datasheet's bandwidth and peak", limit),
            longest_alone_s=scene.longest_alone_s,
        )


def _first(base: Prediction) -> Candidate:
    """BF16 on the layout of a plan's choice; the choice itself if that cannot run."""
    cut = base.chosen.setup.limits.cut
    bf16 = (c for c in base.tried if c.setup.precision == BF16 and c.setup.limits.cut == cut and c.rollout)
    return next(bf16, base.chosen)


def _plan(name: str, candidate: Candidate) -> Level:
    rollout = candidate.timed
    ends = rollout.makespan_low_s, rollout.makespan_high_s
    return Level(f"{name}: {_engine(candidate)}", rollout.makespan_s, *ends)


def _engine(candidate: Candidate) -> str:
    """The precision of a candidate, and its layout if that is not one GPU."""
    limits = candidate.setup.limits
    if limits.gpus == 1:
        return candidate.setup.precision.name
    size = f"TP {limits.tensor_parallel_size}{' EP' if limits.enable_expert_parallel else ''}"
    return f"{candidate.setup.precision.name}, {size} x DP {limits.data_parallel_size}"


def _changes(first: Candidate, tuned: Tuned) -> Iterator[Level]:
    """Yield the level after each change. A limit that cannot stand without the next change shares its level."""
    before, after = tuned.base.chosen, tuned.best.chosen
    scene = Scene.of(before, tuned.base.request, tuned.base.profile)
    done, together = dict[str, Any](), list[str]()
    if _engine(first) != _engine(before):
        yield Level(_engine(before), before.timed.makespan_s)
    for name, (_, new) in tuned.changes.items():
        done[name] = new
        together.append(f"{name} {in_words(name, new)}")
        try:
            run = scene.under(done)
        except (CapacityError, ConfigError):
            continue
        yield Level(", ".join(together), run.makespan_s)
        together = []
    if _engine(before) != _engine(after):
        together.append(_engine(after))
    if together:
        yield Level(", ".join(together), after.timed.makespan_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """The worth of each lever of a tuned plan.

    levers:     those that change the time, the largest saving first
    idle:       names of those that do not, by half a percent
    limited_by: a sentence on what limits the rollout
    floor:      a sentence on what no lever changes
    waterfall:  the rollout's seconds from before the search to the physical limit
    """

    tuned: Tuned
    levers: tuple[Lever, ...]
    idle: tuple[str, ...]
    limited_by: str
    floor: str
    waterfall: Waterfall

    @classmethod
    def of(cls, tuned: Tuned) -> Answer:
        """Simulate every lever on top of a tuned plan."""
        scene = tuned.scene()
        every = levers(tuned, scene)
        working = [lever for lever in every if lever.remedy or abs(lever.gain.ratio - 1) >= WORTH_A_CHANGE]
        idle = dict.fromkeys(lever.name for lever in every if lever not in working)
        return cls(tuned, tuple(working), tuple(idle), _limited_by(scene), _floor(scene), Waterfall.of(tuned, scene))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentences below the table."""
        idle = [f"Changes nothing here: {'; '.join(self.idle)}."] if self.idle else []
        drafts = [] if self.tuned.request.speculation or self.tuned.request.batch.turns else [NO_DRAFTS]
        choice, sync = self.tuned.best.chosen, self.tuned.request.sync
        in_the_step = [] if sync is None else sync_in_the_step(choice, sync)
        return (self.limited_by, self.floor, *in_the_step, *idle, *drafts, NOT_MODELLED)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, for JSON."""
        tuned = self.tuned
        return {
            "settings": tuned.settings,
            "changes": {name: {"before": old, "after": new} for name, (old, new) in tuned.changes.items()},
            "least_gpu_memory_utilization": tuned.least_share,
            "before_s": tuned.base.chosen.seconds,
            "after_s": tuned.best.chosen.seconds,
            "levers": [lever.to_dict() for lever in self.levers],
            "limited_by": self.limited_by,
            "floor": self.floor,
            "changes_nothing": list(self.idle),
            "waterfall": asdict(self.waterfall),
        }


def _limited_by(scene: Scene) -> str:
    rollout = scene.choice.timed
    if rollout.turns is not None:
        return turn_limit(rollout.turns)
    parts = rollout.parts
    if rollout.tail_fraction > TAIL_SHARE:
        where = _largest(rollout.tail_parts)
        return (
            f"The tail limits the rollout: for {rollout.tail_fraction:.0%} of the time nothing waits and fewer than a "
            f"quarter of the requests run. There the time goes to {where}."
        )
    if rollout.recomputed_tokens >= LEAST_GAIN * rollout.output_tokens:
        lost = rollout.recomputed_tokens / rollout.output_tokens
        return (
            f"The KV pool limits the rollout: {rollout.preemptions:,} preemptions lose {lost:.0%} as many tokens as "
            f"the responses have. The time goes to {_largest(parts)}."
        )
    if parts.get("host", 0.0) >= MUCH:
        return f"Launches limit the rollout: the GPU waits for the host {parts['host']:.0%} of the time."
    share = _at_the_datasheet(scene) / rollout.makespan_s
    return (
        f"The GPU limits the rollout: the time goes to {_largest(parts)}. At the datasheet's bandwidth and peak its "
        f"steps would take {share:.0%} of the time."
    )


def _largest(parts: dict[str, float]) -> str:
    """The two largest parts in words."""
    return " and ".join(f"{COMPONENTS[name]} ({share:.0%})" for name, share in list(parts.items())[:2])


def _at_the_datasheet(scene: Scene) -> float:
    """Seconds of the steps of the slowest replica at the datasheet's bandwidth and peak."""
    model = scene.base.model
    return max(least_seconds(plan, step_batch(plan), model) for plan in scene.base.schedules)


def _floor(scene: Scene) -> str:
    longest, subject = int(scene.request.batch.responses.max()), "or drafts shortens the longest response: its"
    if scene.request.batch.turns is not None:
        subject = "shortens the longest trajectory: its tools and its"
    return (
        f"No lever but a cap {subject} {longest:,} tokens take "
        f"{seconds(scene.longest_alone_s)} s even alone. The steps of this plan read and compute for "
        f"{seconds(_at_the_datasheet(scene))} s at the datasheet's bandwidth and peak."
    )
