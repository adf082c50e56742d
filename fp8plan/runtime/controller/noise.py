"""The gradient noise scale, from gradient norms of two batch sizes: at once, or step by step during a run."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from typing import Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.state import LeastErrorState

MEMORY: Final = 0.9  # weight of earlier steps: a single step says little, and the scale drifts over a run
ENOUGH: Final = 10  # steps before the first answer
# Largest multiple of the usual noise and gradient that one step counts. A spike in the reported micro-batch shows as
# noise, and a spike in another as gradient.
SPIKE: Final = 5.0


def noise_scale(norm2_small: float, tokens_small: float, norm2_large: float, tokens_large: float) -> float:
    """The gradient noise scale for LeastErrorThresholds(noise_tokens=...): tokens at which noise equals the gradient.

    norm2_*:  mean squared norm of the gradient (before clipping) over batches of tokens_* tokens each: a micro-batch
              and a whole batch of the same steps, say, averaged over some ten steps at least
    By arXiv 1812.06162, appendix A: the mean squared norm is |G|^2 + V / tokens, so norms at two sizes give G and V.

    Raises ConfigError if tokens_small >= tokens_large, or if the norms leave no gradient or no noise: average longer.
    """
    gradient2, noise = _parts(norm2_small, tokens_small, norm2_large, tokens_large)
    if not (gradient2 > 0 and noise > 0):
        raise ConfigError(
            f"squared norms {norm2_small!r}, {norm2_large!r} tell no noise scale; average over more steps"
        )
    return noise / gradient2


def heard(
    state: LeastErrorState, norm2_small: float, tokens_small: float, norm2_large: float, tokens_large: float
) -> LeastErrorState:
    """The state with the norms of one more step. Norms that are not finite (gradients overflowed) change nothing.

    Raises ConfigError if tokens_small >= tokens_large.
    """
    gradient2, noise = _parts(norm2_small, tokens_small, norm2_large, tokens_large)
    if not (isfinite(gradient2) and isfinite(noise)):
        return state
    part = 1.0
    if state.gradients >= ENOUGH and state.gradient_noise > 0:
        mean = (1 - MEMORY) / (1 - MEMORY**state.gradients)
        usual = mean * state.gradient_noise
        whole = mean * max(state.gradient2, 0.0) + usual / float(tokens_large)  # squared norm of a batch's gradient
        pairs = ((usual, noise), (whole, gradient2))
        part = min([1.0, *(SPIKE * expected / abs(seen) for expected, seen in pairs if seen)])
    return replace(
        state,
        gradients=state.gradients + 1,
        gradient2=MEMORY * state.gradient2 + part * gradient2,
        gradient_noise=MEMORY * state.gradient_noise + part * noise,
    )


def measured(state: LeastErrorState) -> float | None:
    """The noise scale of a run's steps, in tokens; None while unknown, infinite if noise hides the gradient."""
    if state.gradients < ENOUGH or state.gradient_noise <= 0:
        return None
    return state.gradient_noise / state.gradient2 if state.gradient2 > 0 else inf


def _parts(norm2_small: float, tokens_small: float, norm2_large: float, tokens_large: float) -> tuple[float, float]:
    """Unbiased estimates of |G|^2 and V, either of which may be negative."""
    numbers = (norm2_small, tokens_small, norm2_large, tokens_large)
    norm2_small, tokens_small, norm2_large, tokens_large = map(float, numbers)  # they may be tensors of one number
    if not 0 < tokens_small < tokens_large:
        raise ConfigError(f"batches of {tokens_small!r} and {tokens_large!r} tokens; allowed: 0 < small < large")
    gradient2 = (tokens_large * norm2_large - tokens_small * norm2_small) / (tokens_large - tokens_small)
    return gradient2, (norm2_small - norm2_large) / (1 / tokens_small - 1 / tokens_large)
