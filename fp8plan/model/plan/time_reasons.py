"""Where a plan's time goes, and what makes one choice slower than another, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fp8plan.model.plan.choice import Choice
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


def whole_or_sliced(choices: Sequence[Choice], chosen: int, rollouts: Sequence[Rollout | None]) -> list[str]:
    """A sentence on why the chosen layout shares out whole experts, or does not, if that is faster than the other way.

    rollouts: of all choices
    """
    picked = choices[chosen]
    other = (picked.tensor_parallel, picked.data_parallel, not picked.expert_parallel)
    found = [i for i, c in enumerate(choices) if c.precision == picked.precision and c.layout == other]
    if not found:
        return []
    rest = choices[found[0]]
    if picked.expert_parallel and rest.reason is not None:
        return [f"Without expert parallelism this layout cannot run: {rest.reason}."]
    if rest.makespan_s is None or rest.seconds < picked.seconds * (1 + NO_FASTER):
        return []
    mine, theirs = rollouts[chosen], rollouts[found[0]]
    why = f": {_difference(mine, theirs)}" if mine is not None and theirs is not None else ""
    gain = f"{rest.seconds / picked.seconds:.2f}x as fast as"
    if picked.expert_parallel:
        return [f"With expert parallelism, whole experts on each GPU, it is {gain} with a slice of every expert{why}."]
    return [f"A slice of every expert on each GPU is {gain} expert parallelism, which keeps them whole{why}."]


def _difference(mine: Rollout, theirs: Rollout) -> str:
    """The parts that take less time in the first of two rollouts, above all."""
    if mine.preemptions < theirs.preemptions:
        return f"{mine.preemptions:,} preemptions instead of {theirs.preemptions:,}"
    return _share_moved(mine, theirs)


def _share_moved(mine: Rollout, theirs: Rollout) -> str:
    """The part of whose time the first of two rollouts saves most."""
    spent = [{name: share * x.makespan_s for name, share in x.parts.items()} for x in (mine, theirs)]
    saved = {name: theirs_s - spent[0].get(name, 0.0) for name, theirs_s in spent[1].items()}
    most = max(saved, key=lambda name: saved[name])
    return f"{seconds(spent[0].get(most, 0.0))} s go to {COMPONENTS[most]} instead of {seconds(spent[1][most])} s"


def where_from(picked: Choice, choices: Sequence[Choice], timed: Rollout) -> list[str]:
    """Sentences on preemptions that FP8 saves, and on what the time of a rollout and of its tail goes to."""
    sentences = []
    baseline = next((c for c in choices if c.precision == "bf16" and c.layout == picked.layout and c.available), None)
    if baseline is not None and baseline.preemptions and (picked.preemptions or 0) < baseline.preemptions:
        sentences.append(
            f"The KV cache holds {picked.kv_cache_tokens:,} tokens instead of {baseline.kv_cache_tokens:,}, so "
            f"preemptions fall from {baseline.preemptions:,} to {picked.preemptions:,}."
        )
    sentences.append(f"The time goes to {_largest(timed.parts)}.")
    if timed.tail_fraction > TAIL_SHARE:
        sentences.append(
            f"{timed.tail_fraction:.0%} of the rollout is tail: nothing waits, and fewer than a quarter of the "
            f"requests still run. There the time goes to {_largest(timed.tail_parts)}."
        )
    return sentences


def _largest(parts: dict[str, float], least: float = 0.1) -> str:
    named = [f"{COMPONENTS[name]} ({share:.0%})" for name, share in parts.items() if share >= least]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def slower(choices: Sequence[Choice], chosen: int, rollouts: Sequence[Rollout | None]) -> list[str]:
    """A sentence on each precision that is slower than bf16 on the chosen layout, and on what takes longer."""
    there = [i for i, c in enumerate(choices) if c.speedup is not None and c.layout == choices[chosen].layout]
    bf16 = next((rollouts[i] for i in there if choices[i].precision == "bf16"), None)
    sentences = []
    for i in there:
        name, speedup, run = choices[i].precision, choices[i].speedup or 1.0, rollouts[i]
        if speedup < 1 - SLOWER:
            why = f", where {_share_moved(bf16, run)}" if bf16 is not None and run is not None else ""
            sentences.append(f"{name} is {speedup:.2f}x as fast as bf16{why}.")
    return sentences


def seconds(value: float | None) -> str:
    """A number of seconds with at least three digits, such as 1,234 or 98.7 or 0.0123."""
    assert value is not None
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
