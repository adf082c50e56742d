"""Mixers, and the contents of every part of a layer: weight matrices as vLLM cuts them, and caches.

Mixers look back at every token (softmax attention, latent attention), or keep a state of fixed size for each request
(linear attention, state-space layers, short convolutions).
Source of the states' sizes: vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator and
MambaStateDtypeCalculator. The state of a convolution has the model's dtype, and so has the recurrent state unless
the family's config says otherwise (`state_element_bytes`). Convolutions are linears without the quantisation config.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from fp8plan.model.precision import BF16_BYTES, FP8_BLOCK, FP32_BYTES

CacheKind: TypeAlias = Literal["full", "sliding", "chunked", "latent", "state"]
QkNorm: TypeAlias = Literal["none", "head", "width"]

INPUT_BLOCK: Final = FP8_BLOCK.weight_block[1]  # inputs that share a scale; vLLM needs whole blocks of them on a rank
# Elements of an indexer's key that share one FP32 scale (deepseek_v2.py, Indexer and DeepseekV32IndexerCache).
INDEX_BLOCK: Final = 128


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight matrix as vLLM runs it on one tensor-parallel rank: y[m, n] = x[m, k] @ W[n, k]^T."""

    name: str
    n: int
    k: int
    layers: int  # number of layers that have it; 1 in a part's own list
    quantisable: bool  # vLLM gives it the quantisation config
    all_reduce: bool  # row-parallel: followed by an all-reduce of [m, n] when tensor_parallel_size > 1
    parts: tuple[int, ...] = ()  # outputs of each matrix that is fused into it, in order; () for a single matrix
    padded: bool = False  # vLLM pads it to whole blocks, as it does experts
    stored: Literal["", "bf16", "fp8"] = ""  # in an FP8 checkpoint, or "bf16" if kept; "": vLLM quantises it

    elements: int = field(init=False, repr=False, compare=False)  # of one layer's matrix
    intended: bool = field(init=False, repr=False, compare=False)  # for FP8, if its inputs on a rank allow it
    quantised: bool = field(init=False, repr=False, compare=False)  # in FP8 on this rank when weights are FP8

    def __post_init__(self) -> None:
        intended = self.quantisable and self.stored != "bf16"
        fits = self.stored == "fp8" or self.padded or self.k % INPUT_BLOCK == 0
        object.__setattr__(self, "elements", self.n * self.k)
        object.__setattr__(self, "intended", intended)
        object.__setattr__(self, "quantised", intended and fits)

    @property
    def left_in_bf16(self) -> bool:
        """True if its inputs on this rank, or the list in an FP8 checkpoint, keep it in BF16."""
        return self.quantisable and not self.quantised


class Cache(NamedTuple):
    """The cache of one layer on one rank.

    full, latent: K and V (or the latent) of every token
    sliding:      the same of the last `window` tokens
    chunked:      the same of the current chunk of `window` tokens
    state:        a state of fixed size for each request
    """

    kind: CacheKind
    elements_per_token: int = 0  # of the KV dtype
    window: int = 0  # tokens
    state_bytes: int = 0  # of one request
    index_bytes_per_token: int = 0  # keys of a token indexer, in a format of their own


class Size(NamedTuple):
    """A size that tensor parallelism has to cut into equal parts."""

    what: str  # its name in an error, after "it has"
    size: int
    replicated: bool = False  # if there are more ranks than this, each keeps a copy


@dataclass(frozen=True, slots=True)
class Part(ABC):
    """A mixer, an MLP or experts. hidden: the model's width. tp: tensor-parallel ranks.

    bf16:   names of the linears that stay in BF16: those that an FP8 checkpoint lists, or that the user keeps
    stored: of the others, as in Linear
    """

    bf16: frozenset[str] = field(default=frozenset(), kw_only=True)
    stored: Literal["", "fp8"] = field(default="", kw_only=True)

    @abstractmethod
    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        """The matrices of one rank, as vLLM fuses and cuts them, without those of routed experts."""

    @abstractmethod
    def vectors(self, hidden: int, tp: int = 1) -> int:
        """BF16 elements on one rank outside of the linears: norms, biases, convolutions, gates."""

    def parameters(self, hidden: int) -> int:
        """Elements that a checkpoint holds."""
        return sum(linear.elements for linear in self.linears(hidden)) + self.vectors(hidden)

    @abstractmethod
    def cuts(self) -> tuple[Size, ...]:
        """The sizes that tensor parallelism must divide."""

    def held(self, *linears: Linear) -> tuple[Linear, ...]:
        """The linears as the checkpoint holds them, or the user keeps them."""
        if not self.bf16 and not self.stored:
            return linears
        return tuple(replace(x, stored="bf16" if x.name in self.bf16 else self.stored) for x in linears)


def column(name: str, n: int, k: int, *, quantisable: bool = True) -> Linear:
    """A matrix without an all-reduce: cut by rows, or a copy on every rank."""
    return Linear(name, n, k, 1, quantisable, False)


def fused(name: str, parts: tuple[int, ...], k: int) -> Linear:
    """Matrices with the same input that vLLM fuses, cut by rows. parts: outputs of each on one rank"""
    return replace(column(name, sum(parts), k), parts=parts)


def row(name: str, n: int, k: int) -> Linear:
    """A matrix whose inputs are cut, so the outputs of the ranks are added up."""
    return Linear(name, n, k, 1, True, True)


def kv_heads_of_rank(kv_heads: int, tp: int) -> int:
    """KV heads on one rank. vLLM copies them if there are more ranks than heads (QKVParallelLinear)."""
    return max(1, kv_heads // tp)


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Softmax attention with grouped queries. window, chunk: tokens that a query may look back at; 0: all.

    In every family vLLM runs one fused qkv_proj and one o_proj, and `fp8_per_block` quantises both.
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
    gated: bool = False  # a gate as wide as the output is projected beside the queries
    sinks: bool = False  # a learned logit for each head
    shares_kv: bool = False  # reads the KV of an earlier layer and has none of its own
    k_is_v: bool = False  # no V projection: the values are the keys, and are cached too

    @property
    def value_dim(self) -> int:
        """Elements of a value of one head."""
        return self.v_head_dim or self.head_dim

    def heads_of_rank(self, tp: int) -> tuple[int, int]:
        return self.heads // tp, kv_heads_of_rank(self.kv_heads, tp)

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        heads = self.heads // tp
        outputs = row("o_proj", hidden, heads * self.value_dim)
        queries = heads * self.head_dim + (heads * self.value_dim if self.gated else 0)
        if self.shares_kv:  # models/gemma4.py: q_proj alone
            return self.held(column("q_proj", queries, hidden), outputs)
        # With k_is_v vLLM loads the rows of the keys twice (gemma4.py), so the matrix keeps its size.
        kv_heads = kv_heads_of_rank(self.kv_heads, tp)
        matrix = fused("qkv_proj", (queries, kv_heads * self.head_dim, kv_heads * self.value_dim), hidden)
        return self.held(matrix, outputs)

    def vectors(self, hidden: int, tp: int = 1) -> int:
        bias = (self.linears(hidden, tp)[0].n if self.qkv_bias else 0) + (hidden if self.o_bias else 0)
        return bias + self._norm_elements() + (self.heads // tp if self.sinks else 0)

    def parameters(self, hidden: int) -> int:
        copied = self.kv_heads * self.value_dim * (hidden + self.qkv_bias) if self.k_is_v else 0
        return super(Attention, self).parameters(hidden) - copied

    def cuts(self) -> tuple[Size, ...]:
        return Size("attention heads", self.heads), Size("KV heads", self.kv_heads, replicated=True)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        """Its caches on one rank; () if it reads another layer's."""
        if self.shares_kv:
            return ()
        per_token = kv_heads_of_rank(self.kv_heads, tp) * (self.head_dim + self.value_dim)
        if self.chunk:
            return (Cache("chunked", per_token, self.chunk),)
        return (Cache("sliding", per_token, self.window),) if self.window else (Cache("full", per_token),)

    def _norm_elements(self) -> int:
        """Elements of the norms of queries and keys.

        A norm over all heads counts whole on every rank, as in olmoe.py. minimax_m2.py and commandr.py cut it: a few
        kilobytes less.
        """
        key_heads = 0 if self.shares_kv else self.kv_heads
        if self.qk_norm == "head":
            return self.head_dim * (1 + min(1, key_heads))
        return self.head_dim * (self.heads + key_heads) if self.qk_norm == "width" else 0


@dataclass(frozen=True, slots=True)
class Indexer:
    """The part of sparse attention that picks tokens (DeepSeek-V3.2).

    Its keys have their own cache, in FP8 for any KV dtype. Every rank has all of it (deepseek_v2.py, Indexer).
    """

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class LatentAttention(Part):
    """Multi-head latent attention (MLA): one latent per token in place of keys and values.

    vllm/model_executor/models/deepseek_v2.py, DeepseekV2MLAAttention. Every rank has the whole projections to
    latents, and a cache of every token's whole latent. `fp8_per_block` quantises all linears except the
    indexer's wk_weights_proj, which is built without the quantisation config.
    """

    heads: int
    q_lora_rank: int  # 0: queries are projected at once
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None
    shares_index: bool = False  # attends to the tokens picked by an earlier layer's indexer

    @property
    def sparse(self) -> bool:
        """True if an indexer picks the tokens that it attends to."""
        return self.indexer is not None or self.shares_index

    @property
    def latent_width(self) -> int:
        """Elements of one token's latent, and of one head's query in decode."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        """Elements of one head's query in prefill."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        heads, latent = self.heads // tp, self.latent_width
        queries = heads * self.query_width
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
        """BF16 elements of one rank beside an FP8 kv_b_proj.

        Decoding multiplies by its halves W_UK and W_UV in BF16, and vLLM keeps the FP8 matrix for prefill
        (layers/attention/mla_attention.py, process_weights_after_loading).
        """
        return self.heads // tp * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank

    def vectors(self, hidden: int, tp: int = 1) -> int:
        index_norm = 2 * self.indexer.head_dim if self.indexer else 0  # a LayerNorm: weight and bias
        return self.q_lora_rank + self.kv_lora_rank + index_norm

    def cuts(self) -> tuple[Size, ...]:
        return (Size("attention heads", self.heads),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        """The latent with its rotated part (576 elements in DeepSeek-V3), the same on every rank.

        Sparse attention in FP8 packs a token into 656 bytes with its scales (fp8_ds_mla).
        """
        index = self.indexer.head_dim + self.indexer.head_dim // INDEX_BLOCK * 4 if self.indexer else 0
        return (Cache("latent", self.latent_width, index_bytes_per_token=index),)

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
class DeltaNet(Part):
    """Gated delta net (Qwen3-Next): layers/mamba/gdn/qwen_gdn_linear_attn.py.

    The state is [value heads, value size, key size]. vLLM passes the quantisation config to all three linears.

    interleaved: the checkpoint interleaves q, k, v and z by head in one matrix, and b and a in another (Qwen3-Next)
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
            first = replace(first[0], parts=()), replace(first[1], parts=())
        return self.held(*first, row("out_proj", hidden, values))

    def vectors(self, hidden: int, tp: int = 1) -> int:
        gates = 2 * self.value_heads // tp  # A_log and dt_bias
        return self.conv_kernel * self.conv_width // tp + gates + self.value_dim

    def cuts(self) -> tuple[Size, ...]:
        keys, values = ("key heads", self.key_heads), ("value heads", self.value_heads)
        return tuple(Size(f"{heads} of linear attention", number) for heads, number in (keys, values))

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        recurrent = self.value_heads // tp * self.value_dim * self.key_dim
        return _state(self.conv_width // tp, self.conv_kernel, recurrent, self.state_element_bytes)


@dataclass(frozen=True, slots=True)
class KimiDelta(Part):
    """Kimi delta attention: layers/mamba/gdn/kimi_gdn_linear_attn.py.

    Each gate has two matrices with `head_dim` channels between. Every rank has all of the first one. vLLM fuses
    the first projections. The recurrent state is float32 (kda_state_dtype).
    """

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

    def cuts(self) -> tuple[Size, ...]:
        return (Size("heads of linear attention", self.heads),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        heads = self.heads // tp
        return _state(3 * heads * self.head_dim, self.conv_kernel, heads * self.head_dim**2, FP32_BYTES)


@dataclass(frozen=True, slots=True)
class Mamba2(Part):
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

    def cuts(self) -> tuple[Size, ...]:
        # vLLM copies a single group. The norm needs each of several groups whole (Mixer2RMSNormGated).
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
class ShortConv(Part):
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

    def cuts(self) -> tuple[Size, ...]:
        return (Size("channels of its short convolutions", self.width),)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        return _state(self.width // tp, self.kernel, 0, BF16_BYTES)
