"""The sentences of a plan on remedies: those that a choice needs, and the experts that engines return for a trainer."""

from __future__ import annotations

from fp8plan.model.plan.choice import Answer, Choice, power, seconds
from fp8plan.model.risk.remedies import BF16, Remedies


def way_of(choice: Choice, answer: Answer, own: Remedies, whose: str = "Its") -> str:
    """A sentence on the remedies that a choice needs, if the budget rules it out.

    own:   the plan's remedies, which it has
    whose: the word for the choice, or its name with "'s"
    """
    way, risk = choice.remedy, f"{whose} mismatch risk is {choice.risk}"
    if way is None:
        return f"{risk}, and no remedy lowers it to {answer.budget.accept}."
    further = way.remedies.beyond(own)
    needs = "also needs" if own.options else "needs"
    per = "a step" if answer.of_the_step else "a rollout"
    sign = "-" if way.added_s < 0 else "+"
    added = f"{sign}{seconds(abs(way.added_s))} s {per}" if way.added_s else "no more time"
    named = further.words(choice.preset.weights != "bf16")
    kl = f"k3 {power(choice.kl_k3)} -> {power(way.kl_k3)}"
    sentence = f"{risk}; it {needs} {named}: {kl}, {added}, risk {way.risk}."
    if further.trainer_precision != BF16:
        return f"{sentence} That changes the training itself."
    if way.trainer is None:
        return sentence
    return f"{sentence} A trainer in {way.trainer} is enough, too, but changes the training itself."


def returned_experts(picked: Choice) -> list[str]:
    """A sentence on the experts that the engines return."""
    routes = picked.routed_experts
    if routes is None:
        return []
    sent = f"the trainer gets {routes['token']:,} bytes for each token, {routes['rollout'] / 1e9:.2g} GB in all"
    memory = f"{routes['device'] / 1e6:,.0f} MB more of each GPU, and up to {routes['host'] / 1e9:.2g} GB of its host"
    return [f"Router replay: {sent}. A replica needs {memory}. Its time is fitted to rollouts of one slow host."]
