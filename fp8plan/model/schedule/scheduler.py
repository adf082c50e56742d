"""A simulation of the steps of vLLM V1's scheduler, for a finite batch of requests or of trajectories with turns.

The policy is first come first served (vllm/v1/core/sched/scheduler.py). tests/model/schedule/test_scheduler.py checks
it against the real class. A step serves the running requests in admission order: one token each, or a chunk of their
prefill. A request that finds no free block preempts the last running request, possibly itself. If nothing was
preempted, waiting requests are admitted while slots, token budget and blocks last. A preempted request goes to the head
of the queue. It recomputes the tokens that the prefix cache has lost.

Without turns no decision depends on how long a step takes, so the schedule is found first and timed afterwards. With
turns a clock decides by the seconds of each step what arrives when (loop.py). Between two events (a finish, an arrival,
an admission, a full pool) every running request gains one token a step, so a run of steps is one row. Counts are exact.

Not modelled are priorities and LoRA. Nor is the one step more that asynchronous scheduling serves a response which ends
with an end-of-sequence token, because the end is seen a step late. Speculation is a change of units
(fp8plan.model.tune.speculation).

The simulation is written twice. The one in c/scheduler.c is used. The first plan has a C compiler build it, in less
than a second. `State` in state.py is the reference, for machines without a compiler. It is hundreds of times slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.cost.base import FloatArray, IntArray, WindowReads
from fp8plan.model.cost.clock import Clock
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec, admission_cap, windows_of
from fp8plan.model.schedule.rows import TYPES, Columns
from fp8plan.model.schedule.turns_in_c import TurnsInC
from fp8plan.model.turn_table import NO_WAITS, TurnTable
from fp8plan.model.workload import Batch

NOT_COMPILED: Final = (
    "the simulation of vLLM's scheduler was not compiled, so large batches take minutes; install a C compiler, such as "
    "gcc, or name one in CC. ~/.cache, or the folder in XDG_CACHE_HOME, must be writable"
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
class Schedule(Columns):
    """The rows of a batch, and what they were made for.

    With turns, each turn is a request of its own in the columns, and `requests` and `ended` are of trajectories.
    """

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
        enough = self.blocks_wanted is not None and num_blocks >= self.blocks_wanted
        return not self.timed and groups == self.groups and (num_blocks == self.num_blocks or enough)

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
    batch: Batch,
    num_blocks: int,
    limits: EngineLimits,
    longest_run: int = 2**62,
    groups: tuple[Spec, ...] = (),
    rules: CacheRules = OF_0_30,
    clock: Clock | None = None,
) -> Schedule:
    """Simulate vLLM's scheduler on a batch on one engine.

    batch:       requests that all wait at the start, or trajectories of turns
    num_blocks:  KV blocks the scheduler can hand out (vLLM's num_gpu_blocks less its null block)
    longest_run: most steps in one row; 1 gives a row per step
    groups:      specs of the KV-cache groups that share the pool, equal ones repeated; (): one group of full attention,
                 with limits.block_size
    rules:       of the prefix cache of windows and states
    clock:       gives the seconds of a step; needed with turns, and not used without

    Raises CapacityError if a request can never fit the pool: vLLM would preempt it for ever. Raises ConfigError for
    groups whose prefix caching is not modelled, and for turns whose waits are not known.
    """
    groups = groups or (Spec("full", limits.block_size),)
    _check_groups(groups, limits)
    turns = batch.turns
    if turns is not None and not turns.has_waits:
        raise ConfigError(f"{NO_WAITS}; give the seconds of each wait")
    assert turns is None or clock is not None
    least_pool = _check_fits(batch.lengths, num_blocks, limits, groups)
    case = Case(batch, num_blocks, limits, groups, rules, clock)
    made = run_compiled(case, longest_run) or run_reference(case, longest_run)
    wanted = None if turns is not None or made.pool_mattered else max(num_blocks - made.least_free, least_pool)
    return Schedule(
        **made.columns,
        prompt_tokens=int(batch.prompts.sum()),
        requests=len(batch.prompts),
        num_blocks=num_blocks,
        groups=groups,
        blocks_wanted=wanted,
        windows=made.windows,
        ended=made.ended,
        timed=turns is not None,
    )


Numbers = ctypes.POINTER(ctypes.c_int64)
KINDS = {"full": 0, "latent": 0, "sliding": 1, "chunked": 2, "state": 3}  # numbers of kinds in c/state.h
TOO_FEW_BLOCKS = -2
FLAGS = ("-O1", "-ffp-contract=off", "-shared", "-fPIC")  # without fused multiply-adds the clock has Python's bits


class Case(NamedTuple):
    """A batch, and what decides its schedule; as in `schedule`. groups: at least one"""

    batch: Batch
    num_blocks: int
    limits: EngineLimits
    groups: tuple[Spec, ...]
    rules: CacheRules
    clock: Clock | None = None


class Run(NamedTuple):
    """A simulated batch.

    columns:       the arrays of `Columns` by name
    windows:       as in Schedule
    ended:         the row that ended each request, shape (requests,)
    least_free:    fewest free blocks, also of those that an admission needed
    hits_mattered: a waiting request found too few blocks, or freed ones, or missed evicted ones
    """

    columns: dict[str, Any]
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


def run_compiled(case: Case, longest: int) -> Run | None:
    """Simulate in C as `run_reference` does. None where it is not compiled, or finds no memory."""
    library = compiled()
    if library is None:
        return None
    batch, num_blocks, limits, groups, rules, clock = case
    windows, turns = windows_of(groups), batch.turns
    specs = [
        (KINDS[g.kind], g.block_size, g.window, g.checkpoints, admission_cap(g, limits), groups.index(g))
        for g in groups
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
    )
    counts = len(batch.prompts), int(batch.prompt_ids.max(initial=-1)) + 1, len(groups), len(windows)
    kinds = [(KINDS[kind], size) for kind, size in windows]
    tables = (counts, batch.prompts, batch.lengths - batch.prompts, batch.prompt_ids, settings, specs, kinds)
    arrays = [np.ascontiguousarray(table, dtype=np.int64) for table in tables]
    facts, ended, rows = np.zeros(4, dtype=np.int64), np.zeros(len(batch.prompts), dtype=np.int64), Numbers()
    pointers = [array.ctypes.data_as(Numbers) for array in (*arrays, facts, ended)]
    timed = None if turns is None or clock is None else TurnsInC(turns, clock)
    made = library.fp8plan_schedule(*pointers, timed, ctypes.byref(rows))
    if made == TOO_FEW_BLOCKS:
        from fp8plan.model.schedule.pool import too_few_blocks

        raise too_few_blocks(num_blocks)
    if made < 0:
        return None
    bits = np.empty((len(TYPES) + 3 * len(windows), made), dtype=np.int64)
    library.fp8plan_columns(rows, made, len(bits), bits.ctypes.data_as(Numbers))
    columns = {name: column.view(kind) for (name, kind), column in zip(TYPES.items(), bits, strict=False)}
    reads = [bits[at : at + 3] for at in range(len(TYPES), len(bits), 3)]
    work = tuple(WindowReads(*window, *read) for window, read in zip(windows, reads, strict=True))
    least_free, *facts_of_pool = facts.tolist()
    return Run(columns, work, ended, least_free, any(facts_of_pool))


@cache
def compiled() -> ctypes.CDLL | None:
    """The library that this machine's C compiler made of c/scheduler.c, in the user's cache folder; None without one.

    The environment variable CC names another compiler, or, if it is empty, none.
    """
    source = Path(__file__).with_name("c") / "scheduler.c"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler:
        return None
    texts = [path.read_text(encoding="utf-8") for path in sorted(source.parent.iterdir())]
    made_from = "\n".join([platform.platform(), *compiler, *texts])
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8plan"
        library = folder / f"scheduler-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                made = Path(temporary) / library.name
                command = [*compiler, *FLAGS, "-o", str(made), str(source), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                made.replace(library)  # in one go: another process may be about to load it
        loaded = ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home folder
        return None
    loaded.fp8plan_schedule.restype = ctypes.c_int64
    arrays = [Numbers] * 9  # seven tables, the facts, and the rows that end requests
    loaded.fp8plan_schedule.argtypes = [*arrays, ctypes.POINTER(TurnsInC), ctypes.POINTER(Numbers)]
    loaded.fp8plan_columns.argtypes = [Numbers, ctypes.c_int64, ctypes.c_int64, Numbers]
    return loaded


def run_reference(case: Case, longest: int) -> Run:
    """Simulate with `State`. longest: most steps in one row"""
    from fp8plan.model.schedule.holders import HoldersWaitPool
    from fp8plan.model.schedule.pool import Pool
    from fp8plan.model.schedule.state import State

    batch, num_blocks, limits, groups, rules, clock = case
    kind = HoldersWaitPool if rules.holders_wait and limits.enable_prefix_caching else Pool
    prompts, turns = batch.prompts.tolist(), batch.turns
    pool = kind(num_blocks, groups, limits, prompts, batch.prompt_ids.tolist(), rules)
    table = TurnTable.single(batch.responses) if turns is None else turns
    state = State(list(prompts), table, pool, groups, limits, rules, clock)
    state.run(longest)
    mattered = state.refused or pool.hit_freed_blocks or pool.missed_evicted
    ended = np.array(state.ended, dtype=np.int64)
    return Run(state.rows.columns(), state.rows.windows(), ended, state.least_free, mattered)


def _check_groups(groups: tuple[Spec, ...], limits: EngineLimits) -> None:
    """Raise ConfigError if the prefix caching of these groups is not modelled."""
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


def _check_fits(tokens: IntArray, num_blocks: int, limits: EngineLimits, groups: tuple[Spec, ...]) -> int:
    """The blocks of the smallest pool that vLLM would start with (`max_memory_usage_bytes`).

    tokens: prompt and all that is added to it, of each request

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
