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
from fp8plan.model.architecture.parts import Experts, Layer

# The value of `keep_bf16`: counts of first and last layers, and perhaps OUTPUTS. msgspec knows no closer type.
Kept: TypeAlias = tuple[int | str, ...]
OUTPUTS: Final = "o_proj"  # the attention outputs of all layers
_ALLOWED: Final = "allowed: counts of first and last layers, and perhaps o_proj"


def typed_kept(typed: str) -> Kept:
    """The value of keep_bf16 for "FIRST,LAST" or "FIRST,LAST,o_proj". Raises ConfigError for other text."""
    counts, names = typed.split(",")[:2], typed.split(",")[2:]
    try:
        return checked_kept((*map(int, counts), *names))
    except ValueError:
        raise ConfigError(f"--keep-bf16 is {typed!r}; {_ALLOWED}: 1,1 or 1,1,o_proj") from None


def checked_kept(kept: Sequence[Any]) -> Kept:
    """The value of keep_bf16 as a tuple. Raises ConfigError unless it is two counts, or these and OUTPUTS."""
    if isinstance(kept, Sequence) and len(kept) in (2, 3):
        counts, names = kept[:2], kept[2:]
        if all(type(n) is int and n >= 0 for n in counts) and all(name == OUTPUTS for name in names):
            return tuple(kept)
    raise ConfigError(f'keep_bf16 is {kept!r}; {_ALLOWED}: (1, 1) or (1, 1, "o_proj"), typed 1,1 or 1,1,o_proj')


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
    """The layers, of which the kept linears are not quantised."""
    first, last = ends_of(kept)

    def whole(part: Any) -> Any:
        return replace(part, bf16=_names(part, hidden))

    def without_outputs(part: Any) -> Any:
        return replace(part, bf16=part.bf16 | _names(part, hidden) & {OUTPUTS})

    answer = []
    for number, layer in enumerate(layers):
        if number < first or number >= len(layers) - last:
            answer.append(with_parts(layer, whole))
        elif OUTPUTS in kept:
            answer.append(with_parts(layer, without_outputs))
        else:
            answer.append(layer)
    return tuple(answer)


def _names(part: Any, hidden: int) -> frozenset[str]:
    """The names of a part's linears."""
    linears = part.linears(hidden)
    if isinstance(part, Experts):
        linears += part.expert_linears(hidden)
    return frozenset(linear.name for linear in linears)
