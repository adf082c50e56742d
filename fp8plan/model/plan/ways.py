"""Ways down from a mismatch: the cheapest remedies with which a precision that the risk budget rules out is allowed.

One remedy is tried first, then two, then all three. Of as many, those that leave the trainer's arithmetic alone go
first: router replay, and layers of the rollout in BF16. Among these the fastest is offered. A trainer in FP8 takes no
time of the rollout, but changes the training itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Final

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import Experts
from fp8plan.model.architecture.kept import OUTPUTS, Kept, ends_of
from fp8plan.model.memory.plan import check_pool
from fp8plan.model.plan.candidates import Candidate, Way, risks, timed
from fp8plan.model.plan.choice import Answer, Choice, power, seconds
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.remedies import BF16, BLOCK, NO_REMEDIES, POW2, Remedies
from fp8plan.model.setup import EngineSetup

# Values of keep_bf16 that are tried, those that slow down a model with full attention least first.
KEPT: Final[tuple[Kept, ...]] = ((1, 1), (2, 2), (1, 1, OUTPUTS), (2, 2, OUTPUTS), (4, 4), (4, 4, OUTPUTS))


def way_of(candidate: Candidate, request: PlanRequest, profile: Profile) -> Way | None:
    """The way of a candidate that the budget rules out; None if nothing helps."""
    setup, own = candidate.setup, candidate.setup.remedies
    engines = timed(_sufficient(setup, request), request, profile)
    if not engines:
        return None
    best = min(engines, key=lambda engine: engine.seconds)
    remedies, risk, trainer = best.setup.remedies, best.expected, None
    in_trainer = replace(own, trainer_precision=matching_trainer(setup))
    if _further(remedies, own) == (1, False) and in_trainer in _possible(setup) and _enough(setup, in_trainer, request):
        trainer = in_trainer.trainer_precision
    added_s = best.seconds - candidate.seconds
    return Way(remedies, risk.kl_k3, risk.kl_k3_low, risk.kl_k3_high, risk.level, added_s, trainer)


def _sufficient(setup: EngineSetup, request: PlanRequest) -> list[Candidate]:
    """Engines with as few further remedies as are enough, not timed: with and without router replay, and with the
    cheapest of KEPT. [] if none are enough.
    """

    def further(remedies: Remedies) -> tuple[int, bool]:
        return _further(remedies, setup.remedies)

    for _, group in groupby(sorted(_possible(setup), key=further), key=further):
        engines: dict[bool, Candidate] = {}
        for remedies in group:
            if remedies.router_replay not in engines and (engine := _enough(setup, remedies, request)):
                engines[remedies.router_replay] = engine
        if engines:
            return list(engines.values())
    return []


def _possible(setup: EngineSetup) -> list[Remedies]:
    """All combinations of further remedies, the cheapest linears in BF16 first."""
    own = setup.remedies
    replays, every_kept, trainers = [own.router_replay], [own.keep_bf16], [own.trainer_precision]
    if setup.shape.parts_of(Experts) and setup.limits.enable_prefix_caching and not own.router_replay:
        replays.append(True)
    if setup.precision.in_blocks and setup.shape.stored is None:
        every_kept += [kept for kept in KEPT if _includes(kept, own.keep_bf16)]
        if own.trainer_precision == BF16:
            trainers.append(matching_trainer(setup))
    every = [Remedies(replay, trainer, kept) for trainer in trainers for replay in replays for kept in every_kept]
    return [remedies for remedies in every if remedies != own]


def _includes(kept: Kept, own: Kept) -> bool:
    """True if all that the plan's own `keep_bf16` keeps in BF16 is kept, too."""
    (first, last), (own_first, own_last) = ends_of(kept), ends_of(own)
    return first >= own_first and last >= own_last and set(own[2:]) <= set(kept[2:])


def _further(remedies: Remedies, own: Remedies) -> tuple[int, bool]:
    """The number of remedies beyond the plan's own, and true if the trainer's precision is one."""
    trained = remedies.trainer_precision != own.trainer_precision
    others = (remedies.router_replay != own.router_replay, remedies.keep_bf16 != own.keep_bf16)
    return sum(others) + trained, trained


def _enough(setup: EngineSetup, remedies: Remedies, request: PlanRequest) -> Candidate | None:
    """The engine with remedies, and its risk; None if it does not fit, or the budget rules it out."""
    engine = engine_with(setup, remedies)
    if engine is None:
        return None
    risk, _ = risks(engine.setup, request)
    return replace(engine, risk=risk) if request.risk_budget.accepts(risk.level) else None


def matching_trainer(setup: EngineSetup) -> str:
    """The trainer precision on the grid that rollouts in FP8 blocks have without an FP8 trainer."""
    return POW2 if replace(setup, remedies=NO_REMEDIES).e8m0 else BLOCK


def engine_with(setup: EngineSetup, remedies: Remedies) -> Candidate | None:
    """An engine with remedies, not yet timed; None if it does not fit."""
    limits = replace(setup.limits, enable_return_routed_experts=remedies.router_replay)
    try:
        started, memory = replace(setup, limits=limits, remedies=remedies).placed()
        check_pool(memory, started.gpu, started.limits)
    except (CapacityError, ConfigError):
        return None
    return Candidate(started, memory=memory)


def sentence(choice: Choice, answer: Answer, own: Remedies, subject: str = "Its mismatch risk") -> str:
    """A sentence on the remedies that a choice needs, if the budget rules it out. own: the plan's remedies"""
    way, risk = choice.remedy, f"{subject} is {choice.risk}"
    if way is None:
        return f"{risk}, and no remedy lowers it to {answer.budget.accept}."
    further = way.remedies.beyond(own)
    needs = "also needs" if own.options else "needs"
    per = "a step" if answer.of_the_step else "a rollout"
    sign = "-" if way.added_s < 0 else "+"
    added = f"{sign}{seconds(abs(way.added_s))} s {per}" if way.added_s else "no more time"
    named = further.words(choice.preset.weights != "bf16")
    kl = f"k3 {power(choice.kl_k3)} -> {power(way.kl_k3)}"
    text = f"{risk}; it {needs} {named}: {kl}, {added}, risk {way.risk}."
    if further.trainer_precision != BF16:
        return f"{text} That changes the training itself."
    if way.trainer is None:
        return text
    return f"{text} A trainer in {way.trainer} is enough, too, but changes the training itself."
