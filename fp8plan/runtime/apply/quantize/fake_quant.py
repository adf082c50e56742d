"""Fake quantisation: linears of a trainer that rounds weights and activations to E4M3.

    precision        weights                        activations
    fp8_block        a scale for 128 x 128          a scale for 128 of a token: as vLLM's `fp8_per_block`
    fp8_block_pow2   the same, rounded up to powers of two (E8M0)
    fp8_tensor       a scale for the matrix         a scale for all tokens of the call

Values are dequantised and multiplied in FP32, and the result is rounded once. An FP8 GEMM adds exact products in FP32,
too. Dequantised values in BF16 would be rounded a second time, by up to 1/256, and vLLM's are not.

With powers of two, a BF16 weight is rounded once. vLLM with E8M0 on Hopper rounds it twice: first with FP32 scales,
then with powers of two (requant_weight_ue8m0_inplace).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fp8plan.model.precision import E4M3_MAX
from fp8plan.model.risk.remedies import POW2, TENSOR
from fp8plan.runtime.apply.quantize.block_fp8 import AMAX_FLOOR, BLOCK
from fp8plan.runtime.apply.quantize.targets import quantized

if TYPE_CHECKING:
    from torch import Tensor

GROUP_FLOOR: Final = 1e-10  # of the largest activation of a group: eps of vLLM's per_token_group_quant_fp8


def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """Return tokens [..., K] times weight [N, K], in the tokens' dtype.

    precision: one of TRAINER_PRECISIONS but bf16
    """
    product = rounded_activations(tokens, precision) @ rounded_weight(weight, precision).t()
    if bias is not None:
        product += bias.float()
    return product.to(tokens.dtype)


def rounded_weight(weight: Tensor, precision: str) -> Tensor:
    """Return a weight [N, K] with the values that its E4M3 numbers and scales stand for, in FP32."""
    weight = weight.detach()
    if precision == TENSOR:
        return _rounded(weight.float(), weight.abs().amax().float().clamp(AMAX_FLOOR) / E4M3_MAX)
    ((q, scale),) = quantized([weight])  # the bits of vLLM's function on this device
    rows, columns = weight.shape
    scales = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return _rounded(weight.float(), rounded_up(scales)) if precision == POW2 else q.float() * scales


def rounded_activations(tokens: Tensor, precision: str) -> Tensor:
    """Return activations [..., K] with the values that their E4M3 numbers and scales stand for, in FP32."""
    import torch

    values = tokens.float()
    if precision == TENSOR:
        return _rounded(values, _scale(values.abs().amax()))
    width = values.shape[-1]
    groups = torch.nn.functional.pad(values, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = _scale(groups.abs().amax(-1, keepdim=True))
    if precision == POW2:
        scale = rounded_up(scale)
    return _rounded(groups, scale).flatten(-2)[..., :width]


def rounded_up(scale: Tensor) -> Tensor:
    """Return the least powers of two that are no smaller than the scales: E8M0, as vLLM's _ceil_to_ue8m0."""
    return scale.log2().ceil().exp2()


def _scale(largest: Tensor) -> Tensor:
    """Return the scale of activations. On a GPU, PyTorch divides by a tensor exactly, and by a number it does not."""
    return largest.clamp(GROUP_FLOOR) / largest.new_tensor(E4M3_MAX)


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    import torch

    return (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
