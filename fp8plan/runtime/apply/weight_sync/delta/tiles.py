"""Tiles of a tensor: a digest of each, and the places at which two tensors differ.

A digest tells a receiver that its tile of the tensor is as the trainer's. It is the high half of the sum of the tile's
32-bit words, each times a random constant of its place, modulo 2^64 (multilinear hashing: Lemire & Kaser, The Computer
Journal 57(11), 2014). Two tiles that differ have equal digests with a probability of 2^-32.

On a GPU one launch of a Triton kernel reads many tensors. Elsewhere, and for tensors that the kernel cannot read, torch
does one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from numpy.random import PCG64

from fp8plan.model.weight_changes import TILE_BYTES, TILE_ROWS
from fp8plan.runtime.apply.weight_sync.delta.parts import numbers_by

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TILE: Final = (TILE_ROWS, TILE_BYTES)  # shards of matrices mostly begin and end at such tiles
WORD: Final = 4  # bytes of the words that a digest sums
WORDS: Final = TILE[1] // WORD
SEED: Final = 20261128  # of the digests' constants, which both ends must share


class Compared(NamedTuple):
    """A matrix against another one.

    places:  at which they differ, in the flat matrix, int64 [differences], rising
    digests: of the tensor's tiles, int32 [rows of tiles, columns of tiles]
    """

    places: Tensor
    digests: Tensor


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bit patterns as a view of the same shape: uint8, int16 or int32."""
    return tensor.view(_integers()[tensor.element_size()])


@cache
def _integers() -> dict[int, torch.dtype]:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def matrix(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a contiguous tensor as a matrix [rows, columns]: leading dimensions are rows."""
    words = bits(tensor)
    return words if words.dim() == 2 else words.view(flat(words.shape))


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that a tensor's tiles are counted in: leading dimensions are rows."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def tiles(shape: Sequence[int], item: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of tiles of a tensor. item: bytes of a value"""
    rows, columns = flat(shape)
    return -(-rows // TILE[0]), -(-columns * item // TILE[1])


def digests(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the digests of each matrix of bit patterns, int32 [rows of tiles, columns of tiles].

    matrices: [rows, columns] with contiguous rows, all on one device
    """
    numbers = [number for number, matrix in enumerate(matrices) if _for_kernel(matrix)]
    by_kernel: dict[int, Tensor] = {}
    if numbers:
        from fp8plan.runtime.apply.weight_sync.delta import triton_kernels

        some = [matrices[number] for number in numbers]
        by_kernel.update(zip(numbers, triton_kernels.digests(some, constants(some[0].device)), strict=True))
    return [by_kernel[number] if number in by_kernel else _digests(each) for number, each in enumerate(matrices)]


def compared(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Compared]:
    """Compare matrices of bit patterns with others of their shapes, dtypes and devices.

    All are contiguous, and none is empty.
    """
    able = [_for_kernel(a) and _for_kernel(b) for a, b in zip(mine, theirs, strict=True)]
    keys = [(a.device, a.element_size()) if fits else None for a, fits in zip(mine, able, strict=True)]
    by_kernel: dict[int, tuple[Tensor, Tensor]] = {}
    for numbers in numbers_by(keys):  # a launch for each: tensors of one device, whose values have one size
        from fp8plan.runtime.apply.weight_sync.delta import triton_kernels

        pairs = [(mine[number], theirs[number]) for number in numbers]
        own = constants(mine[numbers[0]].device)
        by_kernel.update(zip(numbers, triton_kernels.compared(pairs, own), strict=True))
    return [
        Compared(*by_kernel[number])
        if number in by_kernel
        else Compared((a != b).flatten().nonzero().flatten(), _digests(a))
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True))
    ]


def _for_kernel(matrix: Tensor) -> bool:
    """Return True if the kernel can read a matrix: on a GPU, in aligned words."""
    if not matrix.is_cuda or not has_triton():
        return False
    item = matrix.element_size()
    aligned = not (matrix.data_ptr() % WORD or matrix.shape[1] * item % WORD or matrix.stride(0) * item % WORD)
    return aligned and matrix.stride(1) == 1


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _digests(words: Tensor) -> Tensor:
    import torch

    height, width = tiles(words.shape, words.element_size())
    data = words.view(torch.uint8)
    if data.shape[1] != width * TILE[1] or data.stride() != (data.shape[1], 1) or data.storage_offset() % WORD:
        data = data.new_zeros(data.shape[0], width * TILE[1])  # of whole tiles, and aligned
        data[:, : words.shape[1] * words.element_size()] = words.view(torch.uint8)
    stripes = data.view(torch.int32).view(-1, width, WORDS).split(TILE[0])
    # A row of tiles at a time: products take eight bytes for each word.
    sums = torch.empty(height, width, dtype=torch.int64, device=words.device)
    for row, stripe in enumerate(stripes):
        sums[row] = (stripe * constants(words.device)[: stripe.shape[0]]).sum((0, 2))
    return (sums >> 32).to(torch.int32)


@cache
def constants(device: torch.device) -> Tensor:
    """Return the constants of a tile's words, int64 [rows, 1, words of a row]."""
    import torch

    numbers = PCG64(SEED).random_raw(TILE[0] * WORDS)  # the same with every version of torch
    return torch.from_numpy(numbers.view("int64").reshape(TILE[0], 1, WORDS)).to(device)
