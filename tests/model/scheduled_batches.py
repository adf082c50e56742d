"""Random batches for the simulated scheduler: pools of a few requests, with one KV-cache group and with several."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8plan.model.architecture.mixers import CacheKind
from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec, admission_cap
from fp8plan.model.workload import Batch

BLOCK = 16
IDLE_PREEMPTION = 4594  # a seed: under asynchronous scheduling a request is preempted in a step that serves nobody
# A tight seed: a response of one token ends with its prompt, all of whose blocks have a hash, and is then preempted.
ENDED_PREEMPTED = 20110
FAMILIES: dict[str, tuple[CacheKind, ...]] = {
    "window": ("full", "sliding"),
    "state": ("full", "state"),
    "chunk": ("full", "chunked"),
    "windows": ("full", "sliding", "sliding", "sliding"),  # Gemma 3
    "states": ("full", "state", "state", "state"),  # Qwen3-Next
    "latent": ("latent", "state"),  # Kimi Linear
    "all": ("full", "sliding", "state"),
    "checkpoint": ("full", "state"),  # Nemotron-H from 0.32
    "checkpoints": ("full", "state", "state", "state"),  # Qwen3-Next from 0.33
    "alone": ("sliding",),
    "chunk alone": ("chunked",),
}


def blocks_for(tokens: IntArray) -> IntArray:
    return -(-tokens // BLOCK)


def random_case(seed: int, async_scheduling: bool) -> tuple[Batch, int, EngineLimits]:
    """A workload that is usually starved of KV: odd and even seeds differ in prefix caching, every third has prompts
    that fill their last block, every fifth ends all responses at once, every seventh admits on the first chunk."""
    rng = np.random.default_rng(seed)
    prompts, samples = int(rng.integers(1, 24)), int(rng.integers(1, 9))
    if seed % 12 == 0:
        prompts, samples = 64, 8  # 512 requests
    prompt_lengths = rng.integers(1, 400, prompts)
    if seed % 3 == 0:
        prompt_lengths = blocks_for(prompt_lengths) * BLOCK
    prompt_ids = np.repeat(np.arange(prompts), samples)
    responses = rng.integers(1, 300 if seed % 12 == 0 else 600, len(prompt_ids))
    if seed % 5 == 0:
        responses[:] = rng.integers(1, 300)
    batch = Batch(prompt_lengths[prompt_ids], responses, prompt_ids)
    needed = blocks_for(batch.prompts + batch.responses - 1)
    pool = int(max(needed.max(), needed.sum() * rng.uniform(0.05, 0.9)))
    limits = EngineLimits(
        max_num_seqs=int(rng.integers(1, 200)),
        max_num_batched_tokens=int(rng.integers(200, 2048)),
        enable_prefix_caching=bool(seed % 2),
        async_scheduling=async_scheduling,
        scheduler_reserve_full_isl=seed % 7 != 1,
    )
    return batch, pool, limits


def tight_case(seed: int, async_scheduling: bool) -> tuple[Batch, int, EngineLimits]:
    """A pool of at most a few requests, and a budget of hardly more tokens than slots."""
    rng = np.random.default_rng(seed)
    prompts, samples = int(rng.integers(1, 13)), int(rng.integers(1, 5))
    prompt_lengths = rng.integers(1, rng.choice([40, 150, 320]), prompts)
    if rng.random() < 0.3:
        prompt_lengths = blocks_for(prompt_lengths) * BLOCK
    prompt_ids = np.repeat(np.arange(prompts), samples)
    responses = rng.integers(1, rng.choice([30, 100, 220]), len(prompt_ids))
    if rng.random() < 0.15:
        responses[:] = responses[0]
    batch = Batch(prompt_lengths[prompt_ids], responses, prompt_ids)
    longest = int(blocks_for(batch.prompts + batch.responses - 1).max())
    slots = int(rng.integers(1, 17))
    limits = EngineLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=slots + int(rng.choice([0, 1, 8, 16, 64, 200]) * rng.random()),
        enable_prefix_caching=bool(rng.random() < 0.7),
        async_scheduling=async_scheduling,
        scheduler_reserve_full_isl=bool(rng.random() < 0.4),
    )
    return batch, int(longest * rng.uniform(1, 2.5)) + int(rng.integers(0, 4)), limits


class Case(NamedTuple):
    batch: Batch
    pool: int
    limits: EngineLimits
    groups: tuple[Spec, ...]
    retain_all: bool


def blocks_needed(batch: Batch, group: Spec, limits: EngineLimits) -> int:
    """Blocks that the longest request of a batch must find in a group."""
    if group.kind == "state":
        return 3 + group.checkpoints
    blocks = -(-int((batch.prompts + batch.responses).max()) // group.block_size)
    cap = admission_cap(group, limits)
    # vLLM's cap leaves out that a chunk of attention may not begin with a block.
    return blocks if cap < 0 else min(blocks, cap + (group.kind == "chunked"))


def case(seed: int, family: str, async_scheduling: bool) -> Case:
    """A pool of at most a few requests; seven of ten have prefix caching, a third no more budget than slots."""
    kinds = FAMILIES[family]
    rng = np.random.default_rng([seed, len(kinds), async_scheduling])
    size = int(rng.choice([16, 32, 48, 128])) if "state" in kinds else 16
    prompts, samples = int(rng.integers(1, 13)), int(rng.integers(1, 5))
    lengths = rng.integers(1, rng.choice([40, 150, 320]), prompts)
    if rng.random() < 0.3:
        lengths = -(-lengths // size) * size
    ids = np.repeat(np.arange(prompts), samples)
    responses = rng.integers(1, rng.choice([30, 100, 220]), len(ids))
    if rng.random() < 0.15:
        responses[:] = responses[0]
    batch = Batch(lengths[ids], responses, ids)
    slots, caching = int(rng.integers(1, 17)), bool(rng.random() < 0.7)
    limits = EngineLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=slots + int(rng.choice([0, 1, 16, 64, 200, 400]) * rng.random()),
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
        scheduler_reserve_full_isl=bool(rng.random() < 0.6),
    )
    window = int(rng.choice([1, 2, 17, 33, 64, 100, 200]))
    groups = []
    for kind in kinds:
        if kind in ("sliding", "chunked"):
            own_size = size if caching or rng.random() < 0.5 else 2 * size
            groups.append(Spec(kind, own_size, window))
            window += int(rng.choice([0, 0, 16]))  # equal groups are looked up together
        else:
            groups.append(Spec(kind, size, checkpoints=int(kind == "state" and family.startswith("checkpoint"))))
    pool = sum(blocks_needed(batch, group, limits) for group in groups) * rng.uniform(1, 2.5)
    return Case(batch, int(pool) + int(rng.integers(0, 4)), limits, tuple(groups), bool(rng.random() < 0.4))
