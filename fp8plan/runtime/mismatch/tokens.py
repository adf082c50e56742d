"""Log-probs of a batch, packed: only the valid response tokens, one sequence after another.

    tokens = pack(train_logprobs, rollout_logprobs, mask)              # padded: [batch, length]
    tokens = pack(train_logprobs, rollout_logprobs, lengths=lengths)   # packed: [tokens]
    weights = tokens.unpack(token_weights)                             # in the form that came in

Padding is two thirds of a long-tailed batch; whatever is computed per token is computed after packing. Tokens whose
log-prob is NaN or infinite on either side are left out here, once, and so of every figure and weight: `unpack` gives
them the fill value. `invalid` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.vllm_versions import check_torch

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
