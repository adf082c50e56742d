"""Checks of what a run logged: its KL, the tokens behind it, and the alarms that its Monitor sounded.

The last step decides. A figure that it lacks, or that is no number, is never fine.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

from fp8plan.model.risk.budget import RiskBudget
from fp8plan.runtime.controller.alarms import MEANINGS, AlarmLimits, Meaning
from fp8plan.runtime.controller.state import Alarm
from fp8plan.runtime.doctor.finding import Finding, fault, ok, unknown, warning
from fp8plan.runtime.doctor.observed import Logged, Observed
from fp8plan.runtime.mismatch.attribution import sentence
from fp8plan.schemas import K3

# k3 per token between trainer and FP8 rollout, where the run has no limit of its own: the risk budget's limit of high
# risk.
MOST_K3: Final = RiskBudget().moderate_kl
MOST_INVALID: Final = AlarmLimits().invalid  # share of a step's tokens without a finite log-prob
RECENT: Final = 10  # steps: an alarm that sounded in one of the last is a fault, an earlier one a warning
UNKNOWN_ALARM: Final = Meaning("not known to this fp8plan", "pip install --upgrade fp8plan")
FIND: Final = (
    "doctor(engine, weights=..., scored=...) in the trainer's process says whether it is weights or temperature"
)


def mismatch(seen: Observed) -> Finding:
    """The KL between trainer and rollout, as the run logged it, is a number within its limit."""
    log = seen.log
    if log is None:
        return unknown("mismatch", seen.unseen.get("log", "only a run's log tells; type: fp8plan doctor run.jsonl"))
    if log.invalid and log.invalid > MOST_INVALID * (log.invalid + (log.tokens or 0)):
        says = f"invalid log-probs: {_invalid(log)}"
        return fault("mismatch", "invalid_logprobs", says, MEANINGS[Alarm.INVALID].remedy)
    if log.tokens == 0:
        return unknown("mismatch", f"step {log.step} has no valid token")
    if log.k3 is None or log.k3_step is None:
        return unknown("mismatch", f"no step logs {K3}")
    if not isfinite(log.k3):
        says = f"k3 of step {log.k3_step} is no finite number: log-probs are NaN, infinite, or of other tokens"
        return fault("mismatch", "invalid_logprobs", says, MEANINGS[Alarm.INVALID].remedy)
    limit = MOST_K3 if log.limit is None or not isfinite(log.limit) else log.limit
    says = f"k3 {log.k3:.1e} per token, limit {limit:.1e}"
    if causes := sentence(log.causes):
        says += f"; {causes}"
    if log.k3 > limit:
        return fault("mismatch", "mismatch_high", says, FIND)
    if log.k3_step != log.step:
        return unknown("mismatch", f"step {log.step} logs none; in step {log.k3_step}, the last that does: {says}")
    return ok("mismatch", f"{says}; {_invalid(log)}" if log.invalid else says)


def alarms(seen: Observed) -> list[Finding]:
    """One finding for each alarm that sounded in the run: a fault if it was lately, else a warning."""
    if seen.log is None or seen.log.steps is None:
        return []
    log, steps = seen.log, seen.log.steps
    recent = steps[-RECENT:]
    findings: list[Finding] = []
    for name, sounded in log.alarms.items():
        meaning, remedy = MEANINGS[Alarm(name)] if name in {*Alarm} else UNKNOWN_ALARM
        lately = [step for step in sounded if step >= recent[0]]
        if lately:
            often = f", and in {len(lately)} of the last {len(recent)} steps" if len(lately) > 1 else ""
            findings.append(fault("alarm", f"alarm_{name}", f"{name} in step {lately[-1]}{often}: {meaning}", remedy))
        else:
            says = f"{name} in {len(sounded)} of {len(steps)} steps, last in step {sounded[-1]}: {meaning}"
            findings.append(warning("alarm", f"alarm_{name}", says, remedy))
    return findings or [ok("alarm", f"none in {len(steps)} steps")]


def _invalid(log: Logged) -> str:
    every = (log.invalid or 0) + (log.tokens or 0)
    return f"{log.invalid:,.0f} of {every:,.0f} tokens of step {log.step} have none that is finite"
