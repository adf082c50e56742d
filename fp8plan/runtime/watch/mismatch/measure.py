"""A batch packed to its valid tokens, and the sums of its mismatch in one pass over them.

    tokens = pack(train_logprobs, rollout_logprobs, mask)              # padded: [batch, length]
    tokens = pack(train_logprobs, rollout_logprobs, lengths=lengths)   # packed: [tokens]
    sums = measure(tokens)
    weights = tokens.unpack(token_weights)                             # in the form that came in

Padding is two thirds of a long-tailed batch, so everything per token is computed after packing. `pack` leaves out
tokens whose log-prob is NaN or infinite on either side: no figure and no weight sees them, and `invalid` counts them.
A row without a token is no sequence: it has no mean log-prob.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.packages import check_torch
from fp8plan.runtime.watch.mismatch.metrics import POSITIONS, SLOTS, VERSION_SUMS, MismatchSums, by_slot
from fp8plan.runtime.watch.mismatch.pieces import Piece, check_group, joined
from fp8plan.runtime.watch.mismatch.sums import BINS, LIMIT, FloatArray, IntArray, Segments, bins, by_bin, rank, terms

if TYPE_CHECKING:
    import torch

    Array = torch.Tensor | np.ndarray

# Tokens of one pass. CPU: some temporaries of this size stay in the cache. GPU: they fit the memory.
CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 26
UNSURE: Final = 0.1  # nats: a probability of 0.9, which no rounding makes of 1
ROUNDING: Final = 0.01  # nats above 0 that a mean log-prob may have by rounding


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Valid tokens of a batch.

    train, rollout, log_ratio: [tokens] float32, detached; log_ratio = train - rollout, in nats
    offsets:    [sequences + 1] int64 on the CPU; sequence i is [offsets[i], offsets[i + 1]), and never empty
    rows:       [rows of the input] bool on the CPU: true for those with a valid token, which are the sequences
    invalid:    number of tokens left out because a log-prob was NaN or infinite
    marked:     [rows of the input] bool on the CPU: true for those with a token that the mask marks, valid or not
    shape:      shape of the input
    kept:       bool, of that shape: true for the tokens that are here; None: all are
    mask_dtype: dtype of the input's mask; bool without one
    numpy:      True if the input was numpy arrays
    sequence_group: ranks that hold pieces of these sequences, which are whole here; None: this one alone
    own:        [this rank's tokens] their places here; None without a sequence_group: all are its own
    """

    train: torch.Tensor
    rollout: torch.Tensor
    log_ratio: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    invalid: int
    marked: torch.Tensor
    shape: tuple[int, ...]
    kept: torch.Tensor | None
    mask_dtype: torch.dtype
    numpy: bool
    sequence_group: Any = None
    own: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.log_ratio)

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """[sequences] int64 on the CPU: valid tokens of each."""
        return self.offsets.diff()

    @property
    def counted(self) -> bool:
        """True on the one rank that counts these sequences: the first of their sequence_group."""
        return self.sequence_group is None or rank(self.sequence_group) == 0

    def chunks(self) -> Iterator[slice]:
        """The tokens in slices that fit the cache."""
        return _chunks(self.log_ratio)

    def select(self, values: Array) -> torch.Tensor:
        """Pack `values` that have the form of the log-probs: [this rank's tokens], of their own dtype."""
        import torch

        tensor = to_tensor(values)
        if tuple(tensor.shape) != self.shape:
            raise ConfigError(f"values have shape {tuple(tensor.shape)}; allowed: that of the log-probs, {self.shape}")
        flat = tensor.to(self.log_ratio.device).reshape(-1)
        if self.kept is None:
            return flat
        return torch.cat([flat[:0], *(flat[part].index_select(0, where) for part, where in _valid(self.kept))])

    def unpack(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> Array:
        """Bring `values` [tokens] into the form of the input; 0 where a token is masked, padding or invalid."""
        return self._as_input(self._unpacked(values, dtype or values.dtype))

    def _unpacked(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if len(values) != len(self):
            raise ConfigError(f"{len(values):,} values for {len(self):,} tokens; allowed: one for each")
        if self.own is not None:
            values = values[self.own]
        if self.kept is None:
            return values.reshape(self.shape).to(dtype)
        out = values.new_zeros(self.shape, dtype=dtype)
        flat, done = out.view(-1), 0
        for part, where in _valid(self.kept):
            flat[part].scatter_(0, where, values[done : done + len(where)].to(dtype))
            done += len(where)
        return out

    def mask(self, keep: torch.Tensor | None = None) -> Array:
        """A new mask of the input's form, 1 for valid tokens, less those where `keep` ([tokens] bool) is false."""
        if keep is not None:
            return self.unpack(keep, self.mask_dtype)
        if self.kept is None:
            return self._as_input(self.log_ratio.new_ones(self.shape, dtype=self.mask_dtype))
        return self._as_input(self.kept.to(self.mask_dtype, copy=True))

    def _as_input(self, tensor: torch.Tensor) -> Array:
        return tensor.numpy() if self.numpy else tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations on one thread inside; also a decorator.

    torch joins its threads after each operation, and under load they wait long for one another. A thread that first
    uses torch meanwhile keeps one thread. Raises ConfigError without torch.
    """
    try:
        import torch
    except ModuleNotFoundError:
        check_torch("the correction")
        raise
    # vLLM on a CPU binds the threads to cores, and replaces this function by a warning.
    if torch.set_num_threads is not torch._C.set_num_threads:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def pack(
    train_logprobs: Array,
    rollout_logprobs: Array,
    mask: Array | None = None,
    lengths: Sequence[int] | Array | None = None,
    sequence_group: Any = None,
) -> Tokens:
    """Pack the trainer's and the engine's log-probs, in nats, of the valid tokens of a batch.

    train_logprobs, rollout_logprobs: padded [batch, length] or packed [tokens]; numpy, or torch of any device and any
             float dtype; computations are in float32
    mask:    same shape; bool, or numbers that are 0 or 1; true for valid tokens, with any holes (multi-turn); None: all
    lengths: [sequences] number of tokens of each sequence; needed with packed log-probs, and allowed only there
    sequence_group: process group of the ranks that hold pieces of the same sequences, all of which must call it; each
             gets the whole sequences (fp8plan.runtime.watch.mismatch.pieces). None: sequences are whole

    Raises ConfigError for shapes that do not agree, input without numbers, a mask of other numbers, and without torch.
    With a sequence_group all of its ranks then raise.
    """
    if sequence_group is None:
        return _packed(train_logprobs, rollout_logprobs, mask, lengths)
    check_group(sequence_group)
    own, refusal = None, None
    try:
        own = _packed(train_logprobs, rollout_logprobs, mask, lengths)
    except Exception as error:  # the others wait for this rank's piece
        refusal = error
    return _whole(own, sequence_group, refusal)


def _packed(
    train_logprobs: Array, rollout_logprobs: Array, mask: Array | None, lengths: Sequence[int] | Array | None
) -> Tokens:
    train, rollout = to_tensor(train_logprobs, "train_logprobs"), to_tensor(rollout_logprobs, "rollout_logprobs")
    marks = None if mask is None else to_tensor(mask, "mask").to(train.device)
    ends = _checked(train, rollout, marks, lengths)
    rollout = rollout.to(train.device)
    tokens = _pack(train, rollout, None if marks is None else marks.bool(), ends)
    # Log-probs are finite exactly if their difference is; and a sum is finite only if all its terms are.
    if not bool(tokens.log_ratio.sum().isfinite()) and not bool((finite := tokens.log_ratio.isfinite()).all()):
        some = _pack(train, rollout, tokens._unpacked(finite, finite.dtype), ends)
        tokens = replace(some, invalid=len(tokens) - len(some), marked=tokens.marked)
    dtype = tokens.mask_dtype if marks is None else marks.dtype
    return replace(tokens, mask_dtype=dtype, numpy=isinstance(train_logprobs, np.ndarray))


def _whole(own: Tokens | None, sequence_group: Any, refusal: Exception | None) -> Tokens:
    """The tokens of all pieces. own: those of this rank; None: they were refused"""
    import torch

    piece = None
    if own is not None:
        lengths = torch.zeros(len(own.rows), dtype=torch.long, device="cpu").masked_scatter_(own.rows, own.lengths)
        piece = Piece(torch.stack([own.train, own.rollout]), lengths.numpy(), own.marked.numpy(), own.invalid)
    whole, places = joined(piece, sequence_group, refusal)
    assert own is not None  # else joined has raised
    train, rollout = whole.sides
    rows = whole.lengths > 0
    offsets = np.append(0, whole.lengths[rows].cumsum())
    return replace(
        own, train=train, rollout=rollout, log_ratio=train - rollout, invalid=whole.invalid,
        offsets=torch.from_numpy(offsets), rows=torch.from_numpy(rows),
        marked=torch.from_numpy(whole.marked), sequence_group=sequence_group, own=places,
    )  # fmt: skip


def _pack(train: torch.Tensor, rollout: torch.Tensor, kept: torch.Tensor | None, ends: torch.Tensor) -> Tokens:
    """Pack what `kept` marks (None: everything). ends: [sequences + 1] int64 on the CPU, of the input's sequences"""
    import torch

    sides = [train.reshape(-1), rollout.reshape(-1)]
    if kept is None:
        packed, offsets = [side.float() for side in sides], ends
    else:
        number = int(kept.count_nonzero())
        packed = [torch.empty(number, dtype=torch.float32, device=train.device) for _ in sides]
        offsets, done = torch.zeros_like(ends), 0
        for part, where in _valid(kept):
            stop = done + len(where)
            for side, out in zip(sides, packed, strict=True):
                out[done:stop] = side[part].index_select(0, where)
            # Valid tokens of this part before each end: all or none, except for the few ends inside it.
            offsets += torch.searchsorted(where, (ends - part.start).to(where.device)).cpu()
            done = stop
    rows = offsets.diff() > 0
    offsets = torch.cat([offsets[:1], offsets[1:][rows]])
    ours, theirs = packed
    return Tokens(ours, theirs, ours - theirs, offsets, rows, 0, rows, tuple(train.shape), kept, torch.bool, False)


def _valid(kept: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The flat mask in slices, each with the places of its valid tokens."""
    flat = kept.reshape(-1)
    for part in _chunks(flat):
        yield part, flat[part].nonzero().squeeze(1)


def _chunks(flat: torch.Tensor) -> Iterator[slice]:
    step = CPU_CHUNK if flat.device.type == "cpu" else GPU_CHUNK
    return (slice(start, min(start + step, len(flat))) for start in range(0, len(flat), step))


def to_tensor(values: Array | Sequence[int], name: str = "values") -> torch.Tensor:
    """A detached tensor: a tensor stays on its device, anything else comes to the CPU, whatever the default device is.

    Raises ConfigError for values that are no numbers. name: what the error calls them
    """
    import torch

    if isinstance(values, torch.Tensor):
        return values.detach()
    try:
        if isinstance(values, np.ndarray):  # torch takes neither read-only memory nor negative strides
            return torch.from_numpy(np.require(values, requirements=["C", "W"]))
        return torch.as_tensor(values, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        kind = "None" if values is None else f"a {type(values).__name__}"
        kind += f" of {values.dtype}" if isinstance(values, np.ndarray) else ""
        raise ConfigError(f"{name} is {kind}; allowed: a tensor, an array or a list of numbers") from None


def _checked(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor | None, lengths: Sequence[int] | Array | None
) -> torch.Tensor:
    """Check the shapes and the mask; return [sequences + 1] ends of the sequences in the flat input."""
    import torch

    shape = tuple(train.shape)
    for name, tensor in (("rollout_logprobs", rollout), ("mask", mask)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; allowed: that of train_logprobs, {shape}")
    if mask is not None and mask.dtype != torch.bool and bool((odd := (mask != 0) & (mask != 1)).any()):
        raise ConfigError(
            f"mask holds {mask[odd][0].item()!r}, and {int(odd.sum()):,} numbers that are neither 0 nor 1; allowed: 1 "
            "where a token was sampled, 0 elsewhere; of token ids or labels type labels != -100"
        )
    if len(shape) == 2 and lengths is None:
        return torch.arange(shape[0] + 1, device="cpu") * shape[1]
    if len(shape) != 1 or lengths is None:
        raise ConfigError(
            f"log-probs have shape {shape} and lengths are {'' if lengths is None else 'not '}None; allowed: padded "
            "[batch, length] with a mask, or packed [tokens] with lengths"
        )
    counts = to_tensor(lengths, "lengths").cpu()
    if counts.dim() != 1:
        raise ConfigError(f"lengths have shape {tuple(counts.shape)}; allowed: [sequences]")
    offsets = torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))
    if int(offsets[-1]) != shape[0] or bool((offsets.diff() < 0).any()):
        raise ConfigError(
            f"lengths sum up to {int(offsets[-1]):,} and the log-probs are {shape[0]:,}; allowed: lengths of 0 or more "
            "that sum up to the number of log-probs"
        )
    return offsets


@one_thread()
def measure(tokens: Tokens, versions: Array | Sequence[int] | None = None) -> MismatchSums:
    """Sum up the mismatch of one batch; `MismatchSums.metrics` makes figures of the sums.

    tokens:   the batch, from `pack`
    versions: versions of the weights that sampled: [sequences], or one per token in the form of the log-probs, for
              responses that went on after a sync (`turn_versions` makes them of a trajectory's turns). They are
              integers of 0 or more, less than SLOTS apart over all batches that are added. With a sequence_group they
              are one per sequence. None: unknown

    The first rank of a sequence_group counts its sequences; the sums of the others are 0.
    Raises ConfigError for versions of another shape or range, and without torch.
    """
    pieces = _pieces(tokens.offsets.numpy())
    runs = None if versions is None else _runs(tokens, versions)
    if not tokens.counted:
        return MismatchSums()
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
        for name, values in zip(VERSION_SUMS, by_slot(of_part, np.diff(cuts), per_part), strict=True):
            sums[f"version_{name}"] = values
        piece = np.searchsorted(pieces, cuts[:-1], side="right") - 1
        per_piece = np.array([np.bincount(piece, row, len(pieces) - 1) for row in per_part])
    return _with_sequences(sums, tokens.lengths.numpy(), per_piece, pieces)


def _placeholders(tokens: Tokens, part: slice) -> int:
    """Number of tokens with a log-prob of exactly 0.0 on one side, of which the other side is not sure."""
    certain = (tokens.rollout[part] == 0) | (tokens.train[part] == 0)
    return int((certain & (tokens.log_ratio[part].abs() > UNSURE)).count_nonzero())


def _summed(tokens: Tokens, pieces: IntArray) -> tuple[FloatArray, float, FloatArray]:
    """Sum over tokens, in float64.

    pieces: [pieces + 1] first token of each part of a sequence, in order, and the end of the last

    Returns ([3, BINS]: tokens, ratio, k3; ratio^2; [3, pieces]: log ratio, k3, train).
    """
    import torch

    device = tokens.log_ratio.device
    per_piece = [Segments(pieces, device) for _ in range(3)]
    table = torch.zeros(3, BINS, dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part in tokens.chunks():
        log_ratio, ratio, divergence = terms(tokens.log_ratio[part])
        where = bins(tokens.log_ratio[part])
        table[0] += torch.bincount(where, minlength=BINS)
        table[1] += by_bin(where, ratio)
        table[2] += by_bin(where, divergence)
        squares += torch.dot(ratio, ratio)
        for segments, values in zip(per_piece, (log_ratio, divergence, tokens.train[part]), strict=True):
            segments.add(part, values)
    return table.cpu().numpy(), float(squares), np.array([segments.numpy() for segments in per_piece])


def _pieces(offsets: IntArray) -> IntArray:
    """Sequences cut at POSITIONS, so that each piece is one sequence's tokens in one bin of position.

    Returns [sequences * used + 1]: first token of each piece, and the end of the last. `used` is the number of bins
    that the longest sequence needs.
    """
    starts, lengths = offsets[:-1, None], np.diff(offsets)[:, None]
    used = max(int(np.searchsorted(POSITIONS, lengths.max(initial=0), side="left")), 1)
    return np.append(starts + np.minimum(POSITIONS[:used], lengths), offsets[-1])


def _with_sequences(sums: MismatchSums, lengths: IntArray, per_piece: FloatArray, pieces: IntArray) -> MismatchSums:
    """Add the sums over sequences and over bins of position.

    The tokens of a sequence share one ratio at the levels "sequence" and "geometric".
    """
    import torch

    count = len(lengths)
    if not count:
        return sums
    log_ratio, divergence, train = per_piece.reshape(3, count, -1)
    used = log_ratio.shape[1]
    tokens = np.diff(pieces).reshape(count, used)
    for name, values in (("tokens", tokens), ("k1", -log_ratio), ("k3", divergence)):
        sums[f"position_{name}"][:used] = values.sum(0)
    sums["sequences"], sums["k1"] = count, -log_ratio.sum()
    whole = log_ratio.sum(1)
    train_mean, difference = train.sum(1) / lengths, -whole / lengths
    rollout_mean = train_mean + difference
    sums["train_above_0"], sums["rollout_above_0"] = (train_mean > ROUNDING).sum(), (rollout_mean > ROUNDING).sum()
    with np.errstate(over="ignore"):  # a perplexity may well be infinite
        sums["training_ppl"], sums["rollout_ppl"] = np.exp(-train_mean).sum(), np.exp(-rollout_mean).sum()
        sums["ppl_ratio"] = np.exp(difference).sum()
    sums["training_log_ppl"], sums["rollout_log_ppl"] = -train_mean.sum(), -rollout_mean.sum()
    sums["log_ppl_diff"], sums["log_ppl_abs_diff"] = difference.sum(), np.abs(difference).sum()
    sums["sequence_ratio_squared"] = np.exp(2 * np.clip(whole, -LIMIT, LIMIT)).sum()
    for level, log_ratios in (("sequence", whole), ("geometric", whole / lengths)):
        where = bins(torch.from_numpy(log_ratios.astype(np.float32))).numpy()
        sums[f"{level}_tokens"] = np.bincount(where, lengths, BINS)
        sums[f"{level}_ratio"] = np.bincount(where, lengths * np.exp(np.clip(log_ratios, -LIMIT, LIMIT)), BINS)
    return MismatchSums(sums.values, float(difference.min()), float(difference.max()))


def _runs(tokens: Tokens, versions: Any) -> tuple[IntArray, IntArray]:
    """Runs of tokens that one version sampled: the first token of each, and its version, both [runs] int64."""
    import torch

    sampled_by = to_tensor(versions, "versions")
    whole = tokens.own is None
    if whole and tuple(sampled_by.shape) == tokens.shape:
        packed = tokens.select(sampled_by).long()
        first = torch.ones_like(packed, dtype=torch.bool)
        first[1:] = packed.diff() != 0
        starts = first.nonzero().squeeze(1)
        runs = starts.cpu().numpy(), packed[starts].cpu().numpy()
    elif sampled_by.shape == tokens.rows.shape:
        runs = tokens.offsets.numpy()[:-1], sampled_by.long().cpu()[tokens.rows].numpy()
    else:
        by_token = f", or that of the log-probs, {tokens.shape}" if whole else ""
        raise ConfigError(
            f"versions have shape {tuple(sampled_by.shape)}; allowed: [{len(tokens.rows)}], one per sequence{by_token}"
        )
    if len(runs[1]):
        low, high = int(runs[1].min()), int(runs[1].max())
        if low < 0 or high - low >= SLOTS:
            raise ConfigError(
                f"versions go from {low} to {high}; allowed: 0 or more, and less than {SLOTS} apart in a batch"
            )
    return runs
