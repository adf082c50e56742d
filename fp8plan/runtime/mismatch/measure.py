"""Sums of the mismatch of one batch, in one pass over its tokens.

Log-probs of a batch, packed: only the valid response tokens, one sequence after another.

    tokens = pack(train_logprobs, rollout_logprobs, mask)              # padded: [batch, length]
    tokens = pack(train_logprobs, rollout_logprobs, lengths=lengths)   # packed: [tokens]
    weights = tokens.unpack(token_weights)                             # in the form that came in

Padding is two thirds of a long-tailed batch; whatever is computed per token is computed after packing. Tokens whose
log-prob is NaN or infinite on either side are left out here, once, and so of every figure and weight: `unpack` gives
them the fill value. `invalid` counts them.

Sums (or the largest) over segments of packed tokens, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.runtime.mismatch.metrics import POSITIONS, SLOTS, VERSION_SUMS, MismatchSums
from fp8plan.runtime.mismatch.sums import BINS, LIMIT, FloatArray, IntArray, bins, k3
from fp8plan.runtime.vllm_versions import check_torch

if TYPE_CHECKING:
    import torch

if TYPE_CHECKING:
    import torch

    Array = torch.Tensor | np.ndarray

# Tokens that are worked on at a time. CPU: some temporaries of this size stay in the cache. GPU: they fit the memory.
CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Valid tokens of a batch.

    train, rollout, log_ratio: [tokens] float32, detached; log_ratio = train - rollout, in nats
    offsets:                   [sequences + 1] int64 on the CPU; sequence i is [offsets[i], offsets[i + 1])
    invalid:                   tokens left out because a log-prob was NaN or infinite
    marked:                    sequences with a token that the mask marks, valid or not
    shape, kept, mask_dtype:   of what came in; kept is None if all of it is here
    numpy:                     whether numpy arrays came in
    """

    train: torch.Tensor
    rollout: torch.Tensor
    log_ratio: torch.Tensor
    offsets: torch.Tensor
    invalid: int
    marked: int
    shape: tuple[int, ...]
    kept: torch.Tensor | None
    mask_dtype: torch.dtype
    numpy: bool

    def __len__(self) -> int:
        return len(self.log_ratio)

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """[sequences] int64 on the CPU: valid tokens of each."""
        return self.offsets.diff()

    def chunks(self) -> Iterator[slice]:
        """The tokens in slices that fit the cache."""
        return _chunks(self.log_ratio)

    def select(self, values: Array) -> torch.Tensor:
        """Pack `values` that have the form of the log-probs: [tokens], of their own dtype."""
        import torch

        tensor = to_tensor(values)
        if tuple(tensor.shape) != self.shape:
            raise ConfigError(f"values have shape {tuple(tensor.shape)}; allowed: that of the log-probs, {self.shape}")
        flat = tensor.to(self.log_ratio.device).reshape(-1)
        if self.kept is None:
            return flat
        return torch.cat([flat[part].index_select(0, where) for part, where in _valid(self.kept)])

    def unpack(self, values: torch.Tensor, fill: float = 0.0, dtype: torch.dtype | None = None) -> Array:
        """Bring `values` [tokens] into the form that came in; `fill` where a token is masked, padding or invalid."""
        out = self._unpacked(values, fill, dtype)
        return out.numpy() if self.numpy else out

    def _unpacked(self, values: torch.Tensor, fill: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        if len(values) != len(self):
            raise ConfigError(f"{len(values):,} values for {len(self):,} tokens; allowed: one for each")
        if self.kept is None:
            out = values.reshape(self.shape).to(dtype or values.dtype)
        else:
            out = values.new_full(self.shape, fill, dtype=dtype or values.dtype)
            flat, done = out.view(-1), 0
            for part, where in _valid(self.kept):
                some = values[done : done + len(where)]
                flat[part].scatter_(0, where, some.to(out.dtype))
                done += len(where)
        return out

    def mask(self, keep: torch.Tensor | None = None) -> Array:
        """The mask that came in (all ones, bool, if none did) without what `keep` [tokens] bool lacks; a new tensor."""
        import torch

        if keep is not None:
            return self.unpack(keep, dtype=self.mask_dtype)
        if self.kept is None:
            out = torch.ones(self.shape, dtype=self.mask_dtype, device=self.log_ratio.device)
        else:
            out = self.kept.to(self.mask_dtype, copy=True)
        return out.numpy() if self.numpy else out


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations on one thread inside; also a decorator.

    Threads meet after each operation, and beside other work they wait long for one another.
    A thread that starts to use torch meanwhile stays at one, as torch has it.
    Nothing changes in a process in which vLLM runs on the CPU: it binds the threads to cores, and has put a warning in
    the place of torch's function.
    Raises ConfigError without torch: what is decorated with it is where users come in.
    """
    check_torch("the correction")
    import torch

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
) -> Tokens:
    """Pack the log-probs, in nats, that the trainer and the engine give to the valid tokens of a batch.

    train_logprobs, rollout_logprobs: padded [batch, length] or packed [tokens]; torch (any device, any float dtype) or
                                      numpy; computed with in float32
    mask:    same shape; bool, or numbers that are 0 or 1: true where a token is valid, with any holes (multi-turn);
             None: all are valid
    lengths: [sequences] number of tokens of each sequence; with packed log-probs only, and needed there

    Raises ConfigError for shapes that do not agree, for input that holds no numbers, for a mask with other numbers, and
    without torch.
    """
    train, rollout = to_tensor(train_logprobs, "train_logprobs"), to_tensor(rollout_logprobs, "rollout_logprobs")
    device = train.device
    given = None if mask is None else to_tensor(mask, "mask").to(device)
    ends = _checked(train, rollout, given, lengths)
    rollout = rollout.to(device)
    tokens = _pack(train, rollout, None if given is None else given.bool(), ends)
    # Log-probs are finite exactly if their difference is; and a sum is finite only if all its terms are.
    if not bool(tokens.log_ratio.sum().isfinite()) and not bool((finite := tokens.log_ratio.isfinite()).all()):
        some = _pack(train, rollout, tokens._unpacked(finite, False), ends)
        tokens = replace(some, invalid=len(tokens) - len(some), marked=tokens.marked)
    dtype = tokens.mask_dtype if given is None else given.dtype
    return replace(tokens, mask_dtype=dtype, numpy=isinstance(train_logprobs, np.ndarray))


def _pack(train: torch.Tensor, rollout: torch.Tensor, kept: torch.Tensor | None, ends: torch.Tensor) -> Tokens:
    """Pack what `kept` marks (None: everything).

    ends: [sequences + 1] int64 on the CPU, where sequences end in what came in
    """
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
            # Valid tokens of this part that come before each end: all or none but for the few ends that lie in it.
            offsets += torch.searchsorted(where, (ends - part.start).to(where.device)).cpu()
            done = stop
    ours, theirs = packed
    marked = int((offsets.diff() > 0).sum())
    return Tokens(ours, theirs, ours - theirs, offsets, 0, marked, tuple(train.shape), kept, torch.bool, False)


def _valid(kept: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The flat mask in slices, each with the places of its valid tokens."""
    flat = kept.reshape(-1)
    for part in _chunks(flat):
        yield part, flat[part].nonzero().squeeze(1)


def _chunks(flat: torch.Tensor) -> Iterator[slice]:
    step = CPU_CHUNK if flat.device.type == "cpu" else GPU_CHUNK
    return (slice(start, min(start + step, len(flat))) for start in range(0, len(flat), step))


def to_tensor(values: Array | Sequence[int], name: str = "values") -> torch.Tensor:
    """A detached tensor, on the device where it is; of numbers, on the CPU, whatever the default device is.

    Raises ConfigError for what holds no numbers; `name` is what it is called there.
    """
    import torch

    if isinstance(values, torch.Tensor):
        return values.detach()
    try:
        if isinstance(values, np.ndarray):  # torch takes neither read-only memory nor negative strides
            return torch.from_numpy(np.require(values, requirements=["C", "W"]))
        return torch.as_tensor(values, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        given = "None" if values is None else f"a {type(values).__name__}"
        given += f" of {values.dtype}" if isinstance(values, np.ndarray) else ""
        raise ConfigError(f"{name} is {given}; allowed: a tensor, an array or a list of numbers") from None


def _checked(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor | None, lengths: Sequence[int] | Array | None
) -> torch.Tensor:
    """Check the shapes and the mask; return [sequences + 1] where sequences end in the flat input."""
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
    given = to_tensor(lengths, "lengths").cpu()
    if given.dim() != 1:
        raise ConfigError(f"lengths have shape {tuple(given.shape)}; allowed: [sequences]")
    offsets = torch.nn.functional.pad(given.long().cumsum(0), (1, 0))
    if int(offsets[-1]) != shape[0] or bool((offsets.diff() < 0).any()):
        raise ConfigError(
            f"lengths sum up to {int(offsets[-1]):,} and the log-probs are {shape[0]:,}; allowed: lengths of 0 or more "
            "that sum up to the number of log-probs"
        )
    return offsets


_START = {"sum": 0.0, "max": -np.inf}


class Segments:
    """Sum or maximum of each segment, while chunks of tokens come in order.

    cuts: [segments + 1] where they begin, and where the last one ends; empty ones give 0 or -infinity
    """

    def __init__(self, cuts: IntArray, device: torch.device, reduce: Literal["sum", "max"] = "sum") -> None:
        import torch

        self._cuts, self._reduce = cuts, reduce
        self._found = torch.full((len(cuts) - 1,), _START[reduce], dtype=torch.float64, device=device)

    def add(self, part: slice, values: torch.Tensor) -> None:
        """Add the values of the tokens in `part`, of any float dtype."""
        import torch

        first = int(np.searchsorted(self._cuts, part.start, side="right")) - 1
        last = int(np.searchsorted(self._cuts, part.stop, side="left"))
        offsets = torch.from_numpy(np.clip(self._cuts[first : last + 1], part.start, part.stop) - part.start)
        found = torch.segment_reduce(
            values.double(), self._reduce, offsets=offsets.to(values.device), initial=_START[self._reduce]
        )
        into = self._found[first : first + len(found)]
        if self._reduce == "sum":
            into += found
        else:
            into.copy_(torch.maximum(into, found))

    def numpy(self) -> FloatArray:
        """The figures found, [segments] float64."""
        return self._found.cpu().numpy()


def lost(tokens: Tokens, keep: torch.Tensor) -> FloatArray:
    """Number of tokens of each sequence that are not kept, [sequences]; keep: [tokens] bool."""
    found = Segments(tokens.offsets.numpy(), keep.device)
    for part in tokens.chunks():
        found.add(part, ~keep[part])
    return found.numpy()


def by_bin(where: torch.Tensor, values: torch.Tensor, bins: int) -> torch.Tensor:
    """[bins] sums of float64 `values` [tokens] whose bin is `where` [tokens]."""
    import torch

    if not values.is_cuda:  # three times as fast there; on a GPU it is an error under use_deterministic_algorithms
        return torch.bincount(where, values, minlength=bins)
    return values.new_zeros(bins).index_add_(0, where, values)


def spread(values: NDArray[Any], tokens: Tokens) -> torch.Tensor:
    """The value of each token's sequence, [tokens] on their device; values: [sequences]."""
    import torch

    device = tokens.log_ratio.device
    if device.type == "cpu":  # torch makes an index first, which takes 50 times as long
        return torch.from_numpy(np.repeat(values, tokens.lengths.numpy()))
    return torch.from_numpy(values).to(device).repeat_interleave(tokens.lengths.to(device), output_size=len(tokens))


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
