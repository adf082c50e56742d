"""Importance weights of tokens, and what they cost. Sums are float64, weights float32."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8plan.runtime.correction.settings import CorrectionSettings
from fp8plan.runtime.mismatch.histogram import LIMIT, FloatArray
from fp8plan.runtime.mismatch.moments import Moments, Sums, of_sequences
from fp8plan.runtime.mismatch.ranks import all_reduced
from fp8plan.runtime.mismatch.segments import Segments, spread

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.mismatch.tokens import Tokens

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
