"""The time and risk of every candidate, found in as many processes as pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

from fp8plan.model.architecture import Linear
from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.precision import Precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.budget import RiskBudget
from fp8plan.model.risk.expected import MismatchRisk, mismatch_risk
from fp8plan.model.rl_step import StepTimes, weight_sync_seconds
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.simulate import simulate
from fp8plan.model.workload import Batch

Progress = Callable[[Iterable[Any]], Iterable[Any]]

# Responses, over all candidates, from which on processes of their own pay: half a second of work.
WORTH_PROCESSES = 40_000


@dataclass(frozen=True, slots=True)
class Problem:
    """The part of the question that is the same for every candidate."""

    batch: Batch
    profile: Profile
    times: StepTimes | None
    budget: RiskBudget
    kv_scales_calibrated: bool


def evaluated(candidates: Sequence[Candidate], problem: Problem, progress: Progress, workers: int) -> list[Candidate]:
    """The candidates, each that can run with its rollout, RL step and risk filled in.

    Candidates with the same number of replicas share their schedules, unless their KV pools starve. Such groups go to
    `workers` processes if there is enough work to pay for starting them. The group with the most replicas has the most
    work, so it starts first.
    """
    done = list(candidates)
    order = sorted(
        (-c.setup.limits.data_parallel_size, -c.memory.usable_blocks, i) for i, c in enumerate(candidates) if c.memory
    )
    groups = [[candidates[i] for *_, i in group] for _, group in groupby(order, key=lambda key: key[0])]
    if len(order) * len(problem.batch.prompts) < WORTH_PROCESSES:
        workers = 1
    if workers > 1:
        groups = [part for group in groups for part in _apart(group, problem.batch)]
    setups = {_risk_key(candidates[i].setup): candidates[i].setup for *_, i in order}
    risks = {key: _risks(setup, problem) for key, setup in setups.items()}
    workers = min(workers, len(groups))
    timed_group = _timed_group if workers < 2 else _timed_list
    with _mapper(workers) as map_groups:
        timed = chain.from_iterable(map_groups(partial(timed_group, problem=problem), groups))
        for (*_, i), candidate in zip(progress(order), timed, strict=True):
            risk, unit_risk = risks[_risk_key(candidate.setup)]
            done[i] = replace(candidate, risk=risk, unit_risk=unit_risk)
    return done


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that uses `workers` processes. They are forked, so that a caller's script needs no guard against being
    imported.
    """
    if workers > 1:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map


def _apart(group: list[Candidate], batch: Batch) -> list[list[Candidate]]:
    """A group from the largest KV pool down, cut so that each candidate whose pool starves stands alone.

    Schedules with preemptions hold for one pool only, so nothing is lost. A pool counts as starving if the requests
    that run at once, each halfway through its response, need more than it holds. The guess decides speed alone.
    """
    tokens = float((batch.prompts + batch.responses / 2).mean())

    def starves(candidate: Candidate) -> bool:
        limits, memory = candidate.setup.limits, candidate.memory
        running = min(limits.max_num_seqs, len(batch.prompts) / limits.data_parallel_size)
        return memory is not None and running * tokens > memory.pool_tokens

    ample = sum(not starves(candidate) for candidate in group)
    return [part for part in (group[:ample], *([candidate] for candidate in group[ample:])) if part]


def _timed_list(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates of `_timed_group` as a list, which another process can hand back."""
    return list(_timed_group(candidates, problem))


def _timed_group(candidates: Sequence[Candidate], problem: Problem) -> Iterator[Candidate]:
    """Time candidates with the same number of replicas, from the largest KV pool down. A schedule is reused where it
    holds for the next pool.
    """
    known: Sequence[Schedule] | None = None
    for candidate in candidates:
        found = simulate(candidate.setup, problem.batch, problem.profile, memory=candidate.memory, known=known)
        known = found.schedules
        step_s = None
        if problem.times is not None:
            tokens = int((problem.batch.prompts + problem.batch.responses).sum())
            sync = weight_sync_seconds(found.model, problem.times, problem.kv_scales_calibrated)
            step_s = found.rollout.makespan_s + problem.times.seconds(tokens) + sum(sync.values())
        doubt, rollout = problem.profile.layout_doubt(*candidate.setup.limits.cut), found.rollout
        candidate = replace(candidate, rollout=rollout, extrapolated=found.extrapolated)
        yield replace(candidate, step_s=step_s, layout_doubt=doubt)


def _risk_key(setup: EngineSetup) -> tuple[Precision, tuple[Linear, ...]]:
    """What the risk depends on: of the layout only the linears that stay in BF16."""
    kept = setup.shape.left_in_bf16(setup.limits.tensor_parallel_size) if setup.precision.weights != "bf16" else ()
    return setup.precision, kept


def _risks(setup: EngineSetup, problem: Problem) -> tuple[MismatchRisk, MismatchRisk | None]:
    """The values of a Candidate's `risk` and `unit_risk`."""

    def at(calibrated: bool) -> MismatchRisk:
        return mismatch_risk(
            setup.shape,
            setup.precision,
            problem.batch.responses,
            e8m0=setup.gpu.e8m0_scales,
            kv_scales_calibrated=calibrated,
            tensor_parallel_size=setup.limits.tensor_parallel_size,
            budget=problem.budget,
        )

    held = setup.shape.stored is not None and setup.shape.stored.kv_fp8  # the checkpoint has the scales
    risk = at(problem.kv_scales_calibrated or held)
    if setup.precision.kv != "fp8" or held:
        return risk, None
    return risk, at(False) if problem.kv_scales_calibrated else risk
