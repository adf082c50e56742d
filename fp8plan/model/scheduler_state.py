"""The state of vLLM V1's scheduler between two steps, and the two ways to go on: a run of quiet steps, or one step
in which anything may happen. `scheduler.schedule` alternates them.
"""

from __future__ import annotations

from array import array
from collections import deque
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


NO_PREFILL = (0, 0, 0, 0)


def _prefill_work(chunks: list[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """(tokens, chunks, KV tokens read, query-key pairs) of chunks (request, tokens computed before, after)."""
    return (
        sum(after - before for _, before, after in chunks),
        len(chunks),
        sum(after for _, _, after in chunks),
        sum((after - before) * (after + before + 1) // 2 for _, before, after in chunks),
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
        self.in_phase: list[dict[int, None]] = [{} for _ in range(limits.block_size)]  # decoding requests, in order
        self.decoding = 0
        self.context = 0  # tokens computed so far, summed over decoding requests
        self.admission = [0] * requests  # counts admissions: orders requests that finish in the same step
        self.admissions = 0
        self.finish_at = [-1] * requests
        self.finishes: list[tuple[int, int, int]] = []  # (step, admission, request); outdated where finish_at differs
        self.leaving: list[int] = []  # finished, but the scheduler does not know yet (asynchronous scheduling)
        self.least_free = pool.free
        self.hit_freed_blocks = False
        self.preemptions = 0  # since the last row
        self.lost = 0  # tokens that those requests had computed
        self.rows = array("q")

    def can_admit(self) -> bool:
        """Whether the next step may do more than decode. Blocks only get scarcer while it does nothing else."""
        if self.partial is not None:
            return True
        if not self.waiting or self.pool.free < self.head_needs or len(self.running) >= self.max_num_seqs:
            return False
        return self._admissible(self.waiting[0], self.budget - self.decoding) is not None

    def quiet_steps(self, longest: int) -> tuple[int, int]:
        """(steps up to and including the next finish in which every decoding request finds its block, those blocks)."""
        if not self.decoding:
            return 0, 0
        until_finish = 1 if self.leaving else self._next_finish() - self.now + 1
        wanted = until_finish if until_finish < longest else longest
        size, free, in_phase = self.block_size, self.pool.free, self.in_phase
        cycles = min(free // self.decoding, wanted // size)  # in each, every request fills a block
        steps, blocks = cycles * size, cycles * self.decoding
        phase = (self.now + steps) % size
        while steps < wanted:
            more = blocks + len(in_phase[phase])
            if more > free:
                break
            steps, blocks, phase = steps + 1, more, phase + 1
            if phase == size:
                phase = 0
        return steps, blocks

    def _next_finish(self) -> int:
        finishes, finish_at = self.finishes, self.finish_at
        while finish_at[finishes[0][2]] != finishes[0][0]:
            heappop(finishes)
        return finishes[0][0]

    def decode(self, steps: int, blocks: int) -> None:
        """Advance every decoding request by `steps` tokens, which takes that many blocks."""
        self.pool.take(blocks)
        self._end(steps, [], 0, 0)

    def step(self) -> None:
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
            self.admission[request] = self.admissions = self.admissions + 1
            self.pool.admit(request, hit)
            before = hit * self.block_size
            cached += before
            budget -= after - before
            self._compute(request, before, after, blocks_for(after, self.block_size) - hit, chunks)
        self._end(1, chunks, cached, preemptions)

    def _admissible(self, request: int, budget: int) -> tuple[int, int] | None:
        """(blocks hit, tokens computed after this step) if the head of the queue may be admitted now."""
        known, size = self.known[request], self.block_size
        hit, from_queue = self.pool.lookup(request, known)
        after = min(known, hit * size + budget)
        must_fit = known if self.reserve_full_prompt else after
        needed = blocks_for(must_fit, size) - hit + from_queue
        spare = self.pool.free - needed
        if spare < self.least_free:
            self.least_free = spare
        if from_queue:
            self.hit_freed_blocks = True
        if spare < 0:
            # While it is the head, its whole prompt comes to need more, never less, but for one block: the copy of its
            # prompt's end that it would have hit is evicted, and the next one is held by a sibling. A first chunk needs
            # less when the blocks it would have taken from the free queue are evicted, or other requests leave it less
            # of the budget.
            self.head_needs = needed - 1 if self.reserve_full_prompt else 0
            return None
        return hit, after

    def _compute(self, request: int, before: int, after: int, blocks: int, chunks: list[tuple[int, int, int]]) -> None:
        self.pool.take(blocks)
        self.pool.computed(request, after)
        self.partial = (request, after) if after < self.known[request] else None
        chunks.append((request, before, after))

    def _serve_decoding(self) -> int:
        """Give each decoding request the block it needs in this step; returns the preemptions that took."""
        members = self.in_phase[self.now % self.block_size]
        if len(members) <= self.pool.free:
            self.pool.take(len(members))
            return 0
        queue, served, preemptions = list(members), 0, 0
        while True:
            granted = min(self.pool.free, len(queue) - served)
            if granted:
                self.pool.take(granted)
                served += granted
            if served == len(queue):
                return preemptions
            self._preempt_last()
            preemptions += 1
            if queue[-1] not in self.running:  # the last running request may be one that waits for a block here
                queue.pop()

    def _preempt_last(self) -> None:
        request, _ = self.running.popitem()
        if self.partial is not None and request == self.partial[0]:
            computed = self.partial[1]
            self.partial = None
        elif request in self.leaving:  # its last token is on the way: nothing to resume
            self.leaving.remove(request)
            self._release(request, self.final[request], in_flight=1)
            return
        else:
            computed = self._stop_decoding(request)
        self.lost += computed
        # Under asynchronous scheduling the newest generated token is not known yet, so its block has no hash.
        self._release(request, computed, in_flight=int(self.lag and computed > self.known[request]))
        self.known[request] = max(self.known[request], computed + 1)
        self.waiting.appendleft(request)
        self.head_needs = 0

    def _release(self, request: int, computed: int, in_flight: int = 0) -> None:
        self.pool.release(request, blocks_for(computed, self.block_size), computed - in_flight)

    def _start_decoding(self, request: int) -> None:
        """From the next step on (`now` already points there)."""
        computed = self.known[request]
        self.offset[request] = computed - self.now
        self.phase[request] = phase = -self.offset[request] % self.block_size
        self.in_phase[phase][request] = None
        self.decoding += 1
        self.context += computed
        self.finish_at[request] = finish = self.now + self.final[request] - computed - 1
        heappush(self.finishes, (finish, self.admission[request], request))

    def _stop_decoding(self, request: int) -> int:
        """Returns the tokens computed."""
        computed = self.now + self.offset[request]
        del self.in_phase[self.phase[request]][request]
        self.decoding -= 1
        self.context -= computed
        self.finish_at[request] = -1
        return computed

    def _end(self, steps: int, chunks: list[tuple[int, int, int]], cached: int, preemptions: int) -> None:
        """Record a row, move on, start those whose prefill is done, and let finished requests go."""
        if self.pool.free < self.least_free:
            self.least_free = self.pool.free
        self.preemptions += preemptions
        decoding = self.decoding
        started = [request for request, _, after in chunks if after == self.known[request]] if chunks else ()
        row = (
            steps,
            decoding,
            self.context + decoding,
            *(_prefill_work(chunks) if chunks else NO_PREFILL),
            decoding + len(started),
            cached,
            self.lost,
            len(self.running),
            len(self.waiting),
            self.num_blocks - self.pool.free,
            self.preemptions,
        )
        self.now += steps
        self.context += steps * decoding
        for request in started:
            self._start_decoding(request)
        finished = self._collect_finished() if self.finishes and self.finishes[0][0] < self.now else []
        gone = self.leaving if self.lag else finished
        self.leaving = finished if self.lag else []
        for request in gone:
            del self.running[request]
            self._release(request, self.final[request])
        # Under asynchronous scheduling a step may serve nobody: a finished request still holds its blocks, and the
        # last one left decoding preempts itself; or the engine only learns of finishes.
        if decoding or chunks:
            self.rows.extend((*row, len(finished)))
            self.preemptions = self.lost = 0

    def _collect_finished(self) -> list[int]:
        finished: list[int] = []
        while self.finishes and self.finishes[0][0] < self.now:
            step, _, request = heappop(self.finishes)
            if self.finish_at[request] == step:
                self._stop_decoding(request)
                finished.append(request)
        return finished
