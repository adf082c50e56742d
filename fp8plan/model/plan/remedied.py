"""The sentences of a plan on remedies: those that a choice needs, and the experts that engines return for a trainer."""

from __future__ import annotations

from fp8plan.model.plan.choice import Answer, Choice, power, seconds
from fp8plan.model.risk.remedies import BF16


def way_of(choice: Choice, answer: Answer) -> str:
    """A sentence on the remedies that a choice needs, if the budget rules it out."""
    way, risk = choice.remedy, f"Its mismatch risk is {choice.risk}"
    if way is None:
        return f"{risk}, and no remedy that is planned lowers it to {answer.budget.accept}."
    named = way.remedies.words(choice.preset.weights != "bf16")
    per = "a step" if answer.of_the_step else "a rollout"
    added = f"{'-' if way.added_s < 0 else '+'}{seconds(abs(way.added_s))} s {per}" if way.added_s else "no more time"
    needs = f"{risk}; it needs {named}: k3 {power(choice.kl_k3)} -> {power(way.kl_k3)}, {added}, risk {way.risk}."
    if way.remedies.trainer_precision != BF16:
        return f"{needs} That changes the training itself."
    if way.trainer is None:
        return needs
    return f"{needs} A trainer in {way.trainer} is enough, too, but changes the training itself."


def returned_experts(picked: Choice) -> list[str]:
    """A sentence on the experts that the engines return."""
    routes = picked.routed_experts
    if routes is None:
        return []
    memory = f"{routes['device'] / 1e6:,.0f} MB more on each GPU and up to {routes['host'] / 1e9:.2g} GB of a host"
    sent = f"each token has {routes['token']:,} bytes of experts, and the rollout {routes['rollout'] / 1e9:.2g} GB"
    return [f"Router replay: {sent} for the trainer. A replica needs {memory}. No rollout with it was measured."]
