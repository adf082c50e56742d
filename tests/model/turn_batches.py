"""Random batches of trajectories with turns, and a clock for them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from scheduled_batches import FAMILIES, blocks_needed

from fp8plan.model.cost.clock import DEPTHS, SIZE_STEP, Clock
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec, windows_of
from fp8plan.model.turn_table import TurnTable
from fp8plan.model.workload import Batch

TOKENS, REQUESTS = 16384, 1024  # of a step, at most, as in EngineLimits()
SHAPE = TOKENS // SIZE_STEP + 1, len(DEPTHS), 2


@cache
def linear_clock(
    step_s: float, token_s: float = 0.0, kv_token_s: float = 0.0, pair_s: float = 0.0, windows: int = 0
) -> Clock:
    """Step seconds that are linear in what a step does, at no power limit and no cost of the host or of windows."""
    tokens, sampled, decode = (
        np.zeros((TOKENS + 1, 2)),
        np.zeros((REQUESTS + 1, 2)),
        np.zeros((REQUESTS + 1, *SHAPE[1:])),
    )
    chunk = np.zeros(SHAPE)
    tokens[:, 0] = step_s + token_s * np.arange(TOKENS + 1)
    sampled[:, 0] = token_s * np.arange(REQUESTS + 1)
    decode[..., 0] = kv_token_s * np.arange(REQUESTS + 1)[:, None] * DEPTHS
    chunk[..., 0] = pair_s * SIZE_STEP * np.arange(SHAPE[0])[:, None] * DEPTHS
    decode, chunk = (np.stack([table, *windows * [np.zeros_like(table)]]) for table in (decode, chunk))
    uneven, launches = np.array([kv_token_s, 0.0]), np.zeros((TOKENS + 1, 2))
    return Clock(tokens, sampled, decode, chunk, chunk, uneven, launches, np.zeros(3), True, False, False)


EQUAL_STEPS = linear_clock(1.0)  # so that waits of whole seconds end together


def random_clock(rng: np.random.Generator, limits: EngineLimits, windows: int) -> Clock:
    """A clock of random tables, in which half of the steps have launches."""
    tokens, requests = limits.max_num_batched_tokens + 1, limits.max_num_seqs + 1
    chunks = (1 + windows, tokens // SIZE_STEP + 2, len(DEPTHS), 2)
    return Clock(
        tokens=rng.uniform(1e-3, 1e-2, (tokens, 2)),
        sampled=rng.uniform(0, 1e-3, (requests, 2)),
        decode=rng.uniform(0, 1e-2, (1 + windows, requests, len(DEPTHS), 2)),
        first=rng.uniform(0, 1e-2, chunks),
        further=rng.uniform(0, 3e-3, chunks),
        uneven=rng.uniform(0, 1e-5, 2),
        launches=rng.uniform(0, 1e-2, (tokens, 2)) * rng.integers(0, 2, (tokens, 2)),
        host=rng.uniform(0, 1e-2, 3),
        overlaps=limits.async_scheduling,
        leads=limits.async_scheduling and bool(rng.random() < 0.7),
        on_cpu=bool(rng.random() < 0.2),
    )


def seconds_of(clock: Clock, *work: int) -> float:
    """The seconds of a step by a linear clock, whatever it reads in windows. work: arguments of `Clock.step`"""
    return clock.step(*work, windows=[(0, 0)] * (len(clock.decode) - 1))[0]


class Trace(NamedTuple):
    batch: Batch
    pool: int
    limits: EngineLimits
    groups: tuple[Spec, ...]
    retain_all: bool
    clock: Clock


def table(*trajectories: list[tuple[int, int, float]]) -> TurnTable:
    """The table of trajectories, each a list of (generated, tool, wait_s)."""
    return TurnTable.of(trajectories)


def batch_of(prompts: list[int], prompt_ids: list[int], turns: TurnTable) -> Batch:
    return Batch(np.array(prompts), turns.responses, np.array(prompt_ids), turns)


def with_drops(turns: TurnTable, rng: np.random.Generator) -> TurnTable:
    """Turns of which two thirds leave out tokens, from one to all of the answer."""
    dropped = rng.integers(1, turns.generated + 1) * (rng.random(len(turns.generated)) < 2 / 3)
    return turns._replace(dropped=dropped).ended()


def trace(seed: int, family: str = "full", drops: bool = False) -> Trace:
    """A few trajectories of 1 to 6 turns. Even seeds are asynchronous. Every third seed has waits of whole steps.

    Four of five have prefix caching, and a third a cap on the trajectories at once. Pools hold from one request to all.
    drops: prompts leave out tokens
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
    if drops:
        turns = with_drops(turns, np.random.default_rng([seed, 66]))
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
    costs = (1.0,) if equal else (4e-3, 2.3e-5, 7.1e-8, 1.3e-9)
    clock = linear_clock(*costs, windows=len(windows_of(groups)))
    batch = batch._replace(turns=turns._replace(concurrent=concurrent))
    return Trace(batch, pool, limits, groups, bool(rng.random() < 0.4), clock)
