"""The sentences of a plan on trajectories of several turns."""

from __future__ import annotations

from fp8plan.model.plan.choice import Answer


def turn_sentences(answer: Answer) -> list[str]:
    """Sentences on the prefixes that turns find in the cache, beside those of BF16, and on waits for tools."""
    picked, own = answer.picked, answer.picked.turns
    if own is None:
        return []
    sentence = (
        f"Turns: the prefix cache has {own['hit_share']:.1%} of the prompts' tokens. {own['again_tokens']:,} tokens of "
        "earlier turns are computed again"
    )
    baseline = next((c for c in answer.choices if c.precision == "bf16" and c.layout == picked.layout), None)
    if baseline is not None and baseline is not picked and baseline.turns is not None:
        sentence += f", and with bf16 {baseline.turns['again_tokens']:,}"
    waits = f"For {own['tool_share']:.1%} of the rollout the engine has nothing to do but wait for tools."
    return [f"{sentence}.", waits, "A rollout with turns was not measured: this is the model's."]
