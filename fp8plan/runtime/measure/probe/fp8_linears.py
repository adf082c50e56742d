"""The reference's linears in a trainer's FP8. They are those that the engine has in FP8, experts included.

    with fp8_linears(decoder, "fp8_block", ignored):
        ...                                      # a forward pass rounds weights and activations to E4M3

    precision        weights                        activations
    fp8_block        a scale for 128 x 128          a scale for 128 of a token: as vLLM's `fp8_per_block`
    fp8_block_pow2   the same, rounded up to powers of two (E8M0)
    fp8_tensor       a scale for the matrix         a scale for all tokens of the call

The weights stay in BF16, and each forward pass rounds them anew. So the model needs no more memory, and has its own
linears again afterwards. Each matrix is rounded on its own. vLLM rounds Q, K and V as one, and gate and up. The results
are the same if the parts have multiples of 128 rows.

Values are dequantised and multiplied in FP32, and the result is rounded once. An FP8 GEMM adds exact products in FP32,
too. Dequantised values in BF16 would be rounded a second time, by up to 1/256, and vLLM's are not.

With powers of two, a BF16 weight is rounded once. vLLM with E8M0 on Hopper rounds it twice: first with FP32 scales,
then with powers of two (requant_weight_ue8m0_inplace).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.precision import E4M3_MAX
from fp8plan.model.risk.remedies import POW2, TENSOR
from fp8plan.runtime.apply.quantize.block_fp8 import AMAX_FLOOR, BLOCK
from fp8plan.runtime.apply.quantize.targets import quantized

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

GROUP_FLOOR: Final = 1e-10  # of the largest activation of a group: eps of vLLM's per_token_group_quant_fp8


@contextmanager
def fp8_linears(decoder: Module, precision: str, ignored: Sequence[str]) -> Iterator[None]:
    """Let the linears of a decoder of transformers compute in a precision, until the end of the context.

    precision: one of TRAINER_PRECISIONS but bf16
    ignored:   patterns of modules that stay in BF16, as in vLLM's quantization_config

    Raises ConfigError for experts that are neither linears nor of transformers' ExpertsInterface.
    """
    forwards = dict(_forwards(decoder, precision, ignored))
    for module, forward in forwards.items():
        module.forward = forward  # on the object, where it hides the method of its class
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def _forwards(decoder: Module, precision: str, ignored: Sequence[str]) -> Iterator[tuple[Module, Callable[..., Any]]]:
    import torch

    patterns = [re.compile(pattern.removeprefix("re:")) for pattern in ignored]
    for name, module in decoder.named_modules(prefix="model"):
        if any(pattern.match(name) for pattern in patterns):
            continue
        if isinstance(module, torch.nn.Linear):
            yield module, partial(linear, weight=module.weight, bias=module.bias, precision=precision)
        elif hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", False):
            # transformers' ExpertsInterface gives this method to the experts of a layer
            yield module, partial(_experts, module, precision)
        elif any(parameter.dim() == 3 and "conv" not in name for parameter in module.parameters(recurse=False)):
            raise ConfigError(
                f"{name} ({type(module).__name__}) has experts of a form that this reference cannot round; allowed: "
                "trainer precision bf16, or experts of transformers' ExpertsInterface"
            )


def _experts(module: Any, precision: str, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts [tokens, width], as transformers' `grouped_mm` forms it.

    top_k_index, top_k_weights: [tokens, k]
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    outputs = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
    for expert in top_k_index.unique().tolist():
        rows, places = (top_k_index == expert).nonzero(as_tuple=True)
        inner = _expert_linear(module, first, expert, hidden_states[rows], precision)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outer = _expert_linear(module, "down_proj", expert, inner, precision)
        outputs[rows, places] = (outer * top_k_weights[rows, places, None]).to(outputs.dtype)
    return outputs.sum(1)


def _expert_linear(module: Any, name: str, expert: int, tokens: Tensor, precision: str) -> Tensor:
    import torch

    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if module.is_transposed:
        weight = weight.t().contiguous()
    parts = [weight]
    if name == "gate_up_proj" and module.is_concatenated:
        parts = list(weight.chunk(2))  # vLLM fills each half up to whole blocks
    output = torch.cat([linear(tokens, part, None, precision) for part in parts], -1)
    return output if bias is None else output + bias


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
