"""Mixers that look back at every token: softmax attention with grouped queries, and multi-head latent attention.

Mixers that keep a state of fixed size for each request: linear attention, state-space layers, short convolutions.

Sizes of the states: vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator and
MambaStateDtypeCalculator. The state of a convolution has the model's dtype. So has the recurrent state, unless the
family's config says otherwise (`state_element_bytes`). Convolutions are linears without the quantisation config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from fp8plan.model.architecture.linear import (
    Cache,
    Holder,
    Linear,
    Size,
    column,
    elements,
    fused,
    kv_heads_of_rank,
    row,
)
from fp8plan.model.precision import BF16_BYTES, FP32_BYTES

QkNorm: TypeAlias = Literal["none", "head", "width"]

INDEX_BLOCK: Final = 128  # elements of an indexer's key that share one FP32 scale (deepseek_v2.py, Indexer)


@dataclass(frozen=True, slots=True)
class Attention(Holder):
    """Softmax attention with grouped queries. window, chunk: tokens that a query may look back at; 0: all.

    vLLM runs one fused qkv_proj and one o_proj, both of which `fp8_per_block` quantises, in every family.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0  # 0: head_dim
    window: int = 0
    chunk: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = "none"  # a norm with weights over each head, or over all of them together
    gated: bool = False  # a gate of the output, as wide as it, is projected beside the queries
    sinks: bool = False  # a learned logit for each head
    softcap: bool = False  # logits are bounded by a tanh
    shares_kv: bool = False  # reads the KV of an earlier layer and has none of its own
    k_is_v: bool = False  # has no V projection: values are the keys (they are cached all the same)

    @property
    def value_dim(self) -> int:
        """Elements of a value of one head."""
        return self.v_head_dim or self.head_dim

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        heads = self.heads // tp
        outputs = row("o_proj", hidden, heads * self.value_dim)
        queries = heads * self.head_dim + (heads * self.value_dim if self.gated else 0)
        if (
            self.shares_kv
        ):  # vllm/model_executor/models/gemma4.py (0.30): q_proj alone; 0.26 has a qkv_proj all the same
            return self.held(column("q_proj", queries, hidden), outputs)
        # Where values are the keys, vLLM loads the keys' rows twice (gemma4.py): the matrix is as large as ever.
        kv_heads = kv_heads_of_rank(self.kv_heads, tp)
        matrix = fused("qkv_proj", (queries, kv_heads * self.head_dim, kv_heads * self.value_dim), hidden)
        return self.held(matrix, outputs)

    def vectors(self, hidden: int, tp: int = 1) -> int:
        bias = (self.linears(hidden, tp)[0].n if self.qkv_bias else 0) + (hidden if self.o_bias else 0)
        return bias + self._norm_elements() + (self.heads // tp if self.sinks else 0)

    def parameters(self, hidden: int) -> int:
        copied = self.kv_heads * self.value_dim * (hidden + self.qkv_bias) if self.k_is_v else 0
        return elements(self.linears(hidden)) + self.vectors(hidden) - copied

    def cuts(self) -> tuple[Size, ...]:
        return Size("attention heads", self.heads), Size("KV heads", self.kv_heads, replicated=True)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        """Its cache on one rank: nothing where it reads another layer's."""
        if self.shares_kv:
            return ()
        per_token = kv_heads_of_rank(self.kv_heads, tp) * (self.head_dim + self.value_dim)
        if self.chunk:
            return (Cache("chunked", per_token, self.chunk),)
        return (Cache("sliding", per_token, self.window),) if self.window else (Cache("full", per_token),)

    def _norm_elements(self) -> int:
        """Elements of the norms of queries and keys. A norm over all heads is counted whole on every rank, as olmoe.py
        keeps it; minimax_m2.py and commandr.py cut it, which is a few kilobytes less."""
        key_heads = 0 if self.shares_kv else self.kv_heads
        if self.qk_norm == "head":
            return self.head_dim * (1 + min(1, key_heads))
        return self.head_dim * (self.heads + key_heads) if self.qk_norm == "width" else 0


@dataclass(frozen=True, slots=True)
class Indexer:
    """The part of sparse attention that picks tokens (DeepSeek-V3.2). Its keys have a cache of their own, in FP8
    whatever the KV dtype. Every rank has all of it (deepseek_v2.py, Indexer)."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class LatentAttention(Holder):
    """Multi-head latent attention (MLA): one latent per token in place of keys and values.

    vllm/model_executor/models/deepseek_v2.py, DeepseekV2MLAAttention. What makes the latents is not cut: every rank has
    all of it, and a cache of every token's whole latent. `fp8_per_block` quantises all of its linears but the indexer's
    wk_weights_proj, which is built without the quantisation config.
    """

    heads: int
    q_lora_rank: int  # 0: queries are projected at once
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    shares_index: bool = False  # attends to the tokens that an earlier layer's indexer picked

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        heads, latent = self.heads // tp, self.kv_lora_rank + self.qk_rope_head_dim
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank:
            first = (
                fused("fused_qkv_a_proj", (self.q_lora_rank, latent), hidden),
                column("q_b_proj", queries, self.q_lora_rank),
            )
        else:
            first = column("kv_a_proj_with_mqa", latent, hidden), column("q_proj", queries, hidden)
        kv_b = column("kv_b_proj", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        outputs = row("o_proj", hidden, heads * self.v_head_dim)
        return self.held(*first, kv_b, outputs, *self._index_linears(hidden))

    def dequantised_elements(self, tp: int = 1) -> int:
        """BF16 elements of one rank beside an FP8 kv_b_proj: decoding multiplies by its halves W_UK and W_UV in BF16,
        and vLLM keeps the FP8 matrix for prefill (layers/attention/mla_attention.py, process_weights_after_loading)."""
        return self.heads // tp * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank

    def vectors(self, hidden: int, tp: int = 1) -> int:
        index_norm = 2 * self.indexer.head_dim if self.indexer else 0  # a LayerNorm: weight and bias
        return self.q_lora_rank + self.kv_lora_rank + index_norm

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("attention heads", self.heads),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        """Its cache on one rank, whatever the number of ranks: the latent with its rotated part (576 elements in
        DeepSeek-V3). Sparse attention in FP8 packs a token into 656 bytes, scales included (fp8_ds_mla)."""
        index = self.indexer.head_dim + self.indexer.head_dim // INDEX_BLOCK * 4 if self.indexer else 0
        return (Cache("latent", self.kv_lora_rank + self.qk_rope_head_dim, index_bytes_per_token=index),)

    def _index_linears(self, hidden: int) -> tuple[Linear, ...]:
        if self.indexer is None:
            return ()
        keys = self.indexer.heads * self.indexer.head_dim
        return (
            column("wq_b", keys, self.q_lora_rank),
            column("wk_weights_proj", self.indexer.head_dim + self.indexer.heads, hidden, quantisable=False),
        )


def _state(conv_width: int, conv_kernel: int, recurrent_elements: int, element_bytes: int) -> tuple[Cache, ...]:
    conv = (conv_kernel - 1) * conv_width * BF16_BYTES
    return (Cache("state", state_bytes=conv + recurrent_elements * element_bytes),)


@dataclass(frozen=True, slots=True)
class DeltaNet(Holder):
    """Gated delta net (Qwen3-Next): layers/mamba/gdn/qwen_gdn_linear_attn.py. The state is
    [value heads, value size, key size]. vLLM passes the quantisation config to all three linears, the narrow one too.

    interleaved: the checkpoint holds q, k, v and z as one matrix in turns by head, and so b and a (Qwen3-Next)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_element_bytes: int = BF16_BYTES
    interleaved: bool = False

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        keys, values = self.key_heads * self.key_dim // tp, self.value_heads * self.value_dim // tp
        gates = self.value_heads // tp
        first = fused("in_proj_qkvz", (keys, keys, values, values), hidden), fused("in_proj_ba", (gates, gates), hidden)
        if self.interleaved:
            first = first[0]._replace(parts=()), first[1]._replace(parts=())
        return self.held(*first, row("out_proj", hidden, values))

    def vectors(self, hidden: int, tp: int = 1) -> int:
        gates = 2 * self.value_heads // tp  # A_log and dt_bias
        return self.conv_kernel * self.conv_width // tp + gates + self.value_dim

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return Size("key heads of linear attention", self.key_heads), Size(
            "value heads of linear attention", self.value_heads
        )

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        recurrent = self.value_heads // tp * self.value_dim * self.key_dim
        return _state(self.conv_width // tp, self.conv_kernel, recurrent, self.state_element_bytes)


@dataclass(frozen=True, slots=True)
class KimiDelta(Holder):
    """Kimi delta attention: layers/mamba/gdn/kimi_gdn_linear_attn.py. Its gates pass through `head_dim` channels, whose
    first halves every rank has. vLLM 0.30 fuses the first projections, 0.26 has q, k, v, f_a and b apart. The recurrent
    state is float32 (kda_state_dtype)."""

    heads: int
    head_dim: int
    conv_kernel: int

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        width = self.heads * self.head_dim // tp
        return self.held(
            fused("in_proj_qkvgfab", (width, width, width, self.heads // tp, self.head_dim), hidden),
            column("f_b_proj", width, self.head_dim),
            column("g_a_proj", self.head_dim, hidden),
            column("g_b_proj", width, self.head_dim),
            row("o_proj", hidden, width),
        )

    def vectors(self, hidden: int, tp: int = 1) -> int:
        width = self.heads * self.head_dim // tp
        return 3 * self.conv_kernel * width + width + self.heads // tp + self.head_dim  # conv, dt_bias, A_log, norm

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("heads of linear attention", self.heads),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        heads = self.heads // tp
        return _state(3 * heads * self.head_dim, self.conv_kernel, heads * self.head_dim**2, FP32_BYTES)


@dataclass(frozen=True, slots=True)
class Mamba2(Holder):
    """State-space layer of Mamba 2: layers/mamba/mamba_mixer2.py. Groups that ranks cannot share are copied to each."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_kernel: int
    bias: bool = False
    conv_bias: bool = True
    norm: bool = True  # a gated norm before out_proj
    state_element_bytes: int = BF16_BYTES

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        inner = self.heads * self.head_dim // tp
        groups = (self._conv_width(tp) - inner) // 2
        return self.held(
            fused("in_proj", (inner, inner, groups, groups, self.heads // tp), hidden),
            row("out_proj", hidden, inner),
        )

    def vectors(self, hidden: int, tp: int = 1) -> int:
        first, out = self.linears(hidden, tp)
        conv = self._conv_width(tp) * (self.conv_kernel + self.conv_bias)
        scalars = 3 * self.heads // tp  # A, D and dt_bias
        return conv + scalars + (out.k if self.norm else 0) + (first.n + hidden if self.bias else 0)

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        # With one group vLLM copies it; otherwise the norm works on whole groups (Mixer2RMSNormGated).
        groups = () if self.groups == 1 else (Size("state-space groups", self.groups),)
        return (Size("state-space heads", self.heads), *groups)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        recurrent = self.heads // tp * self.head_dim * self.state_size
        return _state(self._conv_width(tp), self.conv_kernel, recurrent, self.state_element_bytes)

    def _conv_width(self, tp: int) -> int:
        """Channels of one rank's convolution (extra_groups_for_head_shards)."""
        groups = self.groups if self.groups % tp == 0 else tp
        return (self.heads * self.head_dim + 2 * groups * self.state_size) // tp


@dataclass(frozen=True, slots=True)
class ShortConv(Holder):
    """Gated short convolution (LFM2): layers/mamba/short_conv.py."""

    width: int
    kernel: int
    bias: bool = False

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        width = self.width // tp
        return self.held(fused("in_proj", (width, width, width), hidden), row("out_proj", hidden, width))

    def vectors(self, hidden: int, tp: int = 1) -> int:
        width = self.width // tp
        return width * self.kernel + (4 * width + hidden if self.bias else 0)

    def parameters(self, hidden: int) -> int:
        return elements(self.linears(hidden)) + self.vectors(hidden)

    def cuts(self) -> tuple[Size, ...]:
        return (Size("channels of its short convolutions", self.width),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        return _state(self.width // tp, self.kernel, 0, BF16_BYTES)
