"""Readers of layers that differ from Llama's: hybrids, latent attention, LongCat and Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8plan.model.architecture.family import Family, Unknown, attention, dense, experts, head_size, layer, windowed
from fp8plan.model.architecture.parts import (
    Attention,
    DeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    Layer,
    LayerInput,
    Mamba2,
    ShortConv,
)
from fp8plan.model.configs.fields import Fields
from fp8plan.model.precision import BF16_BYTES, FP32_BYTES


def _state_bytes(config: Fields, name: str, default: str) -> int:
    """Bytes of one element of a recurrent state. name: the field of its dtype"""
    dtype = config.word(name, ("float32", "bfloat16", "auto")) or default
    return FP32_BYTES if dtype == "float32" else BF16_BYTES


# Latent attention


def latent(config: Fields, family: Family) -> LatentAttention:
    """DeepSeek's latent attention. In vLLM it has no biases, whatever attention_bias is (deepseek_v2.py)."""
    return LatentAttention(
        config.integer("num_attention_heads"),
        config.integer("q_lora_rank", 0, least=0),
        config.integer("kv_lora_rank"),
        head_size(config, "qk_nope_head_dim"),
        head_size(config, "qk_rope_head_dim"),
        head_size(config, "v_head_dim"),
    )


def indexed(config: Fields, family: Family) -> LatentAttention:
    """Latent attention to tokens that an indexer picks (DeepSeek-V3.2)."""
    indexer = Indexer(config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk"))
    return replace(latent(config, family), indexer=indexer)


def indexed_layer(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    """A layer of sparse attention. Some use an earlier layer's choice of tokens (GLM-5; deepseek_v2.py, _skip_topk)."""
    sparse_layer = layer(config, family, number, kind, sparse)
    mixer = sparse_layer.mixer
    step, offset = config.integer("index_topk_freq", 1, least=0), config.integer("index_skip_topk_offset", 2, least=0)
    total = config.integer("num_hidden_layers")
    kinds = {"full": "F", "shared": "S"}
    listed = config.words("indexer_types", total, tuple(kinds))
    if listed is None and isinstance(config.value("index_topk_pattern"), list):
        listed = config.words("index_topk_pattern", total, tuple(kinds))
    pattern = config.letters("index_topk_pattern", total, "FS") if listed is None else [kinds[x] for x in listed]
    shares = max(number - offset + 1, 0) % max(step, 1) != 0 if pattern is None else pattern[number] == "S"
    if shares and isinstance(mixer, LatentAttention):
        return replace(sparse_layer, mixer=replace(mixer, indexer=None, shares_index=True))
    return sparse_layer


def longcat_layer(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    """A layer of LongCat-Flash: attention and a dense MLP twice, and experts beside them.

    Some experts have no weights (zero_expert_num). Even routing picks them as often as the others.
    Source: vllm/model_executor/models/longcat_flash.py.
    """
    mixer, mlp, idle = latent(config, family), dense(config, family), config.integer("zero_expert_num", 0, least=0)
    routed = experts(config, family)
    share = routed.num_experts / (routed.num_experts + idle)
    per_token = max(1, round(routed.experts_per_token * share))
    return Layer(
        mixer,
        mlp,
        parallel=(mixer, mlp, replace(routed, experts_per_token=per_token, idle_experts=idle)),
        norms=4,
    )


# Linear attention


def delta_net(config: Fields, family: Family) -> DeltaNet:
    """Qwen's gated delta net. Its state has the model's dtype in Qwen3-Next, and mamba_ssm_dtype in Qwen3.5.

    Source: vllm/model_executor/models/config.py, Qwen3_5ForConditionalGenerationConfig.
    """
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    return DeltaNet(
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
        _state_bytes(config, "mamba_ssm_dtype", "auto"),
        interleaved=config.value("model_type") == "qwen3_next",
    )


def kimi_delta(config: Fields, family: Family) -> KimiDelta:
    """Kimi delta attention. Published configs have its sizes in linear_attn_config."""
    nested = _linear_config(config)
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    flat = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    return KimiDelta(*(nested.integer(a) if nested else config.integer(b) for a, b in zip(names, flat, strict=True)))


def kimi_kinds(config: Fields, layers: int) -> list[str]:
    """Full attention in the layers that linear_attn_config lists, counted from 1; else in 4, 8, ... from 0."""
    nested = _linear_config(config)
    full = nested.indices("full_attn_layers", layers, first=1) if nested else None
    if full is None:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]


def _linear_config(config: Fields) -> Fields | None:
    nested = config.inside("linear_attn_config")
    if nested and nested.flag("use_full_rank_gate"):
        raise Unknown("Kimi delta attention with a gate of full rank")
    return nested if nested and nested.config else None


# State-space layers and convolutions


def mamba2(config: Fields, family: Family) -> Mamba2:
    """Mamba 2 with the field names of Bamba, Granite 4 and Falcon-H1."""
    heads = config.integer("mamba_n_heads")
    inner = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * config.integer("hidden_size"))
    head_dim = inner // heads if config.value("mamba_d_head") in (None, "auto") else config.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise config.error("mamba_n_heads", heads, f"a number that times mamba_d_head gives {inner} channels")
    return Mamba2(
        heads,
        head_dim,
        _groups(config, "mamba_n_groups", heads),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        norm=config.flag("mamba_rms_norm", default=True),
    )


def nemotron_mamba(config: Fields, family: Family) -> Mamba2:
    """Mamba 2 of Nemotron-H. Its state is float32 unless the config says otherwise.

    Source: vllm/model_executor/models/config.py, NemotronHForCausalLMConfig.
    """
    heads = config.integer("mamba_num_heads")
    return Mamba2(
        heads,
        config.integer("mamba_head_dim"),
        _groups(config, "n_groups", heads),
        config.integer("ssm_state_size"),
        config.integer("conv_kernel"),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", default=True),
        state_element_bytes=_state_bytes(config, "mamba_ssm_cache_dtype", "float32"),
    )


def _groups(config: Fields, name: str, heads: int) -> int:
    groups = config.integer(name)
    if heads % groups:
        raise config.error(name, groups, f"a divisor of the {heads} state-space heads")
    return groups


def nemotron_kinds(config: Fields, layers: int) -> list[str]:
    """The kinds in Nemotron-H's pattern, one letter for each layer."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = config.letters("hybrid_override_pattern", layers, "".join(letters))
    if pattern is None:
        raise config.error("hybrid_override_pattern", None, f"{layers} of the letters {' '.join(letters)}")
    return [letters[letter] for letter in pattern]


def single_layer(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    if kind in ("mlp", "moe"):
        return Layer(None, experts(config, family) if kind == "moe" else dense(config, family), norms=1)
    return Layer(family.mixers[kind](config, family), None, norms=1)


def no_mixer(config: Fields, family: Family) -> None:
    """None, for a layer that is an MLP alone."""


def at_indices(name: str, other: str) -> Any:
    """Full attention in the layers that a field lists, and another kind in the rest."""

    def kinds(config: Fields, layers: int) -> list[str]:
        listed = config.indices(name, layers)
        full = range(layers) if listed is None and other == "conv" else listed or ()
        return ["full_attention" if i in full else other for i in range(layers)]

    return kinds


def beside_mamba(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    """A layer with attention and a state-space part on the same input (Falcon-H1)."""
    return replace(layer(config, family, number, kind, sparse), parallel=(mamba2(config, family),))


def granite_layer(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    """A layer of Granite 4, which has experts in all layers or in none."""
    return layer(config, family, number, kind, config.integer("num_experts", 0, least=0) > 0)


def short_conv(config: Fields, family: Family) -> ShortConv:
    """The gated short convolution of LFM2."""
    return ShortConv(config.integer("hidden_size"), config.integer("conv_L_cache"), config.flag("conv_bias"))


def lfm2_inner(config: Fields) -> int:
    """The MLP's width, which LFM2 derives from that in the config (vllm/model_executor/models/lfm2.py, Lfm2MLP)."""
    name = "intermediate_size" if config.value("block_ff_dim") is None else "block_ff_dim"
    inner = config.integer(name)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    multiple = config.integer("block_multiple_of")
    adjusted = int(config.number("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
    if not adjusted:
        raise config.error(name, inner, "a width of which block_ffn_dim_multiplier leaves at least 1")
    return -(-adjusted // multiple) * multiple


# Attention that differs from layer to layer


def llama4_kinds(config: Fields, layers: int) -> list[str]:
    """Chunked attention in layers with rotary positions, which no_rope_layers marks with 1 (despite its name)."""
    step = config.integer("no_rope_layer_interval", 4)
    rotary = None if config.value("no_rope_layers") == [] else config.marks("no_rope_layers", layers)
    rotary = [(i + 1) % step != 0 for i in range(layers)] if rotary is None else rotary
    return ["chunked_attention" if x else "full_attention" for x in rotary]


def llama4_sparse(config: Fields, layers: int) -> list[bool]:
    """Experts in the listed layers, or in every interleave_moe_layer_step-th."""
    listed, step = config.indices("moe_layers", layers), config.integer("interleave_moe_layer_step", 1)
    return [(i + 1) % step == 0 if listed is None else i in listed for i in range(layers)]


def ernie_sparse(config: Fields, layers: int) -> list[bool]:
    """Experts in every moe_layer_interval-th layer between two fields' layers; -1 means the model's last layer."""
    first, step = config.integer("moe_layer_start_index", least=0), config.integer("moe_layer_interval")
    last = config.integer("moe_layer_end_index", -1, least=-1, most=layers - 1)
    return [first <= i <= (last if last >= 0 else layers - 1) and (i + 1) % step == 0 for i in range(layers)]


def mimo_kinds(config: Fields, layers: int) -> list[str]:
    """A window in the layers that hybrid_layer_pattern marks with 1."""
    pattern = config.marks("hybrid_layer_pattern", layers)
    if pattern is None:
        pattern = [i > 0 and (i + 1) % 6 != 0 for i in range(layers)]
    return ["sliding_attention" if x else "full_attention" for x in pattern]


def mimo_window(config: Fields, family: Family) -> Attention:
    """MiMo's windowed attention, with twice the KV heads (transformers' default) and sinks."""
    kv_heads = config.integer("swa_num_key_value_heads", 2 * config.integer("num_key_value_heads"))
    mixer = replace(windowed(config, family), kv_heads=kv_heads, sinks=True)
    sizes = {"swa_num_attention_heads": mixer.heads, "swa_head_dim": mixer.head_dim, "swa_v_head_dim": mixer.value_dim}
    differ = any(config.integer(name, size) != size for name, size in sizes.items())
    if differ or not config.flag("add_swa_attention_sink_bias", default=True):
        raise Unknown("windowed attention of other heads than the full attention's")
    return mixer


def gemma4_layer(config: Fields, family: Family, number: int, kind: str, sparse: bool) -> Layer:
    """A layer of Gemma 4 (vllm/model_executor/models/gemma4.py).

    Full attention has heads of its own, and the last layers may share KV. Experts stand beside the dense MLP, and each
    layer may have its own embedding of a token.
    """
    total = config.integer("num_hidden_layers")
    shared = config.integer("num_kv_shared_layers", 0, least=0, most=total - 1)
    last = number >= total - shared
    if number == total - 1:
        kind = "full_attention"  # for any layer_types (transformers, Gemma4TextConfig)
    mixer = windowed(config, family) if kind == "sliding_attention" else attention(config, family)
    if kind == "full_attention":
        mixer = _gemma4_full(config, mixer, number)
    mixer = replace(mixer, shares_kv=last)
    mlp = dense(config, family)
    if last and config.flag("use_double_wide_mlp"):
        mlp = replace(mlp, inner=2 * mlp.inner)
    inputs = _layer_input(config, total, number)
    if not config.flag("enable_moe_block"):
        return Layer(mixer, mlp, parallel=inputs, norms=4 + len(inputs), scalars=1)
    return Layer(mixer, experts(config, family), parallel=(mlp, *inputs), norms=7 + len(inputs), scalars=1)


def _layer_input(config: Fields, layers: int, number: int) -> tuple[LayerInput, ...]:
    """The embedding of each token for one layer of Gemma 4 E2B and E4B; () in other models."""
    width = config.integer("hidden_size_per_layer_input", 0, least=0)
    if not width:
        return ()
    vocabulary = config.integer("vocab_size_per_layer_input", config.integer("vocab_size"))
    return (LayerInput(width, vocabulary, all_widths=0 if number else layers * width),)


def _gemma4_full(config: Fields, mixer: Attention, number: int) -> Attention:
    """Full attention with its own head size and KV heads, and perhaps the keys as values."""
    k_is_v = config.flag("attention_k_eq_v")
    by_layer = config.by_layer("per_layer_config", config.integer("num_hidden_layers"))
    if by_layer is not None:  # transformers 5: the fields that differ in a layer
        fields = by_layer.get(number, Fields({}, config.source))
        head_dim = head_size(fields, "head_dim", mixer.head_dim)
        kv_heads = fields.integer("num_key_value_heads", mixer.kv_heads)
    else:
        head_dim = head_size(config, "global_head_dim", 512)
        kv_heads = config.integer("num_global_key_value_heads", mixer.kv_heads) if k_is_v else mixer.kv_heads
    return replace(mixer, head_dim=head_dim, kv_heads=kv_heads, k_is_v=k_is_v)
