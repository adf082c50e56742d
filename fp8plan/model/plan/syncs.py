"""The sentences of a plan on its weight sync: the fastest mode of each precision, and the share of the RL step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.risk.expected import LEAST_GAIN
from fp8plan.model.rl_step import SENDERS, Mode, SyncCost, WeightSync
from fp8plan.model.targets import TARGETS
from fp8plan.model.weight_changes import KL_OF_RESIDUAL, TopK
from fp8plan.model.weights import LAYERS, SPREAD


def notes_on_sender(inside: str, target: str) -> list[str]:
    """A note on settings for another sender of weights than that of the plan.

    inside: the program that the plan is for
    target: the program that the settings are for
    """
    planned, emitted = (sender or "fp8plan" for sender in (SENDERS[inside], TARGETS[target].sender))
    if planned == emitted:
        return []
    return [f"the plan's times are with {planned}'s front end and sync; for {emitted}'s, plan with --emit {target}"]


def sync_sentences(tried: Sequence[Candidate], chosen: Candidate, sync: WeightSync) -> tuple[str, ...]:
    """The sentences on the syncs of candidates, of which one is chosen. `sync` is the one that they were timed with."""
    modes = () if sync.learning_rate is None or sync.sender else _fastest_of_each(tried, chosen, sync)
    return (*modes, *sync_in_the_step(chosen, sync))


def sync_in_the_step(chosen: Candidate, sync: WeightSync) -> tuple[str, ...]:
    """A sentence on the seconds of the sync and, for fp8plan's own, on what shortens it.

    Empty if the sync takes less than LEAST_GAIN of the RL step. With verl or TRL, a given learning rate gets a sentence
    all the same, as it changes nothing.
    """
    cost = chosen.syncs[0]
    share = 0.0 if chosen.step_s is None else cost.seconds / chosen.step_s
    is_large = share >= LEAST_GAIN
    if not is_large and (sync.sender is None or sync.learning_rate is None):
        return ()
    of_step = f", {share:.0%} of the RL step" if is_large else ""
    transfer = f"{cost.mode} of {cost.bytes / 1e9:.3g} GB over {sync.link}"
    fact = f"The weight sync takes {cost.seconds:.3g} s{of_step}: {transfer}."
    advice = ""
    if sync.sender is not None:
        advice = f" {sync.sender}'s own sync sends all weights in BF16, at any learning rate."
    elif sync.learning_rate is None:
        advice = (
            " A delta sends only what a step changes: type your --learning-rate 1e-6 --optimizer adamw, and the plan "
            "predicts it."
        )
    return (fact + advice,)


def _fastest_of_each(tried: Sequence[Candidate], chosen: Candidate, sync: WeightSync) -> tuple[str, ...]:
    """A sentence on the fastest sync of each precision on the chosen layout, at a known learning rate."""
    layout, parts = chosen.setup.limits.cut, []
    for candidate in tried:
        if not candidate.syncs or candidate.setup.limits.cut != layout:
            continue
        fastest, dense = candidate.syncs[0], next(cost for cost in candidate.syncs if cost.mode.dense)
        notes = [_break_even(cost, candidate.syncs) for cost in candidate.syncs if not cost.mode.dense]
        other = "" if fastest is dense else f" instead of {dense.seconds:.3g} s for {dense.mode}"
        best = f"{fastest.mode} of {fastest.bytes / 1e9:.3g} GB in {fastest.seconds:.3g} s{other}"
        parts.append(f"{candidate.setup.precision.name} {best} ({'; '.join(notes)})")
    how = f"{sync.link}, at a learning rate of {sync.learning_rate:g} with {sync.optimizer}"
    layers, share = sync.weights.get(LAYERS), sync.changed(LAYERS)
    spread = f"{SPREAD}, assumed" if layers is None else f"{layers.spread:.2g}, measured in the checkpoint"
    times = "" if sync.measured == 1.0 else f", {sync.measured:.2g} times as many as in theory, as measured"
    changes = f"a step changes {share.codes:.2%} of their E4M3 codes and {share.bf16:.2%} of their BF16 values{times}"
    how += f" (modelled: weights of layers have a spread of {spread}, and {changes})"
    fastest_of_each = f"The fastest weight sync over {how}: {'; '.join(parts)}."
    return (fastest_of_each,) if sync.top_k is None else (fastest_of_each, _what_waits(sync.top_k))


def _break_even(cost: SyncCost, syncs: Sequence[SyncCost]) -> str:
    """The bandwidth below which a delta is faster than a dense sync, or top-k than a delta."""
    if cost.mode.lossless:
        other = next(each for each in syncs if each.mode.dense)
    else:
        other = next(each for each in syncs if each.mode is Mode.DELTA)
    below = cost.pays_below(other) * 8 / 1e9
    pays = f"below {below:.3g} Gb/s"
    if below == 0:
        pays = "never"
    elif math.isinf(below):
        pays = "always"
    size = "" if cost is syncs[0] else f" of {cost.bytes / 1e9:.3g} GB in {cost.seconds:.3g} s"
    return f"a delta{size} pays {pays}" if cost.mode.lossless else f"top-k{size} pays {pays}, against a delta"


def _what_waits(top_k: TopK) -> str:
    """A sentence on the KL that top-k adds."""
    low, high = KL_OF_RESIDUAL["share" if top_k.residual is None else "residual"]
    fact = (
        f"Top-k of {top_k} is not lossless. In steps of SmolLM2 135M it added a KL per token of {low:,} to {high:,} "
        "times the square of report.residual; for other models it is not known"
    )
    if top_k.residual is None:
        return f"{fact}. The residual grows while a step changes more than a sync sends."
    at = f"{low * top_k.residual**2:.2g} to {high * top_k.residual**2:.2g}"
    return f"{fact} (at this residual, {at}). Its bytes are those of a long run, in which every change must come."
