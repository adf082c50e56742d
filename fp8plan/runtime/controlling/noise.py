"""The gradient noise scale from two gradient norms."""

from __future__ import annotations

from fp8plan.errors import ConfigError


def noise_scale(norm2_small: float, tokens_small: float, norm2_large: float, tokens_large: float) -> float:
    """Tokens in a batch whose gradient has noise as large as itself: for AdaptiveThresholds(noise_tokens=...).

    norm2_*:  mean squared norm of the gradient (before clipping) over batches of tokens_* tokens each: a micro-batch
              and a whole batch of the same steps, say, averaged over some ten steps at least
    By arXiv 1812.06162, appendix A: the mean squared norm is |G|^2 + V / tokens, and two sizes tell G and V apart.

    Raises ConfigError if tokens_small >= tokens_large, or if the norms leave no gradient or no noise: average longer.
    """
    if not 0 < tokens_small < tokens_large:
        raise ConfigError(f"batches of {tokens_small!r} and {tokens_large!r} tokens; allowed: 0 < small < large")
    gradient2 = (tokens_large * norm2_large - tokens_small * norm2_small) / (tokens_large - tokens_small)
    noise = (norm2_small - norm2_large) / (1 / tokens_small - 1 / tokens_large)
    if not (gradient2 > 0 and noise > 0):
        raise ConfigError(
            f"squared norms {norm2_small!r}, {norm2_large!r} tell no noise scale; average over more steps"
        )
    return noise / gradient2
