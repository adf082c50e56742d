"""One layer's cache as vLLM specifies it, and the settings of the engine that its plan depends on.

The functions here and in `groups` and `plan` follow vllm/v1/kv_cache_interface.py, vllm/v1/core/kv_cache_utils.py and
vllm/platforms/interface.py (_align_hybrid_block_size), 0.26 and 0.30; comments say where these differ. They hold for
one pipeline stage, no context parallelism, no speculative decoding and no KV connector, and for layouts of the cache
that put layers outermost: vLLM's choice on Hopper and on a CPU for every family but DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Final, Literal, NamedTuple, TypeAlias

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.linear import Cache, CacheKind
from fp8plan.model.limits import EngineLimits

# A token's latent in FP8 where an indexer picks tokens: 512 numbers, four scales, and 64 numbers of BF16 (fp8_ds_mla:
# vllm/v1/attention/backends/mla/flashmla_sparse.py, 0.26 and 0.30). In BF16 it is the plain latent.
SPARSE_FP8_LATENT_BYTES: Final = 656
INDEXER_SCALE_BLOCK: Final = 128  # a scale of four bytes for each (DeepseekV32IndexerCache in deepseek_v2.py)

MLA_HYBRID_BLOCK: Final = 128  # tokens

VllmVersion: TypeAlias = Literal["0.26", "0.30"]
StateMode: TypeAlias = Literal["none", "align", "all"]


class LayerCache(NamedTuple):
    """The cache of one layer on one rank, in bytes. A layer that reads another's KV keeps nothing and has none."""

    kind: CacheKind
    token_bytes: int = 0
    window: int = 0  # tokens; of a chunked cache its chunk
    state_bytes: int = 0  # of one request


def in_bytes(cache: Cache, kv_bytes: int, sparse: bool = False) -> LayerCache:
    """A cache whose elements take `kv_bytes` each.

    The KV dtype is that of full, sliding and chunked attention and of a latent. A state keeps its own.

    sparse: an indexer picks the tokens of this latent, which has a layout of its own in FP8
    """
    token_bytes = cache.elements_per_token * kv_bytes
    if sparse and cache.kind == "latent" and kv_bytes == 1:
        token_bytes = SPARSE_FP8_LATENT_BYTES
    return LayerCache(cache.kind, token_bytes, cache.window, cache.state_bytes)


def indexer_cache(head_dim: int) -> LayerCache:
    """The cache of an indexer's keys: FP8 with scales, whatever the KV dtype, and the same on every rank."""
    return LayerCache("latent", head_dim + head_dim // INDEXER_SCALE_BLOCK * 4)


@dataclass(frozen=True, slots=True)
class KvRules:
    """The engine's settings that the KV cache depends on.

    max_model_len, max_num_batched_tokens, block_size, enable_prefix_caching, async_scheduling: as in EngineLimits
    hybrid_manager: whether layers of several kinds get groups of their own; vLLM turns this off by itself only for KV
                    connectors and for chunked attention with EAGLE (VllmConfig.__post_init__ in vllm/config/vllm.py)
    kernel_block:   tokens; the attention kernel's smallest block (get_supported_kernel_block_sizes)
    state_mode:     which states of a request are kept; None: vLLM's choice (see `kept_states`)
    state_chunk:    tokens; of mode "all", the config's mamba_chunk_size or chunk_size
    vllm:           whose rules
    """

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    hybrid_manager: bool = True
    kernel_block: int = 16
    state_mode: StateMode | None = None
    state_chunk: int = 0
    vllm: VllmVersion = "0.26"

    @classmethod
    def of(
        cls,
        limits: EngineLimits,
        longest_request: int,
        kernel_block: int = 16,
        state_chunk: int = 0,
        vllm: VllmVersion = "0.26",
    ) -> KvRules:
        """Those of an engine with `limits`. longest_request: tokens, where max_model_len is None"""
        return cls(
            max_model_len=limits.max_model_len or longest_request,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            async_scheduling=limits.async_scheduling,
            kernel_block=kernel_block,
            state_chunk=state_chunk,
            vllm=vllm,
        )

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled but not yet settled (VllmConfig.max_in_flight_tokens)."""
        return (2 if self.async_scheduling else 1) * self.max_num_batched_tokens

    @property
    def kept_states(self) -> StateMode:
        """none: one state per request; align: two, at multiples of the block size; all: one per block of tokens.

        With prefix caching 0.26 chooses "all" for the families whose model class says SupportsMambaPrefixCaching
        (Nemotron-H, Granite-4-H, Falcon-H1, Bamba, Jamba, Zamba2), which state_chunk stands for, and "align" for the
        others; 0.30 always chooses "align" (MambaModelConfig in vllm/model_executor/models/config.py).
        """
        if not self.enable_prefix_caching:
            return "none"
        if self.state_mode is not None:
            return self.state_mode
        return "all" if self.state_chunk and self.vllm == "0.26" else "align"


class Spec(NamedTuple):
    """vLLM's KVCacheSpec of a layer, and of a group of layers that share a block table.

    kind:       full, latent: every token is kept; sliding: the last `window` tokens; chunked: those of the current
                chunk of `window` tokens; state: one recurrent state per request
    block_size: tokens in a page; of a state, tokens between two kept states
    window:     tokens, of sliding and chunked; 0 for the others
    padded:     bytes the page is padded to, or 0
    """

    kind: CacheKind
    block_size: int
    window: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    padded: int = 0

    @property
    def page_bytes(self) -> int:
        return self.padded or self.state_bytes or self.token_bytes * self.block_size

    @property
    def keeps_all(self) -> bool:
        return self.kind in ("full", "latent")


def blocks_of(spec: Spec, rules: KvRules, tokens: int) -> int:
    """The most blocks that one request of `tokens` holds at once (max_memory_usage_bytes of each spec)."""
    if spec.kind == "state":
        return {"none": 1, "align": 2, "all": ceil(tokens / spec.block_size)}[rules.kept_states]
    if spec.window:
        return blocks_of_window(spec, rules.in_flight_tokens, tokens)
    return ceil(tokens / spec.block_size)


def blocks_of_window(spec: Spec, in_flight_tokens: int, tokens: int | None = None) -> int:
    """The most blocks that one request holds in a window or a chunk. tokens: its length, None: any"""
    sliding = spec.kind == "sliding"
    held = spec.window - sliding + in_flight_tokens
    # One block more, as a window need not start at a block.
    return ceil((held if tokens is None else min(held, tokens)) / spec.block_size) + sliding


def specs(caches: Sequence[LayerCache], rules: KvRules) -> list[Spec]:
    """The spec of each layer, before layers of different kinds are made to fit each other."""
    block_size, state_block, padded = block_sizes(caches, rules)
    return [_spec(cache, rules, block_size, state_block, padded) for cache in caches]


def _spec(cache: LayerCache, rules: KvRules, block_size: int, state_block: int, padded: int) -> Spec:
    if cache.kind == "state":
        return Spec("state", state_block, state_bytes=cache.state_bytes, padded=padded)
    if cache.kind == "sliding":
        # Attention.get_kv_cache_spec: 0.26 starts from the kernel's smallest block, 0.30 from the largest that fits.
        multiple = 1 if rules.vllm == "0.26" else max(1, block_size // rules.kernel_block)
        block_size = multiple * rules.kernel_block
    return Spec(cache.kind, block_size, cache.window, cache.token_bytes)


def block_sizes(caches: Iterable[LayerCache], rules: KvRules) -> tuple[int, int, int]:
    """Tokens in a block of attention, tokens between two kept states, and the bytes a state is padded to (or 0).

    A model of both has its attention blocks enlarged until a page of them holds a state, and its states padded to that
    page (_align_hybrid_block_size).
    """
    caches = list(caches)
    state = max((cache.state_bytes for cache in caches), default=0)
    tokens = {cache.token_bytes for cache in caches if cache.kind != "state"}
    mode = rules.kept_states
    between = rules.max_model_len if mode == "none" else rules.block_size
    if not (state and tokens):
        return rules.block_size, between, 0
    if len(tokens) > 1:
        raise ConfigError(
            f"the attention layers beside recurrent ones keep {sorted(tokens)} bytes per token; allowed: one size"
        )
    token_bytes = tokens.pop()
    step = max(rules.kernel_block, rules.block_size)
    if rules.vllm == "0.30" and any(cache.kind == "latent" for cache in caches):
        step = max(step, MLA_HYBRID_BLOCK)
    if mode == "all":
        if not rules.state_chunk:
            raise ConfigError(
                "state_mode is 'all' and state_chunk is 0; allowed: the config's mamba_chunk_size or chunk_size (2048 "
                "where it has none)"
            )
        step = lcm(step, rules.state_chunk)
    enlarged = step * ceil(state / (step * token_bytes))
    block_size = max(rules.block_size, enlarged)
    between = {"none": rules.max_model_len, "align": block_size, "all": enlarged}[mode]
    page = block_size * token_bytes
    return block_size, between, page if page != state else 0
