"""Triton kernels of fp8plan.runtime.apply.quantize.targets: all tensors of one shape and dtype in one launch.

A table tells a kernel the places of its tensors: an int64 row each, [address and row stride of the source, the same of
its targets, index of its flag]. The rows of all launches go to the GPU in one copy that nobody waits for.

Rounding. vLLM's formula has two divisions, amax / 448 and 1 / scale. Their rounding depends on where it runs:

    "exact"     both to nearest: on a CPU
    "eager"     amax * (1/448), and 1 / scale to nearest: torch on a GPU, which makes a product of the division by a
                number on the host (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu)
    "compiled"  amax * (1/448) (torch/_inductor/lowering.py, div_prim), and 1 / scale as div.full.f32, within 2 ulp,
                which is Triton's `/`: vLLM's function as torch.compile makes it for a GPU

The product w * (1 / scale) exceeds 448 by rounding errors alone, so it does not matter that this conversion to E4M3
saturates and torch's does not. NaNs that a GPU computes are 0x7fffffff and become 0x7f, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8plan.model.precision import E4M3_MAX
from fp8plan.runtime.apply.quantize.block_fp8 import AMAX_FLOOR, BLOCK, scale_shape

ROUNDING = "compiled"
ROUNDINGS = {"exact": (False, True), "eager": (True, True), "compiled": (True, False)}  # product, 1 / scale to nearest
WARPS = 8
ALIGNMENT = 16  # bytes for addresses, elements for rows: with it, 16 bytes are read and written at once
FLAT, TILED = (1, 8192), (16, 512)  # rows and columns that one program copies: of contiguous tensors, of others
COLUMNS = 8  # columns of the table

Call = Callable[[], object]
Key = tuple[torch.dtype, int, int]  # dtype, rows and columns of a launch

# The bits of a float: an integer as wide, a mask of all but the sign, the least magnitude that is not finite.
BITS = {
    torch.bfloat16: (tl.int16, 0x7FFF, 0x7F80),
    torch.float16: (tl.int16, 0x7FFF, 0x7C00),
    torch.float32: (tl.int32, 0x7FFFFFFF, 0x7F800000),
    torch.float8_e4m3fn: (tl.int8, 0x7F, 0x7F),
}
ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_TILE = tl.constexpr(BLOCK)
_COLUMNS = tl.constexpr(COLUMNS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_FLOOR_BITS = tl.constexpr(int(np.float32(AMAX_FLOOR).view(np.int32)))


def addresses(*tensors: Sequence[Tensor]) -> np.ndarray:
    """Tabulate sequences of equal length: row i has address and row stride of the i-th tensor of each sequence."""
    places = zip(*tensors, strict=True)
    rows = [[number for tensor in place for number in (tensor.data_ptr(), tensor.stride(0))] for place in places]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2 * len(tensors))


def quantize_calls(sources: Sequence[Tensor], outs: np.ndarray, flags: Tensor, rounding: str) -> list[Call]:
    """Return the launches that quantise sources [N, K] into `outs` = addresses(q_outs, scale_outs), and raise `flags`.

    They may be repeated, in a CUDA graph too, as long as all the tensors live.
    """
    product, nearest = ROUNDINGS[rounding]
    table = _table(addresses(sources), outs)
    calls: list[Call] = []
    for (dtype, rows, columns), members, on_device in _grouped([_key(s) for s in sources], table, flags):
        blocks = scale_shape(rows, columns)
        launch = _quantize[(len(members) * blocks[0] * blocks[1],)]
        settings = _bits(dtype) | {
            "SOURCE": ELEMENTS[dtype],
            "WHOLE": rows % BLOCK == 0 and columns % BLOCK == 0,
            "ALIGNED": _aligned(members, columns),
            "PRODUCT": product,
            "NEAREST": nearest,
        }
        calls.append(partial(launch, on_device, flags, rows, columns, **settings, num_warps=WARPS))
    return calls


def copy_calls(sources: Sequence[Tensor], outs: Sequence[Tensor], flags: Tensor) -> list[Call]:
    """Return the launches that copy sources [N, K] or [N] into `outs`; otherwise as `quantize_calls`."""
    keys = [_as_copied(source, out) for source, out in zip(sources, outs, strict=True)]
    table = _table(addresses(sources, outs))
    table[[rows == 1 for _, rows, _ in keys], 1:4:2] = 0  # strides: one row has none
    calls: list[Call] = []
    for (dtype, rows, columns), members, on_device in _grouped(keys, table, flags):
        height, width = FLAT if rows == 1 else TILED
        launch = _copy[(len(members) * ceil(rows / height) * ceil(columns / width),)]
        settings = _bits(dtype) | {
            "HEIGHT": height,
            "WIDTH": width,
            "WHOLE": rows % height == 0 and columns % width == 0,
            "ALIGNED": _aligned(members, columns),
        }
        calls.append(partial(launch, on_device, flags, rows, columns, **settings, num_warps=WARPS))
    return calls


def run(calls: Sequence[Call], device: torch.device) -> None:
    """Run the launches on the current stream of `device`, whichever device is current."""
    with on(device):
        for call in calls:
            call()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on a device, whichever device is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def moved(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return numbers on a device. The host does not wait for the copy."""
    host = torch.from_numpy(numbers)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def _bits(dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(("BITS", "MAGNITUDE", "NOT_FINITE"), BITS[dtype], strict=True))


def _as_copied(source: Tensor, out: Tensor) -> Key:
    """Return the shape for the kernel: one row if neither side has gaps and columns can be counted in int32."""
    if source.dim() == 1 or (source.is_contiguous() and out.is_contiguous() and source.numel() < 2**31):
        return source.dtype, 1, source.numel()
    return _key(source)


def _key(tensor: Tensor) -> Key:
    rows, columns = tensor.shape
    return tensor.dtype, rows, columns


def _table(*parts: np.ndarray) -> np.ndarray:
    """Join the columns of `parts` and the number of each row, and pad them to COLUMNS."""
    filled = np.concatenate([*parts, np.arange(len(parts[0]))[:, None]], axis=1)
    return np.pad(filled, ((0, 0), (0, COLUMNS - filled.shape[1])))


def _aligned(members: np.ndarray, columns: int) -> bool:
    return columns % ALIGNMENT == 0 and not (members[:, :4] % ALIGNMENT).any()


def _grouped(keys: Sequence[Key], table: np.ndarray, flags: Tensor) -> Iterator[tuple[Key, np.ndarray, Tensor]]:
    """Yield each key with its rows of the table, on the host and on the device of `flags`."""
    places: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    table = table[[place for group in places.values() for place in group]]
    on_device = moved(table, flags.device)
    start = 0
    for key, group in places.items():
        stop = start + len(group)
        yield key, table[start:stop], on_device[start:stop]
        start = stop


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    table,
    flags,
    rows,
    columns,
    BITS: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    SOURCE: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRODUCT: tl.constexpr,
    NEAREST: tl.constexpr,
):
    """Quantise a block in each program, held in registers between its maximum and its rounding."""
    across = tl.cdiv(columns, _TILE)
    blocks = tl.cdiv(rows, _TILE) * across
    block = tl.program_id(0) % blocks
    entry = table + (tl.program_id(0) // blocks) * _COLUMNS
    source, source_stride, q, q_stride = _places(entry, SOURCE, tl.float8e4nv, ALIGNED)

    row = (block // across) * _TILE + tl.arange(0, _TILE)[:, None]
    column = (block % across) * _TILE + tl.arange(0, _TILE)[None, :]
    mask = None if WHOLE else (row < rows) & (column < columns)
    w = tl.load(source + row.to(tl.int64) * source_stride + column, mask, None if WHOLE else 0.0)

    # Positive floats are ordered as their bits are. NaN, which a maximum of floats would ignore, is above Inf.
    # Registers hold the source's own bits, not float32, until the scale is known.
    largest = tl.max(w.to(BITS, bitcast=True) & MAGNITUDE)
    amax = largest.to(BITS).to(SOURCE, bitcast=True).to(tl.float32)
    amax = tl.maximum(amax.to(tl.int32, bitcast=True), _FLOOR_BITS).to(tl.float32, bitcast=True)
    scale = amax * (1.0 / _E4M3_MAX) if PRODUCT else tl.div_rn(amax, _E4M3_MAX)
    inverse = tl.div_rn(1.0, scale) if NEAREST else 1.0 / scale
    tl.store(q + row.to(tl.int64) * q_stride + column, (w.to(tl.float32) * inverse).to(tl.float8e4nv), mask)

    scales = tl.load(entry + 4).to(tl.pointer_type(tl.float32))
    tl.store(scales + (block // across) * tl.load(entry + 5) + block % across, scale)
    _raise(flags + tl.load(entry + 6), largest.to(tl.int32), NOT_FINITE)


@triton.jit(do_not_specialize=["rows"])
def _copy(
    table,
    flags,
    rows,
    columns,
    BITS: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Copy HEIGHT rows by WIDTH columns in each program, as integers."""
    across = tl.cdiv(columns, WIDTH)
    tiles = tl.cdiv(rows, HEIGHT) * across
    tile = tl.program_id(0) % tiles
    entry = table + (tl.program_id(0) // tiles) * _COLUMNS
    source, source_stride, out, out_stride = _places(entry, BITS, BITS, ALIGNED)

    row = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = (tile % across) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = None if WHOLE else (row < rows) & (column < columns)
    bits = tl.load(source + row.to(tl.int64) * source_stride + column, mask, None if WHOLE else 0)
    tl.store(out + row.to(tl.int64) * out_stride + column, bits, mask)
    _raise(flags + tl.load(entry + 4), tl.max((bits & MAGNITUDE).to(tl.int32)), NOT_FINITE)


@triton.jit
def _raise(flag, largest, NOT_FINITE: tl.constexpr):
    """Raise a flag to a block's (targets.FINITE, NOT_FINITE). largest: maximum of its magnitudes' bits"""
    if largest > 0:
        tl.atomic_max(flag, 1 + (largest >= NOT_FINITE).to(tl.int32), sem="relaxed")


@triton.jit
def _places(entry, SOURCE: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load pointer and row stride of the source and of the target, with hints on their alignment."""
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    source_stride = tl.load(entry + 1)
    out = tl.load(entry + 2).to(tl.pointer_type(OUT))
    out_stride = tl.load(entry + 3)
    if ALIGNED:
        source, out = tl.multiple_of(source, _ALIGNMENT), tl.multiple_of(out, _ALIGNMENT)
        source_stride, out_stride = tl.multiple_of(source_stride, _ALIGNMENT), tl.multiple_of(out_stride, _ALIGNMENT)
    return source, source_stride, out, out_stride
