"""The answer of `fp8plan tune`: the levers in one table, what limits the rollout, and what no lever changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fp8plan.model.plan.explain import COMPONENTS, seconds
from fp8plan.model.risk.expected import LEAST_GAIN
from fp8plan.model.rollout import TAIL_SHARE, least_seconds, step_batch
from fp8plan.model.tune.levers import Lever, Scene, levers
from fp8plan.model.tune.search import WORTH_A_CHANGE, Tuned
from fp8plan.model.tune.speculation import Speculation

MUCH: Final = 0.25  # share of the time from which waiting for the host counts as the limit
NOT_MODELLED: Final = "Not modelled: other engines, and a trainer that overlaps with the sync."
NO_DRAFTS: Final = (
    "Speculative decoding: for its row, type --acceptance 0.6 --num-speculative-tokens 3; vLLM logs the first as its "
    "per-position acceptance rate."
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The worth of each lever of a tuned plan.

    levers:     those that change the time, the largest saving first
    idle:       names of those that do not, by half a percent
    limited_by: a sentence on what limits the rollout
    floor:      a sentence on what no lever changes
    """

    tuned: Tuned
    levers: tuple[Lever, ...]
    idle: tuple[str, ...]
    limited_by: str
    floor: str
    speculation: Speculation | None = None

    @classmethod
    def of(cls, tuned: Tuned, speculation: Speculation | None = None) -> Answer:
        """Simulate every lever on top of a tuned plan. speculation: drafts to weigh; None: not known"""
        scene = Scene.of(tuned, speculation)
        every = levers(tuned, scene)
        working = [lever for lever in every if abs(lever.gain.ratio - 1) >= WORTH_A_CHANGE]
        idle = dict.fromkeys(lever.name for lever in every if lever not in working)
        return cls(tuned, tuple(working), tuple(idle), _limited_by(scene), _floor(scene), speculation)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentences below the table."""
        idle = [f"Changes nothing here: {'; '.join(self.idle)}."] if self.idle else []
        drafts = [] if self.speculation else [NO_DRAFTS]
        return (self.limited_by, self.floor, *idle, *drafts, NOT_MODELLED)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, for JSON."""
        tuned = self.tuned
        limits = {name: {"before": old, "after": new} for name, (old, new) in tuned.changes.items()}
        search = {"settings": tuned.settings, "changes": limits, "least_gpu_memory_utilization": tuned.least_share}
        before = {"before_s": tuned.base.chosen.seconds, "after_s": tuned.best.chosen.seconds}
        sentences = {"limited_by": self.limited_by, "floor": self.floor, "changes_nothing": list(self.idle)}
        return search | before | {"levers": [lever.to_dict() for lever in self.levers]} | sentences


def _limited_by(scene: Scene) -> str:
    rollout = scene.base.rollout
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
    longest = int(scene.problem.batch.responses.max())
    return (
        f"No lever but a cap or drafts shortens the longest response: its {longest:,} tokens take "
        f"{seconds(scene.longest_alone_s)} s even alone. The steps of this plan read and compute for "
        f"{seconds(_at_the_datasheet(scene))} s at the datasheet's bandwidth and peak."
    )
