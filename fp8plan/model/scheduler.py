"""vLLM V1's scheduler on a finite batch of requests, all waiting at the start: what every step does.

The policy (vllm/v1/core/sched/scheduler.py, first come first served, checked against the real class in
tests/model/test_scheduler.py): a step serves the running requests in admission order, one token each, or a
chunk of what is still to be prefilled; a request that finds no free block preempts the last running request,
possibly itself. If nothing was preempted, waiting requests are admitted while slots, token budget and blocks
last. A preempted request goes to the head of the queue and recomputes what the prefix cache has lost of it.

No decision depends on how long a step takes, so the schedule is found first, in steps, and timed afterwards.
Between two events (a finish, an admission, a full pool) every running request gains one token a step, so a
run of steps is one row. Counts are exact, not approximated.

Not modelled: a response that ends with an end-of-sequence token is served one step more under asynchronous
scheduling, because its end is seen a step late (one token per response); priorities, LoRA, speculation.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from fp8plan.errors import CapacityError
from fp8plan.model.arrays import IntArray
from fp8plan.model.kv_pool import CachingPool, PlainPool, Pool, blocks_for
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
    "recomputed_tokens",  # work thrown away: tokens that requests preempted here had computed
    "running",
    "waiting",
    "used_blocks",  # while the last step of the row runs
    "preemptions",
    "finished",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the engine does, in order: int64 arrays of shape (rows,), one per name in COLUMNS."""

    steps: IntArray
    decode_requests: IntArray
    decode_kv_tokens: IntArray
    prefill_tokens: IntArray
    prefill_requests: IntArray
    prefill_kv_tokens: IntArray
    prefill_pairs: IntArray
    sampled_requests: IntArray
    cached_tokens: IntArray
    recomputed_tokens: IntArray
    running: IntArray
    waiting: IntArray
    used_blocks: IntArray
    preemptions: IntArray
    finished: IntArray
    blocks_wanted: int | None  # any pool with at least this many blocks gives this very schedule; None: not known

    @property
    def num_steps(self) -> int:
        return int(self.steps.sum())

    @property
    def num_preemptions(self) -> int:
        return int(self.preemptions.sum())


def schedule(
    prompts: IntArray,
    responses: IntArray,
    prompt_ids: IntArray,
    num_blocks: int,
    limits: EngineLimits,
    longest_run: int = 2**62,
) -> Schedule:
    """Schedule a batch on one engine.

    prompts, responses: tokens per request, shape (requests,), all at least 1, in order of arrival
    prompt_ids:         shape (requests,), equal where two requests have the same prompt; 0 .. prompts-1
    num_blocks:         KV blocks the scheduler can hand out (vLLM's num_gpu_blocks less its null block)
    longest_run:        most steps in one row; 1 gives a row per step

    Raises CapacityError if a request can never fit the pool: vLLM would preempt it for ever.
    """
    _check_fits(prompts, responses, num_blocks, limits.block_size)
    pool: Pool
    if limits.enable_prefix_caching:
        pool = CachingPool(num_blocks, limits.block_size, prompts, prompt_ids)
    else:
        pool = PlainPool(num_blocks)
    engine = _Engine(prompts.tolist(), responses.tolist(), pool, limits)
    while engine.waiting or engine.running:
        run = 0 if engine.can_admit() else min(engine.quiet_steps(), longest_run)
        if run:
            engine.decode(run)
        else:
            engine.step()
    table = np.frombuffer(engine.rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T
    # Freed blocks that were hit may be gone from a smaller pool, so then nothing can be said about it.
    pool_mattered = engine.hit_freed_blocks or bool(table[COLUMNS.index("preemptions")].any())
    return Schedule(*table, blocks_wanted=None if pool_mattered else num_blocks - engine.least_free)


NO_PREFILL = (0, 0, 0, 0)


def _prefill_work(chunks: list[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """(tokens, chunks, KV tokens read, query-key pairs) of chunks (request, tokens computed before, after)."""
    return (
        sum(after - before for _, before, after in chunks),
        len(chunks),
        sum(after for _, _, after in chunks),
        sum((after - before) * (after + before + 1) // 2 for _, before, after in chunks),
    )


def _check_fits(prompts: IntArray, responses: IntArray, num_blocks: int, block_size: int) -> None:
    if not len(prompts):
        return
    longest = int((prompts + responses).max()) - 1  # the last token is never read back
    if blocks_for(longest, block_size) > num_blocks:
        raise CapacityError(
            f"a request of {longest + 1} tokens (prompt + response) needs {blocks_for(longest, block_size)} KV blocks of "
            f"{block_size} tokens, but the pool has {num_blocks} ({num_blocks * block_size} tokens); shorten the response, "
            "raise gpu_memory_utilization or tensor_parallel_size, or use an FP8 precision"
        )


class _Engine:
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
        self.lost = 0  # tokens that requests preempted in this step had computed
        self.rows = array("q")

    def can_admit(self) -> bool:
        """Whether the next step may do more than decode. Blocks only get scarcer while it does nothing else."""
        if self.partial is not None:
            return True
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        return self._admissible(self.waiting[0], self.budget) is not None

    def quiet_steps(self) -> int:
        """Steps, up to and including the next finish, in which every decoding request finds its block."""
        if not self.decoding:
            return 0
        if self.leaving:
            until_finish = 1
        else:
            finishes = self.finishes
            while self.finish_at[finishes[0][2]] != finishes[0][0]:
                heappop(finishes)
            until_finish = finishes[0][0] - self.now + 1
        size, free = self.block_size, self.pool.free
        cycles, left = divmod(free, self.decoding)
        if cycles * size >= until_finish:
            return until_finish
        steps = cycles * size
        while steps < until_finish:
            left -= len(self.in_phase[(self.now + steps) % size])
            if left < 0:
                break
            steps += 1
        return min(steps, until_finish)

    def decode(self, steps: int) -> None:
        """Advance every decoding request by `steps` tokens."""
        cycles, rest = divmod(steps, self.block_size)
        blocks = cycles * self.decoding
        for step in range(self.now, self.now + rest):
            blocks += len(self.in_phase[step % self.block_size])
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
        self.hit_freed_blocks |= from_queue > 0
        return None if spare < 0 else (hit, after)

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
            preemptions,
        )
        self.lost = 0
        self.now += steps
        self.context += steps * decoding
        for request in started:
            self._start_decoding(request)
        finished = self._collect_finished()
        gone = self.leaving if self.lag else finished
        self.leaving = finished if self.lag else []
        for request in gone:
            del self.running[request]
            self._release(request, self.final[request])
        if decoding or chunks:  # asynchronous scheduling may end with a step that only learns of finishes
            self.rows.extend((*row, len(finished)))

    def _collect_finished(self) -> list[int]:
        finished = []
        while self.finishes and self.finishes[0][0] < self.now:
            step, _, request = heappop(self.finishes)
            if self.finish_at[request] == step:
                self._stop_decoding(request)
                finished.append(request)
        return finished
