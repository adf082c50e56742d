"""The scheduler's state between two steps where several KV-cache groups share the pool.

It does what `SchedulerState` does, with two differences. Blocks also come free while requests decode, when they leave
a window; so the requests whose blocks change in a step are kept in a calendar, and a run of steps goes from one such
step to the next. And several requests may be partly prefilled: with prefix caching, a model with states is prefilled
in whole blocks (`_mamba_block_aligned_split` in vllm/v1/core/sched/scheduler.py), which may leave some budget to the
next request; then even a decoding request may get no token in a step.
"""

from __future__ import annotations

from heapq import heappop, heappush

from fp8plan.errors import CapacityError
from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.schedule.group_meter import WindowMeter
from fp8plan.model.schedule.group_pool import GroupPool
from fp8plan.model.schedule.groups import next_change, pairs_read, tokens_read
from fp8plan.model.schedule.history import ROW, columns_of, prefill_work, table_of
from fp8plan.model.schedule.state import next_finish


class GroupState:
    """State between two steps. `now` is the number of the next step.

    `running` is in order of admission, which is that of arrival. A request in it is steady if it got its last token
    in the step before and decodes: then it has computed `now + offset` tokens, and a step changes none of its fields
    unless it is in the calendar. Else `computed` says how far it is, and `target` how far it can come.
    """

    def __init__(
        self,
        prompts: list[int],
        responses: list[int],
        pool: GroupPool,
        groups: tuple[Spec, ...],
        limits: EngineLimits,
    ) -> None:
        requests = len(prompts)
        self.pool, self.num_blocks = pool, pool.free
        self.groups, self.limits = groups, limits
        self.prompts = prompts
        self.final = [p + r - 1 for p, r in zip(prompts, responses, strict=True)]  # tokens computed at the end
        self.lag = int(limits.async_scheduling)
        # States are prefilled in whole blocks if the prefix cache is to keep them.
        caching = limits.enable_prefix_caching
        self.aligned = groups[0].block_size if caching and any(g.kind == "state" for g in groups) else 0
        self.now = 0
        self.queue = list(range(requests - 1, -1, -1))  # the waiting requests; the head is the last entry
        self.running: list[int] = []  # includes `leaving`
        self.length = list(prompts)  # tokens to prefill: prompt + generated ones at admission
        self.target = list(prompts)  # tokens that can be computed: those, and one generated in each step after
        self.computed = [0] * requests
        self.junction = [0] * requests  # where prefill has to stop: a hit of some groups reached so far
        self.last_step = [-2] * requests  # in which it was served, and with how many tokens
        self.last_tokens = [0] * requests
        self.hashed = [0] * requests  # tokens whose blocks had a hash after that
        self.steady = [False] * requests
        self.steady_from = [0] * requests
        self.offset = [0] * requests
        self.unsteady = 0  # of the running ones
        self.calendar: dict[int, list[int]] = {}  # step -> requests; outdated where change_of differs
        self.change_of = [-1] * requests
        self.decoding = 0  # steady ones
        self.context = 0  # tokens computed so far, summed over them
        self.finishes: list[int] = []  # heap of finish step * requests + request; outdated where finish_of differs
        self.finish_of = [-1] * requests
        self.leaving: list[int] = []  # finished, but the scheduler does not know yet (asynchronous scheduling)
        self.least_free = pool.free
        self.refused = False  # a request for want of blocks
        self.refused_at = (-1, 0)  # changes of the pool, and requests that decoded, when the head had to wait
        self.alone = 0  # how many preemptions on end found nobody else running
        self.preemptions = 0  # since the last row
        self.lost = 0  # tokens that those requests had computed
        windows = {(group.kind, group.window): group for group in groups if group.window}
        self.meters = [WindowMeter(group, requests) for group in windows.values()]
        self.rows: list[int] = []
        self.prefills: list[int] = []
        self.window_rows: list[int] = []  # (decode KV tokens, prefill KV tokens, prefill pairs) of each meter

    def columns(self) -> dict[str, IntArray]:
        """The history so far: int64 arrays of shape (rows,), one per name in ROW and PREFILL."""
        return columns_of(self.rows, self.prefills)

    def window_columns(self) -> list[tuple[Spec, IntArray]]:
        """For each window: an int64 array of shape (3, rows), as in `window_rows`."""
        if not self.meters:
            return []
        table = table_of(self.window_rows, 3 * len(self.meters))
        return [(meter.group, table[3 * i : 3 * i + 3]) for i, meter in enumerate(self.meters)]

    def next_row(self, longest: int) -> None:
        """Go on by one step, or by a run of at most `longest` alike steps."""
        if self.unsteady or not self.decoding:
            self._step()
        else:
            self._run(longest)

    # A run of steps in which requests only decode

    def _run(self, longest: int) -> None:
        """Run steps up to and including the next finish in which every decoding request is sure to find its blocks,
        or up to the one that admits a request. If the first step is not so sure, run that one.
        """
        pool = self.pool
        wanted = 1 if self.leaving else min(longest, next_finish(self.finishes, self.finish_of) - self.now + 1)
        steps = 0
        pool.begin_step()
        looked_at = -1
        while steps < wanted:
            free = pool.free
            due = self._due(self.now + steps)
            if due and not self._serve_due(due, self.now + steps):
                break
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

    def _due(self, step: int) -> list[int]:
        """The steady requests whose blocks change in that step, in order of admission."""
        entries = self.calendar.get(step)
        if entries is None:
            return []
        return sorted({request for request in entries if self.change_of[request] == step})

    def _serve_due(self, due: list[int], step: int) -> bool:
        """Serve them in a step if the blocks last even without those that come free in it; else do nothing."""
        pool = self.pool
        if sum([pool.needs(request, step + self.offset[request] + 1) for request in due]) > pool.free:
            return False
        for request in due:
            computed = step + self.offset[request]
            pool.drop(request, computed - self._in_flight(request, step))
            pool.take(request, computed + 1)
            if pool.free < self.least_free:
                self.least_free = pool.free
            self._plan_change(request, step)
        self.calendar.pop(step, None)
        return True

    def _in_flight(self, request: int, step: int) -> int:
        """Tokens of a steady request that are computed but not processed yet."""
        if not self.lag:
            return 0
        return self.last_tokens[request] if step == self.steady_from[request] else 1

    def _plan_change(self, request: int, step: int) -> None:
        """Enter a steady request, served in `step`, in the calendar."""
        computed = step + self.offset[request]
        if step == self.steady_from[request] and self.lag:
            following = computed + 1  # what was in flight in the step before it decoded is processed then
        else:
            caching = self.limits.enable_prefix_caching
            following = min([next_change(group, computed, self.lag, caching) for group in self.groups])
        self._change_at(request, following - self.offset[request])

    def _change_at(self, request: int, step: int) -> None:
        self.change_of[request] = step
        if step < self.final[request] - self.offset[request]:  # else it will have ended
            self.calendar.setdefault(step, []).append(request)

    # One step in which anything may happen

    def _step(self) -> None:
        pool, now = self.pool, self.now
        pool.begin_step()
        idle = not self.running  # then a step that admits nobody is followed by more of its kind
        budget = self.limits.max_num_batched_tokens
        chunks: list[tuple[int, int, int]] = []  # (request, tokens computed before, after)
        again: list[tuple[int, int, int]] = []  # tokens of requests that decode, but got none in the step before
        preemptions = i = 0
        while i < len(self.running) and budget:
            request = self.running[i]
            i += 1
            if self.steady[request]:
                budget -= 1
                if self.change_of[request] == now:
                    computed = now + self.offset[request]
                    taken = self._allocate(request, computed, self._in_flight(request, now), 1)
                    preemptions += taken
                    if self.steady[request]:
                        self._plan_change(request, now)
                continue
            if request in self.leaving:
                continue
            computed = self.computed[request]
            tokens = min(self.target[request] - computed, budget)
            if self.aligned:
                tokens = self._whole_blocks(request, computed, tokens)
            if not tokens:
                continue
            served_before = self.lag and self.last_step[request] == now - 1
            taken = self._allocate(request, computed, self.last_tokens[request] if served_before else 0, tokens)
            preemptions += taken
            if i > len(self.running):  # it preempted itself
                break
            budget -= tokens
            chunk = (request, computed, computed + tokens)
            (again if self.target[request] > self.length[request] else chunks).append(chunk)
            self._computed(request, computed + tokens)
        if not budget:
            for request in self.running[i:]:
                if self.steady[request]:
                    self._stall(request)
        cached = 0
        if not preemptions:
            cached = self._admit(budget, chunks)
        self.calendar.pop(now, None)
        if idle and not chunks:
            self._stop_for_blocks()
        self.preemptions += preemptions
        self._end(1, pool.free, chunks, again, cached)

    def _stop_for_blocks(self) -> None:
        raise CapacityError(
            f"the pool has {self.num_blocks} KV blocks, and a request that has it to itself does not find the ones it "
            "needs; raise gpu_memory_utilization or tensor_parallel_size, or use an FP8 precision"
        )

    def _allocate(self, request: int, computed: int, in_flight: int, tokens: int) -> int:
        """Give a running request its blocks; returns the preemptions that took, maybe its own."""
        pool, preemptions = self.pool, 0
        pool.drop(request, max(0, computed - in_flight))
        while pool.needs(request, computed + tokens) > pool.free:
            victim = self.running[-1]
            self._preempt_last()
            preemptions += 1
            if victim == request:
                return preemptions
        pool.take(request, computed + tokens)
        if pool.free < self.least_free:
            self.least_free = pool.free
        return preemptions

    def _computed(self, request: int, after: int) -> None:
        """Note the service of a request that was not steady."""
        # A token generated in the step before is not known yet under asynchronous scheduling.
        unknown = self.lag and self.last_step[request] == self.now - 1 and self.target[request] > self.length[request]
        self.hashed[request] = hashed = min(after, self.target[request] - int(unknown))
        self.pool.cache(request, hashed)
        self.last_tokens[request] = after - self.computed[request]
        self.last_step[request] = self.now
        self.computed[request] = after

    def _may_admit(self) -> bool:
        """True if the head of the queue may be admitted now, in a step in which all others decode."""
        if not self.queue or len(self.running) >= self.limits.max_num_seqs:
            return False
        found = (self.pool.changes, self.decoding)
        if found == self.refused_at:
            return False
        tokens, _ = self._admissible(self.queue[-1], self.limits.max_num_batched_tokens - self.decoding)
        if not tokens:
            self.refused_at = found
        return tokens > 0

    def _admit_and_end(self) -> None:
        """End a step in which all steady requests are served already and the head of the queue is admissible."""
        chunks: list[tuple[int, int, int]] = []
        self.calendar.pop(self.now, None)
        cached = self._admit(self.limits.max_num_batched_tokens - self.decoding, chunks)
        self._end(1, self.pool.free, chunks, [], cached)

    def _admit(self, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        """Admit waiting requests while they find budget, slots and blocks; returns the tokens found in the cache."""
        pool, cached = self.pool, 0
        while self.queue and budget and len(self.running) < self.limits.max_num_seqs:
            request = self.queue[-1]
            tokens, hit = self._admissible(request, budget)
            if not tokens:
                break
            self.queue.pop()
            self.running.append(request)
            self.unsteady += 1
            pool.admit(request, hit)
            pool.take(request, hit + tokens)
            cached += hit
            budget -= tokens
            self.computed[request] = hit
            self.target[request] = self.length[request]
            self._computed(request, hit + tokens)
            chunks.append((request, hit, hit + tokens))
        return cached

    def _admissible(self, request: int, budget: int) -> tuple[int, int]:
        """The pair (tokens the head of the queue may compute in this step, tokens hit); no tokens if it must wait."""
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
        needed = pool.admission_needs(request, hit + tokens, hit, False)
        if self.limits.scheduler_reserve_full_isl:
            needed = max(needed, pool.admission_needs(request, length, hit, True))
        if needed > pool.free:
            self.refused = True
            return 0, hit
        self.least_free = min(self.least_free, pool.free - needed)
        return tokens, hit

    def _whole_blocks(self, request: int, start: int, tokens: int) -> int:
        """The part of a chunk of that many tokens that ends where a state can be kept (vLLM 0.30; 0.26 has no
        chunks shorter than a block, and lets one that starts within a block run past its end)."""
        size, length = self.aligned, self.length[request]
        prefill_end = max(self.prompts[request], length - 1)
        if start >= prefill_end:
            return tokens
        end = start + tokens
        if end < prefill_end:
            whole = end // size * size
            if whole > start or size <= self.limits.max_num_batched_tokens:
                end = whole
        junction = self.junction[request]
        stops = [length - length % size]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        inside = [stop for stop in stops if start < stop < end]
        return max((min(inside) if inside else end) - start, 0)

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
        self.pool.release(request, hashed)
        self.alone = 0 if self.running else self.alone + 1
        if self.alone > 1000:  # over and over, before it gets any further
            self._stop_for_blocks()

    def _hashed_tokens(self, request: int) -> int:
        """Tokens whose full blocks have a hash by now."""
        if self.steady[request]:
            computed = self.now + self.offset[request]
            return computed - (1 if self.lag and self.now > self.steady_from[request] else 0)
        if self.lag and self.last_step[request] == self.now - 1:
            return self.hashed[request]
        return self.computed[request]

    def _stall(self, request: int) -> None:
        """A decoding request gets no token in this step: the budget is used up by those before it."""
        tokens = self.last_tokens[request] if self.now == self.steady_from[request] else 1
        hashed = self._hashed_tokens(request)
        self.computed[request] = self._stop_decoding(request)
        self.target[request] = self.computed[request] + 1
        self.hashed[request], self.last_tokens[request], self.last_step[request] = hashed, tokens, self.now - 1
        self.unsteady += 1

    def _start_decoding(self, request: int) -> None:
        """Let a request decode from the next step on (`now` already points there)."""
        computed = self.computed[request]
        self.unsteady -= 1
        self.steady[request] = True
        self.steady_from[request] = self.now
        self.offset[request] = offset = computed - self.now
        self.decoding += 1
        self.context += computed
        for meter in self.meters:
            meter.start(request, computed)
        self.finish_of[request] = finish = (self.final[request] - offset - 1) * len(self.final) + request
        heappush(self.finishes, finish)
        self._change_at(request, self.now)

    def _stop_decoding(self, request: int) -> int:
        """Stop the decoding of a request, and return the tokens it has computed."""
        computed = self.now + self.offset[request]
        self.steady[request] = False
        self.decoding -= 1
        self.context -= computed
        for meter in self.meters:
            meter.stop(request, computed)
        self.finish_of[request] = self.change_of[request] = -1
        return computed

    # The end of a row

    def _end(
        self,
        steps: int,
        free: int,
        chunks: list[tuple[int, int, int]],
        again: list[tuple[int, int, int]],
        cached: int,
    ) -> None:
        """Record a row, move on, start decoding where the prefill is done, and let finished requests go."""
        decoding, context = self.decoding, self.context
        if decoding or chunks or again:
            self.rows += (
                steps,
                decoding + len(again),
                context + decoding + sum([after for _, _, after in again]),
                self.lost,
                len(self.running),
                len(self.queue),
                self.num_blocks - free,
                self.preemptions,
                0,
            )
            self.preemptions = self.lost = 0
            for meter in self.meters:
                group = meter.group
                self.window_rows += (
                    meter.advance(steps) + sum([meter.read_by(before) for _, before, _ in again]),
                    sum([tokens_read(group, before, after) for _, before, after in chunks]),
                    sum([pairs_read(group, before, after) for _, before, after in chunks]),
                )
        else:
            for meter in self.meters:
                meter.advance(steps)
        row = len(self.rows) // len(ROW) - 1
        self.now += steps
        self.context += steps * decoding
        started = [request for request, _, after in chunks if after == self.target[request]]
        if chunks:
            self.prefills += (row, *prefill_work(chunks), len(started), cached)
        for request in started + [request for request, _, _ in again]:
            self._start_decoding(request)
        finished = self._collect_finished()
        if finished:
            self.rows[-1] = len(finished)
        gone = finished
        if self.lag:
            gone, self.leaving = self.leaving, finished
        for request in gone:
            self.running.remove(request)
            self.pool.release(request, self.final[request])

    def _collect_finished(self) -> list[int]:
        finished: list[int] = []
        finishes, requests = self.finishes, len(self.final)
        end = self.now * requests
        while finishes and finishes[0] < end:
            finish = heappop(finishes)
            request = finish % requests
            if self.finish_of[request] == finish:
                if self.now > self.steady_from[request]:
                    self.hashed[request] = self.final[request] - self.lag
                    self.last_step[request] = self.now - 1
                self.computed[request] = self._stop_decoding(request)
                finished.append(request)
        return finished
