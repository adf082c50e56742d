"""The state of vLLM V1's scheduler between two steps, and the two ways to go on: a run of quiet steps, or one step
in which anything may happen. `next_row` takes the one that is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.schedule.history import ROW, columns_of, prefill_work
from fp8plan.model.schedule.kv_pool import Pool, blocks_for


class SchedulerState:
    """State between two steps. `now` is the number of the next step.

    Requests are admitted in order of arrival, a preemption takes the last one admitted, and it becomes the head of the
    queue: so those that run come before `head` in order of arrival, and those that wait from there on.

    A decoding request i has computed `now + self.offset[i]` tokens, so a quiet step changes no per-request
    state; it needs a new block in the steps that equal `-self.offset[i]` modulo the block size.
    At most one request is partly prefilled, and it is the last of the running ones: admission stops when a
    chunk uses up the budget, and a preemption takes the last first.
    """

    def __init__(self, prompts: list[int], responses: list[int], pool: Pool, limits: EngineLimits) -> None:
        requests = len(prompts)
        self.pool, self.num_blocks = pool, pool.free
        self.final = [p + r - 1 for p, r in zip(prompts, responses, strict=True)]  # tokens computed at the end
        self.block_size = limits.block_size
        self.budget, self.max_num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.reserve_full_prompt = limits.scheduler_reserve_full_isl
        self.lag = limits.async_scheduling
        self.now = 0
        self.known = list(prompts)  # prompt + generated tokens of requests that are not decoding
        # The unfinished requests as a ring in order of arrival; its last entry, also found at -1, is no request.
        self.before = list(range(-1, requests))
        self.after = [*range(1, requests + 1), 0]
        self.head = 0  # of the queue
        self.head_needs = 0  # with fewer free blocks, it stays where it is
        self.waiting = requests
        self.running = 0  # includes `leaving`
        self.partial: tuple[int, int] | None = None  # (request, computed tokens)
        self.offset = [0] * requests
        self.in_phase = [0] * limits.block_size  # decoding requests that need a block in such steps
        self.decoding = 0
        self.context = 0  # tokens computed so far, summed over decoding requests
        self.finishes: list[int] = []  # heap of finish step * requests + request; outdated where finish_of differs
        self.finish_of = [-1] * requests
        self.leaving: list[int] = []  # finished, but the scheduler does not know yet (asynchronous scheduling)
        self.least_free = pool.free
        self.hit_freed_blocks = False
        self.preemptions = 0  # since the last row
        self.lost = 0  # tokens that those requests had computed
        self.rows: list[int] = []  # ROW of each row, one after the other: lists of numbers grow fastest
        self.prefills: list[int] = []  # (row, *PREFILL) of each row with prefill, one after the other

    def columns(self) -> dict[str, IntArray]:
        """The history so far: int64 arrays of shape (rows,), one per name in ROW and PREFILL."""
        return columns_of(self.rows, self.prefills)

    def next_row(self, longest: int) -> None:
        """Go on by one step, or by a run of at most `longest` alike steps."""
        if self._may_admit():
            self._step()
        else:
            self._decode(longest)

    def _may_admit(self) -> bool:
        """True if the next step may do more than decode. Blocks only get scarcer while it does nothing else."""
        if self.partial is not None:
            return True
        if not self.waiting or self.pool.free < self.head_needs or self.running >= self.max_num_seqs:
            return False
        return self._admissible(self.head, self.budget - self.decoding) is not None

    def _decode(self, longest: int) -> None:
        """Run steps up to and including the next finish in which every decoding request finds its block. If a request
        finds none in the first step already, run that one step.
        """
        size, free, in_phase, decoding = self.block_size, self.pool.free, self.in_phase, self.decoding
        phase = self.now % size
        if in_phase[phase] > free or not decoding:
            self._end(1, self._serve_decoding())
            return
        wanted = 1 if self.leaving else next_finish(self.finishes, self.finish_of) - self.now + 1
        if wanted > longest:
            wanted = longest
        steps = blocks = 0
        if wanted >= size and free >= decoding:
            cycles = min(free // decoding, wanted // size)  # in each, every request fills a block
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
        chunks: list[tuple[int, int, int]] = []  # (request, tokens computed before, after)
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
            found = self._admissible(request, budget)
            if found is None:
                break
            hit, after = found
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
        """The pair (blocks hit, tokens computed after this step) if the head of the queue may be admitted now; else
        None.
        """
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
        """Note what the head of the queue needs now. While it is the head, its whole prompt comes to need more, never
        less, but for one block: the copy of its prompt's end that it would have hit is evicted, and the next one is
        held by a sibling. A first chunk comes to need less when blocks that it would have taken from the free queue
        are evicted, or other requests leave it less of the budget."""
        self.head_needs = blocks - 1 if self.reserve_full_prompt else 0

    def _compute(self, request: int, before: int, after: int, blocks: int, chunks: list[tuple[int, int, int]]) -> None:
        self.pool.take(blocks)
        self.pool.computed(request, after)
        self.partial = (request, after) if after < self.known[request] else None
        chunks.append((request, before, after))

    def _serve_decoding(self) -> int:
        """Give each decoding request the block it needs in this step; returns the preemptions that took."""
        pool, in_phase, phase = self.pool, self.in_phase, self.now % self.block_size
        served = preemptions = 0
        # The last running request, which is preempted, may be one that waits for a block here.
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
        self._head_needs(pool.free - free)  # all that it held but what a sibling still holds

    def _remove(self, request: int, in_flight: bool = False) -> None:
        """Drop a finished request from the running ones."""
        before, after = self.before[request], self.after[request]
        self.after[before], self.before[after] = after, before
        self.running -= 1
        final = self.final[request]
        self.pool.release(request, blocks_for(final, self.block_size), final - in_flight)

    def _start_decoding(self, request: int) -> None:
        """Let requests decode from the next step on (`now` already points there)."""
        computed = self.known[request]
        self.offset[request] = offset = computed - self.now
        self.in_phase[-offset % self.block_size] += 1
        self.decoding += 1
        self.context += computed
        self.finish_of[request] = finish = (self.final[request] - offset - 1) * len(self.final) + request
        heappush(self.finishes, finish)

    def _stop_decoding(self, request: int) -> int:
        """Stop the decoding of a request, and return the tokens it has computed."""
        offset = self.offset[request]
        computed = self.now + offset
        self.in_phase[-offset % self.block_size] -= 1
        self.decoding -= 1
        self.context -= computed
        self.finish_of[request] = -1
        return computed

    def _end(self, steps: int, preemptions: int, chunks: Sequence[tuple[int, int, int]] = (), cached: int = 0) -> None:
        """Record a row, move on, start decoding where the prefill is done, and let finished requests go."""
        free, decoding, context = self.pool.free, self.decoding, self.context
        if free < self.least_free:
            self.least_free = free
        self.preemptions += preemptions
        self.now += steps
        self.context += steps * decoding
        if chunks:
            started = len(chunks) - (self.partial is not None)
            self.prefills += (len(self.rows) // len(ROW), *prefill_work(chunks), started, cached)
            for request, _, _ in chunks[:started]:
                self._start_decoding(request)
        finished = self._collect_finished()
        if decoding or chunks:
            self.rows += (
                steps,
                decoding,
                context + decoding,
                self.lost,
                self.running,
                self.waiting,
                self.num_blocks - free,
                self.preemptions,
                len(finished),
            )
            self.preemptions = self.lost = 0
        # Else nobody was served: under asynchronous scheduling a finished request still holds its blocks, and the last
        # one left decoding preempts itself; or the engine only learns of finishes.
        gone = finished
        if self.lag:
            gone, self.leaving = self.leaving, finished
        for request in gone:
            self._remove(request)

    def _collect_finished(self) -> list[int]:
        finished: list[int] = []
        finishes, requests = self.finishes, len(self.final)
        end = self.now * requests
        while finishes and finishes[0] < end:
            finish = heappop(finishes)
            request = finish % requests
            if self.finish_of[request] == finish:
                self._stop_decoding(request)
                finished.append(request)
        return finished


def next_finish(finishes: list[int], finish_of: list[int]) -> int:
    """The step of the next finish, and drop outdated entries of the heap before it."""
    requests = len(finish_of)
    while finish_of[finishes[0] % requests] != finishes[0]:
        heappop(finishes)
    return finishes[0] // requests
