"""A lever of a plan, and the scene that all levers share: the plan's choice, simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import SpeedUp, speed_up
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, Simulated, makespans, rollout, simulate
from fp8plan.model.workload import Batch

NOTHING: Final = "nothing"
CONCURRENT: Final = "concurrent"  # field of Turns: the trajectories at once
UNKNOWN: Final = "unknown"  # no run of fp8plan has measured it
# Beginnings of names of levers that were timed with and without, beside their predictions: docs/evidence/accuracy.md
# and docs/evidence/levers.md.
MEASURED: Final = (
    "max_num_seqs",
    "max_cudagraph_capture_size",
    "FP8 weights",
    "FP8 KV cache",
    "stop the tail",
    "order: long prompts first",
    "order: samples of a prompt apart",
    "speculative decoding by ngram",
    "speculative decoding by eagle3",
)


@dataclass(frozen=True, slots=True)
class Lever:
    """One lever, pulled alone.

    name, setting: what is done
    words:    program -> its own words for the setting; a program that has none is left out
    in_plan:  the plan has it: the gain is that over the plan without it
    step:     the seconds are those of the RL step, not of the rollout
    remedy:   it lowers the mismatch, whatever its time
    of_turns: the rollout has turns, and none such was measured
    before_s, after_s: without and with it
    gain:     ratio of the two, with its 90% interval
    price:    what it costs besides time
    mismatch: what it adds to the mismatch of the precision
    """

    name: str
    setting: str
    words: Mapping[str, str]
    before_s: float
    after_s: float
    gain: SpeedUp
    price: str
    mismatch: str = NOTHING
    in_plan: bool = False
    step: bool = False
    remedy: bool = False
    of_turns: bool = False

    @property
    def measured(self) -> bool:
        """True if rollouts with and without such a lever were timed beside their predictions."""
        return self.name.startswith(MEASURED) and not self.of_turns

    @property
    def saved_s(self) -> tuple[float, float, float]:
        """The seconds saved, and the ends of their 90% interval."""
        low, high = (1 - 1 / (end or self.gain.ratio) for end in (self.gain.low, self.gain.high))
        return self.before_s - self.after_s, self.before_s * low, self.before_s * high

    def to_dict(self) -> dict[str, Any]:
        """The lever as plain data, for JSON."""
        saved, low, high = self.saved_s
        return {
            "lever": self.name,
            "setting": self.setting,
            "words": dict(self.words),
            "in_plan": self.in_plan,
            "of": "RL step" if self.step else "rollout",
            "ground": "measured" if self.measured else "modelled",
            "before_s": self.before_s,
            "after_s": self.after_s,
            "saved_s": saved,
            "saved_low_s": low,
            "saved_high_s": high,
            "gain": self.gain.ratio,
            "gain_low": self.gain.low,
            "gain_high": self.gain.high,
            "price": self.price,
            "mismatch": self.mismatch,
        }


@dataclass(frozen=True)
class Scene:
    """The choice of a plan, simulated, and what all levers share."""

    choice: Candidate
    request: PlanRequest
    profile: Profile
    base: Simulated

    @classmethod
    def of(cls, choice: Candidate, request: PlanRequest, profile: Profile) -> Scene:
        base = simulate(choice.setup, request.batch, profile, memory=choice.memory)
        return cls(choice, request, profile, base)

    @property
    def before(self) -> Rollout:
        """The rollout of the choice."""
        return self.base.rollout

    @property
    def whole(self) -> bool:
        """True if every request was simulated, so that it is known when each response ends."""
        return all(plan.sampled is None for plan in self.base.schedules)

    @cached_property
    def longest_alone_s(self) -> float:
        """Seconds of the longest response alone on a replica."""
        batch = self.request.batch
        return self.run(batch.take([int(batch.responses.argmax())]), data_parallel_size=1).makespan_s

    def run(self, batch: Batch, **limits: Any) -> Rollout:
        """The rollout of a batch on the engine of the choice, or on one with other limits."""
        if self.base.clock is not None and not limits:
            return rollout(self.base.rescheduled(batch), self.base.model)
        setup = replace(self.choice.setup, limits=replace(self.choice.setup.limits, **limits))
        return simulate(setup, batch, self.profile).rollout

    def under(self, changes: Mapping[str, Any]) -> Rollout:
        """The rollout with other limits. A change of CONCURRENT is one of the trajectories at once."""
        limits, batch = dict(changes), self.request.batch
        if CONCURRENT in limits:
            batch = batch.at_most(limits.pop(CONCURRENT))
        return self.run(batch, **limits)

    def kept_gain(self, tokens: int) -> float:
        """The ratio of two makespans of turns: with a KV cache of so many tokens, and with the choice's own.

        That much of its speed-up is by what a larger cache keeps: prefixes, and requests that are not preempted.
        """
        memory = self.base.memory
        blocks = 1 + round(memory.usable_blocks * tokens / memory.kv_cache_tokens)
        smaller = self.base.rescheduled(self.request.batch, blocks)
        return makespans([smaller], self.base.model)[0] / self.before.makespan_s

    def lever(
        self,
        name: str,
        setting: str,
        words: Mapping[str, str],
        after: Rollout,
        price: str,
        before: Rollout | None = None,
        **others: Any,
    ) -> Lever:
        """A lever that takes a rollout from `before`, by default the choice's, to `after`."""
        before = before or self.before
        gain = speed_up(before, after, self.profile)
        return Lever(name, setting, words, before.makespan_s, after.makespan_s, gain, price, **others)
