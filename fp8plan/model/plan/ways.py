"""Ways down from a mismatch: the cheapest remedies with which a precision that the risk budget rules out is allowed.

One remedy is tried first, then two, then all three. Of as many, those that leave the trainer's arithmetic alone go
first: router replay, and layers of the rollout in BF16. Among these the fastest is offered. A trainer in FP8 takes no
time of the rollout, but changes the training itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import Experts
from fp8plan.model.architecture.kept import ends_of
from fp8plan.model.memory.plan import check_pool
from fp8plan.model.plan.candidates import Candidate, risks_with, timed
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.remedies import BF16, BLOCK, POW2, Remedies
from fp8plan.model.setup import EngineSetup

# Counts of first and last layers that are tried in BF16. Attention outputs are not tried: no probe has measured what
# KL they save.
ENDS: Final = ((1, 1), (2, 2), (4, 4))


@dataclass(frozen=True, slots=True)
class Way:
    """The remedies with which a choice is within the risk budget, those of the plan among them.

    kl_k3, kl_k3_low, kl_k3_high, risk: with them
    added_s: seconds that they add to the RL step if the trainer's times are known, else to the rollout
    trainer: a trainer precision that would be enough alone; None: none would, or the remedies have one
    """

    remedies: Remedies
    kl_k3: float
    kl_k3_low: float
    kl_k3_high: float
    risk: str
    added_s: float
    trainer: str | None = None


def ways(tried: Sequence[Candidate], chosen: int, request: PlanRequest, profile: Profile) -> dict[int, Way | None]:
    """The ways of the fastest candidates whose precision the budget rules out, by index; None where nothing helps.

    Only candidates that are faster than the chosen one have a way, or all if the budget rules that one out, too.
    """
    answer: dict[int, Way | None] = dict.fromkeys(_ruled_out(tried, chosen, request))
    fitting = list[tuple[int, Way, Candidate]]()
    for index in answer:
        fitting += [(index, *way_and_engine) for way_and_engine in _sufficient(tried[index].setup, request)]
    engines = timed([engine for *_, engine in fitting], request, profile)
    for (index, way, _), engine in zip(fitting, engines, strict=True):
        best, added_s = answer[index], engine.seconds - tried[index].seconds
        if best is None or added_s < best.added_s:
            answer[index] = replace(way, added_s=added_s)
    return answer


def _ruled_out(tried: Sequence[Candidate], chosen: int, request: PlanRequest) -> Iterator[int]:
    """The chosen candidate if the budget rules it out, and so the fastest of each other precision.

    If the budget allows the chosen one, only faster ones.
    """
    picked, accepts = tried[chosen], request.risk_budget.accepts
    runnable = [i for i, c in enumerate(tried) if c.rollout is not None]
    compared = [i for i in runnable if picked.layout_doubt or not tried[i].layout_doubt]
    for precision in dict.fromkeys(tried[i].setup.precision for i in compared):
        index = chosen
        if precision != picked.setup.precision:
            index = min((i for i in compared if tried[i].setup.precision == precision), key=lambda i: tried[i].seconds)
        faster = tried[index].seconds < picked.seconds or not accepts(picked.expected.level)
        if faster and not accepts(tried[index].expected.level):
            yield index


def _sufficient(setup: EngineSetup, request: PlanRequest) -> list[tuple[Way, Candidate]]:
    """The remedies that are enough, as few as possible, and their engines: with and without router replay, and with the
    fewest layers in BF16.

    Their seconds are not known yet. [] if none are enough.
    """
    own, matching = request.remedies, matching_trainer(setup)

    def enough(remedies: Remedies) -> tuple[Way, Candidate] | None:
        engine = engine_with(setup, remedies)
        if engine is None:
            return None
        risk, _ = risks_with(remedies, engine.setup, request)
        way = Way(remedies, risk.kl_k3, risk.kl_k3_low, risk.kl_k3_high, risk.level, added_s=0.0)
        return (way, engine) if request.risk_budget.accepts(risk.level) else None

    def added(remedies: Remedies) -> tuple[int, bool]:
        """The number of further remedies, and true if the trainer's precision is one."""
        trained = remedies.trainer_precision != own.trainer_precision
        others = (remedies.router_replay != own.router_replay, remedies.keep_bf16 != own.keep_bf16)
        return sum(others) + trained, trained

    every = sorted(_possible(setup, own, matching), key=added)
    in_trainer = replace(own, trainer_precision=matching)
    for (number, trained), group in groupby(every, key=added):
        offers: dict[bool, tuple[Way, Candidate]] = {}
        for remedies in group:
            if remedies.router_replay not in offers and (offer := enough(remedies)) is not None:
                offers[remedies.router_replay] = offer
        if not offers:
            continue
        if number == 1 and not trained and in_trainer in every and enough(in_trainer) is not None:
            return [(replace(way, trainer=matching), engine) for way, engine in offers.values()]
        return list(offers.values())
    return []


def _possible(setup: EngineSetup, own: Remedies, matching: str) -> list[Remedies]:
    """All combinations of further remedies, those with fewer layers first.

    matching: the trainer precision on the rollout's grid
    """
    replays, every_kept, trainers = [own.router_replay], [own.keep_bf16], [own.trainer_precision]
    if setup.shape.parts_of(Experts) and setup.limits.enable_prefix_caching and not own.router_replay:
        replays.append(True)
    if setup.precision.in_blocks and setup.shape.stored is None:
        first, last = ends_of(own.keep_bf16)
        more = [(*each, *own.keep_bf16[2:]) for each in ENDS if each[0] >= first and each[1] >= last]
        every_kept += [kept for kept in more if kept != own.keep_bf16]
        if own.trainer_precision == BF16:
            trainers.append(matching)
    every = [Remedies(replay, trainer, kept) for trainer in trainers for replay in replays for kept in every_kept]
    return [remedies for remedies in every if remedies != own]


def matching_trainer(setup: EngineSetup) -> str:
    """The trainer precision on the grid of this GPU's rollouts in FP8 blocks."""
    return POW2 if setup.gpu.e8m0_scales else BLOCK


def engine_with(setup: EngineSetup, remedies: Remedies) -> Candidate | None:
    """An engine with remedies, not yet timed; None if it does not fit."""
    limits = replace(setup.limits, enable_return_routed_experts=remedies.router_replay)
    pow2 = remedies.trainer_precision == POW2
    try:
        started, memory = replace(setup, limits=limits, keep_bf16=remedies.keep_bf16, e8m0=pow2).placed()
        check_pool(memory, started.gpu, started.limits)
    except (CapacityError, ConfigError):
        return None
    return Candidate(started, memory=memory)
