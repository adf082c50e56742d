"""vLLM's plan of the KV cache: groups of layers that share a block table, and the blocks and tokens of the pool.

Source: get_kv_cache_groups and get_kv_cache_configs in vllm/v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from fp8plan.errors import ConfigError
from fp8plan.model.architecture.mixers import CacheKind
from fp8plan.model.memory.kv_specs import CacheRules, KvRules, LayerCache, Spec, block_sizes, blocks_of, specs

# With two kinds of layers, the rarer is padded to the number of the other, up to this ratio of the numbers.
MOST_PADDED_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table: a block of a request holds a page of each.

    layers: places in the list of caches
    specs:  one of each layer, in that order; they differ only if all layers of the model are in one group
    """

    layers: tuple[int, ...]
    specs: tuple[Spec, ...]

    @property
    def kind(self) -> CacheKind:
        """The kind of the first layer: full and latent ones may share a group."""
        return self.specs[0].kind

    @property
    def window(self) -> int:
        """Tokens, or 0."""
        return self.specs[0].window

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.specs[0].block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return sum(spec.page_bytes for spec in self.specs)

    def blocks(self, rules: KvRules, tokens: int) -> int:
        """The most blocks that one request of `tokens` holds at once."""
        return max(blocks_of(spec, rules, tokens) for spec in self.specs)


def group_layers(specs: Sequence[Spec], rules: KvRules) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers. Raises ConfigError if vLLM would not start."""
    if _one_type(specs, rules):
        return (CacheGroup(tuple(range(len(specs))), tuple(specs)),)
    largest = max(spec.page_bytes for spec in specs)
    try:
        return _equal_groups([_with_page(spec, largest, rules) for spec in specs])
    except _Unalike as unalike:
        return (_all_kept(specs, rules, unalike),)


def _one_type(specs: Sequence[Spec], rules: KvRules) -> bool:
    """True if all layers need the same blocks (is_kv_cache_spec_uniform, UniformTypeKVCacheSpecs.is_uniform_type).

    vLLM before 0.30 ignores the sizes of states.
    """
    types = {
        (
            "full" if spec.keeps_all else spec.kind,
            spec.window,
            spec.block_size,
            spec.page_bytes if spec.kind == "state" and rules.has("states of two sizes are two types") else 0,
        )
        for spec in specs
    }
    return len(types) <= 1


class _Unalike(Exception):
    """Pages that vLLM cannot make equal."""


def _with_page(spec: Spec, page: int, rules: KvRules) -> Spec:
    """The spec with pages of `page` bytes, by more tokens in a block if that fits, else by padding.

    Source: unify_kv_cache_spec_page_size.
    """
    if spec.page_bytes == page:
        return spec
    if spec.kind != "state" and page % spec.page_bytes == 0:
        return spec._replace(block_size=spec.block_size * (page // spec.page_bytes))
    if spec.kind == "latent" and rules.has("latents are not padded"):  # before, all dense backends on Hopper pad
        raise _Unalike(f"a page of {spec.page_bytes} bytes beside one of {page}")
    return spec._replace(padded=page)


def _all_kept(specs: Sequence[Spec], rules: KvRules, unalike: _Unalike) -> CacheGroup:
    """All layers in one group with windows kept whole (_try_get_full_allocation_fallback_groups in 0.30)."""
    full = {spec.block_size for spec in specs if spec.keeps_all}
    common = full.pop() if len(full) == 1 else 0
    kept = [
        spec._replace(kind="full", block_size=common or spec.block_size, window=0) if spec.kind == "sliding" else spec
        for spec in specs
    ]
    kinds = {spec.kind for spec in specs}
    if "chunked" in kinds or "sliding" not in kinds or not _one_type(kept, rules):
        raise ConfigError(f"vLLM {rules.vllm} cannot keep these layers in pages of one size: {unalike}")
    return CacheGroup(tuple(range(len(kept))), tuple(kept))


def _equal_groups(specs: Sequence[Spec]) -> tuple[CacheGroup, ...]:
    """Groups of equally many layers, fewer in the last of a kind (_get_kv_cache_groups_uniform_page_size).

    Layers of a kind are dealt out in turn. vLLM tells kinds apart by heads and head size, and this function by bytes
    per token. No family has kinds with different heads but equal bytes.
    """
    alike: dict[Spec, list[int]] = {}
    for place, spec in enumerate(specs):
        alike.setdefault(spec, []).append(place)
    numbers = list(map(len, alike.values()))
    fewest, most = min(numbers), max(numbers)
    size = most if most < fewest * MOST_PADDED_RATIO else fewest
    groups = []
    for spec, places in alike.items():
        count = ceil(len(places) / size)
        for first in range(count):
            members = tuple(places[first::count])
            groups.append(CacheGroup(members, (spec,) * len(members)))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """vLLM's plan of one rank's KV cache.

    groups:     layers that share a block table
    block_size: tokens in a block of attention layers, as vLLM's log says; 0 without such layers
    num_blocks: as the engine reports it; the scheduler has one fewer (the null block)
    rules:      settings of the engine
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    num_blocks: int
    rules: KvRules

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool, in any group: those of the largest."""
        return max(group.page_bytes for group in self.groups)

    def within(self, available_bytes: int) -> KvPlan:
        """The plan with as many blocks as this memory holds."""
        return replace(self, num_blocks=max(0, available_bytes) // self.block_bytes)

    @property
    def usable_blocks(self) -> int:
        """Blocks the scheduler can hand out, to all groups together."""
        return self.num_blocks - 1

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The scheduler's view of each group: tokens per block, without bytes."""
        return tuple(
            Spec(group.kind, group.block_size, group.window, checkpoints=group.specs[0].checkpoints)
            for group in self.groups
        )

    @property
    def keeps_states(self) -> bool:
        """True if some layers keep a recurrent state (vLLM's KVCacheConfig.has_mamba_layers)."""
        return any(spec.kind == "state" for spec in self.specs)

    @property
    def cache_rules(self) -> CacheRules:
        """The rules of the prefix cache of windows and states."""
        return CacheRules.of(self.rules.vllm)

    @property
    def request_blocks(self) -> int:
        """The most blocks that one request of max_model_len holds at once, in all groups."""
        return self.blocks_of_request(self.rules.max_model_len)

    def blocks_of_request(self, tokens: int) -> int:
        """The most blocks that one request of `tokens` holds at once, in all groups."""
        return sum(group.blocks(self.rules, tokens) for group in self.groups)

    @property
    def tokens(self) -> int:
        """The engine's "GPU KV cache size": tokens in requests of max_model_len."""
        return int(self.num_blocks / self.request_blocks * self.rules.max_model_len)


def plan_kv_cache(caches: Sequence[LayerCache], rules: KvRules, num_blocks: int = 0) -> KvPlan:
    """The plan for layers that keep `caches`, with a pool of `num_blocks`, the null block included.

    Raises ConfigError if vLLM has no plan for these layers.
    """
    if not caches:
        raise ConfigError("caches is empty; allowed: a cache for each layer that keeps one")
    groups = group_layers(specs(caches, rules), rules)
    attends = any(cache.kind != "state" for cache in caches)
    return KvPlan(groups, block_sizes(caches, rules)[0] if attends else 0, num_blocks, rules)
