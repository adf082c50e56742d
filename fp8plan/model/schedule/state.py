"""The state of vLLM V1's scheduler between two steps, and the rows of its history: the reference in Python.

Blocks may come free while requests decode, when they leave a window. Several requests may be partly prefilled. With
prefix caching, a model with states is prefilled in whole blocks (`_mamba_block_aligned_split` in
vllm/v1/core/sched/scheduler.py), which may leave some budget to the next request. Then even a decoding request may get
no token in a step.

A trajectory of several turns is one entry for all of them, which waits, runs and finishes once for each turn. A turn
finds the blocks of the turns before, unless they are evicted, up to the first token that its prompt leaves out.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from fp8plan.model.cost.clock import Clock
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec
from fp8plan.model.schedule.loop import Client, Loop
from fp8plan.model.schedule.pool import Pool, too_few_blocks
from fp8plan.model.schedule.rows import Chunk, Rows
from fp8plan.model.turn_table import TurnTable


class State:
    """The requests that run or wait, and the rows so far. `now` is the number of the next step.

    A decoding request is steady if it got its last token in the step before. It has computed `now + offset` tokens, and
    a step changes none of its fields. Of the others `computed` counts the computed tokens, and `target` those that they
    can reach.
    """

    def __init__(
        self,
        prompts: list[int],
        turns: TurnTable,
        pool: Pool,
        groups: tuple[Spec, ...],
        limits: EngineLimits,
        rules: CacheRules,
        clock: Clock | None,
    ) -> None:
        """clock: None if no request arrives later than at the start"""
        requests = len(prompts)
        self.pool, self.num_blocks = pool, pool.free
        self.loop = Loop(int(limits.async_scheduling), clock)
        self.client = Client(turns, self.loop)
        self.prompts = prompts  # of the turn
        # Tokens computed at the end of the turn.
        self.final = [prompt + self.client.generated(at) - 1 for at, prompt in enumerate(prompts)]
        self.block_size = groups[0].block_size if limits.enable_prefix_caching else 1
        self.earlier = [0] * requests  # tokens of earlier turns that the prefix cache may have
        self.is_new = [True] * requests  # no step has served it in this turn
        self.budget, self.max_num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.reserve_full_prompt = limits.scheduler_reserve_full_isl
        self.lag = int(limits.async_scheduling)
        # States are prefilled in whole blocks if the prefix cache is to keep them.
        caching = limits.enable_prefix_caching
        self.aligned = groups[0].block_size if caching and any(g.kind == "state" for g in groups) else 0
        self.keeps_all = all(group.keeps_all for group in groups)
        self.leaves_one = int(rules.leaves_one)
        self.checkpoints = self.aligned > 0 and all(g.checkpoints for g in groups if g.kind == "state")
        self.retain_all = rules.retain_all
        self.now = 0
        self.queue = deque(reversed(range(self.client.begun)))  # the waiting requests; the head is the last entry
        self.running: list[int] = []  # in order of admission; includes `leaving`
        self.leaving: list[int] = []  # finished requests of which the scheduler does not know yet (asynchronous)
        self.offset: dict[int, int] = {}  # of the steady requests
        self.steady_from = [0] * requests
        self.length = list(prompts)  # tokens to prefill: prompt + generated ones at admission
        self.target = list(prompts)  # tokens that can be computed: `length`, and one more in each step after
        self.computed = [0] * requests
        self.junction = [0] * requests  # tokens at which prefill has to stop: the end of a hit of some groups
        self.last_step = [-2] * requests  # the step that last served it
        self.last_tokens = [0] * requests  # its tokens in that step
        self.hashed = [0] * requests  # tokens whose blocks had a hash after that step
        self.refused = False  # true once a waiting request found too few blocks
        self.refused_at = (-1, 0)  # the pool's changes and the steady requests when the head last had to wait
        self.alone = 0  # preemptions in a row that left nobody running
        self.least_free = pool.free
        self.preemptions = 0  # number since the last row
        self.lost = 0  # tokens that the preempted requests had computed
        self.cached = 0  # tokens of admitted requests that the prefix cache had, since the last row
        self.queried = self.hits = self.again = 0  # tokens of the new ones of them; that it had, and that it had lost
        self.rows = Rows(groups)
        self.ended = [0] * requests  # the row that ended each request, or the last turn of a trajectory

    def run(self, longest: int) -> None:
        """Advance to the end. longest: most steps in one row"""
        while self.queue or self.running or self.loop.awaits:
            self._arrive()
            if self.offset and len(self.offset) + len(self.leaving) == len(self.running):
                self._decode(longest)
            else:
                self._step()

    def _arrive(self) -> None:
        """Let the requests join the queue that the next step sees."""
        if not self.queue and not self.running:
            self.loop.wait()
        for request in self.loop.take_arrived():
            if request in self.client.away:
                self._begin_next_turn(request)
            self.queue.appendleft(request)

    def _begin_next_turn(self, request: int) -> None:
        """Make a trajectory's entry that of the next turn's request."""
        computed = self.final[request]  # without the last generated token
        prompt, same = self.client.next_turn(request, self.prompts[request])
        kept = min(same, computed)
        self.earlier[request] = min(kept, prompt - 1) // self.block_size * self.block_size
        self.is_new[request] = True
        self.prompts[request] = self.length[request] = self.target[request] = prompt
        self.final[request] = prompt + self.client.generated(request) - 1
        self.pool.begin_turn(request, prompt, kept, computed)

    def _decode(self, longest: int) -> None:
        """Run steps until a request finishes, arrives or is admitted, while every decoding one is sure to find blocks.

        Without such a step, run one in which anything may happen.
        """
        pool, steps = self.pool, 0
        if self.keeps_all and self._may_admit():  # decoding frees no block: a row of its own, admitted or not
            self._step()
            return
        to_finish = min(longest, self._steps_to_finish())
        decodes = self.rows.decodes([self.now + offset for offset in self.offset.values()])
        wanted = self.loop.steps_to_arrival(to_finish, decodes)
        while steps < wanted:
            pool.begin_step(self.now + steps)
            free, left = pool.free, pool.free - pool.takes(self.now + steps)  # if no block comes free in the step
            self.least_free = min(self.least_free, left)
            if left < 0:
                break
            pool.serve(self.now + steps)
            if self._may_admit():
                if steps:
                    self._end(steps, free, [], [])
                chunks: list[Chunk] = []
                self._admit(self.budget - len(self.offset), chunks)
                self._end(1, pool.free, chunks, [])
                return
            steps += 1
        if steps:
            self._end(steps, pool.free, [], [])
        else:
            self._step()

    def _steps_to_finish(self) -> int:
        """Steps up to and including the next finish of a request; 1 if a finished one still holds blocks."""
        if self.leaving:
            return 1
        return min(self.final[request] - offset for request, offset in self.offset.items()) - self.now

    # One step in which anything may happen

    def _step(self) -> None:
        self.pool.begin_step(self.now)
        idle = not self.running  # then a step that admits nobody would repeat for ever
        chunks: list[Chunk] = []
        again: list[Chunk] = []  # tokens of requests that decode, but got none in the step before
        budget, preemptions = self._serve_running(chunks, again)
        if not preemptions:
            self._admit(budget, chunks)
        if idle and not chunks:
            raise too_few_blocks(self.num_blocks)
        self.preemptions += preemptions
        self._end(1, self.pool.free, chunks, again)

    def _serve_running(self, chunks: list[Chunk], again: list[Chunk]) -> tuple[int, int]:
        """Serve the running requests in turn; returns the budget left, and the number of preemptions."""
        budget, preemptions, i = self.budget, 0, self._steady_first()
        left = self.pool.free - self.pool.takes(self.now)
        if i and left >= 0 and len(self.offset) <= budget:
            self.pool.serve(self.now)
            self.least_free = min(self.least_free, left)
            budget -= len(self.offset)
            due = set()
        else:
            due, i = set(self.pool.due(self.now)), 0
        while i < len(self.running) and budget:
            request = self.running[i]
            i += 1
            if request in self.offset:
                budget -= 1
                if request in due:
                    preemptions += self._serve_due(request)
                continue
            if request in self.leaving:
                continue
            computed = self.computed[request]
            tokens = min(self.target[request] - computed, budget)
            if self.aligned:
                tokens = self._whole_blocks(request, computed, tokens)
            if not tokens:
                continue
            served_before = self.lag and self.last_step[request] == self.now - 1
            self.pool.drop(request, max(0, computed - (self.last_tokens[request] if served_before else 0)))
            checkpoint = self._has_checkpoint(request, computed, computed + tokens)
            preemptions += self._make_room(request, self.pool.needs(request, computed + tokens, checkpoint))
            if i > len(self.running):  # it preempted itself
                break
            self.pool.take(request, computed + tokens, checkpoint)
            self.least_free = min(self.least_free, self.pool.free)
            budget -= tokens
            chunk = (request, computed, computed + tokens)
            (again if self.target[request] > self.length[request] else chunks).append(chunk)
            self._computed(request, computed + tokens)
        if not budget:
            for request in self.running[i:]:
                if request in self.offset:
                    self._stall(request)
        return budget, preemptions

    def _steady_first(self) -> int:
        """The number of running requests up to the last steady one; 0 if one that is not steady has its turn before."""
        steady, i = len(self.offset), 0
        while steady and (self.running[i] in self.offset or self.running[i] in self.leaving):
            steady -= self.running[i] in self.offset
            i += 1
        return 0 if steady else i

    def _serve_due(self, request: int) -> int:
        """Give a steady request the blocks that it needs in this step; returns the number of preemptions."""
        self.pool.drop_due(request, self.now)
        preemptions = self._make_room(request, self.pool.takes_due(request, self.now))
        if request in self.offset:
            self.pool.take_due(request, self.now)
            self.least_free = min(self.least_free, self.pool.free)
        return preemptions

    def _make_room(self, request: int, blocks: int) -> int:
        """Preempt until that many blocks are free, at last the request itself; returns the number of preemptions."""
        preemptions = 0
        while blocks > self.pool.free:
            victim = self.running[-1]
            self._preempt_last()
            preemptions += 1
            if victim == request:
                break
        return preemptions

    def _computed(self, request: int, after: int) -> None:
        """Note that a request, which is not steady, was computed up to `after` tokens."""
        self.hashed[request] = after  # a generated token is known: the request got none in the step before
        self.pool.cache(request, after)
        self.last_tokens[request] = after - self.computed[request]
        self.last_step[request] = self.now
        self.computed[request] = after

    # Admission

    def _may_admit(self) -> bool:
        """True if the head of the queue may be admitted now, in a step in which all others decode."""
        if not self.queue or len(self.running) >= self.max_num_seqs:
            return False
        counts = (self.pool.changes, len(self.offset))
        if counts == self.refused_at:
            return False
        tokens, _ = self._admissible(self.queue[-1], self.budget - len(self.offset))
        if not tokens:
            self.refused_at = counts
        return tokens > 0

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Admit waiting requests while they find budget, slots and blocks."""
        pool = self.pool
        while self.queue and budget and len(self.running) < self.max_num_seqs:
            request = self.queue[-1]
            tokens, hit = self._admissible(request, budget)
            if not tokens:
                break
            self.running.append(self.queue.pop())
            pool.admit(request, hit)
            pool.take(request, hit + tokens, self._has_checkpoint(request, hit, hit + tokens))
            self.cached += hit
            if self.is_new[request]:
                self.queried += self.length[request]
                self.hits += hit
                self.again += max(self.earlier[request] - hit, 0)
                self.is_new[request] = False
            budget -= tokens
            self.computed[request] = hit
            self.target[request] = self.length[request]
            self._computed(request, hit + tokens)
            chunks.append((request, hit, hit + tokens))

    def _admissible(self, request: int, budget: int) -> tuple[int, int]:
        """The pair (tokens that the head of the queue may compute in this step, 0 if it must wait; tokens hit)."""
        pool, length = self.pool, self.length[request]
        if not budget:
            return 0, 0
        hit = pool.lookup(request, length)
        self.junction[request] = pool.shared_prefix
        tokens = min(length - hit, budget)
        if self.aligned:
            tokens = self._whole_blocks(request, hit, tokens)
            if not tokens:
                return 0, hit
        end, needed = hit + tokens, 0
        if self.reserve_full_prompt:
            needed = pool.admission_needs(request, length, hit, True, self._has_checkpoint(request, hit, length))
        if needed <= pool.free:
            checkpoint = self._has_checkpoint(request, hit, end)
            needed = max(needed, pool.admission_needs(request, end, hit, False, checkpoint))
        if needed > pool.free:
            self.refused = True
            return 0, hit
        self.least_free = min(self.least_free, pool.free - needed)
        return tokens, hit

    def _whole_blocks(self, request: int, start: int, tokens: int) -> int:
        """The tokens of a chunk, cut to end where a state can be kept, as in vLLM 0.30 and 0.32.

        vLLM 0.26 has no chunks shorter than a block. Its chunks that start within a block run past the block's end.
        """
        size, length = self.aligned, self.length[request]
        prefill_end = self._prefill_end(request)
        if start >= prefill_end:
            return tokens
        end = start + tokens
        whole_prefill = end >= prefill_end and self._covers_block(start, prefill_end)
        if end < prefill_end:
            whole = end // size * size
            if whole > start or size <= self.budget:
                end = whole
        junction = self.junction[request]
        stops = [] if whole_prefill else [(length - self.leaves_one) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        inside = [stop for stop in stops if start < stop < end]
        return max((min(inside) if inside else end) - start, 0)

    def _prefill_end(self, request: int) -> int:
        """The tokens of a request's prefill, as vLLM counts them if it resumes."""
        return max(self.prompts[request], self.length[request] - 1)

    def _covers_block(self, start: int, end: int) -> bool:
        """True if kernels keep the state of the last whole block inside a chunk (is_mamba_prefill_checkpoint_valid)."""
        size = self.aligned
        return self.checkpoints and start % size == 0 and start + size <= (end - 1) // size * size

    def _has_checkpoint(self, request: int, start: int, end: int) -> bool:
        """True if a chunk keeps a state inside, which takes a block (MambaManager._needs_internal_checkpoint)."""
        kept = self.retain_all or end >= self._prefill_end(request)
        return kept and self._covers_block(start, end)

    # Between running and waiting

    def _preempt_last(self) -> None:
        request = self.running.pop()
        computed = self.computed[request]
        hashed = self._hashed_tokens(request)
        if request in self.leaving:  # its last token is on the way: nothing to resume
            self.leaving.remove(request)
            self.pool.release(request, hashed)
            return
        if request in self.offset:
            computed = self._stop_decoding(request)
            self.target[request] = computed + 1
        self.lost += computed
        self.length[request] = self.target[request]
        self.computed[request] = 0
        self.last_step[request] = -2
        self.queue.append(request)
        self.pool.release(request, hashed)
        self.alone = 0 if self.running else self.alone + 1
        if self.alone > 1000:  # over and over, before it gets any further
            raise too_few_blocks(self.num_blocks)

    def _hashed_tokens(self, request: int) -> int:
        """The number of tokens whose full blocks have a hash by now."""
        if request in self.offset:
            computed = self.now + self.offset[request]
            return computed - (1 if self.lag and self.now > self.steady_from[request] else 0)
        if self.lag and self.last_step[request] == self.now - 1:
            return self.hashed[request]
        return self.computed[request]

    def _stall(self, request: int) -> None:
        """Give a decoding request no token in this step, because those before it have used up the budget."""
        self.computed[request] = self._stop_decoding(request)
        self.target[request] = self.computed[request] + 1

    def _start_decoding(self, request: int, computed: int) -> None:
        """Let a request decode from the next step on (`now` already points there)."""
        self.offset[request] = computed - self.now
        self.steady_from[request] = self.now
        self.pool.start(request, self.now, computed, self.last_tokens[request] if self.lag else 0)

    def _stop_decoding(self, request: int) -> int:
        """Stop the decoding of a request, and return the tokens it has computed."""
        self.pool.stop(request)
        return self.now + self.offset.pop(request)

    # The end of a row

    def _end(self, steps: int, free: int, chunks: list[Chunk], again: list[Chunk]) -> None:
        """Record a row, advance, start decoding after a whole prefill, and release finished requests."""
        started = [(request, after) for request, _, after in chunks if after == self.target[request]]
        if self.offset or chunks or again:
            self._record(steps, free, chunks, again, len(started))
            self.loop.serve(self.rows)
        else:
            self.loop.skip()
        self.now += steps
        for request, computed in started + [(request, after) for request, _, after in again]:
            self._start_decoding(request, computed)
        finished = [r for r in self.running if r in self.offset and self.final[r] - self.offset[r] <= self.now]
        for request in finished:
            if self.now > self.steady_from[request]:
                self.hashed[request] = self.final[request] - self.lag
                self.last_step[request] = self.now - 1
            self.computed[request] = self._stop_decoding(request)
            self.ended[request] = len(self.rows) - 1
            self.client.end_turn(request)
        if finished:
            self.rows.last["finished"] = len(finished)
        gone = finished
        if self.lag:  # the scheduler knows of a finish one step later
            gone, self.leaving = self.leaving, finished
        for request in gone:
            self.running.remove(request)
            self.pool.release(request, self.final[request])

    def _record(self, steps: int, free: int, chunks: list[Chunk], again: list[Chunk], started: int) -> None:
        """Record a row with no finished request. started: number of requests whose prefill ends in it"""
        context = [self.now + offset for offset in self.offset.values()]
        decoding = [(before, before + steps) for before in context] + [(before, after) for _, before, after in again]
        counts: dict[str, Any] = {
            "steps": steps,
            "recomputed_tokens": self.lost,
            "running": len(self.running),
            "waiting": len(self.queue),
            "used_blocks": self.num_blocks - free,
            "preemptions": self.preemptions,
            "sampled_requests": started + len(decoding),
            "cached_tokens": self.cached,
            "queried_tokens": self.queried,
            "hit_tokens": self.hits,
            "away": len(self.client.away),
            "again_tokens": self.again,
            "idle_s": self.loop.take_idle(),
        }
        self.rows.add(decoding, chunks, counts)
        self.preemptions = self.lost = self.cached = self.queried = self.hits = self.again = 0
