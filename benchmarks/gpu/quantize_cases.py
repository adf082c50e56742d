"""Weights on which implementations of blockwise FP8 could differ, and in how many bits they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK, quantize_into, scale_shape
from fp8plan.runtime.measure.kernels.sweep import Work

if TYPE_CHECKING:
    from torch import Tensor

CASES = "gaussian", "gaussian_fp32", "gaussian_fp16", "tiny", "heavy_tailed", "ragged", "zeros", "nan", "inf"
OURS = "exact", "eager", "compiled", "torch", "torch_cpu"  # Triton's roundings, then torch's operations
SEED, ROWS, COLUMNS = 0, 2048, 4096
RECOMPILED = 64  # times that torch.compile may, before it gives up and runs vLLM's function eagerly

Quantised = tuple["Tensor", "Tensor"]


@dataclass(frozen=True)
class Differences:
    """Numbers of q and scales whose bits differ from those of vLLM's function, compiled and eager; and of all."""

    q: int
    scales: int
    q_from_compiled: int
    scales_from_compiled: int
    q_from_eager: int
    scales_from_eager: int


def work(case: str, ours: str) -> Work:
    """The work of a sweep's point whose row is Differences."""
    return Work([], {"seed": SEED, "rows": ROWS, "columns": COLUMNS}, lambda _: differences(weight(case), ours))


def weight(case: str, device: str = "cuda") -> Tensor:
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


def differences(weight: Tensor, ours: str) -> Differences:
    """Between one of OURS and vLLM's function on the GPU."""
    q, scale = _quantised(weight, ours)
    counts = [q.numel(), scale.numel()]
    for mode in ("compiled", "eager"):
        other_q, other_scale = vllm_function(mode)(weight)
        counts += [different_bits(q, other_q), different_bits(scale, other_scale)]
    return Differences(*counts)


def different_bits(a: Tensor, b: Tensor) -> int:
    """Number of elements of two tensors of one shape and dtype that differ in any bit."""
    import torch

    integers = torch.int32 if a.itemsize == 4 else torch.uint8
    return int((a.view(integers) != b.to(a.device).view(integers)).sum())


def _quantised(weight: Tensor, ours: str) -> Quantised:
    import torch

    device = "cpu" if ours == "torch_cpu" else weight.device
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(scale_shape(*weight.shape), device=device)
    if ours.startswith("torch"):
        quantize_into(weight.to(device), q, scale)
        return q, scale
    from fp8plan.runtime.apply.quantize import triton_kernels as quantize_triton

    flags = torch.zeros(1, dtype=torch.int32, device=weight.device)
    outs = quantize_triton.addresses([q], [scale])
    quantize_triton.run(quantize_triton.quantize_calls([weight], outs, flags, ours), weight.device)
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
