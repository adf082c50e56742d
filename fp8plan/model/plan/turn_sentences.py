"""The sentences of a plan on trajectories of several turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fp8plan.model.plan.choice import Answer

LIMITS: Final = {"tools": "The tools limit", "cache": "The KV cache limits", "tail": "The tail limits"}


def turn_sentences(answer: Answer, prefix_caching: bool) -> list[str]:
    """Sentences on what limits the chosen rollout of turns, and on the prefixes that turns find in the cache.

    prefix_caching: of the chosen engine
    """
    picked = answer.picked
    own = picked.turns or {}
    sentences = [_limit(own), f"Turns: the prefix cache has {own['hit_share']:.1%} of the tokens of admitted requests."]
    baseline = next((c for c in answer.choices if c.precision == "bf16" and c.layout == picked.layout), None)
    of_bf16 = 0 if baseline is None or baseline.turns is None else baseline.turns["again_tokens"]
    if own["again_tokens"] or of_bf16:
        again = f"{own['again_tokens']:,} tokens of earlier turns are computed again"
        if baseline is not None and baseline is not picked:
            again += f", and with bf16 {of_bf16:,}"
        sentences.append(f"{again}.")
    if own["tool_share"]:
        sentences.append(
            f"For {own['tool_share']:.1%} of the rollout the engine is idle, as all trajectories wait for tools."
        )
    if not prefix_caching:
        sentences.append("Prefix caching is off, so that each turn computes the whole context again: --prefix-caching.")
    return [*sentences, "No rollout of turns was measured on a GPU. These are predictions."]


def _limit(turns: Mapping[str, Any]) -> str:
    """The sentence on what limits a rollout. turns: of a Choice"""
    subject = LIMITS.get(turns["limit"], "Compute limits")
    tools, cache, tail = (f"{turns['saves'][name]:.0%}" for name in ("tools", "cache", "tail"))
    return (
        f"{subject} the rollout: of its time, tools that answer at once would save {tools}, an endless KV cache "
        f"{cache}, and the tail is {tail}."
    )
