"""Importance weights of tokens, and what they cost. Sums are float64, weights float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.model.arrays import FloatArray
from fp8plan.runtime.histogram import LIMIT
from fp8plan.runtime.mismatching import dispatch
from fp8plan.runtime.mismatching.segments import Segments, all_reduced, spread
from fp8plan.runtime.mismatching.settings import CorrectionSettings

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.tokens import Tokens

TINY = 1e-8  # what verl adds to counts and means before it divides


@dataclass(slots=True)
class Weighted:
    """weights: [tokens] float32. inside: [tokens] bool, ratios within a band's bounds; None if there is no band.

    mean, square, raw: means over tokens of the weights, their squares and the raw ratios (clamped to e^+-20)
    clipped:   share of the tokens whose weight is not their raw ratio
    high, low: share of the tokens (level token) or sequences whose raw ratio is above or below `bounds`
    largest, smallest: as verl has them: weights of level token, raw ratios of the other two
    sequence_mean, sequence_raw: [sequences] mean weight and raw ratio of each, 0 if it is empty
    """

    weights: torch.Tensor
    inside: torch.Tensor | None
    mean: float
    square: float
    raw: float
    clipped: float
    high: float
    low: float
    largest: float
    smallest: float
    sequence_mean: FloatArray
    sequence_raw: FloatArray

    @property
    def std(self) -> float:
        return float(np.sqrt(max(self.square - self.mean**2, 0.0)))

    @property
    def ess(self) -> float:
        return (self.mean + TINY) ** 2 / self.square if self.square else 0.0

    @property
    def clipped_mass(self) -> float:
        return max(1 - self.mean / self.raw, 0.0)


def bounds(settings: CorrectionSettings) -> tuple[float, float]:
    """What counts as low and high in the metrics: truncation has no lower bound, verl counts from 1 / C."""
    low, high = settings.bounds
    return (1 / high if settings.mode == "tis" else low), high


def weighted(tokens: Tokens, settings: CorrectionSettings) -> Weighted:
    """Weights of at least one token, not normalised."""
    return (_by_token if settings.level == "token" else _by_sequence)(tokens, settings)


def _by_token(tokens: Tokens, settings: CorrectionSettings) -> Weighted:
    low, high = bounds(settings)
    band = settings.mode != "tis"
    if dispatch.by_triton(tokens.log_ratio):
        from fp8plan.runtime.mismatching import fused

        weights, inside, (found, raw), totals = fused.weighed(tokens, low, high, band)
    else:
        weights, inside, (found, raw), totals = by_torch(tokens, low, high, band)
    square, above, below = (totals[:3] / len(tokens)).tolist()
    counts = tokens.lengths.numpy() + TINY
    return Weighted(
        weights, inside, float(found.sum()) / len(tokens), square, float(raw.sum()) / len(tokens),
        above + below if band else above, above, below,
        float(totals[4]), float(totals[3]), found / counts, raw / counts,
    )  # fmt: skip


def by_torch(
    tokens: Tokens, low: float, high: float, band: bool
) -> tuple[torch.Tensor, torch.Tensor | None, FloatArray, FloatArray]:
    """Weights of at least one token, truncated at `high` or, with a band, 0 outside of [low, high]; and their sums.

    Returns (weights [tokens] float32; inside [tokens] bool, None without a band; [2, sequences] float64: weight, raw
    ratio; [5] float64: weight^2, ratios above `high` and below `low`, smallest and largest weight).
    """
    import torch

    weights = torch.empty_like(tokens.log_ratio)
    inside = torch.empty(len(tokens), dtype=torch.bool, device=weights.device) if band else None
    offsets = tokens.offsets.numpy()
    per_sequence, raw_per_sequence = (Segments(offsets, weights.device) for _ in range(2))
    totals = torch.zeros(3, dtype=torch.float64, device=weights.device)
    ends = []
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
        ends.append(torch.stack(out.aminmax()))
    smallest, largest = torch.stack(ends).double().cpu().numpy().T
    return (
        weights, inside, np.array([per_sequence.numpy(), raw_per_sequence.numpy()]),
        np.array([*totals.tolist(), smallest.min(), largest.max()]),
    )  # fmt: skip


def _by_sequence(tokens: Tokens, settings: CorrectionSettings) -> Weighted:
    low, high = bounds(settings)
    lengths = tokens.lengths.numpy()
    sums = Segments(tokens.offsets.numpy(), tokens.log_ratio.device)
    for part in tokens.chunks():
        sums.add(part, tokens.log_ratio[part])
    log_ratio = sums.numpy()
    if settings.level == "geometric":
        log_ratio = log_ratio / np.maximum(lengths, 1)
    raw = np.exp(np.clip(log_ratio, -LIMIT, LIMIT))
    above, below = raw > high, raw < low
    within = ~(above | below)
    found = np.minimum(raw, high) if settings.mode == "tis" else raw * within
    share = lengths / len(tokens)

    filled = lengths > 0
    return Weighted(
        spread(found.astype(np.float32), tokens), None if settings.mode == "tis" else spread(within, tokens),
        float(share @ found), float(share @ found**2), float(share @ raw),
        float(share @ (above if settings.mode == "tis" else ~within)), float(above.mean()), float(below.mean()),
        float(raw.max()), float(raw.min()),
        found * filled, raw * filled,
    )  # fmt: skip


def normalised(tokens: Tokens, settings: CorrectionSettings, found: Weighted, group: Any = None) -> float:
    """Divides the weights, in place, by their mean over tokens or sequences that are not empty, of all ranks."""
    count, total = float(len(tokens)), found.mean * len(tokens)
    if settings.level != "token":
        count, total = float((tokens.lengths > 0).sum()), float(found.sequence_mean.sum())
    total, count = all_reduced(np.array([total, count]), group)
    mean = total / max(count, TINY)
    if mean <= TINY:
        return 1.0
    found.weights.div_(mean)
    return float(mean)
