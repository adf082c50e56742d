"""The sentences of a plan on trajectories of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import Answer, seconds
from fp8plan.model.plan.scene import Lever, Scene

LIMITS: Final = {"tools": "The tools limit", "cache": "The KV cache limits", "tail": "The tail limits"}
WORTH: Final = 1.005  # smaller gains count as none


def turn_sentences(answer: Answer, candidate: Candidate) -> list[str]:
    """Sentences on what limits the chosen rollout of turns, and on its cache beside that of BF16.

    candidate: the choice
    """
    picked, bf16 = answer.picked, answer.bf16
    own = picked.turns or {}
    sentences = [turn_limit(own)]
    again, of_bf16 = own["again_tokens"], 0
    words = f"{again:,} tokens in full blocks of earlier turns are computed again"
    if bf16 is not None and bf16 is not picked and bf16.turns is not None:
        of_bf16 = bf16.turns["again_tokens"]
        words += f", and with bf16 {of_bf16:,}"
    if again or of_bf16:
        sentences.append(f"{words}.")
    if not candidate.setup.limits.enable_prefix_caching:
        sentences.append("Prefix caching is off, so that each turn computes the whole context again: --prefix-caching.")
    return sentences


def lever_sentences(answer: Answer, scene: Scene, levers: Sequence[Lever]) -> list[str]:
    """Sentences on what a larger KV cache gains, and on the levers of a rollout of turns.

    scene:  the choice, simulated
    levers: its `turn_levers`
    """
    picked, bf16, sentences = answer.picked, answer.bf16, []
    if picked.gain is not None and bf16 is not None and bf16.kv_cache_tokens is not None:
        kept = scene.kept_gain(bf16.kv_cache_tokens)
        if kept >= WORTH:
            sentences.append(
                f"Of the {picked.gain.ratio:.2f}x over bf16, {kept:.2f}x is by the prefixes and requests that a larger "
                f"KV cache keeps, and {picked.gain.ratio / kept:.2f}x by faster steps."
            )
    priced = [*_kv_cache(answer), *map(_priced, levers)]
    return [*sentences, *priced, "Rollouts of turns were measured with two dense models on one H200 alone."]


def turn_limit(turns: Mapping[str, Any]) -> str:
    """The sentence on what limits a rollout. turns: of a Choice"""
    subject = LIMITS.get(turns["limit"], "Compute limits")
    tools, cache, tail = (f"{turns['saves'][name]:.0%}" for name in ("tools", "cache", "tail"))
    return (
        f"{subject} the rollout: of its time, tools that answer at once would save {tools}, an endless KV cache "
        f"{cache}, and the tail is {tail}."
    )


def _kv_cache(answer: Answer) -> list[str]:
    """The sentence on an FP8 KV cache, from the choice that differs in it alone."""
    picked = answer.picked
    for other in answer.choices:
        alike = other.preset.weights == picked.preset.weights and other.layout == picked.layout
        if not alike or other.preset.kv == picked.preset.kv or other.makespan_s is None:
            continue
        in_plan = picked.preset.kv == "fp8"
        with_it, without = (picked, other) if in_plan else (other, picked)
        saves = _saves(without.makespan_s or 0.0, with_it.makespan_s or 0.0)
        where = f"the plan has it, {other.precision} has not" if in_plan else other.precision
        return [f"Lever: FP8 KV cache ({where}): {saves}; risk {with_it.risk}."]
    return []


def _priced(lever: Lever) -> str:
    """The sentence on a lever."""
    return f"Lever: {lever.name} ({lever.setting}): {_saves(lever.before_s, lever.after_s)}; {lever.price}."


def _saves(before_s: float, after_s: float) -> str:
    """The words for the seconds that a lever saves or loses."""
    if max(before_s, after_s) < WORTH * min(before_s, after_s):
        return "changes nothing"
    return f"saves {seconds(before_s - after_s)} s" if after_s < before_s else f"loses {seconds(after_s - before_s)} s"
