"""Random batches of trajectories with turns, and a clock for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scheduled_batches import FAMILIES, blocks_needed

from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.turns import TurnTable
from fp8plan.model.workload import Batch


@dataclass(frozen=True)
class LinearClock:
    """Step seconds that are linear in what a step does."""

    step_s: float
    token_s: float
    kv_token_s: float
    pair_s: float = 0.0

    def seconds(
        self,
        decode_requests: int,
        decode_kv_tokens: int,
        prefill_tokens: int,
        prefill_requests: int,
        prefill_kv_tokens: int,
        prefill_pairs: int,
        sampled_requests: int,
    ) -> float:
        tokens = decode_requests + prefill_tokens + sampled_requests + prefill_requests
        kv_tokens = decode_kv_tokens + prefill_kv_tokens
        return self.step_s + self.token_s * tokens + self.kv_token_s * kv_tokens + self.pair_s * prefill_pairs


EQUAL_STEPS = LinearClock(1.0, 0.0, 0.0)  # so that waits of whole seconds end together
CLOCK = LinearClock(4e-3, 2.3e-5, 7.1e-8, 1.3e-9)


class Trace(NamedTuple):
    batch: Batch
    pool: int
    limits: EngineLimits
    groups: tuple[Spec, ...]
    retain_all: bool
    clock: LinearClock
    concurrent: int | None


def table(*trajectories: list[tuple[int, int, float]]) -> TurnTable:
    """The table of trajectories, each a list of (generated, tool, wait_s)."""
    counts = [len(turns) for turns in trajectories]
    generated, tool, wait_s = zip(*(turn for turns in trajectories for turn in turns), strict=True)
    return TurnTable(
        np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
        np.array(generated),
        np.array(tool),
        np.array(wait_s, dtype=float),
        np.zeros(len(generated), dtype=np.int64),
    )


def batch_of(prompts: list[int], prompt_ids: list[int], turns: TurnTable) -> Batch:
    return Batch(np.array(prompts), np.add.reduceat(turns.generated, turns.first[:-1]), np.array(prompt_ids), turns)


def trace(seed: int, family: str = "full") -> Trace:
    """A few trajectories of 1 to 6 turns. Even seeds are asynchronous. Every third seed has waits of whole steps.

    Four of five have prefix caching, and a third a cap on the trajectories at once. Pools hold from one request to all.
    """
    rng = np.random.default_rng([seed, 65])
    kinds = FAMILIES.get(family, ("full",))
    size = int(rng.choice([16, 32, 48])) if "state" in kinds else 16
    prompts, samples = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    prompt_ids = np.repeat(np.arange(prompts), samples)
    lengths = rng.integers(1, rng.choice([40, 150, 320]), prompts)[prompt_ids]
    most_generated, most_tool = rng.choice([3, 30, 100]), rng.choice([2, 40, 200])
    equal = seed % 3 == 0
    longest_wait = rng.choice([0.02, 0.3, 2.0])
    trajectories = []
    for _ in prompt_ids:
        turns = [
            (
                int(rng.integers(1, most_generated + 1)),
                int(rng.integers(0, most_tool)),
                float(rng.integers(0, 12)) if equal else float(rng.exponential(longest_wait)),
            )
            for _ in range(rng.integers(1, 7))
        ]
        turns[-1] = (turns[-1][0], 0, 0.0)
        trajectories.append(turns)
    turns = table(*trajectories)
    batch = batch_of(lengths.tolist(), prompt_ids.tolist(), turns)
    slots = int(rng.integers(1, 17))
    limits = EngineLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=slots + int(rng.choice([0, 1, 16, 64, 200, 400]) * rng.random()),
        enable_prefix_caching=bool(rng.random() < 0.8),
        async_scheduling=seed % 2 == 0,
        scheduler_reserve_full_isl=bool(rng.random() < 0.6),
    )
    window = int(rng.choice([1, 2, 17, 33, 64, 100, 200]))
    groups = tuple(
        Spec(
            kind,
            size,
            window if kind in ("sliding", "chunked") else 0,
            checkpoints=int(kind == "state" and family.startswith("checkpoint")),
        )
        for kind in kinds
    )
    longest = batch._replace(responses=turns.added)
    least = sum(blocks_needed(longest, group, limits) for group in groups)
    pool = int(least * rng.choice([1.0, 1.5, 2.5, 6.0, 100.0])) + int(rng.integers(0, 4))
    concurrent = int(rng.integers(1, len(prompt_ids) + 1)) if rng.random() < 1 / 3 else None
    clock = EQUAL_STEPS if equal else CLOCK
    return Trace(batch, pool, limits, groups, bool(rng.random() < 0.4), clock, concurrent)
