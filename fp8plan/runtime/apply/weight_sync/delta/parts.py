"""Values of many tensors in one flat tensor, a part for each. Cuts say where each part begins and ends.

So a few launches on a GPU serve all tensors, however many there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def numbers_by(keys: Sequence[Hashable | None]) -> list[list[int]]:
    """Return the numbers of the items with one key, for each key but None."""
    groups = defaultdict[Hashable, list[int]](list)
    for number, key in enumerate(keys):
        if key is not None:
            groups[key].append(number)
    return list(groups.values())


def cuts_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return where parts with these counts of values begin and end, int64 [parts + 1]."""
    import torch

    return torch.tensor([0, *accumulate(counts)], device=device)


def owners_of(cuts: Tensor, size: int) -> Tensor:
    """Return the number of the part that each value is in, int64 [size].

    cuts: from cuts_of, with at least one part
    """
    import torch

    # torch.repeat_interleave is slow on a GPU for few long parts.
    steps = cuts.new_zeros(size + 1)
    steps.index_add_(0, cuts[1:-1], torch.ones_like(cuts[1:-1]))
    return steps[:size].cumsum_(0)


def sums(values: Tensor, cuts: Tensor) -> Tensor:
    """Return the sum of each part of values, int64 [parts]. cuts: where parts begin and end, int64 [parts + 1]"""
    import torch

    return at_cuts(torch.cumsum(values, 0, dtype=torch.int64), cuts).diff()


def at_cuts(total: Tensor, cuts: Tensor) -> Tensor:
    """Return the running total before each cut: 0 at the start."""
    import torch

    if not len(total):
        return torch.zeros_like(cuts)
    return torch.where(cuts > 0, total[(cuts - 1).clamp(min=0)], 0)
