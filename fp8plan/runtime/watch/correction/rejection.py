"""Rejections of tokens and sequences by a bound on their divergence, and the veto of a sequence by one token."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Rejection
from fp8plan.runtime.watch.mismatch.sums import LIMIT, TINY, FloatArray, Moments, Segments, Sums, k3, of_sequences

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.watch.mismatch.measure import Tokens


def rejected(tokens: Tokens, settings: CorrectionSettings) -> tuple[torch.Tensor | None, Sums]:
    """Apply the rejections and the veto.

    Returns ([tokens] bool: kept, or None if nothing can be rejected; sums, of each rule under NAME_ and RULE_SUMS).
    """
    keep, sums = None, Sums()
    for rule in settings.reject:
        kept, rule_sums = (_tokens_kept if rule.over == "token" else _sequences_kept)(tokens, rule)
        sums |= {f"{rule.name}_{name}": moments for name, moments in rule_sums.items()}
        keep = kept if keep is None else keep.logical_and_(kept)
    if keep is not None:
        sums |= _masked(tokens, keep)
    if settings.veto is not None:
        kept, vetoed = _vetoed(tokens, settings.veto)
        sums |= vetoed
        keep = kept if keep is None else keep.logical_and_(kept)
    return keep, sums


def _masked(tokens: Tokens, keep: torch.Tensor) -> Sums:
    """Shares of the tokens that are not kept, and of the sequences with such a token."""
    dropped = lost(tokens, keep)
    return {
        "masked": Moments.share(dropped.sum(), len(tokens)),
        "masked_sequences": Moments.share((dropped > 0).sum(), tokens.sequences),
    }


def divergence(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """k1, k2 or k3 of float32 log ratios, clamped to +-20."""
    clamped = log_ratio.clamp(-LIMIT, LIMIT)
    if estimator == "k1":
        return clamped.neg_()
    if estimator == "k2":
        return clamped.square_().mul_(0.5)
    return k3(clamped)


def _limits(rule: Rejection) -> tuple[float, float]:
    """The smallest and the largest divergence to keep: bounds on a ratio are bounds on k1, turned round."""
    if rule.estimator != "k1":
        return -inf, rule.high
    least = -log(rule.high) if rule.high < inf else -inf
    most = -log(rule.low) if rule.low else inf
    return least, most


def _tokens_kept(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, Sums]:
    import torch

    low, high = _limits(rule)
    device = tokens.log_ratio.device
    keep = torch.empty(len(tokens), dtype=torch.bool, device=device)
    per_sequence = Segments(tokens.offsets.numpy(), device)
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # clamped, its square, high, low
    ends = [torch.tensor([inf, -inf], dtype=torch.float64, device="cpu")]
    for part in tokens.chunks():
        values = divergence(tokens.log_ratio[part], rule.estimator)
        above, below = values > high, values < low
        torch.logical_not(above | below, out=keep[part])
        per_sequence.add(part, values)
        ends.append(torch.stack(values.aminmax()).double().cpu())
        clamped = values.clamp_(low if rule.estimator == "k1" else 0.0, high).double()
        totals += torch.stack(
            [clamped.sum(), torch.dot(clamped, clamped), above.count_nonzero(), below.count_nonzero()]
        )
    total, square, above_count, below_count = totals.tolist()
    smallest, largest = torch.stack(ends).numpy().T
    sums, lengths, count = per_sequence.numpy(), tokens.lengths.numpy(), len(tokens)
    means = sums / (lengths + TINY)
    return keep, {
        "value": Moments(count, float(sums.sum()), 0.0, float(smallest.min()), float(largest.max())),
        "clamped": Moments.of_sums(count, total, square),
        "above": Moments.share(above_count, count),
        "below": Moments.share(below_count, count),
        **of_sequences(means, means, low, high),
        **_masked(tokens, keep),
    }


def _sequences_kept(tokens: Tokens, rule: Rejection) -> tuple[torch.Tensor, Sums]:
    low, high = _limits(rule)
    lengths = tokens.lengths.numpy()
    segments = Segments(tokens.offsets.numpy(), tokens.log_ratio.device, "max" if rule.over == "seq_max" else "sum")
    for part in tokens.chunks():
        segments.add(part, divergence(tokens.log_ratio[part], rule.estimator))
    values = segments.numpy()
    if rule.over == "seq_mean":
        values = values / lengths
    clamped = np.clip(values, low if rule.estimator == "k1" else 0.0, high)
    keep = spread((values >= low) & (values <= high), tokens)
    out = of_sequences(values, values, low, high)
    return keep, {
        "value": Moments.of(values, lengths),
        "clamped": Moments.of(clamped, lengths),
        "above": out["sequence_above"],
        "below": out["sequence_below"],
        **out,
        **_masked(tokens, keep),
    }


def _vetoed(tokens: Tokens, veto: float | tuple[float, float]) -> tuple[torch.Tensor, Sums]:
    low, high = veto if isinstance(veto, tuple) else (veto, inf)
    least, most = log(low) if low else -inf, log(high)
    segments = Segments(tokens.offsets.numpy(), tokens.log_ratio.device)
    for part in tokens.chunks():
        log_ratio = tokens.log_ratio[part]
        segments.add(part, (log_ratio < least) | (log_ratio > most))
    beyond = segments.numpy()
    return spread(beyond == 0, tokens), {
        "vetoed_sequences": Moments.share((beyond > 0).sum(), tokens.sequences),
        "catastrophic": Moments.share(beyond.sum(), len(tokens)),
    }


def lost(tokens: Tokens, keep: torch.Tensor) -> FloatArray:
    """[sequences] number of tokens that are not kept. keep: [tokens] bool"""
    dropped = Segments(tokens.offsets.numpy(), keep.device)
    for part in tokens.chunks():
        dropped.add(part, ~keep[part])
    return dropped.numpy()


def spread(values: NDArray[Any], tokens: Tokens) -> torch.Tensor:
    """[tokens] on their device: the value of each token's sequence. values: [sequences]"""
    import torch

    device = tokens.log_ratio.device
    if device.type == "cpu":  # torch would make an index first, and take 50 times as long
        return torch.from_numpy(np.repeat(values, tokens.lengths.numpy()))
    return torch.from_numpy(values).to(device).repeat_interleave(tokens.lengths.to(device), output_size=len(tokens))
