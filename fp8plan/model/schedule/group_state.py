"""The scheduler's state between two steps, where one KV-cache group or several share the pool.

Blocks also come free while requests decode, when they leave a window. Several requests may be partly prefilled. With
prefix caching, a model with states is prefilled in whole blocks (`_mamba_block_aligned_split` in
vllm/v1/core/sched/scheduler.py), which may leave some budget to the next request. Then even a decoding request may get
no token in a step.
"""

from __future__ import annotations

from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec
from fp8plan.model.schedule.group_pool import GroupPool, too_few_blocks
from fp8plan.model.schedule.state import Chunk, State, table_of
from fp8plan.model.schedule.windows import WindowMeter, pairs_read, tokens_read


class GroupState(State):
    """State between two steps.

    A decoding request is steady if it got its last token in the step before. Then a step changes none of its fields.
    Else `computed` counts its computed tokens, and `target` those that it can reach.
    """

    def __init__(
        self,
        prompts: list[int],
        responses: list[int],
        pool: GroupPool,
        groups: tuple[Spec, ...],
        limits: EngineLimits,
        rules: CacheRules,
    ) -> None:
        super().__init__(prompts, responses, pool.free, limits)
        requests = len(prompts)
        self.pool = pool
        self.prompts = prompts
        # States are prefilled in whole blocks if the prefix cache is to keep them.
        caching = limits.enable_prefix_caching
        self.aligned = groups[0].block_size if caching and any(g.kind == "state" for g in groups) else 0
        self.keeps_all = all(group.keeps_all for group in groups)
        self.leaves_one = int(rules.leaves_one)
        self.checkpoints = self.aligned > 0 and all(g.checkpoints for g in groups if g.kind == "state")
        self.retain_all = rules.retain_all
        self.queue = list(range(requests - 1, -1, -1))  # the waiting requests; the head is the last entry
        self.length = list(prompts)  # tokens to prefill: prompt + generated ones at admission
        self.target = list(prompts)  # tokens that can be computed: `length`, and one more in each step after
        self.computed = [0] * requests
        self.junction = [0] * requests  # tokens at which prefill has to stop: the end of a hit of some groups
        self.last_step = [-2] * requests  # the step that last served it
        self.last_tokens = [0] * requests  # its tokens in that step
        self.hashed = [0] * requests  # tokens whose blocks had a hash after that step
        self.steady = [False] * requests
        self.steady_from = [0] * requests
        self.unsteady = 0  # running requests that are not steady
        self.refused = False  # true once a waiting request found too few blocks
        self.refused_at = (-1, 0)  # the pool's changes and the decoding requests when the head last had to wait
        self.alone = 0  # preemptions in a row that left nobody running
        windows = {(group.kind, group.window): group for group in groups if group.window}
        self.meters = [WindowMeter(group, requests) for group in windows.values()]
        self.window_rows: list[int] = []  # (decode KV tokens, prefill KV tokens, prefill pairs) of each meter

    def window_columns(self) -> list[tuple[Spec, IntArray]]:
        """For each window: an int64 array of shape (3, rows), as in `window_rows`."""
        if not self.meters:
            return []
        table = table_of(self.window_rows, 3 * len(self.meters))
        return [(meter.group, table[3 * i : 3 * i + 3]) for i, meter in enumerate(self.meters)]

    def next_row(self, longest: int) -> None:
        if self.unsteady or not self.decoding:
            self._step()
        else:
            self._run(longest)

    # A run of steps in which requests only decode

    def _run(self, longest: int) -> None:
        """Run steps until a request finishes or is admitted, while every decoding request is sure to find its blocks.

        Without such a step, run one in which anything may happen.
        """
        pool = self.pool
        if self.keeps_all and self._may_admit():  # decoding frees no block: a row of its own, admitted or not
            self._step()
            return
        wanted = min(longest, self._steps_to_finish())
        steps = 0
        looked_at = -1
        while steps < wanted:
            pool.begin_step(self.now + steps)
            free = pool.free
            left = free - pool.takes(self.now + steps)  # if no block comes free in the step
            if left < self.least_free:
                self.least_free = left
            if left < 0:
                break
            pool.serve(self.now + steps)
            if pool.changes != looked_at:
                looked_at = pool.changes
                if self._may_admit():
                    if steps:
                        self._end(steps, free, [], [], 0)
                    self._admit_and_end()
                    return
            steps += 1
        if steps:
            self._end(steps, pool.free, [], [], 0)
        else:
            self._step()

    # One step in which anything may happen

    def _step(self) -> None:
        pool = self.pool
        pool.begin_step(self.now)
        idle = not self.running  # then a step that admits nobody would repeat for ever
        chunks: list[Chunk] = []
        again: list[Chunk] = []  # tokens of requests that decode, but got none in the step before
        cached = 0
        if self.unsteady:
            budget, preemptions = self._serve_running(chunks, again)
        else:
            preemptions = self._serve_steady()
            budget = self.budget - self.decoding
        if not preemptions:
            cached = self._admit(budget, chunks)
        if idle and not chunks:
            raise too_few_blocks(self.num_blocks)
        self.preemptions += preemptions
        self._end(1, pool.free, chunks, again, cached)

    def _serve_running(self, chunks: list[Chunk], again: list[Chunk]) -> tuple[int, int]:
        """Serve the running requests in turn; returns the budget left, and the number of preemptions."""
        budget, preemptions, i = self.budget, 0, self._steady_first()
        left = self.pool.free - self.pool.takes(self.now)
        if i and left >= 0 and self.decoding <= budget:
            self.pool.serve(self.now)
            self.least_free = min(self.least_free, left)
            budget -= self.decoding
            due = set()
        else:
            due, i = set(self.pool.due(self.now)), 0
        while i < len(self.running) and budget:
            request = self.running[i]
            i += 1
            if self.steady[request]:
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
                if self.steady[request]:
                    self._stall(request)
        return budget, preemptions

    def _steady_first(self) -> int:
        """The number of running requests up to the last steady one; 0 if one that is not steady has its turn before."""
        steady, i = self.decoding, 0
        while steady and (self.steady[self.running[i]] or self.running[i] in self.leaving):
            steady -= self.steady[self.running[i]]
            i += 1
        return 0 if steady else i

    def _serve_steady(self) -> int:
        """Give all steady requests the blocks that they need in this step; returns the number of preemptions."""
        pool, preemptions = self.pool, 0
        short = pool.serve(self.now)
        while short >= 0:
            preemptions += self._make_room_and_take(short)
            short = pool.serve(self.now, short + 1)
        return preemptions

    def _serve_due(self, request: int) -> int:
        """Give a steady request the blocks that it needs in this step; returns the number of preemptions."""
        self.pool.drop_due(request, self.now)
        return self._make_room_and_take(request)

    def _make_room_and_take(self, request: int) -> int:
        pool, now = self.pool, self.now
        preemptions = self._make_room(request, pool.takes_due(request, now))
        if self.steady[request]:
            pool.take_due(request, now)
            self.least_free = min(self.least_free, pool.free)
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
        self.head_needs = 0  # the head may find more now
        self.last_tokens[request] = after - self.computed[request]
        self.last_step[request] = self.now
        self.computed[request] = after

    def _may_admit(self) -> bool:
        """True if the head of the queue may be admitted now, in a step in which all others decode."""
        if not self.queue or self.pool.free < self.head_needs or len(self.running) >= self.max_num_seqs:
            return False
        counts = (self.pool.changes, self.decoding)
        if counts == self.refused_at:
            return False
        tokens, _ = self._admissible(self.queue[-1], self.budget - self.decoding)
        if not tokens:
            self.refused_at = counts
        return tokens > 0

    def _admit_and_end(self) -> None:
        """End a step in which all steady requests are served already and the head of the queue is admissible."""
        chunks: list[Chunk] = []
        cached = self._admit(self.budget - self.decoding, chunks)
        self._end(1, self.pool.free, chunks, [], cached)

    def _admit(self, budget: int, chunks: list[Chunk]) -> int:
        """Admit waiting requests while they find budget, slots and blocks; returns the tokens found in the cache."""
        pool, cached = self.pool, 0
        while self.queue and budget and len(self.running) < self.max_num_seqs:
            request = self.queue[-1]
            tokens, hit = self._admissible(request, budget)
            if not tokens:
                break
            self.queue.pop()
            self.waiting -= 1
            self.running.append(request)
            self.unsteady += 1
            pool.admit(request, hit)
            pool.take(request, hit + tokens, self._has_checkpoint(request, hit, hit + tokens))
            cached += hit
            budget -= tokens
            self.computed[request] = hit
            self.target[request] = self.length[request]
            self._computed(request, hit + tokens)
            chunks.append((request, hit, hit + tokens))
        return cached

    def _admissible(self, request: int, budget: int) -> tuple[int, int]:
        """The pair (tokens that the head of the queue may compute in this step, 0 if it must wait; tokens hit)."""
        pool, length = self.pool, self.length[request]
        if not budget:
            return 0, 0
        self.head_needs = pool.least_needs(request, length, length - 1) if self.reserve_full_prompt else 0
        if pool.free < self.head_needs:
            self.refused = True
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
            # A hit grows only when others are prefilled.
            self.head_needs = pool.least_needs(request, length, hit) if self.reserve_full_prompt else 0
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
        if self.steady[request]:
            computed = self._stop_decoding(request)
            self.target[request] = computed + 1
        else:
            self.unsteady -= 1
        self.lost += computed
        self.length[request] = self.target[request]
        self.computed[request] = 0
        self.last_step[request] = -2
        self.queue.append(request)
        self.waiting += 1
        self.head_needs = 0
        self.pool.release(request, hashed)
        self.alone = 0 if self.running else self.alone + 1
        if self.alone > 1000:  # over and over, before it gets any further
            raise too_few_blocks(self.num_blocks)

    def _hashed_tokens(self, request: int) -> int:
        """The number of tokens whose full blocks have a hash by now."""
        if self.steady[request]:
            computed = self.now + self.offset[request]
            return computed - (1 if self.lag and self.now > self.steady_from[request] else 0)
        if self.lag and self.last_step[request] == self.now - 1:
            return self.hashed[request]
        return self.computed[request]

    def _stall(self, request: int) -> None:
        """Give a decoding request no token in this step, because those before it have used up the budget."""
        tokens = self.last_tokens[request] if self.now == self.steady_from[request] else 1
        hashed = self._hashed_tokens(request)
        self.computed[request] = self._stop_decoding(request)
        self.target[request] = self.computed[request] + 1
        self.hashed[request], self.last_tokens[request], self.last_step[request] = hashed, tokens, self.now - 1
        self.unsteady += 1

    def _start_decoding(self, request: int, computed: int) -> None:
        super()._start_decoding(request, computed)
        self.unsteady -= 1
        self.steady[request] = True
        self.steady_from[request] = self.now
        for meter in self.meters:
            meter.start(request, computed)
        self.pool.start(request, self.now, computed, self.last_tokens[request] if self.lag else 0)

    def _stop_decoding(self, request: int) -> int:
        computed = super()._stop_decoding(request)
        self.steady[request] = False
        for meter in self.meters:
            meter.stop(request, computed)
        self.pool.stop(request, self.now)
        return computed

    def _finish(self, request: int) -> None:
        if self.now > self.steady_from[request]:
            self.hashed[request] = self.final[request] - self.lag
            self.last_step[request] = self.now - 1
        self.computed[request] = self._stop_decoding(request)

    # The end of a row

    def _end(self, steps: int, free: int, chunks: list[Chunk], again: list[Chunk], cached: int) -> None:
        """Record a row, advance, start decoding after a whole prefill, and release finished requests."""
        decoding, context = self.decoding, self.context
        served = bool(decoding or chunks or again)
        if served:
            kv_tokens = context + decoding + sum([after for _, _, after in again])
            self._record(steps, decoding + len(again), kv_tokens, free)
        for meter in self.meters:
            reads = meter.advance(steps)
            if chunks or again:
                group = meter.group
                self.window_rows += (
                    reads + sum([meter.read_by(before) for _, before, _ in again]),
                    sum([tokens_read(group, before, after) for _, before, after in chunks]),
                    sum([pairs_read(group, before, after) for _, before, after in chunks]),
                )
            elif served:
                self.window_rows += (reads, 0, 0)
        self.now += steps
        self.context += steps * decoding
        started = [(request, after) for request, _, after in chunks if after == self.target[request]]
        if chunks:
            self._record_prefill(chunks, len(started), cached)
        for request, computed in started + [(request, after) for request, _, after in again]:
            self._start_decoding(request, computed)
        finished = self._pass_finishes()
        if finished:
            self.rows[-1] = len(finished)
        for request in self._gone(finished):
            self.running.remove(request)
            self.pool.release(request, self.final[request])
