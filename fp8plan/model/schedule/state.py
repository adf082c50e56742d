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
from fp8plan.model.schedule.kv_pool import Pool, blocks_for

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
    """The scheduler between two steps, for any groups in the pool. `now` is the number of the next step.

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

    def unfinished(self) -> bool:
        """True while a request waits or runs."""
        raise NotImplementedError

    def next_row(self, longest: int) -> None:
        """Advance by one step, or by a run of at most `longest` alike steps."""
        raise NotImplementedError

    def run(self, longest: int) -> dict[str, IntArray]:
        """Advance to the end. Returns int64 arrays of shape (rows,), one per name in ROW and PREFILL.

        longest: most steps in one row
        """
        while self.unfinished():
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

    def _record(self, steps: int, requests: int, kv_tokens: int, running: int, free: int) -> None:
        """Record a row, with 0 finished requests."""
        self.rows += (
            steps,
            requests,
            kv_tokens,
            self.lost,
            running,
            self.waiting,
            self.num_blocks - free,
            self.preemptions,
            0,
        )
        self.preemptions = self.lost = 0

    def _record_prefill(self, chunks: Sequence[Chunk], started: int, cached: int) -> None:
        """Record the prefill of the last row. started: number of requests whose prefill it ends"""
        self.prefills += (len(self.rows) // len(ROW) - 1, *prefill_work(chunks), started, cached)


class SchedulerState(State):
    """The scheduler between two steps, if one group of full attention has the pool.

    Requests are admitted in order of arrival. A preempted request is the last one admitted, and becomes the head of the
    queue. So in order of arrival the running requests come before `head`, and the others wait.

    A quiet step changes no per-request state. A decoding request i needs a new block in the steps that equal
    `-self.offset[i]` modulo the block size.
    At most one request is partly prefilled, and it is the last of the running ones. Admission stops when a chunk uses
    up the budget, and a preemption takes the last request first.
    """

    def __init__(
        self, prompts: list[int], responses: list[int], pool: Pool, block_size: int, limits: EngineLimits
    ) -> None:
        super().__init__(prompts, responses, pool.free, limits)
        requests = len(prompts)
        self.pool = pool
        self.block_size = block_size
        self.known = list(prompts)  # prompt + generated tokens of requests that are not decoding
        # The unfinished requests as a ring in order of arrival. Its last entry, also at index -1, is no request.
        self.before = list(range(-1, requests))
        self.after = [*range(1, requests + 1), 0]
        self.head = 0  # first waiting request
        self.running = 0  # includes `leaving`
        self.partial: tuple[int, int] | None = None  # (request, computed tokens)
        self.in_phase = [0] * block_size  # decoding requests that need a block in such steps
        self.hit_freed_blocks = False

    def unfinished(self) -> bool:
        return self.waiting > 0 or self.running > 0

    def next_row(self, longest: int) -> None:
        if self._may_admit():
            self._step()
        else:
            self._decode(longest)

    def _may_admit(self) -> bool:
        """True if the next step may do more than decode. Steps that only decode make blocks scarcer."""
        if self.partial is not None:
            return True
        if not self.waiting or self.pool.free < self.head_needs or self.running >= self.max_num_seqs:
            return False
        return self._admissible(self.head, self.budget - self.decoding) is not None

    def _decode(self, longest: int) -> None:
        """Run steps until a request finishes, while every decoding request finds its block.

        If a request finds none in the first step, run that step alone.
        """
        size, free, in_phase, decoding = self.block_size, self.pool.free, self.in_phase, self.decoding
        phase = self.now % size
        if in_phase[phase] > free or not decoding:
            self._end(1, self._serve_decoding())
            return
        wanted = min(longest, self._steps_to_finish())
        steps = blocks = 0
        if wanted >= size and free >= decoding:
            cycles = min(free // decoding, wanted // size)  # each request fills one block in a cycle
            steps, blocks = cycles * size, cycles * decoding
        while steps < wanted:
            more = blocks + in_phase[phase]
            if more > free:
                break
            steps, blocks, phase = steps + 1, more, phase + 1
            if phase == size:
                phase = 0
        self.pool.take(blocks)
        self._end(steps, 0)

    def _step(self) -> None:
        """Run one step with everything that can happen in it."""
        preemptions = self._serve_decoding()
        budget = self.budget - self.decoding
        chunks: list[Chunk] = []
        if self.partial is not None and budget:
            request, before = self.partial
            after = min(self.known[request], before + budget)
            blocks = blocks_for(after, self.block_size) - blocks_for(before, self.block_size)
            if blocks > self.pool.free:
                self._preempt_last()
                preemptions += 1
            else:
                budget -= after - before
                self._compute(request, before, after, blocks, chunks)
        cached = 0
        while self.waiting and budget and not preemptions and self.running < self.max_num_seqs:
            request = self.head
            admissible = self._admissible(request, budget)
            if admissible is None:
                break
            hit, after = admissible
            self.head, self.head_needs = self.after[request], 0
            self.waiting -= 1
            self.running += 1
            self.pool.admit(request, hit)
            before = hit * self.block_size
            cached += before
            budget -= after - before
            self._compute(request, before, after, blocks_for(after, self.block_size) - hit, chunks)
        self._end(1, preemptions, chunks, cached)

    def _admissible(self, request: int, budget: int) -> tuple[int, int] | None:
        """The pair (blocks hit, tokens computed after this step) for the head of the queue; None if it must wait."""
        known, size = self.known[request], self.block_size
        hit, from_queue = self.pool.lookup(request, known)
        after = hit * size + budget
        if after > known:
            after = known
        must_fit = known if self.reserve_full_prompt else after
        needed = -(-must_fit // size) - hit + from_queue
        spare = self.pool.free - needed
        if spare < self.least_free:
            self.least_free = spare
        if from_queue:
            self.hit_freed_blocks = True
        if spare < 0:
            self._head_needs(needed)
            return None
        return hit, after

    def _head_needs(self, blocks: int) -> None:
        """Set the fewest free blocks that may admit the head of the queue, which needs `blocks` now.

        Its whole prompt will need at least as many, less one. That one is saved if the copy of the prompt's end that it
        would hit is evicted, and a sibling holds the next copy. A first chunk needs less if blocks that it would take
        from the free queue are evicted, or if other requests leave it less of the budget.
        """
        self.head_needs = blocks - 1 if self.reserve_full_prompt else 0

    def _compute(self, request: int, before: int, after: int, blocks: int, chunks: list[Chunk]) -> None:
        self.pool.take(blocks)
        self.pool.computed(request, after)
        self.partial = (request, after) if after < self.known[request] else None
        chunks.append((request, before, after))

    def _serve_decoding(self) -> int:
        """Give each decoding request the block it needs in this step; returns the number of preemptions."""
        pool, in_phase, phase = self.pool, self.in_phase, self.now % self.block_size
        served = preemptions = 0
        # The preempted request, the last running one, may itself wait for a block here.
        while (wanting := in_phase[phase] - served) > pool.free:
            if pool.free:
                served += pool.free
                pool.take(pool.free)
            self._preempt_last()
            preemptions += 1
        if wanting:
            pool.take(wanting)
        return preemptions

    def _preempt_last(self) -> None:
        pool, request = self.pool, self.before[self.head]
        if self.leaving and request in self.leaving:  # its last token is on the way: nothing to resume
            self.leaving.remove(request)
            self._remove(request, in_flight=self.final[request] > self.known[request])
            return
        if self.partial is not None and request == self.partial[0]:
            computed = self.partial[1]
            self.partial = None
        else:
            computed = self._stop_decoding(request)
        self.running -= 1
        self.waiting += 1
        self.head = request
        self.lost += computed
        known, free = self.known[request], pool.free
        # Under asynchronous scheduling the newest generated token is not known yet, so its block has no hash.
        in_flight = self.lag and computed > known
        pool.release(request, blocks_for(computed, self.block_size), computed - in_flight)
        if computed >= known:
            self.known[request] = computed + 1
        self._head_needs(pool.free - free)  # all its blocks, except those that a sibling still holds

    def _remove(self, request: int, in_flight: bool = False) -> None:
        """Remove a finished request from the running ones, and release its blocks."""
        before, after = self.before[request], self.after[request]
        self.after[before], self.before[after] = after, before
        self.running -= 1
        final = self.final[request]
        self.pool.release(request, blocks_for(final, self.block_size), final - in_flight)

    def _start_decoding(self, request: int, computed: int) -> None:
        super()._start_decoding(request, computed)
        self.in_phase[-self.offset[request] % self.block_size] += 1

    def _stop_decoding(self, request: int) -> int:
        self.in_phase[-self.offset[request] % self.block_size] -= 1
        return super()._stop_decoding(request)

    def _end(self, steps: int, preemptions: int, chunks: Sequence[Chunk] = (), cached: int = 0) -> None:
        """Record a row, advance, start decoding after a whole prefill, and release finished requests."""
        free, decoding, context = self.pool.free, self.decoding, self.context
        if free < self.least_free:
            self.least_free = free
        self.preemptions += preemptions
        self.now += steps
        self.context += steps * decoding
        if decoding or chunks:
            self._record(steps, decoding, context + decoding, self.running, free)
        # Else nobody was served. Either the engine only learns of finishes, or a finished request still holds its
        # blocks under asynchronous scheduling, and the last decoding one preempts itself.
        if chunks:
            started = len(chunks) - (self.partial is not None)
            self._record_prefill(chunks, started, cached)
            for request, _, _ in chunks[:started]:
                self._start_decoding(request, self.known[request])
        finished = self._pass_finishes()
        if finished:
            self.rows[-1] = len(finished)
        for request in self._gone(finished):
            self._remove(request)


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
