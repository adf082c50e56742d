"""Weights in blocks of FP8, as new tensors, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK, quantize_into, scale_shape


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and scale of a weight, as `quantize_into` writes them."""
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    blocks = scale_shape(*weight.shape[-2:]) if weight.dim() > 1 else ()
    scale = torch.empty((*weight.shape[:-2], *blocks), device=weight.device)
    quantize_into(weight, q, scale)
    return q, scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the weights q * scale, multiplied in FP32 and rounded to `dtype`."""
    rows, columns = q.shape[-2:]
    factors = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return (q.float() * factors[..., :rows, :columns]).to(dtype)
