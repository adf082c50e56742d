"""Where a plan's time goes, and what makes one choice slower than another, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8plan.model.plan.choice import Choice, several_layouts
from fp8plan.model.plan.speedup import SpeedUp, speed_up, timed
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import TAIL_SHARE, Rollout

NO_FASTER = 0.005  # gains below half a percent are not worth a sentence of their own
SLOWER = 0.01  # losses from which on they are

COMPONENTS = {
    "attention": "attention over the KV cache",
    "recurrent": "recurrent layers",
    "kv_write": "writing the KV cache",
    "gemm": "linear layers",
    "moe": "experts",
    "lm_head": "lm_head",
    "quantise": "quantising activations",
    "overhead": "small kernels",
    "sampling": "sampling",
    "collective": "all-reduce",
    "host": "waiting for the host",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan's choices and the rollouts behind them, None for a choice that cannot run."""

    choices: Sequence[Choice]
    chosen: int
    rollouts: Sequence[Rollout | None]
    profile: Profile

    @property
    def picked(self) -> Choice:
        """The chosen choice."""
        return self.choices[self.chosen]

    @property
    def of_the_step(self) -> str:
        """The words that name what choices are compared by, if that is not the rollout."""
        return " for the whole RL step" if self.picked.rl_step_s is not None else ""

    def rollout(self, choice: Choice) -> Rollout:
        """The rollout of a choice that can run."""
        rollout = next(rollout for c, rollout in zip(self.choices, self.rollouts, strict=True) if c is choice)
        assert rollout is not None
        return rollout

    def gain(self, choice: Choice, than: Choice) -> SpeedUp:
        """The ratio of a choice's speed to another's, by the time that choices are compared by. Both can run."""
        other, own = (timed(self.rollout(c), c.cut, c.rl_step_s) for c in (than, choice))
        return speed_up(other, own, self.profile)


def whole_or_sliced(answer: Answer) -> list[str]:
    """A sentence on why the chosen layout shares out whole experts, or slices, if that is faster than the other way."""
    picked = answer.picked
    other = (picked.tensor_parallel, picked.data_parallel, not picked.expert_parallel)
    rest = next((c for c in answer.choices if c.precision == picked.precision and c.layout == other), None)
    if rest is None:
        return []
    if picked.expert_parallel and rest.reason is not None:
        return [f"Without expert parallelism this layout cannot run: {rest.reason}."]
    if rest.makespan_s is None or rest.seconds < picked.seconds * (1 + NO_FASTER):
        return []
    whole, sliced = "expert parallelism", "a slice of every expert on each GPU"
    way, other_way = (whole, sliced) if picked.expert_parallel else (sliced, whole)
    gain = answer.gain(picked, rest).over(other_way + answer.of_the_step)
    why = _difference(answer.rollout(picked), answer.rollout(rest))
    return [f"{way[0].upper()}{way[1:]} is {gain}: {why}."]


def _difference(mine: Rollout, theirs: Rollout) -> str:
    """The words for what takes less time in the first of two rollouts, above all."""
    if mine.preemptions < theirs.preemptions:
        return f"it has {mine.preemptions:,} preemptions instead of {theirs.preemptions:,}"
    part, own, other = _moved(mine, theirs)
    return f"it spends {seconds(own)} s on {part} instead of {seconds(other)} s" if own else f"it needs no {part}"


def _moved(mine: Rollout, theirs: Rollout) -> tuple[str, float, float]:
    """The part of whose time the first of two rollouts saves most, and the seconds that both spend on it."""
    spent = [{name: share * x.makespan_s for name, share in x.parts.items()} for x in (mine, theirs)]
    saved = {name: theirs_s - spent[0].get(name, 0.0) for name, theirs_s in spent[1].items()}
    most = max(saved, key=lambda name: saved[name])
    return COMPONENTS[most], spent[0].get(most, 0.0), spent[1][most]


def where_from(answer: Answer) -> list[str]:
    """Sentences on preemptions that FP8 saves, and on what the time of a rollout and of its tail goes to."""
    sentences, picked, rollout = [], answer.picked, answer.rollout(answer.picked)
    there = [c for c in answer.choices if c.available and c.layout == picked.layout]
    baseline = next((c for c in there if c.precision == "bf16"), None)
    if baseline is not None and baseline.preemptions and (picked.preemptions or 0) < baseline.preemptions:
        sentences.append(
            f"The KV cache holds {picked.kv_cache_tokens:,} tokens instead of {baseline.kv_cache_tokens:,} with bf16, "
            f"so preemptions fall from {baseline.preemptions:,} to {picked.preemptions:,}."
        )
    sentences.append(f"The time goes to {_largest(rollout.parts)}.")
    if rollout.tail_fraction > TAIL_SHARE:
        sentences.append(
            f"{rollout.tail_fraction:.0%} of the rollout is tail: nothing waits, and fewer than a quarter of the "
            f"requests still run. There the time goes to {_largest(rollout.tail_parts)}."
        )
    return sentences


def _largest(parts: dict[str, float]) -> str:
    named = [f"{COMPONENTS[name]} ({share:.0%})" for name, share in parts.items() if share >= 0.1]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def slower(answer: Answer) -> list[str]:
    """A sentence on each precision that is slower than bf16 on the chosen layout, and on what takes longer."""
    there = [c for c in answer.choices if c.gain is not None and c.layout == answer.picked.layout]
    bf16 = next((answer.rollout(c) for c in there if c.precision == "bf16"), None)
    than = "bf16 on the chosen layout" if several_layouts(answer.choices) else "bf16"
    sentences = []
    for choice in there:
        if bf16 is None or choice.gain is None or choice.gain.ratio >= 1 - SLOWER:
            continue
        part, less, more = _moved(bf16, answer.rollout(choice))
        other = f", and bf16 {seconds(less)} s" if less else ""
        sentences.append(
            f"{choice.precision} is {choice.gain.percent(than)}: it spends {seconds(more)} s on {part}{other}."
        )
    return sentences


def seconds(value: float | None) -> str:
    """A number of seconds with at least three digits, such as 1,234 or 98.7 or 0.0123."""
    assert value is not None
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
