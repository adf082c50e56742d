"""Values at places of many tensors, read and written together.

A place is a number in a flat tensor. On a GPU one launch of a Triton kernel serves all tensors. Elsewhere, and for
tensors that the kernel cannot reach, torch takes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fp8plan.runtime.apply.weight_sync.delta.parts import numbers_by
from fp8plan.runtime.apply.weight_sync.delta.tiles import has_triton

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[int, int]  # start and stop


class Window(NamedTuple):
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


def values_at(matrices: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
    """Return the bit patterns at places of each matrix, an integer dtype [places].

    matrices: bit patterns, contiguous; places: int64 [places] on the matrix's device
    """
    import torch

    out: dict[int, Tensor] = {}
    windows = [whole_window(matrix) for matrix in matrices]
    for numbers in _groups(windows):
        first = windows[numbers[0]].matrix
        counts = [places[number].numel() for number in numbers]
        if _for_kernel(windows[numbers[0]]):
            from fp8plan.runtime.apply.weight_sync.delta import triton_kernels

            words = torch.empty(sum(counts), dtype=first.dtype, device=first.device)
            every = torch.cat([places[number] for number in numbers])
            triton_kernels.values([_row(windows[number]) for number in numbers], counts, every, words, write=False)
            out.update(zip(numbers, words.split(counts), strict=True))
        else:
            out.update((number, windows[number].matrix.view(-1)[places[number]]) for number in numbers)
    return [out[number] for number in range(len(windows))]


def write_values(windows: Sequence[Window], places: Sequence[Tensor], words: Sequence[Tensor]) -> None:
    """Write values at places of each tensor into its window. Places outside of the window's box are skipped.

    places: int64 [values] in the flat tensor, each place at most once
    words:  bit patterns [values]; both on the window's device
    """
    import torch

    for numbers in _groups(windows):
        if _for_kernel(windows[numbers[0]]):
            from fp8plan.runtime.apply.weight_sync.delta import triton_kernels

            counts = [places[number].numel() for number in numbers]
            some = (torch.cat([each[number] for number in numbers]) for each in (places, words))
            triton_kernels.values([_row(windows[number]) for number in numbers], counts, *some, write=True)
        else:
            for number in numbers:
                _write(windows[number], places[number], words[number])


def whole_window(matrix: Tensor) -> Window:
    """Return the Window that holds all of a tensor. matrix: its bit patterns [rows, columns]"""
    rows, columns = matrix.shape
    return Window(matrix, (0, rows), (0, columns), columns)


def _write(window: Window, places: Tensor, words: Tensor) -> None:
    (top, bottom), (left, right) = window.rows, window.columns
    row = places // window.width
    column = places - row * window.width
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    window.matrix[row[inside] - top, column[inside] - left] = words[inside]


def _row(window: Window) -> tuple[int, ...]:
    matrix = window.matrix
    return matrix.data_ptr(), matrix.stride(0), window.rows[0], window.columns[0], *matrix.shape, window.width


def _groups(windows: Sequence[Window]) -> list[list[int]]:
    """Return the numbers of the windows that one launch can serve: alike in device and size of values."""
    return numbers_by([(each.matrix.device, each.matrix.element_size(), _for_kernel(each)) for each in windows])


def _for_kernel(window: Window) -> bool:
    return window.matrix.is_cuda and window.matrix.stride(1) == 1 and has_triton()
