"""The search of the engine's limits: plan at every setting of a grid, and keep the fastest plan.

The search is exact over the grid of max_num_seqs, CUDA graphs and, with turns, the trajectories at once. Each setting
is simulated with every precision on every layout, and chosen from as `plan` would choose. From the best setting the
search goes on by single changes of max_num_batched_tokens and prefix caching, until none gains WORTH_A_CHANGE. Only
makespans are computed, several settings at a time. The result is planned in full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, Final, NamedTuple

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.cost.clock import Clock
from fp8plan.model.limits import Derived, EngineLimits, Lowerable, capture_size_for
from fp8plan.model.memory.kv_specs import windows_of
from fp8plan.model.plan.candidates import Candidate, in_a_step
from fp8plan.model.plan.choice import SpeedUp, choose, speed_up
from fp8plan.model.plan.explain import limits_matter
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import Prediction, priced, unpriced
from fp8plan.model.plan.request import of_fields
from fp8plan.model.plan.scene import CONCURRENT, Scene
from fp8plan.model.precision import Precision
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.rollout import makespans, schedules
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.targets import TARGETS
from fp8plan.model.tune.request import SEARCHED, TuneRequest
from fp8plan.model.workers import mapper

LEAST_SEQS, MOST_SEQS = 64, 2048  # beyond them nothing was measured
BUDGETS: Final = (8192, 16384, 32768)
SHARE_STEP = 0.05  # of gpu_memory_utilization
WORTH_A_CHANGE = 0.005  # a setting that gains less keeps the limits that were there
LEAST_AT_ONCE = 16  # trajectories


class Point(NamedTuple):
    """Limits of the engines, and with turns the trajectories at once; None: all, or no turns."""

    limits: EngineLimits
    concurrent: int | None = None

    @classmethod
    def of(cls, made: Prediction) -> Point:
        """The point of a plan."""
        turns = made.request.batch.turns
        return cls(made.plan.limits, None if turns is None else turns.concurrent)

    def changes(self, before: Point) -> dict[str, tuple[Any, Any]]:
        """The fields that differ: name -> (before, here)."""
        pairs = {name: (getattr(before.limits, name), getattr(self.limits, name)) for name in SEARCHED}
        pairs[CONCURRENT] = before.concurrent, self.concurrent
        return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of each limit.

    max_num_seqs:           powers of two from LEAST_SEQS on, and the requests of a replica
    whole_graphs:           False: CUDA graphs as vLLM captures them; True: for as many requests as may run
    max_num_batched_tokens: tried at the best of these
    prefix_caching:         likewise
    concurrent:             with turns, powers of two from LEAST_AT_ONCE on, and all; all for targets that start all
    """

    max_num_seqs: tuple[int, ...]
    whole_graphs: tuple[bool, ...]
    max_num_batched_tokens: tuple[int, ...]
    prefix_caching: tuple[bool, ...]
    concurrent: tuple[int | None, ...] = (None,)

    @classmethod
    def around(cls, base: Prediction, callers: EngineLimits | None, keep: Collection[str]) -> Grid:
        """The grid around a plan. These stay: sizes that the caller set, a prefix cache that is off, limits in `keep`.
        A prefix cache that returned experts need stays on.

        callers: the caller's limits, before the GPU's defaults filled them
        """
        limits, requests = base.plan.limits, len(base.request.batch.prompts)
        kept_sizes = [x for x in ("max_num_seqs", "max_num_batched_tokens") if not _left_out(callers, x)]
        graphs = limits.max_cudagraph_capture_size is None and not limits.enforce_eager
        caching = () if callers is None or callers.enable_prefix_caching is not False else ("enable_prefix_caching",)
        fixed = {*keep, *kept_sizes, *caching, *(() if graphs else ("max_cudagraph_capture_size",))}
        if limits.enable_return_routed_experts:
            fixed.add("enable_prefix_caching")
        replicas = {-(-requests // c.setup.limits.data_parallel_size) for c in base.tried}
        powers = {2**k for k in range(LEAST_SEQS.bit_length() - 1, MOST_SEQS.bit_length()) if 2**k < max(replicas)}
        values: dict[str, set[Any]] = {
            "max_num_seqs": powers | {n for n in replicas if LEAST_SEQS <= n <= MOST_SEQS},
            "max_cudagraph_capture_size": {True},
            "max_num_batched_tokens": set(BUDGETS),
            "enable_prefix_caching": {True, False},
        }
        before: dict[str, Any] = {name: getattr(limits, name) for name in SEARCHED}
        before["max_cudagraph_capture_size"] = False
        seqs, whole_graphs, budgets, caches = (
            tuple(sorted({before[x]} | (set() if x in fixed else values[x]))) for x in SEARCHED
        )
        if _left_out(callers, "max_num_seqs"):  # each candidate may lower it to its KV blocks
            seqs = tuple(map(Lowerable, seqs))
        at_once, numbers = Point.of(base).concurrent, list[int]()
        starts, turns = TARGETS[base.request.target], base.request.batch.turns
        if at_once is None and not starts.starts_all and CONCURRENT not in keep and turns is not None:
            least = max(LEAST_AT_ONCE, starts.least_at_once(base.request.workload.samples_per_prompt))
            numbers = [2**k for k in range(requests.bit_length()) if least <= 2**k < requests]
        return cls(seqs, whole_graphs, budgets, caches, (*numbers, at_once))

    def settings(self, base: Prediction) -> list[list[Point]]:
        """The settings of max_num_seqs, CUDA graphs and trajectories at once, those with the same graphs together."""
        setup, alike = base.chosen.setup, defaultdict[Any, list[Point]](list)
        for seqs, whole in product(self.max_num_seqs, self.whole_graphs):
            budget = max(base.plan.limits.max_num_batched_tokens, seqs)
            limits = replace(base.plan.limits, max_num_seqs=seqs, max_num_batched_tokens=budget)
            sizes = replace(setup, limits=limits).cudagraph_sizes
            if whole and seqs <= max(sizes, default=0):
                continue
            wider = replace(limits, max_cudagraph_capture_size=capture_size_for(seqs)) if whole else limits
            alike[seqs if whole else sizes] += [Point(wider, number) for number in self.concurrent]
        return sorted(alike.values(), key=len, reverse=True)

    def near(self, point: Point) -> list[Point]:
        """The settings with one other value of max_num_batched_tokens or of prefix caching."""
        limits = point.limits
        budgets = [budget for budget in self.max_num_batched_tokens if budget >= limits.max_num_seqs]
        others = [replace(limits, max_num_batched_tokens=budget) for budget in budgets]
        others += [replace(limits, enable_prefix_caching=on) for on in self.prefix_caching]
        return [Point(other, point.concurrent) for other in others if other != limits]


def in_words(name: str, value: Any) -> str:
    """The value of a limit, or of the trajectories at once, in a sentence."""
    if value is None:
        return "all" if name == CONCURRENT else "vLLM's own"
    return str(value)


def _left_out(callers: EngineLimits | None, name: str) -> bool:
    return callers is None or isinstance(getattr(callers, name), Derived)


@dataclass(frozen=True, slots=True)
class Tuned:
    """Two plans: under the limits before the search, and under the best limits.

    request:     the question
    base:        without levers of turns
    settings:    number of settings that were tried
    least_share: the least gpu_memory_utilization at which the best plan is as fast; None: not known
    """

    request: TuneRequest
    base: Prediction
    best: Prediction
    grid: Grid
    settings: int
    least_share: float | None

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The limits, and the trajectories at once, that changed: name -> (before, after)."""
        return Point.of(self.best).changes(Point.of(self.base))

    def gain(self) -> SpeedUp:
        """The speed of the best plan's choice over that of the choice under the limits before."""
        before, after = self.base.chosen, self.best.chosen
        return speed_up(before.timed, after.timed, self.best.profile, (before.step_s, after.step_s))

    def scene(self) -> Scene:
        """The best plan's choice, simulated."""
        return Scene.of(self.best.chosen, self.best.request, self.best.profile)

    @property
    def prediction(self) -> Prediction:
        """The best prediction. Its plan has the reasons for the limits, in place of the advice to tune them."""
        plan, chosen = self.best.plan, self.best.chosen
        advice = limits_matter(chosen.setup, chosen.timed)
        reasons = (*(reason for reason in plan.reasons if reason not in advice), *self._sentences())
        return replace(self.best, plan=replace(plan, reasons=reasons))

    def _sentences(self) -> Iterator[str]:
        plan, grid = self.best.plan, self.grid
        if self.changes:
            changed = ", ".join(
                f"{name} {after} instead of {in_words(name, before)}" for name, (before, after) in self.changes.items()
            )
            before = self.base.plan.select().precision
            yield f"Limits: {changed}. The choice is {self.gain().over(f'{before}, the choice before')}."
        else:
            yield "Limits: no other setting makes a better plan."
        seqs, budgets = (", ".join(map(str, x)) for x in (grid.max_num_seqs, grid.max_num_batched_tokens))
        graphs, caching, at_once = "", "", ""
        if any(grid.whole_graphs):
            graphs = ", with CUDA graphs as vLLM captures them and for all requests that may run"
        if len(grid.prefix_caching) > 1:
            caching = " and prefix caching on or off"
        if len(grid.concurrent) > 1:
            numbers = ", ".join(in_words(CONCURRENT, number) for number in grid.concurrent)
            at_once = f", with {numbers} trajectories at once"
        yield (
            f"The best of {self.settings} settings tried, up to half a percent: max_num_seqs {seqs}{graphs}{at_once}, "
            f"in every precision and layout, and around the best of them max_num_batched_tokens {budgets}{caching}."
        )
        if self.least_share is not None and self.least_share < plan.limits.gpu_memory_utilization:
            yield (
                f"gpu_memory_utilization {self.least_share:g} would be enough for these lengths, and leave the rest of "
                "the memory to a trainer."
            )


@of_fields(TuneRequest)
def tune(request: TuneRequest) -> Plan:
    """Choose the engine's limits too: the plan that `plan` makes under the best limits of a grid.

    The arguments are the fields of TuneRequest. Searched are max_num_seqs, max_num_batched_tokens, the CUDA graphs,
    prefix caching and, with turns, the trajectories at once, together with precision and layout. The plan's reasons
    state the grid.

    Raises what `plan` raises, and ConfigError for an unknown name in `keep`, and for drafts of turns or of a model that
    they are not modelled for.
    """
    return search(request).prediction.plan


def search(request: TuneRequest) -> Tuned:
    """The plans before and after the search of `tune`. Raises as `tune` does."""
    if request.speculation is not None:
        if request.workload.turns is not None:
            raise ConfigError("the workload has turns, for which drafts are not modelled; leave --acceptance out")
        request.speculation.check(request.shape)
    quiet = replace(request, progress=iter)
    base = unpriced(quiet)
    start, budget = Point.of(base), base.plan.budget
    grid = Grid.around(base, request.limits, request.keep)
    groups, rivals = grid.settings(base), Field.of(base)
    tried: list[Setting] = []
    with mapper(min(request.workers, len(groups))) as map_groups:
        for _, choices in zip(request.progress(groups), map_groups(rivals.choices, groups), strict=True):
            tried += choices
    best = _pick(tried, start, budget)
    count, last = len(tried), None
    while best != last:
        last, near = best, rivals.choices(grid.near(best.point))
        best = _pick([best, *near], best.point, budget)
        count += len(near)
    plan = priced(base if best.point == start else unpriced(_asked(quiet, best.point)))
    return Tuned(request, base, plan, grid, count, _least_share(best.choice, plan))


def _asked(request: TuneRequest, point: Point) -> TuneRequest:
    """The request of a plan at a point."""
    workload = request.workload
    if workload.turns is not None:
        workload = replace(workload, turns=replace(workload.turns, concurrent=point.concurrent))
    return replace(request, limits=point.limits, workload=workload)


class Setting(NamedTuple):
    """A point, and the choice there."""

    point: Point
    choice: Candidate


Timed = tuple[int, int, Candidate]  # numbers of a point and of a candidate, and the candidate with its makespan there


def _engine(candidate: Candidate) -> tuple[Precision, tuple[int, bool, int]]:
    return candidate.setup.precision, candidate.setup.limits.layout


@dataclass(frozen=True, slots=True)
class Field:
    """The candidates that settings choose from.

    candidates: those of the plan that can run, or do not fit, with their risks
    base:       the plan
    """

    candidates: tuple[Candidate, ...]
    base: Prediction

    @classmethod
    def of(cls, base: Prediction) -> Field:
        """The field of a plan."""
        return cls(tuple(replace(c, rollout=None) for c in base.tried if c.memory or c.unfit), base)

    def choices(self, points: Sequence[Point]) -> list[Setting]:
        """The choice at each of some points; none where nothing fits."""
        rated: list[dict[int, Candidate]] = [{} for _ in points]
        timed = self._of_responses(points) if self.base.request.batch.turns is None else self._of_turns(points)
        for number, i, candidate in timed:
            rated[number][i] = candidate
        ordered = [[those[i] for i in sorted(those)] for those in rated]
        pairs = [(point, those) for point, those in zip(points, ordered, strict=True) if those]
        return [Setting(point, those[choose(those, self.base.plan.budget)]) for point, those in pairs]

    def _of_turns(self, points: Sequence[Point]) -> Iterator[Timed]:
        """The candidates that can run at each point, timed. Each has a clock for all points with the same limits."""
        request, profile = self.base.request, self.base.profile
        for i, first in enumerate(self.candidates):
            clocks = dict[EngineLimits, Clock]()
            for number, (limits, concurrent) in enumerate(points):
                candidate, batch = self._under(limits, first), request.batch.at_most(concurrent)
                if candidate is None or candidate.memory is None or batch.at_once < self._replicas(i):
                    continue
                setup, memory = candidate.setup, candidate.memory
                model = setup.step_model(profile, memory=memory)
                if limits not in clocks:
                    clocks[limits] = Clock.of(model, windows_of(memory.kv.specs))
                try:
                    planned = schedules(batch.split(self._replicas(i)), memory.kv, setup.limits, clock=clocks[limits])
                except ConfigError:  # prefix caching of these layers is not modelled
                    continue
                timed_so = replace(candidate, quick_s=makespans([planned], model)[0])
                yield number, i, in_a_step(timed_so, model, request)

    def _of_responses(self, points: Sequence[Point]) -> Iterator[Timed]:
        """The same for responses of one turn.

        Candidates with equally many replicas share schedules, as in a plan; so do settings that allow more requests
        than there are. Settings with the same CUDA graphs are timed together.
        """
        for replicas, group in groupby(self._order(), key=self._replicas):
            batches = self.base.request.batch.split(replicas)
            most = max(len(batch.prompts) for batch in batches)
            known: dict[Any, list[Schedule]] = {}
            for i in group:
                alike = defaultdict[Any, list[tuple[int, Candidate, list[Schedule]]]](list)
                for number, (limits, _) in enumerate(points):
                    candidate = self._under(limits, self.candidates[i])
                    if candidate is None or candidate.memory is None:
                        continue
                    setup, kv = candidate.setup, candidate.memory.kv
                    running = min(setup.limits.max_num_seqs, most)
                    work = running, limits.max_num_batched_tokens, limits.enable_prefix_caching
                    try:
                        planned = schedules(batches, kv, setup.limits, known.get(work))
                    except ConfigError:  # prefix caching of these layers is not modelled
                        continue
                    known[work] = planned
                    alike[setup.cudagraph_sizes].append((number, candidate, planned))
                for together in alike.values():
                    model = together[0][1].setup.step_model(self.base.profile)
                    seconds = makespans([planned for *_, planned in together], model)
                    for (number, candidate, _), quick_s in zip(together, seconds, strict=True):
                        timed_so = replace(candidate, quick_s=quick_s)
                        yield number, i, in_a_step(timed_so, model, self.base.request)

    def _order(self) -> list[int]:
        """The indices of the candidates: most replicas first, then the largest KV pool first."""
        pools = [c.memory.usable_blocks if c.memory else 0 for c in self.candidates]
        return sorted(range(len(pools)), key=lambda i: (-self._replicas(i), -pools[i]))

    def _replicas(self, index: int) -> int:
        return self.candidates[index].setup.limits.data_parallel_size

    def _under(self, limits: EngineLimits, candidate: Candidate) -> Candidate | None:
        """A candidate under other limits; None if it cannot run so."""
        changes: dict[str, Any] = {name: getattr(limits, name) for name in SEARCHED}
        setup = replace(candidate.setup, limits=replace(candidate.setup.limits, **changes))
        try:
            started, memory = setup.placed()
            return replace(candidate, setup=started, memory=memory)
        except (CapacityError, ConfigError):  # ConfigError: vLLM keeps these layers' caches without prefix caching only
            return None


def _pick(settings: Sequence[Setting], before: Point, budget: RiskBudget) -> Setting:
    """The setting whose choice is best, by the rule of `choose`.

    Of settings with the same choice, within WORTH_A_CHANGE of its time, the one nearest to the point before.
    """
    best = settings[choose([setting.choice for setting in settings], budget)].choice
    same = [
        setting
        for setting in settings
        if _engine(setting.choice) == _engine(best) and setting.choice.seconds <= best.seconds * (1 + WORTH_A_CHANGE)
    ]
    return min(same, key=lambda setting: (len(setting.point.changes(before)), setting.choice.seconds))


def _least_share(choice: Candidate, best: Prediction) -> float | None:
    """The least gpu_memory_utilization, in steps of SHARE_STEP, with which a choice is as fast; None if it has none."""
    limits = choice.setup.limits.settled()
    if choice.setup.gpu.is_cpu or limits.num_gpu_blocks is not None:
        return None
    batch, known, least = best.request.batch, None, limits.gpu_memory_utilization
    model, share = choice.setup.step_model(best.profile), round(least - SHARE_STEP, 4)
    batches, clock = batch.split(limits.data_parallel_size), None
    if batch.turns is not None and choice.memory is not None:
        clock = Clock.of(model, windows_of(choice.memory.kv.specs))
    while share > 0:
        try:
            memory = replace(choice.setup, limits=replace(limits, gpu_memory_utilization=share)).placed()[1]
        except CapacityError:
            break
        known = schedules(batches, memory.kv, limits, known, clock)
        if makespans([known], model)[0] > (choice.makespan_s or 0.0) * (1 + WORTH_A_CHANGE):
            break
        least, share = share, round(share - SHARE_STEP, 4)
    return least
