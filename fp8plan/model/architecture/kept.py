"""The linears that a user keeps in BF16 beside others in FP8: those of first and last layers, and attention outputs.

The attention outputs are the linears that vLLM names o_proj in most families: those of softmax attention, of latent
attention, and of Kimi's delta attention. The out_proj of other recurrent mixers is none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.held import with_parts
from fp8plan.model.architecture.parts import Experts, Layer, parts

# The value of `keep_bf16`: counts of first and last layers, and perhaps OUTPUTS. msgspec reads no closer type.
Kept: TypeAlias = tuple[int | str, ...]
OUTPUTS: Final = "o_proj"  # the attention outputs of all layers


def ends_of(kept: Kept) -> tuple[int, int]:
    """The counts of first and last layers."""
    return cast("tuple[int, int]", kept[:2])


def kept_numbers(kept: Kept, layers: int) -> tuple[int, ...]:
    """The numbers of the first and last layers that stay in BF16. Raises ConfigError if none of the layers is left."""
    first, last = ends_of(kept)
    if first + last >= layers:
        raise ConfigError(
            f"keep_bf16 is {kept}, and the model has {layers} layers; allowed: fewer in all, or bf16 for all of them"
        )
    return (*range(first), *range(layers - last, layers))


def kept_layers(layers: Sequence[Layer], kept: Kept, hidden: int) -> tuple[Layer, ...]:
    """The layers, of which the kept linears are not quantised.

    Raises ConfigError if none of the layers is left, and for attention outputs of layers without any.
    """
    numbers, outputs = kept_numbers(kept, len(layers)), frozenset(kept[2:])
    if outputs and not any(outputs & _names(part, hidden) for layer in layers for part in parts(layer)):
        raise ConfigError(f"keep_bf16 is {kept}, and the model has no {OUTPUTS}; leave {OUTPUTS} out")

    def whole(part: Any) -> Any:
        return replace(part, bf16=_names(part, hidden))

    def others(part: Any) -> Any:
        return replace(part, bf16=part.bf16 | (outputs & _names(part, hidden)))

    return tuple(with_parts(layer, whole if number in numbers else others) for number, layer in enumerate(layers))


def kept_words(kept: Kept) -> str:
    """The kept linears in a sentence; "" for none."""
    words = []
    ends = {end: count for end, count in zip(("first", "last"), ends_of(kept), strict=True) if count}
    if ends:
        several = max(ends.values()) > 1
        named = [f"{end} {count}" if several else end for end, count in ends.items()]
        words.append(f"the {' and '.join(named)} {'layers' if several else 'layer'}")
    if OUTPUTS in kept:
        words.append("attention outputs")
    return " and ".join(words)


def _names(part: Any, hidden: int) -> frozenset[str]:
    linears = part.linears(hidden)
    if isinstance(part, Experts):
        linears += part.expert_linears(hidden)
    return frozenset(linear.name for linear in linears)
