"""The linears that an FP8 checkpoint lists to stay in BF16 beside others.

Checkpoints name modules as vLLM does before it fuses them, and each method has its own way to match names. Here a name
also covers the modules below it, as in transformers and ModelOpt. vLLM refuses a fused linear if only some of its parts
are listed (`is_layer_skipped`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import cache
from typing import Any, Final, TypeVar

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention, Layer, Mixer, TokenPart, parts
from fp8plan.model.precision import Stored, Unplanned, refused

Kind = TypeVar("Kind", bound=Mixer | TokenPart)

# Patterns of the modules that hold an MLP's matrices, shared experts', and a recurrent mixer's.
_MLP: Final = r"(mlp|mlps\.\d+|feed_forward|mixer|shared_mlp)"  # LongCat has two MLPs in a layer
_SHARED: Final = r"(shared_experts?|shared_mlp)"
_RECURRENT: Final = r"(linear_attn|mamba|mixer|short_conv|conv)"

# A linear of the cost model -> the ends of vLLM's names for it, over all families. Other linears keep their name.
MODULES: Final[Mapping[str, str]] = {
    "qkv_proj": r"(qkv|q|k|v)_proj",
    "o_proj": r"(o_proj|self_attn\.(out_proj|dense))",  # LFM2, Phi
    "fused_qkv_a_proj": r"(fused_qkv_a_proj|q_a_proj|kv_a_proj_with_mqa)",
    "in_proj_qkvz": r"in_proj_(qkvz|qkv|z)",
    "in_proj_ba": r"in_proj_(ba|b|a)",
    "in_proj_qkvgfab": r"(in_proj_qkvgfab|[qkv]_proj|f_a_proj|b_proj)",
    "in_proj": rf"{_RECURRENT}\.in_proj",
    "out_proj": rf"{_RECURRENT}\.out_proj",
    # Granite, LFM2, Phi, StarCoder2
    "gate_up_proj": rf"{_MLP}\.(gate_up_proj|gate_proj|up_proj|input_linear|w13|w1|w3)",
    "up_proj": rf"{_MLP}\.(up_proj|fc1|c_fc)",
    "down_proj": rf"{_MLP}\.(down_proj|output_linear|w2|fc2|c_proj)",
    "shared_gate_up_proj": rf"{_SHARED}\.(gate_up_proj|gate_proj|up_proj|input_linear)",
    "shared_up_proj": rf"{_SHARED}\.up_proj",
    "shared_down_proj": rf"{_SHARED}\.(down_proj|output_linear)",
}

# Modules of a layer that hold these linears, and prefixes of a layer in the text model of a checkpoint.
_ATTENTION_BLOCKS: Final = ("self_attn", "self_attn.indexer", "attention", "attn", "mixer")
_RECURRENT_BLOCKS: Final = ("linear_attn", "mamba", "mixer", "short_conv", "conv", "self_attn")
_MLP_BLOCKS: Final = ("mlp", "feed_forward", "mixer", "block_sparse_moe", "shared_mlp", "mlps.0")
_ROOTS: Final = ("model.", "language_model.model.", "model.language_model.", "backbone.")
_EXPERTS: Final = ("experts", *(f"experts.0.{x}" for x in "gate_proj up_proj down_proj w1 w2 w3".split()))
_NUMBERED: Final = re.compile(r"(?:(.*)\.)?layers\.(\d+)(?:\.(.*))?")
_OTHER_TOWER: Final = re.compile(r"vision|visual|audio|image|mtp|encoder|tower", re.IGNORECASE)
# Names of modules that are never in FP8.
_NEVER: Final = re.compile(
    r"norm|embed|conv|rotary|bias|gate$|router|\bwg$|classifier|A_log|dt_|\bD$|sinks|scale|weights_proj"
)


def held_layers(layers: Sequence[Layer], stored: Stored, hidden: int, source: str) -> tuple[Layer, ...]:
    """The layers of an FP8 checkpoint, with the linears that its list leaves in BF16. Equal layers are one object.

    Raises ConfigError for a list with unknown modules or routed experts, and for experts that are not in blocks.
    """
    if stored.weights != "fp8_block" and any(isinstance(part, Experts) for layer in layers for part in parts(layer)):
        raise ConfigError(
            f"{source}: experts in {stored.label} are not planned: vLLM's kernel for them differs by GPU and version, "
            f"and none was timed; name a checkpoint in blocks of 128 x 128, or {stored.bf16_model}"
        )
    try:
        listed = _Listed(stored.in_bf16)
        held = [_held_layer(layer, number, listed, hidden) for number, layer in enumerate(layers)]
        listed.check(len(held))
    except Unplanned as error:
        raise refused(source, str(error), stored.twin, "whose config.json does not say so") from None
    distinct: dict[Layer, Layer] = {}
    return tuple(distinct.setdefault(layer, layer) for layer in held)


class _Listed:
    """A list of modules in BF16: names, patterns with *, or regular expressions after "re:"."""

    def __init__(self, names: Sequence[str]) -> None:
        self.numbered = defaultdict[int, set[str]](set)  # layer -> names below it
        self.anywhere: set[str] = set()
        self.patterns: list[re.Pattern[str]] = []
        self.known: set[str] = set()  # names of linears and of the modules above them
        for name in names:
            self._add(name)

    def _add(self, name: str) -> None:
        if name.startswith("re:"):
            try:
                self.patterns.append(re.compile(name.removeprefix("re:")))
            except re.error as error:
                raise Unplanned(f"{name} (no regular expression: {error})") from None
        elif "*" in name:
            self.patterns.append(re.compile(translate(name)))
        elif match := _NUMBERED.fullmatch(name):
            head, number, rest = match.groups()
            if not _OTHER_TOWER.search(head or ""):
                self.numbered[int(number)].add(re.sub(r"(experts|mlps)\.\d+", r"\1.0", rest or ""))
        else:
            self.anywhere.add(name)

    def has(self, number: int, name: str) -> bool:
        above, runs = _names_within(name)
        self.known |= above
        if not (self.numbered[number].isdisjoint(above) and self.anywhere.isdisjoint(runs)):
            return True
        full = (f"{root}layers.{number}.{name}" for root in _ROOTS)
        return any(pattern.match(x) for x in full for pattern in self.patterns)

    def check(self, layers: int) -> None:
        """Raise Unplanned if a listed module of one of the layers is not known."""
        for number, names in self.numbered.items():
            for name in names if number < layers else ():
                if name not in self.known and not _NEVER.search(name):
                    raise Unplanned(f"layers.{number}.{name}, a module that is not known, in BF16")


@cache
def _names_within(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a module and of those above it, with "", and all runs of words in its name."""
    words = name.split(".")
    above = frozenset(".".join(words[:i]) for i in range(len(words) + 1))
    runs = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return above, frozenset(runs)


def _held_layer(layer: Layer, number: int, listed: _Listed, hidden: int) -> Layer:
    def held(part: Kind) -> Kind:
        return replace(part, bf16=_in_bf16(part, number, listed, hidden), stored="fp8")

    return with_parts(layer, held)


def with_parts(layer: Layer, changed: Callable[[Any], Any]) -> Layer:
    return replace(
        layer,
        mixer=None if layer.mixer is None else changed(layer.mixer),
        mlp=None if layer.mlp is None else changed(layer.mlp),
        parallel=tuple(map(changed, layer.parallel)),
    )


def _in_bf16(part: Mixer | TokenPart, number: int, listed: _Listed, hidden: int) -> frozenset[str]:
    """The names of a part's linears that are listed."""
    blocks: tuple[str, ...] = _RECURRENT_BLOCKS
    if isinstance(part, TokenPart):
        blocks = _MLP_BLOCKS
    elif isinstance(part, Attention | LatentAttention):
        blocks = _ATTENTION_BLOCKS
    routed = (f"{block}.{name}" for block in blocks for name in _EXPERTS)
    if isinstance(part, Experts) and [name for name in routed if listed.has(number, name)]:
        raise Unplanned(f"routed experts of layer {number} in BF16")
    names = [linear.name for linear in part.linears(hidden) if linear.quantisable]
    return frozenset(name for name in names for full in _spellings(name, blocks) if listed.has(number, full))


@cache
def _spellings(linear: str, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a linear below its layer. blocks: names of the part that holds it"""
    ends = list(_spelt(MODULES.get(linear, linear)))
    whole = [end for end in ends if any(end.startswith(f"{block}.") for block in blocks)]
    return tuple(dict.fromkeys([*whole, *(f"{block}.{end}" for block in blocks for end in ends if end not in whole)]))


def _spelt(pattern: str) -> Iterator[str]:
    """All texts that match a pattern of MODULES, which has groups of alternatives, sets of letters, and ?."""
    if choice := re.search(r"\(([^()]*)\)|\[(\w+)\]|(\w)\?", pattern):
        group, letters, maybe = choice.groups()
        options = [maybe, ""]
        if group is not None:
            options = group.split("|")
        elif letters:
            options = list(letters)
        for option in options:
            yield from _spelt(pattern[: choice.start()] + option + pattern[choice.end() :])
    elif "|" in pattern:
        for option in pattern.split("|"):
            yield from _spelt(option)
    else:
        yield pattern.replace("\\.", ".").replace("\\d+", "0")
