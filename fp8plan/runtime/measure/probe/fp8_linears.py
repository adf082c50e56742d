"""The reference's linears in a trainer's FP8. They are those that the engine has in FP8, experts included.

    with fp8_linears(decoder, "fp8_block", ignored):
        ...                                      # a forward pass rounds weights and activations

The weights stay in BF16, and each forward pass rounds them anew. So the model needs no more memory, and has its own
linears again afterwards. Each matrix is rounded on its own. vLLM rounds Q, K and V as one, and gate and up. The results
are the same if the parts have multiples of 128 rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.quantize.fake_quant import linear

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


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
            yield module, partial(_linear, module, precision)
        elif hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", False):
            # transformers' ExpertsInterface gives this method to the experts of a layer
            yield module, partial(_experts, module, precision)
        elif any(parameter.dim() == 3 and "conv" not in name for parameter in module.parameters(recurse=False)):
            raise ConfigError(
                f"{name} ({type(module).__name__}) has experts of a form that this reference cannot round; allowed: "
                "trainer precision bf16, or experts of transformers' ExpertsInterface"
            )


def _linear(module: Any, precision: str, tokens: Tensor) -> Tensor:
    return linear(tokens, module.weight, module.bias, precision)


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
