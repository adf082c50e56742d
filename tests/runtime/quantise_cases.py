"""Weights on which implementations of blockwise FP8 could differ, and vLLM's own function."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK, scale_shape

if TYPE_CHECKING:
    from torch import Tensor

CASES = "gaussian", "gaussian_fp32", "gaussian_fp16", "tiny", "heavy_tailed", "ragged", "zeros", "nan", "inf"
SEED, ROWS, COLUMNS = 0, 2048, 4096
RECOMPILED = 64  # times that torch.compile may, before it gives up and runs vLLM's function eagerly

Quantised = tuple["Tensor", "Tensor"]


def case_weight(case: str, device: str = "cuda") -> Tensor:
    """[ROWS, COLUMNS] or a part of it, BF16 unless the case says otherwise; the same in every call."""
    import torch

    torch.manual_seed(SEED)
    normal = torch.randn(ROWS, COLUMNS, device=device).mul_(0.02)
    if case == "gaussian_fp32":
        return normal
    if case == "gaussian_fp16":
        return normal.half()
    if case == "tiny":  # from far below the least amax to far above
        blocks = 10.0 ** torch.empty(scale_shape(ROWS, COLUMNS), device=device).uniform_(-8, 1)
        normal *= blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    if case == "heavy_tailed":
        normal.cauchy_()
    if case == "ragged":
        normal = normal[: ROWS - 28, : COLUMNS - 60].contiguous()
    if case == "zeros":
        normal.zero_()
    if case in ("nan", "inf"):
        normal[:: 2 * BLOCK, :: 3 * BLOCK] = float(case)
        normal[1 :: 2 * BLOCK, :: 2 * BLOCK] = -float(case)
    return normal.bfloat16()


def by_triton(weight: Tensor, rounding: str) -> Quantised:
    """The weight as Triton's kernel quantises it, with the roundings "compiled" or "eager"."""
    import torch

    from fp8plan.runtime.apply.quantize import triton_kernels

    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(scale_shape(*weight.shape), device=weight.device)
    flags = torch.zeros(1, dtype=torch.int32, device=weight.device)
    calls = triton_kernels.quantize_calls([weight], triton_kernels.addresses([q], [scale]), flags, rounding)
    triton_kernels.run(calls, weight.device)
    return q, scale


@cache
def vllm_function(mode: str) -> Callable[[Tensor], Quantised]:
    """per_block_cast_to_fp8 as vLLM's online quantisation calls it: "compiled", or "eager" without torch.compile."""
    import torch
    from torch import _dynamo
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    _dynamo.config.recompile_limit = RECOMPILED
    function = partial(per_block_cast_to_fp8, block_size=[BLOCK, BLOCK], use_ue8m0=False)
    if mode == "compiled":
        return function

    def eager(weight: Tensor) -> Quantised:
        with torch.compiler.set_stance("force_eager"):
            return function(weight)

    return eager
