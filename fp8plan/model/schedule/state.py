"""The state of vLLM V1's scheduler between two steps, and the rows of its history.

`next_row` adds a row: a run of quiet steps, or one step in which anything may happen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits

Chunk = tuple[int, int, int]  # (request, tokens computed before, after)

ROW = (
    "steps",  # alike steps in this row
    "decode_requests",  # requests that get one token in each step
    "decode_kv_tokens",  # KV tokens they read in the row's first step, summed; grows by decode_requests a step
    "recomputed_tokens",  # work thrown away: tokens that the requests of `preemptions` had computed
    "running",
    "waiting",
    "used_blocks",  # while the last step of the row runs
    "preemptions",  # in this row, or in a step without tokens before it, which costs nothing and has no row
    "finished",
)
# Columns of rows with prefill; zero in the others, which are most.
PREFILL = (
    "prefill_tokens",
    "prefill_requests",
    "prefill_kv_tokens",  # KV tokens the chunks read: context before them + their own, summed
    "prefill_pairs",  # query-key pairs of the chunks, summed
    "sampled_requests",  # whose prefill ends here; `State.run` adds the decoding requests
    "cached_tokens",  # prefill that the prefix cache saved for requests admitted here
)


class State:
    """The requests that run or wait, and the rows so far. `now` is the number of the next step.

    A decoding request i has computed `now + self.offset[i]` tokens.
    """

    def __init__(self, prompts: list[int], responses: list[int], num_blocks: int, limits: EngineLimits) -> None:
        requests = len(prompts)
        self.num_blocks = num_blocks
        self.final = [p + r - 1 for p, r in zip(prompts, responses, strict=True)]  # tokens computed at the end
        self.budget, self.max_num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.reserve_full_prompt = limits.scheduler_reserve_full_isl
        self.lag = int(limits.async_scheduling)
        self.now = 0
        self.waiting = requests
        self.running: list[int] = []  # in order of admission, which is the order of arrival; includes `leaving`
        self.head_needs = 0  # with fewer free blocks, the head of the queue stays where it is
        self.offset = [0] * requests
        self.decoding = 0
        self.context = 0  # tokens computed so far, summed over decoding requests
        self.finishes: list[int] = []  # heap of finish step * requests + request; outdated where finish_of differs
        self.finish_of = [-1] * requests
        self.ended = [0] * requests  # the row that ended each request
        self.leaving: list[int] = []  # finished requests of which the scheduler does not know yet (asynchronous)
        self.least_free = num_blocks
        self.preemptions = 0  # number since the last row
        self.lost = 0  # tokens that the preempted requests had computed
        self.rows: list[int] = []  # the ROW columns of each row in turn: lists of numbers grow fastest
        self.prefills: list[int] = []  # (row, *PREFILL) of each row with prefill, in turn

    def next_row(self, longest: int) -> None:
        """Advance by one step, or by a run of at most `longest` alike steps."""
        raise NotImplementedError

    def run(self, longest: int) -> dict[str, IntArray]:
        """Advance to the end. Returns int64 arrays of shape (rows,), one per name in ROW and PREFILL.

        longest: most steps in one row
        """
        while self.waiting or self.running:
            self.next_row(longest)
        table = table_of(self.rows, len(ROW))
        columns = dict(zip(ROW, table, strict=True))
        at, *more = table_of(self.prefills, 1 + len(PREFILL))
        for name, values in zip(PREFILL, more, strict=True):
            columns[name] = np.zeros(table.shape[1], dtype=np.int64)
            columns[name][at] = values
        columns["sampled_requests"] += columns["decode_requests"]
        return columns

    def _start_decoding(self, request: int, computed: int) -> None:
        """Let a request decode from the next step on (`now` already points there)."""
        self.offset[request] = offset = computed - self.now
        self.decoding += 1
        self.context += computed
        self.finish_of[request] = finish = (self.final[request] - offset - 1) * len(self.final) + request
        heappush(self.finishes, finish)

    def _stop_decoding(self, request: int) -> int:
        """Stop the decoding of a request, and return the tokens it has computed."""
        computed = self.now + self.offset[request]
        self.decoding -= 1
        self.context -= computed
        self.finish_of[request] = -1
        return computed

    def _steps_to_finish(self) -> int:
        """Steps up to and including the next finish of a request; 1 if a finished one still holds blocks."""
        if self.leaving:
            return 1
        finishes, requests = self.finishes, len(self.final)
        while self.finish_of[finishes[0] % requests] != finishes[0]:
            heappop(finishes)
        return finishes[0] // requests - self.now + 1

    def _pass_finishes(self) -> list[int]:
        """The requests that have finished by now."""
        finished: list[int] = []
        finishes, requests = self.finishes, len(self.final)
        end = self.now * requests
        while finishes and finishes[0] < end:
            finish = heappop(finishes)
            request = finish % requests
            if self.finish_of[request] == finish:
                self._finish(request)
                self.ended[request] = len(self.rows) // len(ROW) - 1
                finished.append(request)
        return finished

    def _finish(self, request: int) -> None:
        self._stop_decoding(request)

    def _gone(self, finished: list[int]) -> list[int]:
        """The requests to release now: under asynchronous scheduling those that finished before this time."""
        if not self.lag:
            return finished
        gone, self.leaving = self.leaving, finished
        return gone

    def _record(self, steps: int, requests: int, kv_tokens: int, free: int) -> None:
        """Record a row, with 0 finished requests."""
        self.rows += (
            steps,
            requests,
            kv_tokens,
            self.lost,
            len(self.running),
            self.waiting,
            self.num_blocks - free,
            self.preemptions,
            0,
        )
        self.preemptions = self.lost = 0

    def _record_prefill(self, chunks: Sequence[Chunk], started: int, cached: int) -> None:
        """Record the prefill of the last row. started: number of requests whose prefill it ends"""
        self.prefills += (len(self.rows) // len(ROW) - 1, *prefill_work(chunks), started, cached)


def prefill_work(chunks: Sequence[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """The (tokens, chunks, KV tokens read, query-key pairs) of chunks (request, tokens computed before, after)."""
    tokens = read = pairs = 0
    for _, before, after in chunks:
        tokens += after - before
        read += after
        pairs += (after - before) * (after + before + 1) // 2
    return tokens, len(chunks), read, pairs


def table_of(values: list[int], columns: int) -> IntArray:
    """The table of `values`, row by row, as an int64 array of shape (columns, rows)."""
    return np.frombuffer(array("q", values), dtype=np.int64).reshape(-1, columns).T
