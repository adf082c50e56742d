"""Importance weights of tokens, and what they cost. Sums are float64, weights float32.

Tokens and sequences that are masked out because a divergence, or one token, is beyond a bound.
"""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fp8plan.runtime.correction.settings import CorrectionSettings, Rejection
from fp8plan.runtime.mismatch.measure import Segments, lost, spread
from fp8plan.runtime.mismatch.sums import LIMIT, FloatArray, Moments, Sums, all_reduced, k3, of_sequences

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.mismatch.measure import Tokens

TINY = 1e-8  # what verl adds to counts and means before it divides


class Weighted(NamedTuple):
    """Weights and their sums.

    weights: [tokens] float32
    inside: [tokens] bool, ratios within a band's bounds; None if there is no band
    sums: weight, raw: over tokens, of weights and of raw ratios (clamped to e^+-20)
          clipped: tokens whose weight is not their raw ratio
          above, below: tokens (level token) or sequences whose raw ratio is above or below `bounds`
          shown: what verl gives the extremes of: weights of level token, raw ratios of the other two
          sequence, sequence_above, sequence_below: mean weight and raw ratio of each sequence, 0 if it is empty
    """

    weights: torch.Tensor
    inside: torch.Tensor | None
    sums: Sums


def bounds(settings: CorrectionSettings) -> tuple[float, float]:
    """The bounds that the metrics call low and high. Truncation has no lower bound; verl counts from 1 / C."""
    low, high = settings.bounds
    return (1 / high if settings.mode == "tis" else low), high


def weighted(tokens: Tokens, settings: CorrectionSettings) -> Weighted:
    """Compute the weights of a batch, not normalised."""
    return (_by_token if settings.level == "token" else _by_sequence)(tokens, settings)


def _by_token(tokens: Tokens, settings: CorrectionSettings) -> Weighted:
    low, high = bounds(settings)
    band = settings.mode != "tis"
    weights, inside, (found, raw), totals = _weighed(tokens, low, high, band)
    square, above, below, smallest, largest = totals.tolist()
    count, lengths = len(tokens), tokens.lengths.numpy() + TINY
    weight = Moments.of_sums(count, float(found.sum()), square, smallest, largest)
    sums = {
        "weight": weight, "shown": weight, "raw": Moments.share(float(raw.sum()), count),
        "clipped": Moments.share(above + below if band else above, count),
        "above": Moments.share(above, count), "below": Moments.share(below, count),
    }  # fmt: skip
    return Weighted(weights, inside, sums | of_sequences(found / lengths, raw / lengths, low, high))


def _weighed(
    tokens: Tokens, low: float, high: float, band: bool
) -> tuple[torch.Tensor, torch.Tensor | None, FloatArray, FloatArray]:
    """Weights, truncated at `high` or, with a band, 0 outside of [low, high]; and their sums.

    Returns (weights [tokens] float32; inside [tokens] bool, None without a band; [2, sequences] float64: weight, raw
    ratio; [5] float64: weight^2, ratios above `high` and below `low`, smallest and largest weight).
    """
    import torch

    weights = torch.empty_like(tokens.log_ratio)
    inside = torch.empty(len(tokens), dtype=torch.bool, device=weights.device) if band else None
    offsets = tokens.offsets.numpy()
    per_sequence, raw_per_sequence = (Segments(offsets, weights.device) for _ in range(2))
    totals = torch.zeros(3, dtype=torch.float64, device=weights.device)
    ends = [torch.tensor([inf, -inf], dtype=torch.float64, device="cpu")]
    for part in tokens.chunks():
        raw = tokens.log_ratio[part].clamp(-LIMIT, LIMIT).exp_()
        above, below = raw > high, raw < low
        out = weights[part]
        if inside is None:
            torch.clamp(raw, max=high, out=out)
        else:
            torch.logical_not(above | below, out=inside[part])
            torch.mul(raw, inside[part], out=out)
        exact = out.double()
        per_sequence.add(part, exact)
        raw_per_sequence.add(part, raw)
        totals += torch.stack([torch.dot(exact, exact), above.count_nonzero(), below.count_nonzero()])
        ends.append(torch.stack(out.aminmax()).double().cpu())
    smallest, largest = torch.stack(ends).numpy().T
    return (
        weights, inside, np.array([per_sequence.numpy(), raw_per_sequence.numpy()]),
        np.array([*totals.tolist(), smallest.min(), largest.max()]),
    )  # fmt: skip


def _by_sequence(tokens: Tokens, settings: CorrectionSettings) -> Weighted:
    low, high = bounds(settings)
    lengths = tokens.lengths.numpy()
    per_sequence = Segments(tokens.offsets.numpy(), tokens.log_ratio.device)
    for part in tokens.chunks():
        per_sequence.add(part, tokens.log_ratio[part])
    log_ratio = per_sequence.numpy()
    if settings.level == "geometric":
        log_ratio = log_ratio / np.maximum(lengths, 1)
    raw = np.exp(np.clip(log_ratio, -LIMIT, LIMIT))
    above, below = raw > high, raw < low
    within = ~(above | below)
    tis, count, filled = settings.mode == "tis", len(raw), lengths > 0
    found = np.minimum(raw, high) if tis else raw * within
    sums = {
        "weight": Moments.of(found, lengths), "shown": Moments.of(raw), "raw": Moments.of(raw, lengths),
        "clipped": Moments.of((above if tis else ~within).astype(np.float64), lengths),
        "above": Moments.share(above.sum(), count), "below": Moments.share(below.sum(), count),
        "raw_sequences": Moments.of(raw[filled]),
    }  # fmt: skip
    return Weighted(
        spread(found.astype(np.float32), tokens),
        None if tis else spread(within, tokens),
        sums | of_sequences(found * filled, raw * filled, low, high),
    )


def normalised(tokens: Tokens, settings: CorrectionSettings, found: Weighted, group: Any = None) -> float:
    """Divide the weights, in place, by their mean over tokens or sequences that are not empty, of all ranks."""
    count, total = float(len(tokens)), found.sums["weight"].total
    if settings.level != "token":
        count, total = float((tokens.lengths > 0).sum()), found.sums["sequence"].total
    total, count = all_reduced(np.array([total, count]), group)
    mean = total / max(count, TINY)
    if mean <= TINY:
        return 1.0
    found.weights.div_(mean)
    return float(mean)


# Of a rule: its divergence over tokens, and clamped to its limits (for the standard deviation); what is beyond them
# (tokens, or sequences that are not empty); the same by sequence; and what is masked out.
RULE_SUMS: Final = (
    "value", "clamped", "above", "below", "sequence", "sequence_above", "sequence_below", "masked", "masked_sequences",
)  # fmt: skip


def rejected(tokens: Tokens, settings: CorrectionSettings) -> tuple[torch.Tensor | None, Sums]:
    """([tokens] bool: kept, or None if nothing can be rejected; sums, of each rule under NAME_ and RULE_SUMS)."""
    keep, sums = None, Sums()
    for rule in settings.reject:
        kept, found = (_tokens_kept if rule.over == "token" else _sequences_kept)(tokens, rule)
        sums |= {f"{rule.name}_{name}": moments for name, moments in found.items()}
        keep = kept if keep is None else keep.logical_and_(kept)
    if keep is not None:
        sums |= _masked(tokens, keep, tokens.sequences)
    if settings.veto is not None:
        kept, found = _vetoed(tokens, settings.veto)
        sums |= found
        keep = kept if keep is None else keep.logical_and_(kept)
    return keep, sums


def _masked(tokens: Tokens, keep: torch.Tensor, sequences: int) -> Sums:
    """Tokens that are not kept, and sequences, of so many, with any such token."""
    found = lost(tokens, keep)
    return {
        "masked": Moments.share(found.sum(), len(tokens)),
        "masked_sequences": Moments.share((found > 0).sum(), sequences),
    }


def divergence(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """k1, k2 or k3 of float32 log ratios, clamped to +-20."""
    clamped = log_ratio.clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        return clamped.neg_()
    if estimator == "k2":
        return clamped.square_().mul_(0.5)
    return k3(clamped)


def limits(rule: Rejection) -> tuple[float, float]:
    """(smallest, largest) divergence that is kept: bounds on a ratio are bounds on k1, turned round."""
    if rule.estimator != "k1":
        return -inf, rule.high
    return -log(rule.high) if rule.high < inf else -inf, -log(rule.low) if rule.low else inf


def _tokens_kept(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, Sums]:
    import torch

    low, high = limits(rule)
    device = tokens.log_ratio.device
    keep = torch.empty(len(tokens), dtype=torch.bool, device=device)
    per_sequence = Segments(tokens.offsets.numpy(), device)
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # clamped, its square, high, low
    ends = [torch.tensor([inf, -inf], dtype=torch.float64, device="cpu")]
    for part in tokens.chunks():
        found = divergence(tokens.log_ratio[part], rule.estimator)
        above, below = found > high, found < low
        torch.logical_not(above | below, out=keep[part])
        per_sequence.add(part, found)
        ends.append(torch.stack(found.aminmax()).double().cpu())
        clamped = found.clamp_(low if rule.estimator == "k1" else 0.0, high).double()
        totals += torch.stack(
            [clamped.sum(), torch.dot(clamped, clamped), above.count_nonzero(), below.count_nonzero()]
        )
    total, square, above_count, below_count = totals.tolist()
    smallest, largest = torch.stack(ends).numpy().T
    sums, lengths, count = per_sequence.numpy(), tokens.lengths.numpy(), len(tokens)
    means = (sums / (lengths + TINY))[lengths > 0]
    return keep, {
        "value": Moments(count, float(sums.sum()), 0.0, float(smallest.min()), float(largest.max())),
        "clamped": Moments.of_sums(count, total, square),
        "above": Moments.share(above_count, count),
        "below": Moments.share(below_count, count),
        **of_sequences(means, means, low, high),
        **_masked(tokens, keep, int((lengths > 0).sum())),
    }


def _sequences_kept(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, Sums]:
    low, high = limits(rule)
    lengths = tokens.lengths.numpy()
    segments = Segments(tokens.offsets.numpy(), tokens.log_ratio.device, "max" if rule.over == "seq_max" else "sum")
    for part in tokens.chunks():
        segments.add(part, divergence(tokens.log_ratio[part], rule.estimator))
    found = segments.numpy()
    if rule.over == "seq_mean":
        found = found / np.maximum(lengths, 1)
    filled = lengths > 0
    clamped = np.clip(found, low if rule.estimator == "k1" else 0.0, high)
    keep = spread((found >= low) & (found <= high), tokens)
    out = of_sequences(found[filled], found[filled], low, high)
    return keep, {
        "value": Moments.of(found, lengths),
        "clamped": Moments.of(clamped, lengths),
        "above": out["sequence_above"],
        "below": out["sequence_below"],
        **out,
        **_masked(tokens, keep, int(filled.sum())),
    }


def _vetoed(tokens: Tokens, veto: float) -> tuple[torch.Tensor, Sums]:
    low = Segments(tokens.offsets.numpy(), tokens.log_ratio.device)
    for part in tokens.chunks():
        low.add(part, tokens.log_ratio[part] < log(veto))
    found = low.numpy()
    return spread(found == 0, tokens), {
        "vetoed_sequences": Moments.share((found > 0).sum(), float((tokens.lengths > 0).sum())),
        "catastrophic": Moments.share(found.sum(), len(tokens)),
    }
