"""A simulation of the steps of vLLM V1's scheduler, for a finite batch of requests or of trajectories with turns.

The policy is first come first served (vllm/v1/core/sched/scheduler.py). tests/model/schedule/test_scheduler.py checks
it against the real class. A step serves the running requests in admission order: one token each, or a chunk of their
prefill. A request that finds no free block preempts the last running request, possibly itself. If nothing was
preempted, waiting requests are admitted while slots, token budget and blocks last. A preempted request goes to the head
of the queue. It recomputes the tokens that the prefix cache has lost.

If all requests wait at the start, no decision depends on how long a step takes. So the schedule is found first, in
steps, and timed afterwards. The next request of a trajectory arrives when a tool has answered. So turns need a clock,
which gives the seconds of each step while the schedule is made (loop.py).

Between two events (a finish, an arrival, an admission, a full pool) every running request gains one token a step, so a
run of steps is one row. Counts are exact, not approximated.

Not modelled are priorities and LoRA. Nor is the one step more that asynchronous scheduling serves a response which ends
with an end-of-sequence token, because the end is seen a step late. Speculation is a change of units
(fp8plan.model.tune.speculation).

The simulation is written twice. The one in c/scheduler.c is used. The first plan has a C compiler build it, in less
than half a second. `State` in state.py is the reference, which serves where there is no compiler. It is
hundreds of times slower.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8plan.checks import whole
from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.cost.base import FloatArray, IntArray, WindowReads
from fp8plan.model.cost.clock import Clock
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec, admission_cap
from fp8plan.model.schedule.compiled import ClockInC, Numbers, Seconds, compiled
from fp8plan.model.turns import TurnTable

COLUMNS = (  # of a Schedule, in the order of c/state.h
    "steps",  # alike steps in this row
    "decode_requests",  # requests that get one token in each step
    "decode_kv_tokens",  # KV tokens they read in the row's first step, summed; grows by decode_requests a step
    "recomputed_tokens",  # work thrown away: tokens that the requests of `preemptions` had computed
    "running",
    "waiting",
    "used_blocks",  # while the last step of the row runs
    "preemptions",  # in this row, or in a step without tokens before it, which costs nothing and has no row
    "finished",
    "prefill_tokens",
    "prefill_requests",
    "prefill_kv_tokens",  # KV tokens the chunks read: context before them + their own, summed
    "prefill_pairs",  # query-key pairs of the chunks, summed
    "sampled_requests",  # that decode, or whose prefill ends here
    "cached_tokens",  # prefill that the prefix cache saved for requests admitted here
)
TURN_COLUMNS = (  # 0 without turns
    "away",  # trajectories whose tool works
    # Tokens of the turns before that requests admitted here compute again, because the cache has lost them. Those of a
    # block that was not full are left out, because no cache keeps it.
    "again_tokens",
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The numbers that scale the schedule of a sample to all requests.

    repeats:  number of times that each row takes place, float64 of shape (rows,)
    requests: number in the sample
    """

    repeats: FloatArray
    requests: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of the engine in order: int64 arrays of shape (rows,), one for each name of COLUMNS and TURN_COLUMNS.

    With turns, each turn is a request of its own in the columns, and `requests` and `ended` are of trajectories.
    """

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
    away: IntArray
    again_tokens: IntArray
    idle_s: FloatArray  # seconds that the engine waited for a request before each row, shape (rows,)
    prompt_tokens: int  # in all requests; of trajectories, in their first turns
    requests: int
    num_blocks: int  # size of the pool that it was made for
    groups: tuple[Spec, ...]  # the groups that shared the pool
    blocks_wanted: int | None  # any pool with at least this many blocks gives this very schedule; None: not known
    # One for each distinct window among the KV-cache groups. `decode_kv_tokens` does not grow evenly, so it is the sum
    # over the row's steps. The mean step reads decode_kv_tokens / steps, and has as many query-key pairs.
    windows: tuple[WindowReads, ...] = ()
    sampled: Sampled | None = None  # None: the schedule is of all requests, not of a sample
    ended: IntArray | None = None  # the row that ended each request, shape (requests,); None with `sampled`
    gained: float = 1.0  # tokens that a decoding request gains in a step
    queries: int = 1  # tokens that it computes in a step
    timed: bool = False  # the seconds of steps decided what arrived when

    def holds_for(self, num_blocks: int, groups: tuple[Spec, ...]) -> bool:
        """True if a pool of that size, shared by these groups, is known to give this very schedule on any engine."""
        if self.timed:
            return False
        enough = self.blocks_wanted is not None and num_blocks >= self.blocks_wanted
        return groups == self.groups and (num_blocks == self.num_blocks or enough)

    @property
    def weights(self) -> IntArray | FloatArray:
        """The number of times that the step of each row runs, shape (rows,)."""
        return self.steps if self.sampled is None else self.steps * self.sampled.repeats

    @property
    def made(self) -> FloatArray:
        """The response tokens of the step of each row, shape (rows,)."""
        return self.sampled_requests + (self.gained - 1) * self.decode_requests

    def total(self, column: IntArray | FloatArray) -> int:
        """The sum of a column that is counted by row, over the whole rollout."""
        return int(column.sum() if self.sampled is None else round(float((column * self.sampled.repeats).sum())))

    @property
    def num_steps(self) -> int:
        return self.total(self.steps)

    @property
    def num_preemptions(self) -> int:
        return self.total(self.preemptions)


OF_0_30 = CacheRules()


def schedule(
    prompts: IntArray,
    responses: IntArray,
    prompt_ids: IntArray,
    turns: TurnTable | None,
    num_blocks: int,
    limits: EngineLimits,
    longest_run: int = 2**62,
    groups: tuple[Spec, ...] = (),
    rules: CacheRules = OF_0_30,
    clock: Clock | None = None,
    concurrent: int | None = None,
) -> Schedule:
    """Simulate vLLM's scheduler on a batch on one engine.

    prompts, responses: tokens per request, shape (requests,), all at least 1, in order of arrival
    prompt_ids:         shape (requests,), equal where two requests have the same prompt; 0 .. prompts-1
    turns:              of the requests, which are trajectories then; None: one turn each, and all wait at the start
    num_blocks:         KV blocks the scheduler can hand out (vLLM's num_gpu_blocks less its null block)
    longest_run:        most steps in one row; 1 gives a row per step
    groups:             specs of the KV-cache groups that share the pool, equal ones repeated; (): one group of full
                        attention, with limits.block_size
    rules:              of the prefix cache of windows and states
    clock:              gives the seconds of a step; needed with turns, and not used without
    concurrent:         most trajectories that run or wait for a tool at once, the next of which begins when one ends;
                        None: all begin at the start

    Raises CapacityError if a request can never fit the pool: vLLM would preempt it for ever. Raises ConfigError for
    groups whose prefix caching is not modelled, and for turns that are malformed, drop tokens or come without a clock.
    """
    groups = groups or (Spec("full", limits.block_size),)
    _check_groups(groups, limits)
    most = _check_turns(turns, responses, clock, concurrent)
    tokens = prompts + (responses if turns is None else turns.added)
    least_pool = _check_fits(tokens, num_blocks, limits, groups)
    work = prompts, responses, prompt_ids, turns, num_blocks, limits, longest_run, groups, rules
    timed_by = None if turns is None else clock
    made = run_compiled(*work, timed_by, most) or run_reference(*work, timed_by, most)
    return Schedule(
        **made.columns,
        prompt_tokens=int(prompts.sum()),
        requests=len(prompts),
        num_blocks=num_blocks,
        groups=groups,
        blocks_wanted=None if timed_by or made.pool_mattered else max(num_blocks - made.least_free, least_pool),
        windows=made.windows,
        sampled=None,
        ended=made.ended,
        gained=1.0,
        queries=1,
        timed=turns is not None,
        idle_s=made.idle_s,
    )


KINDS = {"full": 0, "latent": 0, "sliding": 1, "chunked": 2, "state": 3}  # numbers of kinds in c/state.h
TOO_FEW_BLOCKS = -2


class Run(NamedTuple):
    """A simulated batch.

    columns:       int64 arrays of shape (rows,), one for each name of COLUMNS and TURN_COLUMNS
    idle_s:        as in Schedule
    windows:       as in Schedule
    ended:         the row that ended each request, shape (requests,)
    least_free:    fewest free blocks, also of those that an admission needed
    hits_mattered: a waiting request found too few blocks, or freed ones, or missed evicted ones
    """

    columns: dict[str, IntArray]
    idle_s: FloatArray
    windows: tuple[WindowReads, ...]
    ended: IntArray
    least_free: int
    hits_mattered: bool

    @property
    def pool_mattered(self) -> bool:
        """True if another pool may have another schedule.

        A smaller one may have lost freed blocks that were hit. A larger one may still have those that were missed, or
        admit a head earlier that had to wait, or preempt fewer requests, or cut other runs of steps.
        """
        return self.hits_mattered or self.least_free < 0 or bool(self.columns["preemptions"].any())


def run_compiled(
    prompts: IntArray,
    responses: IntArray,
    prompt_ids: IntArray,
    turns: TurnTable | None,
    num_blocks: int,
    limits: EngineLimits,
    longest: int,
    groups: tuple[Spec, ...],
    rules: CacheRules,
    clock: Clock | None = None,
    concurrent: int = 2**62,
) -> Run | None:
    """Simulate in C. None where it is not compiled, or finds no memory.

    longest: most steps in one row. clock, concurrent: as in `schedule`, with turns
    """
    library = compiled()
    if library is None:
        return None
    table = TurnTable.single(responses) if turns is None else turns
    windows = list(dict.fromkeys((group.kind, group.window) for group in groups if group.window))
    specs = [
        (
            KINDS[group.kind],
            group.block_size,
            group.window,
            group.checkpoints,
            admission_cap(group, limits),
            groups.index(group),
        )
        for group in groups
    ]
    settings = (
        num_blocks,
        limits.enable_prefix_caching,
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        limits.scheduler_reserve_full_isl,
        limits.async_scheduling,
        longest,
        rules.retain_all,
        rules.leaves_one,
        rules.holders_wait,
        concurrent,
    )
    counts = len(prompts), int(prompt_ids.max(initial=-1)) + 1, len(groups), len(windows), len(table.generated)
    kinds = [(KINDS[kind], window) for kind, window in windows]
    tables = (counts, prompts, prompt_ids, table.first, table.generated, table.tool, settings, specs, kinds)
    arrays = [np.ascontiguousarray(numbers, dtype=np.int64) for numbers in tables]
    facts, ended, rows = np.zeros(4, dtype=np.int64), np.zeros(len(prompts), dtype=np.int64), Numbers()
    pointers = [array.ctypes.data_as(Numbers) for array in (*arrays, facts, ended)]
    wait_s = np.ascontiguousarray(table.wait_s, dtype=np.float64)
    timed_by = None if clock is None else ctypes.byref(ClockInC(clock))
    made = library.fp8plan_schedule(*pointers, wait_s.ctypes.data_as(Seconds), timed_by, ctypes.byref(rows))
    if made == TOO_FEW_BLOCKS:
        from fp8plan.model.schedule.pool import too_few_blocks

        raise too_few_blocks(num_blocks)
    if made < 0:
        return None
    names = (*COLUMNS, *TURN_COLUMNS, "idle_s")
    made_rows = np.empty((len(names) + 3 * len(windows), made), dtype=np.int64)
    library.fp8plan_columns(rows, made, len(made_rows), made_rows.ctypes.data_as(Numbers))
    columns = dict(zip(names, made_rows, strict=False))
    idle_s = columns.pop("idle_s").view(np.float64)
    reads = [made_rows[at : at + 3] for at in range(len(names), len(made_rows), 3)]
    work = tuple(WindowReads(*window, *read) for window, read in zip(windows, reads, strict=True))
    least_free, *facts_of_pool = facts.tolist()
    return Run(columns, idle_s, work, ended, least_free, any(facts_of_pool))


def run_reference(
    prompts: IntArray,
    responses: IntArray,
    prompt_ids: IntArray,
    turns: TurnTable | None,
    num_blocks: int,
    limits: EngineLimits,
    longest: int,
    groups: tuple[Spec, ...],
    rules: CacheRules,
    clock: Clock | None = None,
    concurrent: int = 2**62,
) -> Run:
    """Simulate with `State`. longest: most steps in one row. clock, concurrent: as in `schedule`, with turns"""
    from fp8plan.model.schedule.holders import HoldersWaitPool
    from fp8plan.model.schedule.pool import Pool
    from fp8plan.model.schedule.state import State

    kind = HoldersWaitPool if rules.holders_wait and limits.enable_prefix_caching else Pool
    pool = kind(num_blocks, groups, limits, prompts.tolist(), prompt_ids.tolist(), rules)
    table = TurnTable.single(responses) if turns is None else turns
    state = State(prompts.tolist(), table, pool, groups, limits, rules, clock, concurrent)
    state.run(longest)
    names = COLUMNS + TURN_COLUMNS
    columns = {name: np.array([row[name] for row in state.rows], dtype=np.int64) for name in names}
    tables = [np.array(rows, dtype=np.int64).reshape(-1, 3).T for rows in state.window_rows]
    windows = tuple(
        WindowReads(window.kind, window.window, *table) for window, table in zip(state.windows, tables, strict=True)
    )
    mattered = state.refused or pool.hit_freed_blocks or pool.missed_evicted
    ended = np.array(state.ended, dtype=np.int64)
    return Run(columns, np.array(state.idle_s), windows, ended, state.least_free, mattered)


def _check_groups(groups: tuple[Spec, ...], limits: EngineLimits) -> None:
    """Raise ConfigError for malformed groups, or if their prefix caching is not modelled."""
    for group in groups:
        windowed = group.kind in ("sliding", "chunked")
        if group.block_size < 1 or (group.window > 0) != windowed:
            raise ConfigError(
                f"{group} is no KV-cache group; allowed: a block_size of at least 1, and a window of at least 1 for "
                "sliding and chunked, 0 for the others"
            )
    if not limits.enable_prefix_caching:
        return
    sizes = sorted({group.block_size for group in groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"the KV-cache groups have block sizes {sizes}; with prefix caching only one size for all is modelled; "
            "set enable_prefix_caching=False"
        )
    if all(group.kind == "state" for group in groups):
        raise ConfigError(
            "prefix caching of a model without attention is not modelled (vLLM leaves it off); "
            "set enable_prefix_caching=False"
        )


def _check_turns(turns: TurnTable | None, responses: IntArray, clock: Clock | None, concurrent: int | None) -> int:
    """The most trajectories at once. Raises ConfigError for turns that are malformed, or cannot be simulated so."""
    if turns is None:
        if concurrent is not None:
            raise ConfigError(f"concurrent is {concurrent!r} for a batch without turns; allowed: None")
        return len(responses)
    turns.check(responses)
    if turns.dropped.any():
        raise ConfigError(
            "the next prompt leaves out tokens of a turn (dropped), which the scheduler does not simulate; "
            "allowed: dropped = 0 for every turn"
        )
    if clock is None:
        raise ConfigError("a batch with turns needs the seconds of each step; give clock")
    return len(responses) if concurrent is None else whole("concurrent", concurrent, otherwise=", or None")


def _check_fits(tokens: IntArray, num_blocks: int, limits: EngineLimits, groups: tuple[Spec, ...]) -> int:
    """The blocks of the smallest pool that vLLM would start with (`max_memory_usage_bytes`).

    tokens: of each request with its response, and of each trajectory with all turns; shape (requests,)

    Raises CapacityError if the pool has fewer.
    """
    if not len(tokens):
        return 0
    longest = int(tokens.max()) - 1  # the last token is never read back
    needed = 0
    for group in groups:
        cap, blocks = admission_cap(group, limits), -(-longest // group.block_size)
        if group.kind == "state":
            cap, blocks = -1, 2 + group.checkpoints if limits.enable_prefix_caching else 1
        needed += min(cap, blocks) if cap >= 0 else blocks
    if needed > num_blocks:
        kind, has = f"in {len(groups)} groups", f"{num_blocks}"
        if len(groups) == 1:
            size = groups[0].block_size
            kind, has = f"of {size} tokens", f"{num_blocks} ({num_blocks * size} tokens)"
        raise CapacityError(
            f"a request of {longest + 1} tokens (prompt + response) needs {needed} KV blocks {kind}, but the pool has "
            f"{has}; shorten the response, raise gpu_memory_utilization or tensor_parallel_size, or use an FP8 "
            "precision"
        )
    return needed
