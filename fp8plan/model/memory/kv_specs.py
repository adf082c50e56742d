"""The caches of a model's layers as vLLM specifies them, in bytes of a precision, and the settings they depend on.

The functions here and in `kv_plan` follow vllm/v1/kv_cache_interface.py, vllm/v1/core/kv_cache_utils.py and
vllm/platforms/interface.py (_align_hybrid_block_size); `SINCE` names the differences of versions. They hold for one
pipeline stage, without context parallelism, speculative decoding and KV connectors, so for the hybrid manager, with
which layers of several kinds get groups of their own. With prefix caching a request keeps its states at multiples of
the block size (mamba_cache_mode "align"), else one of them ("none"). They assume layouts of the cache
with layers outermost: vLLM's choice on Hopper and on a CPU for every family except DeepSeek-V4.

Kernels that read FP8 caches, and their blocks, are in fp8plan.model.attention_backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, lcm
from typing import Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.mixers import Cache, CacheKind
from fp8plan.model.architecture.parts import Attention, DeltaNet, LatentAttention, Mamba2, Mixer, mixers
from fp8plan.model.attention_backend import BLACKWELL_DATA_CENTER, kernel_block, why_no_fp8_kv, why_not_indexed
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import Precision
from fp8plan.version import DEFAULT_VERSION, has

# A token's latent in FP8 if an indexer picks tokens: 512 numbers, four scales, and 64 numbers of BF16 (fp8_ds_mla:
# vllm/v1/attention/backends/mla/flashmla_sparse.py). In BF16 it is the plain latent.
SPARSE_FP8_LATENT_BYTES: Final = 656

MLA_HYBRID_BLOCK: Final = 128  # tokens
GDN_CHECKPOINT: Final = "gated delta nets have a checkpoint block"  # of version.SINCE
GDN_CHECKPOINT_TOKENS: Final = 64  # blocks are whole multiples (vllm/v1/attention/backends/gdn_attn.py)
FIRST_GDN_CHECKPOINT: Final = (9, 0)  # compute capability: FlashInfer's prefill alone has it (qwen_gdn_linear_attn.py)


class LayerCache(NamedTuple):
    """The cache of one layer on one rank, in bytes. A layer that reads another's KV has none."""

    kind: CacheKind
    token_bytes: int = 0
    window: int = 0  # tokens: the window, or a chunked cache's chunk
    state_bytes: int = 0  # of one request
    checkpoint: str = ""  # the difference of version.SINCE with which a state has one more block for a prompt's end


def in_bytes(cache: Cache, kv_bytes: int, sparse: bool = False) -> LayerCache:
    """The cache with `kv_bytes` per element; a state has its own dtype.

    sparse: an indexer picks the tokens of this latent for FlashMLA, whose layout in FP8 differs
    """
    token_bytes = cache.elements_per_token * kv_bytes
    if sparse and cache.kind == "latent" and kv_bytes == 1:
        token_bytes = SPARSE_FP8_LATENT_BYTES
    return LayerCache(cache.kind, token_bytes, cache.window, cache.state_bytes)


@dataclass(frozen=True, slots=True)
class KvRules:
    """The engine's settings that the KV cache depends on.

    max_model_len, max_num_batched_tokens, block_size, enable_prefix_caching, async_scheduling: as in EngineLimits
    kernel_block:   tokens; the attention kernel's smallest block (get_supported_kernel_block_sizes)
    vllm:           the version whose rules apply
    """

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    kernel_block: int = 16
    vllm: str = DEFAULT_VERSION

    @classmethod
    def of(
        cls, limits: EngineLimits, longest_request: int, kernel_block: int = 16, vllm: str = DEFAULT_VERSION
    ) -> KvRules:
        """The rules of an engine with `limits`. longest_request: tokens, used if max_model_len is None"""
        return cls(
            max_model_len=limits.max_model_len or longest_request,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            async_scheduling=limits.async_scheduling,
            kernel_block=kernel_block,
            vllm=vllm,
        )

    def has(self, difference: str) -> bool:
        """True if this vLLM has a difference of fp8plan.version.SINCE."""
        return has(self.vllm, difference)

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that are scheduled and not yet settled (VllmConfig.max_in_flight_tokens)."""
        return (2 if self.async_scheduling else 1) * self.max_num_batched_tokens


class Spec(NamedTuple):
    """vLLM's KVCacheSpec of a layer, and of a group of layers that share a block table.

    kind:       full, latent: every token is kept; sliding: the last `window` tokens; chunked: the current chunk of
                `window` tokens; state: one recurrent state per request
    block_size: tokens in a page; for a state, tokens between two kept states
    window:     tokens, for sliding and chunked; else 0
    padded:     bytes that the page is padded to, or 0
    checkpoints: blocks of a kept state beside the usual two
    """

    kind: CacheKind
    block_size: int
    window: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    padded: int = 0
    checkpoints: int = 0

    @property
    def page_bytes(self) -> int:
        return self.padded or self.state_bytes or self.token_bytes * self.block_size

    @property
    def keeps_all(self) -> bool:
        return self.kind in ("full", "latent")


class CacheRules(NamedTuple):
    """A version's prefix cache of windows and states.

    retain_all:  all their full blocks are found, as in vLLM 0.26; else those where a prompt ends, as in 0.30
    leaves_one:  the last block in which a state is kept ends before the last token of a prompt
    holders_wait: no request is admitted onto a state in a step in which another that holds it is served (0.32)
    """

    retain_all: bool = False
    leaves_one: bool = False
    holders_wait: bool = False

    @classmethod
    def of(cls, vllm: str) -> CacheRules:
        return cls(
            retain_all=not has(vllm, "only ends of prompts are retained"),
            leaves_one=has(vllm, "the last state of a prompt leaves a token to compute"),
            holders_wait=has(vllm, "a kept state makes others wait while it is held")
            and not has(vllm, "a kept state makes others wait once"),
        )


def blocks_of(spec: Spec, rules: KvRules, tokens: int) -> int:
    """The most blocks that one request of `tokens` holds at once (max_memory_usage_bytes of each spec)."""
    if spec.kind == "state":
        return 2 + spec.checkpoints if rules.enable_prefix_caching else 1
    if spec.window:
        return blocks_of_window(spec, rules.in_flight_tokens, tokens)
    return ceil(tokens / spec.block_size)


def blocks_of_window(spec: Spec, in_flight_tokens: int, tokens: int | None = None) -> int:
    """The most blocks that one request holds in a window or a chunk. tokens: its length; None: any"""
    sliding = spec.kind == "sliding"
    held = spec.window - sliding + in_flight_tokens
    # A window may start inside a block, so it needs one block more.
    return ceil((held if tokens is None else min(held, tokens)) / spec.block_size) + sliding


def windows_of(groups: Iterable[Spec]) -> list[tuple[str, int]]:
    """Kind and size of each distinct window of KV-cache groups, in their order."""
    return list(dict.fromkeys((group.kind, group.window) for group in groups if group.window))


def admission_cap(group: Spec, limits: EngineLimits) -> int:
    """The most blocks that the check of the whole prompt asks for (`max_admission_blocks_per_request`); -1: no cap.

    vLLM also cuts it by max_model_len. That never matters: no request is longer.
    """
    in_flight = limits.max_num_batched_tokens * (2 if limits.async_scheduling else 1)
    return blocks_of_window(group, in_flight) if group.window else -1


def specs(caches: Sequence[LayerCache], rules: KvRules) -> list[Spec]:
    """The spec of each layer, before kinds of layers are made to fit each other."""
    block_size, state_block, padded = block_sizes(caches, rules)
    return [_spec(cache, rules, block_size, state_block, padded) for cache in caches]


def _spec(cache: LayerCache, rules: KvRules, block_size: int, state_block: int, padded: int) -> Spec:
    if cache.kind == "state":
        checkpoints = int(bool(cache.checkpoint) and rules.has(cache.checkpoint))
        return Spec("state", state_block, state_bytes=cache.state_bytes, padded=padded, checkpoints=checkpoints)
    if cache.kind == "sliding":
        # Attention.get_kv_cache_spec: 0.26 starts from the kernel's smallest block, 0.30 from the largest that fits.
        largest = rules.has("windows start from the largest block")
        multiple = max(1, block_size // rules.kernel_block) if largest else 1
        block_size = multiple * rules.kernel_block
    return Spec(cache.kind, block_size, cache.window, cache.token_bytes)


def block_sizes(caches: Iterable[LayerCache], rules: KvRules) -> tuple[int, int, int]:
    """Tokens in a block of attention, tokens between two kept states, and the bytes a state is padded to (or 0).

    If a model has both, attention blocks grow until a page holds a state, and states are padded to that page
    (_align_hybrid_block_size).
    """
    caches = list(caches)
    state = max((cache.state_bytes for cache in caches), default=0)
    tokens = {cache.token_bytes for cache in caches if cache.kind != "state"}
    block_size, padded = rules.block_size, 0
    if len(tokens) > 1 and state:
        raise ConfigError(
            f"the attention layers beside recurrent ones keep {sorted(tokens)} bytes per token; allowed: one size"
        )
    if state and tokens:
        token_bytes = tokens.pop()
        step = max(rules.kernel_block, block_size)
        if rules.has("latents beside states have blocks of 128") and any(cache.kind == "latent" for cache in caches):
            step = max(step, MLA_HYBRID_BLOCK)
        checkpoints = rules.has(GDN_CHECKPOINT) and any(cache.checkpoint == GDN_CHECKPOINT for cache in caches)
        if rules.enable_prefix_caching and checkpoints:
            step = lcm(step, GDN_CHECKPOINT_TOKENS)
        block_size = max(block_size, step * ceil(state / (step * token_bytes)))
        page = block_size * token_bytes
        padded = page if page != state else 0
    between = block_size if rules.enable_prefix_caching else rules.max_model_len
    return block_size, between, padded


CPU_BLOCK: Final = 32  # tokens; vllm/v1/attention/backends/cpu_attn.py


def model_caches(
    shape: ModelShape,
    precision: Precision,
    limits: EngineLimits,
    longest_request: int,
    on_cpu: bool = False,
    capability: tuple[int, int] | None = None,
    vllm: str = DEFAULT_VERSION,
) -> tuple[tuple[LayerCache, ...], KvRules]:
    """The caches of all layers on one rank, and vLLM's rules for their plan.

    longest_request: tokens, used if limits.max_model_len is None
    capability:      compute capability of the GPU; None: Hopper's
    vllm:            the version

    Raises ConfigError if vLLM cannot keep them in this precision, or keeps them in a way that is not modelled.
    """
    layers = layer_caches(shape, precision, limits.tensor_parallel_size, capability)
    if not layers:
        raise ConfigError(f"{shape.name}: no layer keeps anything of earlier tokens; allowed: models with attention")
    if on_cpu or (capability is not None and capability < FIRST_GDN_CHECKPOINT):
        layers = tuple(x._replace(checkpoint="") if x.checkpoint == GDN_CHECKPOINT else x for x in layers)
    _check_states(shape, limits, vllm)
    if reason := why_not_kept(shape, precision, on_cpu, capability, vllm):
        other = "a BF16" if precision.kv == "fp8" else "an FP8"
        allowed = f"a precision with {other} KV cache, or another GPU"
        raise ConfigError(f"{shape.name} in {precision.name}: {reason}; allowed: {allowed}")
    if on_cpu:
        return layers, KvRules.of(limits, longest_request, CPU_BLOCK, vllm)
    latent = bool(shape.parts_of(LatentAttention))
    block = kernel_block(capability, latent, precision.kv == "fp8", shape.indexed)
    # Without a given block vLLM takes the kernel's. Here a smaller block means the same.
    rules = KvRules.of(limits, longest_request, block, vllm)
    return layers, replace(rules, block_size=max(rules.block_size, block))


def why_not_kept(
    shape: ModelShape,
    precision: Precision,
    on_cpu: bool = False,
    capability: tuple[int, int] | None = None,
    vllm: str = DEFAULT_VERSION,
) -> str | None:
    """The reason why this version of vLLM cannot keep this model's caches in this precision; None if it can.

    capability: compute capability of the GPU; None: Hopper's
    """
    if shape.indexed and capability is not None and (reason := why_not_indexed(capability, precision.kv == "fp8")):
        return reason
    if precision.kv != "fp8":
        return None
    kinds = {cache.kind for cache in shape.caches()}
    if on_cpu:  # one kernel reads heads of every size
        return why_no_fp8_kv(kinds, vllm=vllm)
    layers = [attention for attention, _ in shape.parts_of(Attention)]
    head_dims, sinks = {x.head_dim for x in layers}, any(x.sinks for x in layers)
    shorter_values = any(x.v_head_dim for x in layers)
    return why_no_fp8_kv(kinds, head_dims, vllm, sinks=sinks, shorter_values=shorter_values, capability=capability)


def layer_caches(
    shape: ModelShape,
    precision: Precision,
    tensor_parallel_size: int = 1,
    capability: tuple[int, int] | None = None,
) -> tuple[LayerCache, ...]:
    """The caches of all layers on one rank, in order: none for a layer without a cache, two for one with an indexer.

    capability: compute capability of the GPU; None: Hopper's
    """
    packed = capability is None or capability[0] != BLACKWELL_DATA_CENTER  # FlashInfer's sparse kernel reads plain E4M3
    every = (mixer for layer in shape.layers for mixer in mixers(layer))
    of_mixer = (_of_mixer(mixer, precision.kv_element_bytes, tensor_parallel_size, packed) for mixer in every)
    return tuple(cache for caches in of_mixer for cache in caches)


@lru_cache
def _of_mixer(mixer: Mixer, kv_bytes: int, tp: int, packed: bool) -> tuple[LayerCache, ...]:
    """The caches of one mixer. Cached: most layers are equal, and a search plans memory thousands of times."""
    packed = packed and isinstance(mixer, LatentAttention) and mixer.sparse
    caches = tuple(in_bytes(cache, kv_bytes, packed) for cache in mixer.caches(tp))
    if isinstance(mixer, Mamba2 | DeltaNet):
        checkpoint = "Mamba 2 has a checkpoint block" if isinstance(mixer, Mamba2) else GDN_CHECKPOINT
        return tuple(cache._replace(checkpoint=checkpoint) for cache in caches)
    # An indexer's keys are a cache of their own: FP8 with scales for any KV dtype, and the same on every rank.
    keys = [cache.index_bytes_per_token for cache in mixer.caches(tp) if cache.index_bytes_per_token]
    return *caches, *(LayerCache("latent", each) for each in keys)


def _check_states(shape: ModelShape, limits: EngineLimits, vllm: str) -> None:
    """Raise ConfigError if vLLM would keep a state for every block of tokens (mamba_cache_mode "all").

    With prefix caching it does for model classes with SupportsMambaPrefixCaching, which all have Mamba 2.
    """
    aligned = has(vllm, "states are always aligned")
    if limits.enable_prefix_caching and not aligned and shape.parts_of(Mamba2):
        raise ConfigError(
            f"{shape.name}: enable_prefix_caching is True, with which vLLM {vllm} keeps a state of its Mamba layers "
            "for every block of tokens (mamba_cache_mode 'all'), and that is not modelled; allowed: False, vLLM's "
            "default for models with recurrent layers"
        )
