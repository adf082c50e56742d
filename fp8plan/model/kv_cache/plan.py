"""Blocks and tokens of the KV cache, and whether one request fits: get_kv_cache_configs in
vllm/v1/core/kv_cache_utils.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8plan.checks import whole
from fp8plan.errors import ConfigError
from fp8plan.model.kv_cache.groups import CacheGroup, group_layers
from fp8plan.model.kv_cache.specs import KvRules, LayerCache, Spec, block_sizes, specs


@dataclass(frozen=True, slots=True)
class KvPlan:
    """vLLM's plan of one rank's KV cache.

    groups:     layers that share a block table
    block_size: tokens in a block of attention layers, as vLLM's log says; 0 without such layers
    num_blocks: as the engine reports it; the scheduler has one fewer (the null block)
    rules:      the settings it was made with
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    num_blocks: int
    rules: KvRules

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes from the pool, whichever group holds it."""
        return block_bytes(self.groups)

    @property
    def usable_blocks(self) -> int:
        """Blocks the scheduler can hand out, to all groups together."""
        return self.num_blocks - 1

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The scheduler's view of each group: how its tokens fall into blocks, and not their bytes."""
        return tuple(Spec(group.kind, group.block_size, group.window) for group in self.groups)

    @property
    def retains_all(self) -> bool:
        """Tell whether the prefix cache finds all full blocks of windows and states, as by 0.26, and not only those
        where a prompt ends (prefix_cache_retention_interval, which is 0 in 0.30)."""
        return self.rules.vllm == "0.26"

    @property
    def request_blocks(self) -> int:
        """The most blocks that one request of max_model_len holds at once, in all groups."""
        return self.blocks_of_request(self.rules.max_model_len)

    def blocks_of_request(self, tokens: int) -> int:
        """The most blocks that one request of `tokens` holds at once, in all groups."""
        return sum(group.blocks(self.rules, tokens) for group in self.groups)

    @property
    def request_bytes(self) -> int:
        """Memory that one request of max_model_len needs ("GiB KV cache is needed" in vLLM's error)."""
        return self.request_blocks * self.block_bytes

    @property
    def fits(self) -> bool:
        """Tell whether the engine starts: one request of max_model_len fits.

        0.30 takes the null block off before it asks, 0.26 does not.
        """
        free = self.num_blocks - (self.rules.vllm == "0.30")
        return free > 0 and self.request_blocks <= free

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that the pool holds ("Maximum concurrency")."""
        return self.num_blocks / self.request_blocks

    @property
    def tokens(self) -> int:
        """The engine's "GPU KV cache size": tokens in requests of max_model_len."""
        return int(self.max_concurrency * self.rules.max_model_len)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token more takes in a long request: what padding wastes counts, full windows do not."""
        return self.block_bytes * sum(1 / group.block_size for group in self.groups if _grows(group, self.rules))


def plan_kv_cache(
    caches: Sequence[LayerCache], rules: KvRules, available_bytes: int | None = None, num_blocks: int | None = None
) -> KvPlan:
    """The plan for layers that keep `caches`, in memory of `available_bytes` or with a pool of `num_blocks`.

    num_blocks: with the null block. Raises ConfigError where vLLM has no plan for these layers.
    """
    if (available_bytes is None) == (num_blocks is None):
        raise ConfigError(
            f"available_bytes is {available_bytes!r}, num_blocks is {num_blocks!r}; allowed: one of the two"
        )
    if not caches:
        raise ConfigError("caches is empty; allowed: a cache for each layer that keeps one")
    groups = group_layers(specs(caches, rules), rules)
    attends = any(cache.kind != "state" for cache in caches)
    if num_blocks is None:
        num_blocks = whole("available_bytes", available_bytes, least=0) // block_bytes(groups)
    block_size = block_sizes(caches, rules)[0] if attends else 0
    return KvPlan(groups, block_size, whole("num_blocks", num_blocks, least=0), rules)


def block_bytes(groups: Sequence[CacheGroup]) -> int:
    """Bytes of a block: those of the largest group."""
    return max(group.page_bytes for group in groups)


def _grows(group: CacheGroup, rules: KvRules) -> bool:
    return group.kind in ("full", "latent") or (group.kind == "state" and rules.kept_states == "all")
