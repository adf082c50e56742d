"""The columns of a row of `families`, and readers that turn a config's fields into parts by such a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, TypeAlias

from fp8plan.model.architecture.parts import Attention, Experts, Layer, Mixer, Mlp, QkNorm
from fp8plan.model.configs.fields import Fields, worded


class Unknown(ValueError):
    """A part of a model that is not known; the message names it."""


Readers: TypeAlias = Mapping[str, "Callable[[Fields, Family], Mixer | None]"]  # kind of a layer -> reader of its mixer
MOST_LAYERS: Final = 10_000  # a hundred times the deepest model; a typo must not fill memory or take minutes
MOST_EXPERTS: Final = 100_000  # likewise
MOST_HEAD: Final = 512  # elements of the largest head that FlashAttention 4 and FlashInfer support
TRITON_HEAD: Final = 32  # elements of the smallest head that Triton's attention supports
Switch: TypeAlias = bool | str  # a value, or the name of the config's field that has it


@dataclass(frozen=True, slots=True)
class Moe:
    """The fields that describe the experts of a family.

    inner:         field of one expert's width
    shared:        field of the width of all shared experts together; "" if there is none
    shared_count:  the config gives the number of shared experts, each as wide as a routed one
    shared_stream: as in Experts
    sparse:        True for each layer that has experts
    """

    inner: str = "moe_intermediate_size"
    shared: str = ""
    shared_count: bool = False
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    shared_bias: Switch = False
    shared_stream: bool = True
    router_bias: Switch = False
    router_scales: bool = False
    sparse: Callable[[Fields, int], Sequence[bool]] = lambda _, layers: [True] * layers


@dataclass(frozen=True, slots=True)
class Family:
    """Rules by which configs of one model_type become layers. The defaults are those of Llama.

    kinds:        kind of each layer if layer_types does not list them
    mixers:       kind -> reader of the mixer
    layer:        reader of a layer, by its number, its kind, and True if it has experts
    by_number:    `layer` depends on the number
    gated:        the dense MLP has a gate
    norms, norm_vectors: as in Layer
    tied:         embeddings are tied if the config does not say
    defaults:     values of fields that published configs leave to the family's config class
    own:          fields for parts that this family has and most do not
    missing:      field -> the unknown part that a true value means, by name
    published:    field -> its value in all published configs, if vLLM needs it and the config class has no default
    """

    kinds: Callable[[Fields, int], Sequence[str]] = lambda _, layers: ["full_attention"] * layers
    mixers: Readers = field(default_factory=lambda: ATTENTIONS)
    layer: Callable[[Fields, Family, int, str, bool], Layer] = lambda *arguments: layer(*arguments)
    by_number: bool = False
    qkv_bias: Switch = "attention_bias"
    o_bias: Switch = "attention_bias"
    qk_norm: QkNorm | tuple[str, QkNorm] = "none"  # or a field, and the norm that a true value means
    sinks: bool = False
    gated_attention: Switch = False
    gated: bool = True
    mlp_bias: Switch = False
    inner: str | Callable[[Fields], int] = "intermediate_size"
    norms: int = 2
    norm_vectors: int = 1
    moe: Moe | None = None
    lm_head_bias: Switch = False
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)


def says(config: Fields, switch: Switch) -> bool:
    """True if a switch is on in this config."""
    return config.flag(switch) if isinstance(switch, str) else switch


# Kinds of layers without layer_types


def has_window(config: Fields) -> bool:
    """True if the config has a window; 0 is none, as in vLLM (ModelConfig)."""
    return config.integer("sliding_window", 0, least=0) > 0


def everywhere(config: Fields, layers: int) -> list[str]:
    """A window in every layer, if the config has one."""
    return ["sliding_attention" if has_window(config) else "full_attention"] * layers


def later(config: Fields, layers: int) -> list[str]:
    """A window from layer max_window_layers on, if the config has one and use_sliding_window is not false."""
    if not (config.flag("use_sliding_window", default=True) and has_window(config)):
        return ["full_attention"] * layers
    first = config.integer("max_window_layers", least=0)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


def every(default: int, *names: str, other: str = "sliding_attention") -> Callable[[Fields, int], list[str]]:
    """Full attention in every n-th layer, and `other` in the rest. names: fields that may hold n"""

    def kinds(config: Fields, layers: int) -> list[str]:
        if other == "sliding_attention" and not has_window(config):
            return ["full_attention"] * layers
        name = next((name for name in names if config.value(name) is not None), names[0])
        pattern = config.value(name)
        if isinstance(pattern, str) and not re.fullmatch("L*G", pattern):
            raise config.error(name, pattern, "a whole number of at least 1, or a pattern such as LLLG")
        step = len(pattern) if isinstance(pattern, str) else config.integer(name, default)  # EXAONE writes LLLG for 4
        return ["full_attention" if (i + 1) % step == 0 else other for i in range(layers)]

    return kinds


# Layers with experts


def by_step(config: Fields, layers: int) -> list[bool]:
    """Every decoder_sparse_step-th layer except mlp_only_layers (Qwen)."""
    step, dense = config.integer("decoder_sparse_step", 1), config.indices("mlp_only_layers", layers) or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def after_dense(config: Fields, layers: int) -> list[bool]:
    """The layers that mlp_layer_types calls sparse, or all after the dense ones at the start (DeepSeek)."""
    if (listed := config.words("mlp_layer_types", layers, ("dense", "sparse"))) is not None:
        return [kind == "sparse" for kind in listed]
    if isinstance(config.value("moe_layer_freq"), list):
        return config.marks("moe_layer_freq", layers) or []
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", config.value("moe_layer_freq"), "1, or a list of 0 and 1")
    name = "num_dense_layers" if config.value("num_dense_layers") is not None else "first_k_dense_replace"
    return [i >= config.integer(name, 0, least=0) for i in range(layers)]


# Parts


def head_size(config: Fields, name: str, default: int | None = None) -> int:
    """The elements of a head: a multiple of 8 for FlashAttention, or an even number from 32 on for Triton.

    Source: supports_head_size in vllm/v1/attention/backends. Rotary positions turn pairs of elements.
    """
    size = config.integer(name, default, most=MOST_HEAD)
    if size % 8 and (size < TRITON_HEAD or size % 2):
        allowed = f"a multiple of 8, or an even number of at least {TRITON_HEAD}, as vLLM's attention takes no other"
        derived = " (it is absent, and follows from others)" if config.value(name) is None else ""
        raise config.error(name, size, allowed + derived)
    return size


def attention(config: Fields, family: Family) -> Attention:
    """Attention over all tokens."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    if config.value("head_dim") is None and hidden % heads:
        raise config.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), as head_dim is absent")
    head_dim = head_size(config, "head_dim", hidden // heads)
    norm = family.qk_norm
    if isinstance(norm, tuple):
        norm = norm[1] if config.flag(norm[0]) else "none"
    value_dim = head_size(config, "v_head_dim", head_dim)
    return Attention(
        heads,
        kv_heads,
        head_dim,
        v_head_dim=0 if value_dim == head_dim else value_dim,
        qkv_bias=says(config, family.qkv_bias),
        o_bias=says(config, family.o_bias),
        qk_norm=norm,
        gated=says(config, family.gated_attention),
        sinks=family.sinks,
    )


def windowed(config: Fields, family: Family) -> Attention:
    """Attention over the last `sliding_window` tokens."""
    return replace(attention(config, family), window=config.integer("sliding_window"))


def chunked(config: Fields, family: Family) -> Attention:
    """Attention inside chunks of `attention_chunk_size` tokens."""
    return replace(attention(config, family), chunk=config.integer("attention_chunk_size"))


ATTENTIONS: Readers = {
    "full_attention": attention,
    "sliding_attention": windowed,
}


def dense(config: Fields, family: Family) -> Mlp:
    inner = config.integer(family.inner) if isinstance(family.inner, str) else family.inner(config)
    activation = 4 if config.word("hidden_act") == "xielu" else 0
    return Mlp(inner, gated=family.gated, bias=says(config, family.mlp_bias), activation_elements=activation)


def experts(config: Fields, family: Family) -> Experts:
    moe = family.moe
    if moe is None:
        raise ValueError("a family without experts")
    number, each = config.integer("num_experts", most=MOST_EXPERTS), config.integer("num_experts_per_tok")
    inner = config.integer(moe.inner)
    if each > number:
        raise config.error("num_experts_per_tok", each, f"at most the number of experts ({number})")
    shared = config.integer(moe.shared, 0, least=0) if moe.shared else 0
    if moe.shared_count:
        shared = inner * config.integer("num_shared_experts", 0, least=0)
    return Experts(
        number,
        each,
        inner,
        shared_intermediate_size=shared,
        shared_gate=moe.shared_gate and shared > 0,
        gated=moe.gated,
        bias=moe.bias,
        shared_bias=says(config, moe.shared_bias),
        shared_stream=moe.shared_stream,
        router_bias=says(config, moe.router_bias),
        router_scales=moe.router_scales,
    )


def layer(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    """A layer of one mixer and one MLP."""
    mixer = family.mixers[kind](config, family)
    mlp = experts(config, family) if sparse else dense(config, family)
    return Layer(mixer, mlp, norms=family.norms, norm_vectors=family.norm_vectors)


def layers(config: Fields, family: Family) -> tuple[Layer, ...]:
    """All layers of a model, in order. Equal layers are one object."""
    blocks = config.value("layers_block_type")
    listed = len(blocks) if isinstance(blocks, list) else None
    number = config.integer("num_hidden_layers", listed, most=MOST_LAYERS)
    kinds = config.words("layer_types", number) or config.words("layers_block_type", number)
    kinds = list(family.kinds(config, number)) if kinds is None else kinds
    if unknown := sorted({kind for kind in kinds if kind not in family.mixers})[:8]:
        raise Unknown(" and ".join(f"{worded(kind)} layers" for kind in unknown))
    sparse = family.moe.sparse(config, number) if family.moe else [False] * number

    @cache
    def read(at: int, kind: str, has_experts: bool) -> Layer:
        return family.layer(config, family, at, kind, has_experts)

    places = range(number) if family.by_number else [0] * number
    distinct: dict[Layer, Layer] = {}
    every_layer = (read(at, kind, bool(has)) for at, kind, has in zip(places, kinds, sparse, strict=True))
    return tuple(distinct.setdefault(each, each) for each in every_layer)
