"""The Triton kernels of a sparse sync. Each launch serves many tensors.

`_tiles` has a program for each tile (fp8plan.runtime.weight_sync.delta.tiles). Where two matrices are compared, a bit
marks each value that differs. `_count` and `_find` list the places of these bits.
`_values` reads or writes single values (fp8plan.runtime.weight_sync.delta.places).

A table tells a kernel the addresses of the matrices, and `owners` the table's row of each program or value.
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
from numpy.typing import NDArray
from torch import Tensor

# Address and row stride (in words) of both matrices; rows; words of a row; first program; first byte of marks.
COLUMNS = 8
STEP = 4  # rows that a program reads at a time
WARPS = 4
WORD = 4  # bytes
VECTOR = 4  # words that a thread reads at once, from addresses that allow it
MARKED = 8  # values that a byte of marks stands for
SCANNED = 512  # bytes of marks that a program searches
# Address and row stride (in values) of a window; top, left, rows and columns; columns of the flat tensor.
WINDOW_COLUMNS = 7
BLOCK = 1024  # values of a program

_COLUMNS, _WINDOW_COLUMNS = tl.constexpr(COLUMNS), tl.constexpr(WINDOW_COLUMNS)


def digests(matrices: Sequence[Tensor], constants: Tensor) -> list[Tensor]:
    """Return the digests of matrices whose rows are aligned words. constants: tiles.constants of their device"""
    return _run([(matrix, matrix) for matrix in matrices], constants, None)


def compared(pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places at which two matrices differ, and the digests of the first.

    pairs: of values of one size
    """
    marks = torch.empty(sum(map(_marks, pairs)), dtype=torch.uint8, device=constants.device)
    own = _run(pairs, constants, marks)
    bits = _places(marks)
    starts = torch.tensor([MARKED * start for start in accumulate(map(_marks, pairs), initial=0)], device=bits.device)
    counts = torch.searchsorted(bits, starts).diff()
    places = bits - torch.repeat_interleave(starts[:-1], counts, output_size=len(bits))
    columns = [mine.shape[1] for mine, _ in pairs]
    if any(width % MARKED for width in columns):  # a row's marks are whole bytes, with bits that stand for no value
        padded = torch.tensor([[ceil(width / MARKED) * MARKED, width] for width in columns], device=bits.device).T
        of_bits, of_values = padded[:, torch.repeat_interleave(counts, output_size=len(bits))]
        places -= places // of_bits * (of_bits - of_values)
    yield from zip(places.split(counts.tolist()), own, strict=True)


def _marks(pair: tuple[Tensor, Tensor]) -> int:
    """Return the bytes of marks of two matrices."""
    rows, columns = pair[0].shape
    return rows * ceil(columns / MARKED)


def _places(marks: Tensor) -> Tensor:
    """Return the numbers of set bits, int64 [bits], rising.

    A first kernel counts the bits of each block. A second writes their numbers behind those of earlier blocks.
    """
    blocks = ceil(len(marks) / SCANNED)
    counts = torch.empty(blocks, dtype=torch.int32, device=marks.device)
    shape = {"BYTES": SCANNED, "BITS": MARKED}
    with torch.cuda.device(marks.device) if marks.is_cuda else nullcontext():
        _count[(blocks,)](marks, len(marks), counts, **shape)
        ends = torch.cumsum(counts, 0)
        places = torch.empty(int(ends[-1]), dtype=torch.int64, device=marks.device)
        _find[(blocks,)](marks, len(marks), ends, places, **shape)
    return places


def _run(pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor, marks: Tensor | None) -> list[Tensor]:
    height, _, width = constants.shape
    words = [mine.shape[1] * mine.element_size() // WORD for mine, _ in pairs]
    shapes = [
        (ceil(mine.shape[0] / height), ceil(count / width)) for (mine, _), count in zip(pairs, words, strict=True)
    ]
    counts = [rows * columns for rows, columns in shapes]
    firsts = accumulate(counts, initial=0)
    first_marks = accumulate(map(_marks, pairs), initial=0)
    table = np.array(
        [
            (*_place(mine), *_place(other), mine.shape[0], count, first, mark)
            for (mine, other), count, first, mark in zip(pairs, words, firsts, first_marks, strict=False)
        ],
        dtype=np.int64,
    )
    on_device = _moved(np.concatenate([table.ravel(), np.array(counts)]), constants.device)
    owners = torch.repeat_interleave(on_device[table.size :], output_size=sum(counts))
    out = torch.empty(sum(counts), dtype=torch.int32, device=constants.device)
    values = WORD // pairs[0][0].element_size()
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        _tiles[(len(out),)](
            on_device, owners, constants, out, marks, ROWS=height, WORDS=width, VALUES=values,
            MARKED=MARKED, COMPARE=marks is not None, VECTOR=_vector(table), STEP=STEP, num_warps=WARPS,
        )  # fmt: skip
    return [part.view(shape) for part, shape in zip(out.split(counts), shapes, strict=True)]


def _place(matrix: Tensor) -> tuple[int, int]:
    return matrix.data_ptr(), matrix.stride(0) * matrix.element_size() // WORD


def _vector(table: NDArray[np.int64]) -> int:
    """Return the words that a thread can read at once of all matrices of a table."""
    aligned = not (table[:, [0, 2]] % (VECTOR * WORD)).any() and not (table[:, [1, 3, 5]] % VECTOR).any()
    return VECTOR if aligned else 1


def _moved(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return numbers on a device, int64."""
    return torch.from_numpy(numbers).to(device)


def values(rows: Sequence[Sequence[int]], counts: Sequence[int], places: Tensor, words: Tensor, *, write: bool) -> None:
    """Write words to places of windows, or read them from there.

    rows:   of the table, one for each window
    counts: places of each window
    places: int64 [sum of counts]
    words:  as the windows' values [sum of counts]
    """
    item = words.element_size()
    table = np.array(rows, dtype=np.int64).ravel()
    on_device = _moved(np.concatenate([table, np.array(counts, dtype=np.int64)]), words.device)
    owners = torch.repeat_interleave(on_device[table.size :], output_size=len(words))
    if len(words):
        with torch.cuda.device(words.device) if words.is_cuda else nullcontext():
            _values[(ceil(len(words) / BLOCK),)](
                on_device, owners, places, words, len(words), ITEM=item, SIZE=BLOCK, WRITE=write
            )


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
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
):
    """Digest a tile, and mark where it differs from the other one.

    VALUES: in a word; STEP: rows read at a time; VECTOR: addresses, strides and rows are multiples of so many words
    """
    program = tl.program_id(0)
    entry = table + tl.load(owners + program) * _COLUMNS
    mine = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), VECTOR * 4)
    other = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.int32)), VECTOR * 4)
    stride = tl.multiple_of(tl.load(entry + 1), VECTOR)
    other_stride = tl.multiple_of(tl.load(entry + 3), VECTOR)
    rows, words = tl.load(entry + 4), tl.multiple_of(tl.load(entry + 5), VECTOR)
    tile = program - tl.load(entry + 6)
    across = tl.cdiv(words, WORDS)
    top, left = tile // across * ROWS, tile % across * WORDS
    inside = tl.arange(0, WORDS)[None, :]
    column = left + inside
    total = tl.zeros([STEP, WORDS], tl.int64)
    for start in range(0, ROWS, STEP):
        step = start + tl.arange(0, STEP)[:, None]
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
            grouped = tl.reshape(bit, [STEP, WORDS // GROUP, GROUP])
            byte = tl.sum(grouped << (tl.arange(0, GROUP) * VALUES)[None, None, :], axis=2)
            across_marks = tl.cdiv(words, GROUP)
            mark = left // GROUP + tl.arange(0, WORDS // GROUP)[None, :]
            place = marks + tl.load(entry + 7) + row * across_marks + mark
            tl.store(place, byte.to(tl.uint8), (row < rows) & (mark < across_marks))
    tl.store(digests + program, (tl.sum(tl.sum(total, 1), 0) >> 32).to(tl.int32))


@triton.jit
def _values(table, owners, places, words, count, ITEM: tl.constexpr, SIZE: tl.constexpr, WRITE: tl.constexpr):
    """Read or write the values at some places. ITEM: bytes of a value; SIZE: values of a program"""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    valid = at < count
    entry = table + tl.load(owners + at, valid, 0) * _WINDOW_COLUMNS
    width, place = tl.load(entry + 6, valid, 1), tl.load(places + at, valid, 0)
    row = place // width
    column = place - row * width - tl.load(entry + 3, valid, 0)
    row -= tl.load(entry + 2, valid, 0)
    inside = valid & (row >= 0) & (row < tl.load(entry + 4, valid, 0))
    inside = inside & (column >= 0) & (column < tl.load(entry + 5, valid, 0))
    address = tl.load(entry, valid, 0) + (row * tl.load(entry + 1, valid, 0) + column) * ITEM
    pointer = address.to(words.dtype)
    if WRITE:
        tl.store(pointer, tl.load(words + at, inside, 0), inside)
    else:
        tl.store(words + at, tl.load(pointer, inside, 0), valid)


@triton.jit
def _set_bits(marks, size, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Return the bits of a program's marks, int32 [BYTES * BITS]."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    mark = tl.load(marks + at, at < size, 0).to(tl.int32)
    return tl.reshape((mark[:, None] >> tl.arange(0, BITS)[None, :]) & 1, [BYTES * BITS])


@triton.jit
def _count(marks, size, counts, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Count the bits of each block of marks."""
    tl.store(counts + tl.program_id(0), tl.sum(_set_bits(marks, size, BYTES, BITS), 0))


@triton.jit
def _find(marks, size, ends, places, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Write the places of set bits. ends: how many there are up to the end of each block"""
    program = tl.program_id(0).to(tl.int64)
    bits = _set_bits(marks, size, BYTES, BITS)
    rank = tl.load(ends + program) - tl.sum(bits, 0) + tl.cumsum(bits, 0) - 1
    tl.store(places + rank, program * BYTES * BITS + tl.arange(0, BYTES * BITS), bits != 0)
