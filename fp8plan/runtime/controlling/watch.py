"""What is remembered of a batch before anything is decided."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, isnan
from typing import TYPE_CHECKING, Final

import numpy as np

from fp8plan.runtime.controlling import law
from fp8plan.runtime.controlling.state import ControllerState

if TYPE_CHECKING:
    from fp8plan.model.plan import Plan
    from fp8plan.runtime.mismatch import Mismatch

KL_MEMORY: Final = 0.7  # of the last step's smoothed KL: a half-life of two steps


def usable(mismatch: Mismatch) -> bool:
    """Whether there is a valid token and the figures that decide are numbers. An infinite k3 is: of one token."""
    figures = (mismatch.k1, mismatch.k3, mismatch.k3_robust, mismatch.ess_raw, mismatch.chi2_token)
    if not mismatch.tokens or any(value is None or isnan(value) for value in figures):
        return False
    return isfinite(mismatch.k3_robust) and isfinite(mismatch.kept_fraction(0.0, 1.0))


def observed(state: ControllerState, mismatch: Mismatch, tail_tokens: float) -> ControllerState:
    """The state with this batch in its KL and its tail, thresholds unmoved.

    tail_tokens: earlier batches count as far as this one falls short of so many tokens: a large batch speaks for
                 itself, and the past never outweighs it
    """
    above = law.tail(mismatch)
    past = min(state.tail_tokens, max(tail_tokens - mismatch.tokens, 0.0))
    if past:
        above = (past * np.array(state.tail) + mismatch.tokens * above) / (past + mismatch.tokens)
    kl = mismatch.k3_robust if state.kl is None else KL_MEMORY * state.kl + (1 - KL_MEMORY) * mismatch.k3_robust
    return replace(
        state, steps=state.steps + 1, kl=kl, tail=tuple(above.tolist()), tail_tokens=float(past + mismatch.tokens)
    )


def limit_kl(plan: Plan | None, default: float) -> float:
    """The upper end of the KL that the plan predicts for its choice, if it is above the default."""
    return max(default, plan.select().kl_k3_high or 0.0) if plan is not None else default
