"""Mixers that look back at every token: softmax attention with grouped queries, and multi-head latent attention."""

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
