"""Tokens and sequences that are masked out because a divergence, or one token, is beyond a bound."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING

import numpy as np

from fp8plan.model.arrays import FloatArray
from fp8plan.runtime.histogram import LIMIT
from fp8plan.runtime.mismatching.segments import Segments, spread
from fp8plan.runtime.mismatching.settings import CorrectionSettings, Rejection
from fp8plan.runtime.mismatching.weights import TINY

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.tokens import Tokens


def rejected(tokens: Tokens, settings: CorrectionSettings) -> tuple[torch.Tensor | None, dict[str, float]]:
    """([tokens] bool: kept, or None if nothing can be rejected; metrics) of at least one token."""
    keep, metrics = None, {}
    for rule in settings.reject:
        kept, found = (_by_token if rule.over == "token" else _by_sequence)(tokens, rule)
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in found.items()}
        keep = kept if keep is None else keep.logical_and_(kept)
    if keep is not None:
        lost, whole = lost_shares(tokens, keep)
        metrics |= {"rollout_rs_masked_fraction": lost, "rollout_rs_seq_masked_fraction": float(whole.mean())}
    if settings.veto is not None:
        kept, found = _vetoed(tokens, settings.veto)
        metrics |= found
        keep = kept if keep is None else keep.logical_and_(kept)
    return keep, metrics


def lost_shares(tokens: Tokens, keep: torch.Tensor) -> tuple[float, FloatArray]:
    """(share of the tokens that are not kept, [sequences] whether one of its tokens is not)."""
    lost = Segments(tokens.offsets.numpy(), keep.device)
    for part in tokens.chunks():
        lost.add(part, ~keep[part])
    found = lost.numpy()
    return float(found.sum() / len(tokens)), (found > 0).astype(np.float64)


def divergence(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """k1, k2 or k3 of float32 log ratios, clamped to +-20."""
    clamped = log_ratio.clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        return clamped.neg_()
    if estimator == "k2":
        return clamped.square_().mul_(0.5)
    return clamped.expm1().sub_(clamped)


def limits(rule: Rejection) -> tuple[float, float]:
    """(smallest, largest) divergence that is kept: bounds on a ratio are bounds on k1, turned round."""
    if rule.estimator != "k1":
        return -inf, rule.high
    return -log(rule.high) if rule.high < inf else -inf, -log(rule.low) if rule.low else inf


def _by_token(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, dict[str, float]]:
    import torch

    low, high = limits(rule)
    device = tokens.log_ratio.device
    keep = torch.empty(len(tokens), dtype=torch.bool, device=device)
    sums = Segments(tokens.offsets.numpy(), device)
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # clamped, its square, high, low
    ends = []
    for part in tokens.chunks():
        found = divergence(tokens.log_ratio[part], rule.estimator)
        above, below = found > high, found < low
        torch.logical_not(above | below, out=keep[part])
        sums.add(part, found)
        ends.append(torch.stack(found.aminmax()))
        clamped = found.clamp_(low if rule.estimator == "k1" else 0.0, high).double()
        totals += torch.stack(
            [clamped.sum(), torch.dot(clamped, clamped), above.count_nonzero(), below.count_nonzero()]
        )
    mean, square, above_share, below_share = (totals / len(tokens)).tolist()
    smallest, largest = torch.stack(ends).cpu().numpy().T
    found, lengths = sums.numpy(), tokens.lengths.numpy()
    metrics = {
        "mean": float(found.sum() / len(tokens)), "max": float(largest.max()), "min": float(smallest.min()),
        "fraction_high": above_share, "fraction_low": below_share,
        "std": float(np.sqrt(max(square - mean**2, 0.0))),
    }  # fmt: skip
    return keep, metrics | _of_sequences((found / (lengths + TINY))[lengths > 0], rule) | _masked(tokens, keep)


def _by_sequence(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, dict[str, float]]:
    low, high = limits(rule)
    lengths = tokens.lengths.numpy()
    segments = Segments(tokens.offsets.numpy(), tokens.log_ratio.device, "max" if rule.over == "seq_max" else "sum")
    for part in tokens.chunks():
        segments.add(part, divergence(tokens.log_ratio[part], rule.estimator))
    found = segments.numpy()
    if rule.over == "seq_mean":
        found = found / np.maximum(lengths, 1)
    within = (found >= low) & (found <= high)
    filled, share = lengths > 0, lengths / len(tokens)
    of_filled = found[filled]
    clamped = np.where(filled, np.clip(found, low if rule.estimator == "k1" else 0.0, high), 0.0)
    metrics = {
        "mean": float(share[filled] @ of_filled), "max": float(of_filled.max()), "min": float(of_filled.min()),
        "fraction_high": float((of_filled > high).mean()), "fraction_low": float((of_filled < low).mean()),
        "std": float(np.sqrt(max(share @ clamped**2 - (share @ clamped) ** 2, 0.0))),
    }  # fmt: skip
    keep = spread(within, tokens)
    return keep, metrics | _of_sequences(of_filled, rule) | _masked(tokens, keep)


def _of_sequences(values: FloatArray, rule: Rejection) -> dict[str, float]:
    """values: of sequences that are not empty, one at least."""
    low, high = limits(rule)
    metrics = {
        "seq_mean": float(values.mean()),
        "seq_std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "seq_max": float(values.max()),
        "seq_min": float(values.min()),
        "seq_max_deviation": float(np.abs(values).max()),
        "seq_fraction_high": float((values > high).mean()),
    }
    return metrics | ({"seq_fraction_low": float((values < low).mean())} if rule.estimator == "k1" else {})


def _masked(tokens: Tokens, keep: torch.Tensor) -> dict[str, float]:
    lost, whole = lost_shares(tokens, keep)
    return {"masked_fraction": lost, "seq_masked_fraction": float(whole.sum() / (tokens.lengths > 0).sum())}


def _vetoed(tokens: Tokens, veto: float) -> tuple[torch.Tensor, dict[str, float]]:
    """What verl had up to 0.7.0, under its names."""
    low = Segments(tokens.offsets.numpy(), tokens.log_ratio.device)
    for part in tokens.chunks():
        low.add(part, tokens.log_ratio[part] < log(veto))
    found, lengths = low.numpy(), tokens.lengths.numpy()
    catastrophic = float(found.sum() / len(tokens))
    keep = spread(found == 0, tokens)
    return keep, {
        "rollout_is_veto_fraction": float((found > 0).sum() / (lengths > 0).sum()),
        "rollout_is_catastrophic_token_fraction": catastrophic,
    }
