"""Sums (or the largest) over segments of packed tokens, chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8plan.runtime.mismatch.histogram import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.mismatch.tokens import Tokens

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
