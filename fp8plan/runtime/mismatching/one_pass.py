"""The sums of one batch, in one pass over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.arrays import FloatArray, IntArray
from fp8plan.runtime.histogram import BINS, LIMIT, bins
from fp8plan.runtime.mismatching import dispatch
from fp8plan.runtime.mismatching.segments import Segments, by_bin
from fp8plan.runtime.mismatching.sums import POSITIONS, SIZE, SLOTS, VERSION_SUMS, MismatchSums
from fp8plan.runtime.mismatching.threads import one_thread
from fp8plan.runtime.tokens import to_tensor

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.tokens import Array, Tokens


@one_thread()
def measure(tokens: Tokens, versions: Array | Sequence[int] | None = None) -> MismatchSums:
    """The sums of one batch.

    versions: of the weights that sampled: [sequences], or one per token in the form of the log-probs (a response that
              went on after a sync); integers of 0 or more, less than SLOTS apart over all batches that are added

    Raises ConfigError for versions that do not fit.
    """
    slots = None if versions is None else _slots(tokens, versions)
    pieces = _pieces(tokens.offsets.numpy())
    if dispatch.by_triton(tokens.log_ratio):
        from fp8plan.runtime.mismatching import fused

        histogram, squares, per_piece = fused.measured(tokens, pieces)
    else:
        histogram, squares, per_piece = by_torch(tokens, pieces)
    sums = MismatchSums(np.zeros(SIZE))
    sums["tokens"], sums["invalid"], sums["ratio_squared"] = len(tokens), tokens.invalid, squares
    sums["ratio"], sums["k3"] = histogram[1].sum(), histogram[2].sum()
    for name, values in zip(("tokens", "ratio", "k3"), histogram, strict=True):
        sums[f"histogram_{name}"] = values
    if slots is not None:
        for name, values in zip(VERSION_SUMS, _by_slot(tokens, *slots), strict=True):
            sums[f"version_{name}"] = values
    return _with_sequences(sums, tokens.lengths.numpy(), per_piece, pieces)


def by_torch(tokens: Tokens, pieces: IntArray) -> tuple[FloatArray, float, FloatArray]:
    """The sums over tokens, float64.

    pieces: [pieces + 1] where they begin, and where the last one ends; they have all tokens, and are in order

    Returns ([3, BINS]: tokens, ratio, k3; ratio^2; [3, pieces]: log ratio, k3, train).
    """
    import torch

    device = tokens.log_ratio.device
    per_piece = [Segments(pieces, device) for _ in range(3)]
    table = torch.zeros(3, BINS, dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part in tokens.chunks():
        log_ratio, ratio, k3 = _terms(tokens.log_ratio[part])
        where = bins(tokens.log_ratio[part])
        table[0] += torch.bincount(where, minlength=BINS)
        table[1] += by_bin(where, ratio, BINS)
        table[2] += by_bin(where, k3, BINS)
        squares += torch.dot(ratio, ratio)
        for segments, values in zip(per_piece, (log_ratio, k3, tokens.train[part]), strict=True):
            segments.add(part, values)
    return table.cpu().numpy(), float(squares), np.array([of.numpy() for of in per_piece])


def _terms(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log ratio, ratio (clamped to e^+-20) and k3 (not clamped) in float64, where ratio - 1 cancels harmlessly."""
    exact = log_ratio.double()
    ratio = exact.clamp(-LIMIT, LIMIT).exp_()
    k3 = (ratio - 1).sub_(exact).clamp_(min=0)
    beyond = log_ratio > LIMIT
    if bool(beyond.any()):
        k3[beyond] = exact[beyond].expm1() - exact[beyond]
    return exact, ratio, k3


def _pieces(offsets: IntArray) -> IntArray:
    """Sequences cut at POSITIONS, so that a sum over a piece is one over a sequence's tokens in one bin of position.

    [sequences * used + 1] where they begin, and where the last one ends; `used` is as many bins as the longest needs.
    """
    starts, lengths = offsets[:-1, None], np.diff(offsets)[:, None]
    used = max(int(np.searchsorted(POSITIONS, lengths.max(initial=0), side="left")), 1)
    return np.append(starts + np.minimum(POSITIONS[:used], lengths), offsets[-1])


def _with_sequences(sums: MismatchSums, lengths: IntArray, per_piece: FloatArray, pieces: IntArray) -> MismatchSums:
    """Adds what is summed over sequences and over bins of position. An empty sequence counts with log p = 0."""
    count = len(lengths)
    log_ratio, k3, train = per_piece.reshape(3, count, -1) if count else np.zeros((3, 0, 1))
    used = log_ratio.shape[1]
    tokens = np.diff(pieces).reshape(count, used) if count else np.zeros((0, 1))
    for name, values in (("tokens", tokens), ("k1", -log_ratio), ("k3", k3)):
        sums[f"position_{name}"][:used] = values.sum(0)
    sums["sequences"], sums["k1"] = count, -log_ratio.sum()
    if not count:
        return sums
    whole, divisor = log_ratio.sum(1), np.maximum(lengths, 1)
    train_mean, difference = train.sum(1) / divisor, -whole / divisor
    rollout_mean = train_mean + difference
    with np.errstate(over="ignore"):  # a perplexity may well be infinite
        sums["training_ppl"], sums["rollout_ppl"] = np.exp(-train_mean).sum(), np.exp(-rollout_mean).sum()
        sums["ppl_ratio"] = np.exp(difference).sum()
    sums["training_log_ppl"], sums["rollout_log_ppl"] = -train_mean.sum(), -rollout_mean.sum()
    sums["log_ppl_diff"], sums["log_ppl_abs_diff"] = difference.sum(), np.abs(difference).sum()
    sums["sequence_ratio_squared"] = np.exp(2 * np.clip(whole, -LIMIT, LIMIT)).sum()
    return MismatchSums(sums.values, float(difference.min()), float(difference.max()))


def _slots(tokens: Tokens, versions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(turn, slot) of each token, [tokens] int64: version = turn * SLOTS + slot."""
    given = to_tensor(versions).to(tokens.log_ratio.device)
    if tuple(given.shape) == tokens.shape:
        packed = tokens.select(given).long()
    elif given.shape == (tokens.sequences,):
        packed = given.long().repeat_interleave(tokens.lengths.to(given.device))
    else:
        raise ConfigError(
            f"versions have shape {tuple(given.shape)}; allowed: [{tokens.sequences}], one per sequence, or that of "
            f"the log-probs, {tokens.shape}"
        )
    if len(packed):
        low, high = int(packed.min()), int(packed.max())
        if low < 0 or high - low >= SLOTS:
            raise ConfigError(
                f"versions go from {low} to {high}; allowed: 0 or more, and less than {SLOTS} apart in a batch"
            )
    return packed // SLOTS, packed % SLOTS


def _by_slot(tokens: Tokens, turns: torch.Tensor, slots: torch.Tensor) -> FloatArray:
    """[VERSION_SUMS, SLOTS] sums over the tokens of each slot."""
    import torch

    found = torch.zeros(len(VERSION_SUMS), SLOTS, dtype=torch.float64, device=slots.device)
    for part in tokens.chunks():
        log_ratio, _, k3 = _terms(tokens.log_ratio[part])
        turn, slot = turns[part].double(), slots[part]
        for row, weights in enumerate((torch.ones_like(k3), turn, turn * turn, -log_ratio, k3)):
            found[row] += by_bin(slot, weights, SLOTS)
    return found.cpu().numpy()
