"""A sequence that the trainer has scored, which new weights must reproduce."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.tokens import refuse_tokens
from fp8plan.runtime.watch.mismatch.sums import LIMIT, k3

# Allowed mean k3 per token of a scored sequence. FP8 shows 0.001 to 0.03, wrong weights more than 1.
MOST_K3: Final = 0.5


class Scored(NamedTuple):
    """A sequence's token ids, and the trainer's log-probs of all but the first, in nats, at temperature 1."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


def refuse_scored(state: SyncState, scored: Scored) -> None:
    """Raises ConfigError for tokens that the engine cannot score, and log-probs that do not fit them."""
    if not isinstance(scored, Scored):
        raise ConfigError(f"scored is of type {type(scored).__name__}; allowed: Scored(token ids, log-probs)")
    refuse_tokens("scored", [scored.tokens], state.vocabulary, state.longest_prompt)
    try:
        tokens, logprobs, finite = len(scored.tokens), len(scored.logprobs), [*map(isfinite, scored.logprobs)]
    except TypeError as error:
        raise ConfigError(f"scored: {error}; allowed: Scored(list of token ids, list of log-probs)") from None
    if logprobs != tokens - 1 or not logprobs:
        raise ConfigError(f"{logprobs} log-probs for {tokens} tokens; allowed: one for each but the first")
    if not all(finite):
        raise ConfigError("scored: a log-prob is not finite; allowed: the trainer's, in nats")


def score(scored: Scored) -> Generator[Call, Any, float]:
    """Return the mean k3 between the trainer and the engine on a sequence: that of the worst replica.

    Raises ConfigError above MOST_K3.
    """
    settings = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    worst = 0.0
    for (output,) in (yield Generate([scored.tokens], settings, everywhere=True)):
        own = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], scored.tokens[1:], strict=True)]
        ratios = [float(trainer - engine) for trainer, engine in zip(scored.logprobs, own, strict=True)]
        mean = sum(k3(min(ratio, LIMIT)) for ratio in ratios) / len(ratios)
        if not mean <= MOST_K3:  # NaN fails, too
            raise ConfigError(
                f"the engine's log-probs differ from the trainer's: k3 {mean:.3g} per token; allowed: {MOST_K3:g}"
            )
        worst = max(worst, mean)
    return worst
