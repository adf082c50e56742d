"""The state of vLLM V1's scheduler between two steps, and the two ways to go on: a run of quiet steps, or one step
in which anything may happen. `scheduler.schedule` alternates them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from fp8plan.model.kv_pool import Pool, blocks_for
from fp8plan.model.limits import EngineLimits

COLUMNS = (
    "steps",  # alike steps in this row
    "decode_requests",  # requests that get one token in each of them
    "decode_kv_tokens",  # KV tokens they read in the first step, summed; grows by decode_requests a step
    "prefill_tokens",
    "prefill_requests",
    "prefill_kv_tokens",  # KV tokens the chunks read: context before them + their own, summed
    "prefill_pairs",  # query-key pairs of the chunks, summed
    "sampled_requests",
    "cached_tokens",  # prefill that the prefix cache saved to requests admitted here
    "recomputed_tokens",  # work thrown away: tokens that the requests of `preemptions` had computed
    "running",
    "waiting",
    "used_blocks",  # while the last step of the row runs
    "preemptions",  # here, or in the step without tokens before: that costs nothing and has no row
    "finished",
)


class SchedulerState:
    """State between two steps. `now` is the number of the next step.

    A decoding request i has computed `now + self.offset[i]` tokens, so a quiet step changes no per-request
    state; it needs a new block in the steps that equal `self.phase[i]` modulo the block size.
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
        self.waiting = deque(range(requests))
        self.head_needs = 0  # with fewer free blocks, the head of the queue stays where it is
        self.running: dict[int, None] = {}  # in admission order; includes `leaving`
        self.partial: tuple[int, int] | None = None  # (request, computed tokens)
        self.offset = [0] * requests
        self.phase = [0] * requests
        self.in_phase = [0] * limits.block_size  # decoding requests by phase
        self.decoding = 0
        self.context = 0  # tokens computed so far, summed over decoding requests
        self.admission = [0] * requests  # of those that decode, counted: orders those that finish in the same step
        self.admissions = 0
        self.finishes: list[tuple[int, int, int]] = []  # (step, admission, request); outdated where admission differs
        self.leaving: list[int] = []  # finished, but the scheduler does not know yet (asynchronous scheduling)
        self.least_free = pool.free
        self.hit_freed_blocks = False
        self.preemptions = 0  # since the last row
        self.lost = 0  # tokens that those requests had computed
        self.rows = array("q")

    def next_row(self, longest: int) -> None:
        """Go on by one step, or by a run of at most `longest` alike steps."""
        if self._may_admit():
            self._step()
        else:
            self._decode(longest)

    def _may_admit(self) -> bool:
        """Whether the next step may do more than decode. Blocks only get scarcer while it does nothing else."""
        if self.partial is not None:
            return True
        if not self.waiting or self.pool.free < self.head_needs or len(self.running) >= self.max_num_seqs:
            return False
        return self._admissible(self.waiting[0], self.budget - self.decoding) is not None

    def _decode(self, longest: int) -> None:
        """Steps up to and including the next finish in which every decoding request finds its block; or one step, if
        already in the first a request finds none."""
        size, free, in_phase, decoding = self.block_size, self.pool.free, self.in_phase, self.decoding
        phase = self.now % size
        if in_phase[phase] > free or not decoding:
            self._end(1, self._serve_decoding())
            return
        wanted = 1 if self.leaving else min(self._next_finish() - self.now + 1, longest)
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

    def _next_finish(self) -> int:
        finishes, admission = self.finishes, self.admission
        while admission[finishes[0][2]] != finishes[0][1]:
            heappop(finishes)
        return finishes[0][0]

    def _step(self) -> None:
        """One step with everything that can happen in it."""
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
        while self.waiting and budget and not preemptions and len(self.running) < self.max_num_seqs:
            found = self._admissible(self.waiting[0], budget)
            if found is None:
                break
            hit, after = found
            request = self.waiting.popleft()
            self.head_needs = 0
            self.running[request] = None
            self.pool.admit(request, hit)
            before = hit * self.block_size
            cached += before
            budget -= after - before
            self._compute(request, before, after, blocks_for(after, self.block_size) - hit, chunks)
        self._end(1, preemptions, chunks, cached)

    def _admissible(self, request: int, budget: int) -> tuple[int, int] | None:
        """(blocks hit, tokens computed after this step) if the head of the queue may be admitted now."""
        known, size = self.known[request], self.block_size
        hit, from_queue = self.pool.lookup(request, known)
        after = hit * size + budget
        if after > known:
            after = known
        must_fit = known if self.reserve_full_prompt else after
        needed = blocks_for(must_fit, size) - hit + from_queue
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
        while (granted := in_phase[phase] - served) > pool.free:
            granted = pool.free
            if granted:
                pool.take(granted)
                served += granted
            self._preempt_last()
            preemptions += 1
        if granted:
            pool.take(granted)
        return preemptions

    def _preempt_last(self) -> None:
        pool, (request, _) = self.pool, self.running.popitem()
        if self.partial is not None and request == self.partial[0]:
            computed = self.partial[1]
            self.partial = None
        elif request in self.leaving:  # its last token is on the way: nothing to resume
            self.leaving.remove(request)
            pool.release(request, blocks_for(self.final[request], self.block_size), self.final[request] - 1)
            return
        else:
            computed = self._stop_decoding(request)
        self.lost += computed
        # Under asynchronous scheduling the newest generated token is not known yet, so its block has no hash.
        known, free = self.known[request], pool.free
        pool.release(request, blocks_for(computed, self.block_size), computed - (self.lag and computed > known))
        if computed >= known:
            self.known[request] = computed + 1
        self.waiting.appendleft(request)
        self._head_needs(pool.free - free)  # all that it held but what a sibling still holds

    def _start_decoding(self, request: int) -> None:
        """From the next step on (`now` already points there)."""
        computed, now = self.known[request], self.now
        self.offset[request] = offset = computed - now
        self.phase[request] = phase = -offset % self.block_size
        self.in_phase[phase] += 1
        self.decoding += 1
        self.context += computed
        self.admission[request] = self.admissions = admission = self.admissions + 1
        heappush(self.finishes, (now + self.final[request] - computed - 1, admission, request))

    def _stop_decoding(self, request: int) -> int:
        """Returns the tokens computed."""
        computed = self.now + self.offset[request]
        self.in_phase[self.phase[request]] -= 1
        self.decoding -= 1
        self.context -= computed
        self.admission[request] = 0
        return computed

    def _end(self, steps: int, preemptions: int, chunks: Sequence[tuple[int, int, int]] = (), cached: int = 0) -> None:
        """Record a row, move on, start those whose prefill is done, and let finished requests go."""
        free = self.pool.free
        if free < self.least_free:
            self.least_free = free
        self.preemptions += preemptions
        started = [request for request, _, after in chunks if after == self.known[request]] if chunks else ()
        decoding, context, running = self.decoding, self.context, len(self.running)
        self.now += steps
        self.context += steps * decoding
        for request in started:
            self._start_decoding(request)
        finished = self._collect_finished() if self.finishes and self.finishes[0][0] < self.now else []
        if decoding or chunks:
            self.rows.extend(
                (
                    steps,
                    decoding,
                    context + decoding,
                    *(_prefill_work(chunks) if chunks else NO_PREFILL),
                    decoding + len(started),
                    cached,
                    self.lost,
                    running,
                    len(self.waiting),
                    self.num_blocks - free,
                    self.preemptions,
                    len(finished),
                )
            )
            self.preemptions = self.lost = 0
        # Else nobody was served: under asynchronous scheduling a finished request still holds its blocks, and the last
        # one left decoding preempts itself; or the engine only learns of finishes.
        gone = self.leaving if self.lag else finished
        self.leaving = finished if self.lag else []
        for request in gone:
            del self.running[request]
            final = self.final[request]
            self.pool.release(request, blocks_for(final, self.block_size), final)

    def _collect_finished(self) -> list[int]:
        finished: list[int] = []
        while self.finishes and self.finishes[0][0] < self.now:
            _, admission, request = heappop(self.finishes)
            if self.admission[request] == admission:
                self._stop_decoding(request)
                finished.append(request)
        return finished


NO_PREFILL = (0, 0, 0, 0)


def _prefill_work(chunks: Sequence[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """(tokens, chunks, KV tokens read, query-key pairs) of chunks (request, tokens computed before, after)."""
    tokens = read = pairs = 0
    for _, before, after in chunks:
        tokens += after - before
        read += after
        pairs += (after - before) * (after + before + 1) // 2
    return tokens, len(chunks), read, pairs
