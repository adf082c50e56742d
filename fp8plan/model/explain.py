"""Why a choice was made, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fp8plan.model.mismatch import MismatchRisk, RiskBudget, ThresholdAdvice
from fp8plan.model.plan import Choice
from fp8plan.model.profile import Profile


def explain(
    choices: Sequence[Choice],
    chosen: int,
    risk: MismatchRisk,
    advice: ThresholdAdvice,
    budget: RiskBudget,
    profile: Profile,
    whole_step: bool,
) -> tuple[str, ...]:
    """Sentences: the choice and its gain, what was passed over, where the gain comes from, the risk, the caveats."""
    picked = choices[chosen]
    sentences = [_headline(picked, choices, budget, whole_step)]
    sentences += _passed_over(choices, chosen, budget, whole_step)
    sentences += _where_from(picked, choices)
    sentences += [f"Mismatch: {reason}." for reason in risk.reasons]
    sentences += [f"Correction: {note}." for note in advice.notes]
    sentences += _caveats(choices, profile)
    return tuple(sentences)


def _headline(picked: Choice, choices: Sequence[Choice], budget: RiskBudget, whole_step: bool) -> str:
    layout = _layout(picked, choices)
    if picked.risk is not None and budget_exceeded(picked, budget):
        return (
            f"No precision stays within the risk budget ({budget.accept}): {picked.precision}{layout} has the lowest "
            f"expected KL, and its risk is {picked.risk}."
        )
    if picked.precision == "bf16":
        why = _why_not_fp8(picked, choices, budget, whole_step)
        return f"Stay with bf16{layout}: {_seconds(picked)} for the rollout; {why}."
    if picked.speedup is None:
        tried = any(c.precision == "bf16" and _same_layout(c, picked) for c in choices)
        bf16 = "bf16 does not fit this layout" if tried else "bf16 was not asked for, so there is no speed-up to name"
        return f"Choose {picked.precision}{layout}: {_seconds(picked)} for the rollout; {bf16}."
    step = f", {picked.step_speedup:.2f}x for the whole RL step" if picked.step_speedup is not None else ""
    gain = f"{picked.speedup:.2f}x as fast as bf16{step}"
    return f"Choose {picked.precision}{layout}: the rollout takes {_seconds(picked)}, {gain}."


def _why_not_fp8(picked: Choice, choices: Sequence[Choice], budget: RiskBudget, whole_step: bool) -> str:
    others = [c for c in choices if c.precision != "bf16"]
    if not others:
        return "no other precision was asked for"
    if not any(c.available for c in others):
        return "no FP8 precision can run here"
    refused = [c for c in others if c.available and budget_exceeded(c, budget)]
    if any(_cost(c, whole_step) < _cost(picked, whole_step) for c in refused):
        return f"faster precisions are outside the risk budget ({budget.accept})"
    return "FP8 is not worth it here"


def budget_exceeded(choice: Choice, budget: RiskBudget) -> bool:
    return choice.risk not in ("low", "moderate", "high")[: ("low", "moderate", "high").index(budget.accept) + 1]


def _passed_over(choices: Sequence[Choice], chosen: int, budget: RiskBudget, whole_step: bool) -> list[str]:
    """Choices that would have been at least as fast, and why they were not taken; FP8 that gains nothing."""
    picked, sentences = choices[chosen], []
    for choice in choices:
        if choice is picked or not choice.available or choice.makespan_s is None or picked.makespan_s is None:
            continue
        name = f"{choice.precision}{_layout(choice, choices)}"
        gain = _cost(picked, whole_step) / _cost(choice, whole_step)
        if gain >= 1 and budget_exceeded(choice, budget):
            sentences.append(f"{name} would be {gain:.2f}x as fast, but its mismatch risk is {choice.risk}.")
        elif gain >= 1:
            sentences.append(f"{name} is no more than {gain - 1:.1%} faster, which does not pay for its mismatch.")
        elif picked.precision == "bf16" and choice.precision != "bf16":
            sentences.append(f"{name} would not be faster than {picked.precision}: {gain:.2f}x its speed.")
    return sentences


def _where_from(picked: Choice, choices: Sequence[Choice]) -> list[str]:
    baseline = next((c for c in choices if c.precision == "bf16" and _same_layout(c, picked) and c.available), None)
    if baseline is None or baseline is picked or not baseline.kv_cache_tokens or not picked.kv_cache_tokens:
        return []
    sentences = []
    if baseline.preemptions and (picked.preemptions or 0) < baseline.preemptions:
        sentences.append(
            f"The KV cache holds {picked.kv_cache_tokens:,} tokens instead of {baseline.kv_cache_tokens:,}, so "
            f"preemptions fall from {baseline.preemptions:,} to {picked.preemptions:,}."
        )
    if picked.tail_fraction is not None and picked.tail_fraction > 0.25:
        sentences.append(
            f"{picked.tail_fraction:.0%} of the rollout is tail, at less than a quarter of its largest batch: there "
            "the weights and the host decide the speed; shorter responses or a larger tensor_parallel_size help most."
        )
    return sentences


def _caveats(choices: Sequence[Choice], profile: Profile) -> list[str]:
    sentences = []
    if profile.kind == "datasheet":
        sentences.append(
            "Uncalibrated: times come from the GPU's datasheet and generic efficiencies, so trust the order of "
            "magnitude and the direction."
        )
    elif any(c.extrapolated for c in choices):
        sentences.append(f"Part of this workload lies outside of what the profile {profile.source} measured.")
    return sentences


def _cost(choice: Choice, whole_step: bool) -> float:
    seconds = choice.rl_step_s if whole_step else choice.makespan_s
    assert seconds is not None
    return seconds


def _same_layout(one: Choice, other: Choice) -> bool:
    return (one.tensor_parallel, one.data_parallel) == (other.tensor_parallel, other.data_parallel)


def _layout(choice: Choice, choices: Sequence[Choice]) -> str:
    """Named only where there is more than one."""
    if all(_same_layout(choice, other) for other in choices):
        return ""
    return f" with tensor_parallel_size {choice.tensor_parallel} x {choice.data_parallel} replicas"


def _seconds(choice: Choice) -> str:
    return f"{seconds(choice.makespan_s)} s ({seconds(choice.makespan_low_s)} to {seconds(choice.makespan_high_s)})"


def seconds(value: float | None) -> str:
    """At least three digits: 1,234 or 98.7 or 0.0123."""
    assert value is not None
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
