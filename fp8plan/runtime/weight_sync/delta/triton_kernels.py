"""The Triton kernel of fp8plan.runtime.weight_sync.delta.tiles: a program for each tile of many matrices.

A table tells it the places of the matrices, and `owners` the row of each program. Where two matrices are compared, a
bit marks each value that differs. Marks have an eighth of the bytes of E4M3, so that torch finds the places in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from math import ceil

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Address and row stride in words of a matrix and of the other one, rows, words of a row, first program, first mark.
COLUMNS = 8
STEP = 16  # rows that a program reads at a time
WARPS = 4
WORD = 4  # bytes

_COLUMNS, _STEP = tl.constexpr(COLUMNS), tl.constexpr(STEP)


def digests(matrices: Sequence[Tensor], constants: Tensor) -> list[Tensor]:
    """Return the digests of matrices whose rows are aligned words. constants: tiles.constants of their device"""
    return _run([(matrix, matrix) for matrix in matrices], constants, None)


def compared(
    pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor, marked_values: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places at which two matrices differ, and the digests of the first.

    pairs:         of values of one size
    marked_values: that a byte of marks stands for; columns are multiples of it
    """
    sizes = [mine.numel() // marked_values for mine, _ in pairs]
    marks = torch.empty(sum(sizes), dtype=torch.uint8, device=constants.device)
    own = _run(pairs, constants, marks, marked_values)
    marked = marks.nonzero().flatten()
    flags = marks[marked].unsqueeze(1) >> torch.arange(marked_values, dtype=torch.uint8, device=marks.device) & 1
    byte, bit = flags.nonzero(as_tuple=True)
    places = marked[byte] * marked_values + bit
    starts = [marked_values * start for start in accumulate(sizes, initial=0)]
    cuts = torch.searchsorted(places, torch.tensor(starts, device=places.device)).tolist()
    for start, first, last, each in zip(starts, cuts, cuts[1:], own, strict=False):
        yield places[first:last] - start, each


def _run(
    pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor, marks: Tensor | None, marked_values: int = 1
) -> list[Tensor]:
    height, _, width = constants.shape
    words = [mine.shape[1] * mine.element_size() // WORD for mine, _ in pairs]
    shapes = [
        (ceil(mine.shape[0] / height), ceil(count / width)) for (mine, _), count in zip(pairs, words, strict=True)
    ]
    counts = [rows * columns for rows, columns in shapes]
    firsts = accumulate(counts, initial=0)
    first_marks = accumulate((mine.numel() // marked_values for mine, _ in pairs), initial=0)
    table = np.array(
        [
            (*_place(mine), *_place(other), mine.shape[0], count, first, mark)
            for (mine, other), count, first, mark in zip(pairs, words, firsts, first_marks, strict=False)
        ],
        dtype=np.int64,
    )
    numbers = torch.from_numpy(np.concatenate([table.ravel(), np.repeat(np.arange(len(pairs)), counts)]))
    on_device = (numbers.pin_memory() if constants.is_cuda else numbers).to(constants.device, non_blocking=True)
    out = torch.empty(sum(counts), dtype=torch.int32, device=constants.device)
    values = WORD // pairs[0][0].element_size()
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        _tiles[(len(out),)](
            on_device, on_device[table.size :], constants, out, marks, ROWS=height, WORDS=width, VALUES=values,
            MARKED=marked_values, COMPARE=marks is not None, num_warps=WARPS,
        )  # fmt: skip
    return [part.view(shape) for part, shape in zip(out.split(counts), shapes, strict=True)]


def _place(matrix: Tensor) -> tuple[int, int]:
    return matrix.data_ptr(), matrix.stride(0) * matrix.element_size() // WORD


@triton.jit
def _tiles(
    table,
    owners,
    constants,
    digests,
    marks,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUES: tl.constexpr,
    MARKED: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """Digest a tile, and mark where it differs from the other one. VALUES: of a word"""
    program = tl.program_id(0)
    entry = table + tl.load(owners + program) * _COLUMNS
    mine, stride = tl.load(entry).to(tl.pointer_type(tl.int32)), tl.load(entry + 1)
    other, other_stride = tl.load(entry + 2).to(tl.pointer_type(tl.int32)), tl.load(entry + 3)
    rows, words = tl.load(entry + 4), tl.load(entry + 5)
    tile = program - tl.load(entry + 6)
    across = tl.cdiv(words, WORDS)
    top, left = tile // across * ROWS, tile % across * WORDS
    inside = tl.arange(0, WORDS)[None, :]
    column = left + inside
    total = tl.zeros([_STEP, WORDS], tl.int64)
    for start in range(0, ROWS, _STEP):
        step = start + tl.arange(0, _STEP)[:, None]
        row = top + step
        mask = (row < rows) & (column < words)
        word = tl.load(mine + row * stride + column, mask, 0, eviction_policy="evict_first")
        constant = tl.load(constants + step * WORDS + inside, eviction_policy="evict_last")
        total += word.to(tl.int64) * constant
        if COMPARE:
            differ = word ^ tl.load(other + row * other_stride + column, mask, 0, eviction_policy="evict_first")
            # A bit for each value of a word; then the bits of the words of a byte together.
            if VALUES == 4:
                bit = ((differ & 0xFF) != 0).to(tl.int32) + ((differ & 0xFF00) != 0).to(tl.int32) * 2
                bit += ((differ & 0xFF0000) != 0).to(tl.int32) * 4 + ((differ & -0x1000000) != 0).to(tl.int32) * 8
            elif VALUES == 2:
                bit = ((differ & 0xFFFF) != 0).to(tl.int32) + ((differ & -0x10000) != 0).to(tl.int32) * 2
            else:
                bit = (differ != 0).to(tl.int32)
            GROUP: tl.constexpr = MARKED // VALUES
            grouped = tl.reshape(bit, [_STEP, WORDS // GROUP, GROUP])
            byte = tl.sum(grouped << (tl.arange(0, GROUP) * VALUES)[None, None, :], axis=2)
            across_marks = words // GROUP
            mark = left // GROUP + tl.arange(0, WORDS // GROUP)[None, :]
            place = marks + tl.load(entry + 7) + row * across_marks + mark
            tl.store(place, byte.to(tl.uint8), (row < rows) & (mark < across_marks))
    tl.store(digests + program, (tl.sum(tl.sum(total, 1), 0) >> 32).to(tl.int32))
