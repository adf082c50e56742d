"""The Triton kernels of a sparse sync. Each launch serves many tensors.

`_tiles` has a program for each tile (apply.weight_sync.delta.tiles). Where two matrices are compared, a bit
marks each value that differs. `_count` and `_find` list the places of these bits, block by block.
`_values` reads or writes single values (fp8plan.runtime.apply.weight_sync.delta.places).

A table tells a kernel the addresses of the matrices, and `owners` the table's row of each program or value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from fp8plan.runtime.apply.quantize.triton_kernels import addresses, moved, on
from fp8plan.runtime.apply.weight_sync.delta.parts import at_cuts, owners_of

# Address and row stride (in words) of both matrices; rows; words of a row; first program; first byte of marks.
COLUMNS = 8
STEP = 4  # rows that a program reads at a time
WARPS = 4
WORD = 4  # bytes
VECTOR = 4  # words that a thread reads at once, from addresses that allow it
MARKED = 8  # values that a byte of marks stands for
SCANNED = 4096  # bytes of marks that a program searches; those of each pair begin at a multiple of it
# Address and row stride (in values) of a window; top, left, rows and columns; columns of the flat tensor.
WINDOW_COLUMNS = 7
BLOCK = 1024  # values of a program

_COLUMNS, _WINDOW_COLUMNS = tl.constexpr(COLUMNS), tl.constexpr(WINDOW_COLUMNS)


def digests(matrices: Sequence[Tensor], constants: Tensor) -> list[Tensor]:
    """Return the digests of matrices whose rows are aligned words. constants: tiles.constants of their device"""
    return _digested(_Table([(matrix, matrix) for matrix in matrices], constants), constants, None)


def compared(pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places at which two matrices differ, and the digests of the first.

    pairs: of values of one size
    """
    table, marks, own = marked(pairs, constants)
    yield from zip(_places(table, marks), own, strict=True)


def marked(pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor) -> tuple[_Table, Tensor, list[Tensor]]:
    """Return the pairs' table, their marks as uint8, and the digests of the first matrices."""
    table = _Table(pairs, constants)
    marks = torch.zeros(SCANNED * int(table.blocks.sum()), dtype=torch.uint8, device=constants.device)
    return table, marks, _digested(table, constants, marks)


class _Table:
    """The kernels' table of pairs of matrices.

    item:    bytes of a value of the first pair; compared pairs have values of one size
    padded:  True if rows of marks have bits that stand for no value
    tiles:   rows and columns of tiles [pairs, 2]
    blocks:  blocks of marks of each pair; a row's marks begin at a new byte
    vector:  words that a thread can read at once of all matrices
    on_device: the table, a row for each pair
    tile_cuts, block_cuts: where the tiles and the blocks of each pair begin and end, on the device [pairs + 1]
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], constants: Tensor) -> None:
        items = np.array([mine.element_size() for mine, _ in pairs])
        self.item = int(items[0])
        rows, columns = np.array([mine.shape for mine, _ in pairs], dtype=np.int64).T
        self.padded = bool((columns % MARKED).any())
        words = columns * items // WORD
        height, _, width = constants.shape
        self.tiles = np.stack([_ceil_div(rows, height), _ceil_div(words, width)], axis=1)
        self.blocks = _ceil_div(rows * _ceil_div(columns, MARKED), SCANNED)
        layouts = addresses(*zip(*pairs, strict=True))
        layouts[:, [1, 3]] = layouts[:, [1, 3]] * items[:, None] // WORD
        tile_cuts, block_cuts = (np.cumsum([0, *counts]) for counts in (self.tiles.prod(1), self.blocks))
        table = np.column_stack([layouts, rows, words, tile_cuts[:-1], SCANNED * block_cuts[:-1]])
        aligned = not (table[:, [0, 2]] % (VECTOR * WORD)).any() and not (table[:, [1, 3, 5]] % VECTOR).any()
        self.vector = VECTOR if aligned else 1
        numbers = [table.ravel(), tile_cuts, block_cuts]
        numbers_there = moved(np.concatenate(numbers), constants.device)
        self.on_device, self.tile_cuts, self.block_cuts = numbers_there.split([each.size for each in numbers])


def _ceil_div(sizes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    return -(-sizes // most)


def _digested(table: _Table, constants: Tensor, marks: Tensor | None) -> list[Tensor]:
    """Return the digests of the first matrices.

    marks: zeros, into which the kernel writes a bit for each value that differs; None: nothing is compared
    """
    counts = table.tiles.prod(1)
    owners = owners_of(table.tile_cuts, int(counts.sum()))
    out = torch.empty(len(owners), dtype=torch.int32, device=constants.device)
    height, _, width = constants.shape
    with on(out.device):
        _tiles[(len(out),)](
            table.on_device, owners, constants, out, marks, ROWS=height, WORDS=width, VALUES=WORD // table.item,
            MARKED=MARKED, COMPARE=marks is not None, VECTOR=table.vector, STEP=STEP, num_warps=WARPS,
        )  # fmt: skip
    return [part.view(*shape) for part, shape in zip(out.split(counts.tolist()), table.tiles.tolist(), strict=True)]


def _places(table: _Table, marks: Tensor) -> Sequence[Tensor]:
    """Return the places of marked values in each pair, int64, rising.

    A first kernel counts the bits of each block. A second writes their places behind those of earlier blocks.
    """
    owners = owners_of(table.block_cuts, int(table.blocks.sum()))
    counts = torch.empty(len(owners), dtype=torch.int32, device=marks.device)
    with on(marks.device):
        _count[(len(owners),)](marks, counts, BYTES=SCANNED)
        ends = torch.cumsum(counts, 0)
        totals = at_cuts(ends, table.block_cuts).diff().tolist()
        places = torch.empty(sum(totals), dtype=torch.int64, device=marks.device)
        _find[(len(owners),)](
            marks, table.on_device, owners, ends, places,
            BYTES=SCANNED, MARKED=MARKED, VALUES=WORD // table.item, PADDED=table.padded,
        )  # fmt: skip
    parts: Sequence[Tensor] = places.split(totals)
    return parts


def values(rows: Sequence[Sequence[int]], counts: Sequence[int], places: Tensor, words: Tensor, *, write: bool) -> None:
    """Write words to places of windows, or read them from there.

    rows:   of the table, one for each window
    counts: places of each window
    places: int64 [sum of counts]
    words:  as the windows' values [sum of counts]
    """
    if not len(words):
        return
    table = np.array(rows, dtype=np.int64).ravel()
    on_device = moved(np.concatenate([table, np.cumsum([0, *counts])]), words.device)
    owners = owners_of(on_device[table.size :], len(words))
    with on(words.device):
        _values[(ceil(len(words) / BLOCK),)](
            on_device, owners, places, words, len(words), ITEM=words.element_size(), SIZE=BLOCK, WRITE=write
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
def _scanned(marks, BYTES: tl.constexpr):
    """Return the marks of a program's block, uint32 [BYTES // 4], and how many bits of each word are set."""
    at = tl.program_id(0).to(tl.int64) * (BYTES // 4) + tl.arange(0, BYTES // 4)
    mark = tl.load(marks.to(tl.pointer_type(tl.uint32)) + at)
    # Bits are counted in parallel (Warren, Hacker's Delight, section 5-1): the interpreter has no instruction for it.
    count = mark - ((mark >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F
    count += count >> 8
    return mark, ((count + (count >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _count(marks, counts, BYTES: tl.constexpr):
    _, count = _scanned(marks, BYTES)
    tl.store(counts + tl.program_id(0), tl.sum(count, 0))


@triton.jit
def _find(
    marks,
    table,
    owners,
    ends,
    places,
    BYTES: tl.constexpr,
    MARKED: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the places of set bits in their matrix.

    ends: set bits up to the end of each block; MARKED: values of a byte of marks; VALUES: values of a word
    PADDED: rows of marks may have bits without a value
    """
    program = tl.program_id(0).to(tl.int64)
    mark, count = _scanned(marks, BYTES)
    entry = table + tl.load(owners + program) * _COLUMNS
    out = places + tl.load(ends + program) - tl.sum(count, 0)
    rank = tl.cumsum(count, 0) - count
    first = (program * BYTES - tl.load(entry + 7) + tl.arange(0, BYTES // 4) * 4) * MARKED
    for _ in range(tl.max(count, 0)):  # the lowest set bit of every word, then the next one
        others = mark & (mark - (mark != 0).to(tl.uint32))
        bit = ((mark ^ others).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the exponent of a power of two
        place = first + bit
        if PADDED:
            columns = tl.load(entry + 5) * VALUES
            marked = tl.cdiv(columns, MARKED) * MARKED
            place -= place // marked * (marked - columns)
        tl.store(out + rank, place, mark != 0)
        mark = others
        rank += 1
