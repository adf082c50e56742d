"""Blockwise FP8 weights: E4M3 with one FP32 scale for each 128 x 128 block, bit for bit as vLLM's own function.

The formula is vllm.utils.deep_gemm.per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=False), which vLLM's online
`fp8_per_block` calls: amax = max |w| of a block, at least AMAX_FLOOR; scale = amax / 448; q = w * (1 / scale), rounded
to E4M3; all in float32. A block at the edge counts as filled up with zeros. A block of zeros has the
scale AMAX_FLOOR / 448.

Blocks that are not finite: with a NaN, the scale and every q are NaN. With an Inf and no NaN, the scale is Inf,
infinite weights become NaN and finite ones zeros of their sign. As in vLLM the sign of a NaN is the device's own: q is
0x7f on an NVIDIA GPU; on a CPU also 0xff.

These are torch's operations, on any device. apply.quantize.targets quantises whole groups of weights, by Triton on a
GPU. A CPU, torch on a GPU and vLLM's compiled function divide in three ways, and scales may differ in their last bit
(see runtime.apply.quantize.triton_kernels).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from fp8plan.errors import ConfigError
from fp8plan.model.precision import E4M3_MAX

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
AMAX_FLOOR = 1e-4  # as in vLLM's function


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a weight [rows, columns]."""
    return ceil(rows / BLOCK), ceil(columns / BLOCK)


def stands_alone(shape: Sequence[int], rows: slice, columns: slice) -> bool:
    """Return True if a part of a fused weight, quantised on its own, gets the q and scales that it has in the whole.

    It does if it starts at a block, and stops at one or at the weight's edge.

    shape: [N, K] of the whole; rows, columns: start and stop of the part. Raises ConfigError for a part outside.
    """
    sides = list(zip(shape, (rows, columns), strict=True))
    for size, part in sides:
        if not 0 <= part.start < part.stop <= size:
            raise ConfigError(f"{part} is no part of {size}; give slice(start, stop) with 0 <= start < stop <= {size}")
    return all(part.start % BLOCK == 0 and (part.stop % BLOCK == 0 or part.stop == size) for size, part in sides)


def quantize_into(source: Tensor, q_out: Tensor, scale_out: Tensor) -> None:
    """Quantise weights [..., N, K] in bf16, fp16 or fp32. Leading dimensions, experts for example, are done together.

    q_out, scale_out: E4M3 [..., N, K] and FP32 [..., ceil(N/128), ceil(K/128)], of any strides: rows or columns of a
                      fused weight, for example

    Raises ConfigError for other shapes and dtypes.
    """
    check_weight(source)
    check_quantized(q_out, scale_out)
    if source.shape != q_out.shape:
        raise ConfigError(f"the weight is {list(source.shape)} and q {list(q_out.shape)}; give two of one shape")
    for scale, tiles, q in _tiles(scale_out, source.detach(), q_out):
        amax = tiles.abs().amax(dim=(-3, -1), keepdim=True).float().clamp(min=AMAX_FLOOR)
        scale.copy_(amax / E4M3_MAX)
        q.copy_(tiles * (1.0 / scale))


def _tiles(scale: Tensor, *matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of equal size together, as views: scale [..., n, 1, k, 1], each matrix [..., n, height, k, width].

    They are the whole blocks, those at the right and at the lower edge, and the corner. Nothing is padded or copied.
    """
    rows, columns = matrices[0].shape[-2:]
    for row_span, row_blocks, height in _spans(rows):
        for column_span, column_blocks, width in _spans(columns):
            parts = (matrix[..., row_span, column_span] for matrix in matrices)
            tiled = (part.unflatten(-1, (-1, width)).unflatten(-3, (-1, height)) for part in parts)
            yield scale[..., row_blocks, column_blocks].unsqueeze(-1).unsqueeze(-3), *tiled


def _spans(size: int) -> list[tuple[slice, slice, int]]:
    """List (rows or columns, blocks, size of a block) of the whole blocks, then of the block at the edge, if any."""
    whole, rest = divmod(size, BLOCK)
    spans = [(slice(0, whole * BLOCK), slice(0, whole), BLOCK)] if whole else []
    return spans + ([(slice(whole * BLOCK, size), slice(whole, whole + 1), rest)] if rest else [])


def check_weight(weight: Tensor) -> None:
    """Raises ConfigError for a tensor that cannot be quantised."""
    import torch

    if weight.dim() < 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"a weight is {described(weight)}; quantised are bf16, fp16 and fp32 [..., N, K]")


def check_quantized(q: Tensor, scale: Tensor) -> None:
    """Raises ConfigError for a pair that is no quantised weight."""
    import torch

    if q.dim() < 2 or q.dtype != torch.float8_e4m3fn:
        raise ConfigError(f"q is {described(q)}; it must be torch.float8_e4m3fn [..., N, K]")
    expected = (*q.shape[:-2], *scale_shape(*q.shape[-2:]))
    if scale.shape != expected or scale.dtype != torch.float32:
        raise ConfigError(f"scale is {described(scale)}; for q {list(q.shape)} it is torch.float32 {list(expected)}")


def described(tensor: Tensor) -> str:
    """Describe a tensor in a message: dtype, shape, device."""
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
