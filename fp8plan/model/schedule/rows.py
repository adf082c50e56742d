"""The rows of a schedule: runs of alike steps, and what the reference in Python counts of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count, islice
from typing import Any

import numpy as np

from fp8plan.model.cost.base import QUANTITIES, Array, FloatArray, IntArray, WindowReads
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.schedule.windows import pairs_read, tokens_read


@dataclass(frozen=True, slots=True)
class Columns:
    """The actions of the engine in order: arrays of shape (rows,), in the order of c/state.h."""

    steps: IntArray  # alike steps in this row
    decode_requests: IntArray  # requests that get one token in each step
    # KV tokens they read in the row's first step, summed; grows by decode_requests a step
    decode_kv_tokens: IntArray
    recomputed_tokens: IntArray  # work thrown away: tokens that the requests of `preemptions` had computed
    running: IntArray
    waiting: IntArray
    used_blocks: IntArray  # while the last step of the row runs
    preemptions: IntArray  # in this row, or in a step without tokens before it, which costs nothing and has no row
    finished: IntArray
    prefill_tokens: IntArray
    prefill_requests: IntArray
    prefill_kv_tokens: IntArray  # KV tokens the chunks read: context before them + their own, summed
    prefill_pairs: IntArray  # query-key pairs of the chunks, summed
    sampled_requests: IntArray  # that decode, or whose prefill ends here
    cached_tokens: IntArray  # prefill that the prefix cache saved for requests admitted here
    # Of requests that are admitted here for the first time, as vLLM's metrics have it (PrefixCacheStats):
    queried_tokens: IntArray  # of their prompts
    hit_tokens: IntArray  # those of them that the prefix cache has
    # The columns below are 0 without turns.
    away: IntArray  # trajectories whose tool works
    # Tokens of the turns before that requests admitted here compute again, because the cache has lost them. Those of a
    # block that was not full, or after a dropped token, are left out, because no cache has them.
    again_tokens: IntArray
    idle_s: FloatArray  # seconds that the engine waited for a request before this row


TYPES = dict.fromkeys((field.name for field in fields(Columns)), np.int64) | {"idle_s": np.float64}

Chunk = tuple[int, int, int]  # (request, tokens computed before, after)
Work = dict[str, Any]  # of a step: arguments of `Clock.step` by name, without `ahead`


class Rows:
    """The rows so far."""

    def __init__(self, groups: tuple[Spec, ...]) -> None:
        self._windows = list({(group.kind, group.window): group for group in groups if group.window}.values())
        self._rows: list[dict[str, Any]] = []
        self._before: list[int] = []  # tokens that the decoding requests of the last row had computed before
        # By window and row: the columns of a WindowReads.
        self._reads: list[list[tuple[int, int, int]]] = [[] for _ in self._windows]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> dict[str, Any]:
        return self._rows[-1]

    def add(self, decoding: list[tuple[int, int]], chunks: list[Chunk], counts: dict[str, Any]) -> None:
        """Add a row with no finished request.

        decoding: for each request that decodes, the tokens computed before and after the row
        counts:   the columns that follow from neither, by name
        """
        work = {
            "decode_requests": len(decoding),
            "decode_kv_tokens": sum(before + 1 for before, _ in decoding),
            "finished": 0,
            "prefill_tokens": sum(after - before for _, before, after in chunks),
            "prefill_requests": len(chunks),
            "prefill_kv_tokens": sum(after for _, _, after in chunks),
            "prefill_pairs": sum((after - before) * (after + before + 1) // 2 for _, before, after in chunks),
        }
        self._rows.append(counts | work)
        self._before = [before for before, _ in decoding]
        for window, reads in zip(self._windows, self._reads, strict=True):
            decoded = sum(pairs_read(window, before, after) for before, after in decoding)
            read = sum(tokens_read(window, before, after) for _, before, after in chunks)
            pairs = sum(pairs_read(window, before, after) for _, before, after in chunks)
            reads.append((decoded, read, pairs))

    def decodes(self, before: list[int]) -> Iterator[Work]:
        """The work of steps without end in which requests only decode.

        before: tokens that each request has computed before the first step
        """
        for step in count():
            computed, requests = [tokens + step for tokens in before], len(before)
            reads = [(sum(pairs_read(window, at, at + 1) for at in computed), 0) for window in self._windows]
            yield dict.fromkeys(QUANTITIES, 0) | {
                "decode_requests": requests,
                "decode_kv_tokens": sum(computed) + requests,
                "sampled_requests": requests,
                "windows": reads,
            }

    def last_steps(self) -> list[Work]:
        """The work of each step of the last row. In one of several steps, requests only decode."""
        if self.last["steps"] > 1:
            return list(islice(self.decodes(self._before), self.last["steps"]))
        reads = [(decoded, pairs) for decoded, _, pairs in (reads[-1] for reads in self._reads)]
        return [{name: self.last[name] for name in QUANTITIES} | {"windows": reads}]

    def columns(self) -> dict[str, Array]:
        return {name: np.array([row[name] for row in self._rows], dtype=kind) for name, kind in TYPES.items()}

    def windows(self) -> tuple[WindowReads, ...]:
        """As in Schedule."""
        tables = [np.array(reads, dtype=np.int64).reshape(-1, 3).T for reads in self._reads]
        return tuple(
            WindowReads(window.kind, window.window, *table) for window, table in zip(self._windows, tables, strict=True)
        )
