"""What is remembered of a batch before anything is decided."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, isnan
from typing import TYPE_CHECKING, Final

from fp8plan.runtime.controller.state import State

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.runtime.mismatch.metrics import Mismatch

KL_MEMORY: Final = 0.7  # of the last step's smoothed KL: a half-life of two steps
KL_LEAP: Final = (
    100.0  # times the limit, or the KL so far, that a batch may count: no single one rules for long after it
)


def usable(mismatch: Mismatch) -> bool:
    """Whether there is a valid token and the figures that decide are numbers. An infinite k3 is: of one token."""
    figures = (mismatch.k1, mismatch.k3, mismatch.k3_robust, mismatch.ess_raw, mismatch.chi2_token)
    if not mismatch.tokens or any(value is None or isnan(value) for value in figures):
        return False
    return isfinite(mismatch.k3_robust) and isfinite(mismatch.kept_fraction(0.0, 1.0))


def observed(state: State, mismatch: Mismatch) -> State:
    """The state with this batch in its KL, thresholds unmoved."""
    counts = min(mismatch.k3_robust, KL_LEAP * max(state.limit_kl, state.kl or 0.0))
    kl = counts if state.kl is None else KL_MEMORY * state.kl + (1 - KL_MEMORY) * counts
    return replace(state, steps=state.steps + 1, kl=kl)


def predicted_kl(plan: Plan | None, choice: int | str | None = None) -> float:
    """The upper end of the KL that the plan predicts for a choice, or its own; 0 if it says nothing."""
    return (plan.select(choice).kl_k3_high or 0.0) if plan is not None else 0.0
