"""Values at places of many tensors, read and written together.

A place is a number in a flat tensor. On a GPU one launch of a Triton kernel serves all tensors. Elsewhere, and for
tensors that the kernel cannot reach, torch takes one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fp8plan.runtime.weight_sync.delta.tiles import bits, flat, has_triton

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Span = tuple[int, int]  # start and stop


class Part(NamedTuple):
    """A box of a tensor that is kept as a matrix of its own.

    matrix:  bit patterns of the box, an integer dtype [rows, columns]
    rows:    of the box in the flat tensor (tiles.flat)
    columns: of the box
    width:   columns of the flat tensor
    """

    matrix: Tensor
    rows: Span
    columns: Span
    width: int


def read(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
    """Return the bit patterns at places of each tensor, an integer dtype [places].

    tensors: contiguous; places: int64 [places] on the tensor's device
    """
    import torch

    out: dict[int, Tensor] = {}
    parts = [whole(tensor) for tensor in tensors]
    for numbers in _groups(parts):
        first = parts[numbers[0]].matrix
        counts = [places[number].numel() for number in numbers]
        if _for_kernel(parts[numbers[0]]):
            from fp8plan.runtime.weight_sync.delta import triton_kernels

            words = torch.empty(sum(counts), dtype=first.dtype, device=first.device)
            every = torch.cat([places[number] for number in numbers])
            triton_kernels.values([_row(parts[number]) for number in numbers], counts, every, words, write=False)
            out.update(zip(numbers, words.split(counts), strict=True))
        else:
            out.update((number, parts[number].matrix.view(-1)[places[number]]) for number in numbers)
    return [out[number] for number in range(len(parts))]


def write(parts: Sequence[Part], places: Sequence[Tensor], words: Sequence[Tensor]) -> None:
    """Write values of each part's tensor into the part, those outside of its box apart.

    places: int64 [values] in the flat tensor, each place at most once; words: bit patterns [values]; on the part's
    device
    """
    import torch

    for numbers in _groups(parts):
        if _for_kernel(parts[numbers[0]]):
            from fp8plan.runtime.weight_sync.delta import triton_kernels

            counts = [places[number].numel() for number in numbers]
            some = (torch.cat([each[number] for number in numbers]) for each in (places, words))
            triton_kernels.values([_row(parts[number]) for number in numbers], counts, *some, write=True)
        else:
            for number in numbers:
                _write(parts[number], places[number], words[number])


def whole(tensor: Tensor) -> Part:
    """Return the Part of all of a contiguous tensor."""
    rows, columns = flat(tensor.shape)
    return Part(bits(tensor).view(rows, columns), (0, rows), (0, columns), columns)


def _write(part: Part, places: Tensor, words: Tensor) -> None:
    row = places // part.width
    column = places - row * part.width
    if part.matrix.shape != (part.rows[1], part.width):
        (top, bottom), (left, right) = part.rows, part.columns
        inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
        row, column, words = row[inside] - top, column[inside] - left, words[inside]
    part.matrix[row, column] = words


def _row(part: Part) -> tuple[int, ...]:
    """Return the part's row of the kernel's table."""
    matrix = part.matrix
    return matrix.data_ptr(), matrix.stride(0), part.rows[0], part.columns[0], *matrix.shape, part.width


def _groups(parts: Sequence[Part]) -> list[list[int]]:
    """Return the numbers of the parts that one launch can serve: alike in device and size of values."""
    groups: dict[tuple[torch.device, int, bool], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        groups[part.matrix.device, part.matrix.element_size(), _for_kernel(part)].append(number)
    return list(groups.values())


def _for_kernel(part: Part) -> bool:
    return part.matrix.is_cuda and part.matrix.stride(1) == 1 and has_triton()
