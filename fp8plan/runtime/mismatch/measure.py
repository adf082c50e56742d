"""Sums of the mismatch of one batch, in one pass over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.mismatch.histogram import BINS, LIMIT, FloatArray, IntArray, bins, k3
from fp8plan.runtime.mismatch.metrics import POSITIONS, SLOTS, VERSION_SUMS, MismatchSums
from fp8plan.runtime.mismatch.segments import Segments, by_bin
from fp8plan.runtime.mismatch.tokens import one_thread, to_tensor

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.mismatch.tokens import Array, Tokens


UNSURE: Final = 0.1  # nats: a probability of 0.9, which no rounding makes of 1
ROUNDING: Final = 0.01  # nats above 0 that a mean log-prob may have by rounding


@one_thread()
def measure(tokens: Tokens, versions: Array | Sequence[int] | None = None) -> MismatchSums:
    """Sum up how far trainer and rollout differ over one batch; `MismatchSums.metrics` makes figures of it.

    tokens:   the batch, from `pack`; log-probs in nats
    versions: versions of the weights that sampled: [sequences], or one per token in the form of the log-probs (for a
              response that went on after a sync). Integers of 0 or more, less than SLOTS apart over all batches that
              are added. None: unknown

    Raises ConfigError for versions of another shape or range, and without torch.
    """
    pieces = _pieces(tokens.offsets.numpy())
    runs = None if versions is None else _runs(tokens, versions)
    cuts = pieces if runs is None else np.union1d(pieces, runs[0])
    histogram, squares, per_part = _summed(tokens, cuts)
    sums = MismatchSums()
    sums["tokens"], sums["invalid"], sums["ratio_squared"] = len(tokens), tokens.invalid, squares
    sums["placeholders"] = sum(_placeholders(tokens, part) for part in tokens.chunks())
    sums["ratio"], sums["k3"] = histogram[1].sum(), histogram[2].sum()
    for name, values in zip(("tokens", "ratio", "k3"), histogram, strict=True):
        sums[f"histogram_{name}"] = values
    per_piece = per_part
    if runs is not None:  # parts of pieces
        starts, of_run = runs
        of_part = of_run[np.searchsorted(starts, cuts[:-1], side="right") - 1]
        for name, values in zip(VERSION_SUMS, _by_slot(of_part, np.diff(cuts), per_part), strict=True):
            sums[f"version_{name}"] = values
        piece = np.searchsorted(pieces, cuts[:-1], side="right") - 1
        per_piece = np.array([np.bincount(piece, row, len(pieces) - 1) for row in per_part])
    return _with_sequences(sums, tokens.lengths.numpy(), per_piece, pieces)


def _placeholders(tokens: Tokens, part: slice) -> int:
    """The number of tokens that one side gives exactly 0.0, where the other side is not sure of them."""
    certain = (tokens.rollout[part] == 0) | (tokens.train[part] == 0)
    return int((certain & (tokens.log_ratio[part].abs() > UNSURE)).count_nonzero())


def _summed(tokens: Tokens, pieces: IntArray) -> tuple[FloatArray, float, FloatArray]:
    """Sum over tokens, in float64.

    pieces: [pieces + 1] where parts of sequences begin, in order, and where the last one ends

    Returns ([3, BINS]: tokens, ratio, k3; ratio^2; [3, pieces]: log ratio, k3, train).
    """
    import torch

    device = tokens.log_ratio.device
    per_piece = [Segments(pieces, device) for _ in range(3)]
    table = torch.zeros(3, BINS, dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part in tokens.chunks():
        log_ratio, ratio, divergence = _terms(tokens.log_ratio[part])
        where = bins(tokens.log_ratio[part])
        table[0] += torch.bincount(where, minlength=BINS)
        table[1] += by_bin(where, ratio, BINS)
        table[2] += by_bin(where, divergence, BINS)
        squares += torch.dot(ratio, ratio)
        for segments, values in zip(per_piece, (log_ratio, divergence, tokens.train[part]), strict=True):
            segments.add(part, values)
    return table.cpu().numpy(), float(squares), np.array([of.numpy() for of in per_piece])


def _terms(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log ratio, ratio (clamped to e^+-20) and k3 (not clamped) in float64, where ratio - 1 cancels harmlessly."""
    exact = log_ratio.double()
    ratio = exact.clamp(-LIMIT, LIMIT).exp_()
    divergence = (ratio - 1).sub_(exact).clamp_(min=0)
    beyond = log_ratio > LIMIT
    if bool(beyond.any()):
        divergence[beyond] = k3(exact[beyond])
    return exact, ratio, divergence


def _pieces(offsets: IntArray) -> IntArray:
    """Sequences cut at POSITIONS, so that a sum over a piece is one over a sequence's tokens in one bin of position.

    [sequences * used + 1] where they begin, and where the last one ends; `used` is as many bins as the longest needs.
    """
    starts, lengths = offsets[:-1, None], np.diff(offsets)[:, None]
    used = max(int(np.searchsorted(POSITIONS, lengths.max(initial=0), side="left")), 1)
    return np.append(starts + np.minimum(POSITIONS[:used], lengths), offsets[-1])


def _with_sequences(sums: MismatchSums, lengths: IntArray, per_piece: FloatArray, pieces: IntArray) -> MismatchSums:
    """Add what is summed over sequences and over bins of position. An empty sequence counts with log p = 0."""
    count = len(lengths)
    log_ratio, divergence, train = per_piece.reshape(3, count, -1) if count else np.zeros((3, 0, 1))
    used = log_ratio.shape[1]
    tokens = np.diff(pieces).reshape(count, used) if count else np.zeros((0, 1))
    for name, values in (("tokens", tokens), ("k1", -log_ratio), ("k3", divergence)):
        sums[f"position_{name}"][:used] = values.sum(0)
    sums["sequences"], sums["k1"] = count, -log_ratio.sum()
    if not count:
        return sums
    whole, divisor = log_ratio.sum(1), np.maximum(lengths, 1)
    train_mean, difference = train.sum(1) / divisor, -whole / divisor
    rollout_mean = train_mean + difference
    sums["train_above_0"], sums["rollout_above_0"] = (train_mean > ROUNDING).sum(), (rollout_mean > ROUNDING).sum()
    with np.errstate(over="ignore"):  # a perplexity may well be infinite
        sums["training_ppl"], sums["rollout_ppl"] = np.exp(-train_mean).sum(), np.exp(-rollout_mean).sum()
        sums["ppl_ratio"] = np.exp(difference).sum()
    sums["training_log_ppl"], sums["rollout_log_ppl"] = -train_mean.sum(), -rollout_mean.sum()
    sums["log_ppl_diff"], sums["log_ppl_abs_diff"] = difference.sum(), np.abs(difference).sum()
    sums["sequence_ratio_squared"] = np.exp(2 * np.clip(whole, -LIMIT, LIMIT)).sum()
    for level, of_each in (("sequence", whole), ("geometric", whole / divisor)):
        _by_ratio(sums, level, of_each, lengths)
    return MismatchSums(sums.values, float(difference.min()), float(difference.max()))


def _by_ratio(sums: MismatchSums, level: str, log_ratio: FloatArray, lengths: IntArray) -> None:
    """Tokens and their ratios at `level`, by the log ratio [sequences] that those of a sequence share there."""
    import torch

    where = bins(torch.from_numpy(log_ratio.astype(np.float32))).numpy()
    ratio = np.exp(np.clip(log_ratio, -LIMIT, LIMIT))
    sums[f"{level}_tokens"] = np.bincount(where, lengths, BINS)
    sums[f"{level}_ratio"] = np.bincount(where, lengths * ratio, BINS)


def _runs(tokens: Tokens, versions: Any) -> tuple[IntArray, IntArray]:
    """Runs of tokens that one version sampled: the first token of each, and its version, both [runs] int64."""
    import torch

    given = to_tensor(versions, "versions")
    if tuple(given.shape) == tokens.shape:
        packed = tokens.select(given).long()
        first = torch.ones_like(packed, dtype=torch.bool)
        first[1:] = packed.diff() != 0
        starts = first.nonzero().squeeze(1)
        runs = starts.cpu().numpy(), packed[starts].cpu().numpy()
    elif given.shape == (tokens.sequences,):
        filled = tokens.lengths.numpy() > 0
        runs = tokens.offsets.numpy()[:-1][filled], given.long().cpu().numpy()[filled]
    else:
        raise ConfigError(
            f"versions have shape {tuple(given.shape)}; allowed: [{tokens.sequences}], one per sequence, or that of "
            f"the log-probs, {tokens.shape}"
        )
    if len(runs[1]):
        low, high = int(runs[1].min()), int(runs[1].max())
        if low < 0 or high - low >= SLOTS:
            raise ConfigError(
                f"versions go from {low} to {high}; allowed: 0 or more, and less than {SLOTS} apart in a batch"
            )
    return runs


def _by_slot(versions: IntArray, tokens: IntArray, sums: FloatArray) -> FloatArray:
    """[VERSION_SUMS, SLOTS], from the version of each part, its tokens and its sums; version = turn * SLOTS + slot."""
    turn, slot = (versions // SLOTS).astype(np.float64), versions % SLOTS
    rows = tokens, turn * tokens, turn * turn * tokens, -sums[0], sums[1]
    return np.array([np.bincount(slot, row, SLOTS) for row in rows])
