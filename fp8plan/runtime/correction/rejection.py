"""Tokens and sequences that are masked out because a divergence, or one token, is beyond a bound."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.runtime.correction.settings import CorrectionSettings, Rejection
from fp8plan.runtime.correction.weights import TINY
from fp8plan.runtime.mismatch.histogram import LIMIT, k3
from fp8plan.runtime.mismatch.moments import Moments, Sums, of_sequences
from fp8plan.runtime.mismatch.segments import Segments, lost, spread

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.mismatch.tokens import Tokens

# Of a rule: its divergence over tokens, and clamped to its limits (for the standard deviation); what is beyond them
# (tokens, or sequences that are not empty); the same by sequence; and what is masked out.
RULE_SUMS: Final = (
    "value", "clamped", "above", "below", "sequence", "sequence_above", "sequence_below", "masked", "masked_sequences",
)  # fmt: skip


def rejected(tokens: Tokens, settings: CorrectionSettings) -> tuple[torch.Tensor | None, Sums]:
    """([tokens] bool: kept, or None if nothing can be rejected; sums, of each rule under NAME_ and RULE_SUMS)."""
    keep, sums = None, Sums()
    for rule in settings.reject:
        kept, found = (_by_token if rule.over == "token" else _by_sequence)(tokens, rule)
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


def _by_token(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, Sums]:
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


def _by_sequence(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, Sums]:
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
