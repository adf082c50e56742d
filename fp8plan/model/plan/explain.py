"""The reasons for a choice, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.collective import NETWORK_BANDWIDTH
from fp8plan.model.plan.choice import Choice, several_layouts
from fp8plan.model.plan.time_reasons import NO_FASTER, SLOWER, seconds, slower, where_from, whole_or_sliced
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.budget import LEAST_GAIN
from fp8plan.model.risk.expected import Level, MismatchRisk, RiskBudget, ThresholdAdvice
from fp8plan.model.rollout import Rollout
from fp8plan.model.shards import left_in_bf16

STEP_SHARES = (0.5, 0.8)  # of a rollout in an RL step


def explain(
    choices: Sequence[Choice],
    chosen: int,
    timed: Rollout,
    risk: MismatchRisk,
    advice: ThresholdAdvice,
    budget: RiskBudget,
    profile: Profile,
    gpus_per_node: int | None = None,
    rollouts: Sequence[Rollout | None] = (),
    shape: ModelShape | None = None,
) -> tuple[str, ...]:
    """The sentences of a plan: the choice and its gain, the others, where the time goes, the risk, the caveats.

    timed, risk, advice: of the chosen choice
    gpus_per_node: beyond it tensor parallelism crosses the network; None: it does not
    rollouts: of all choices, if they are known
    shape: of the model; None: nothing is said of linears that stay in BF16
    """
    picked, rollouts = choices[chosen], rollouts or [None] * len(choices)
    sentences = [_headline(picked, choices, budget, profile), *_of_the_step(picked)]
    sentences += _passed_over(choices, chosen, budget, profile)
    sentences += slower(choices, chosen, rollouts)
    sentences += _not_measured(choices, chosen, budget, profile)
    sentences += whole_or_sliced(choices, chosen, rollouts)
    sentences += where_from(picked, choices, timed)
    sentences += _left_in_bf16(choices, shape) if shape is not None else []
    sentences += [f"Mismatch: {reason}." for reason in risk.reasons]
    sentences += [f"Correction: {note}." for note in advice.notes]
    sentences += _caveats(choices, timed, profile)
    sentences += _network(picked, gpus_per_node)
    return tuple(sentences)


def _headline(picked: Choice, choices: Sequence[Choice], budget: RiskBudget, profile: Profile) -> str:
    name = f"{picked.precision}{_layout(picked, choices)}"
    if _refused(picked, budget):
        return (
            f"No precision stays within the risk budget ({budget.accept}): {name} has the lowest expected KL, and its "
            f"risk is {picked.risk}."
        )
    if picked.precision == "bf16":
        why = _why_not_fp8(picked, choices, budget, profile)
        return f"Stay with {name}: {_seconds(picked)} for the rollout; {why}."
    return f"Choose {name}: {_seconds(picked)} for the rollout; {_gain(picked, choices)}."


def _gain(picked: Choice, choices: Sequence[Choice]) -> str:
    """The speed-up over bf16 on the same layout, and over the best bf16 if that has another layout."""
    bf16 = [c for c in choices if c.precision == "bf16"]
    runnable = [c for c in bf16 if c.makespan_s is not None]
    if not bf16:
        return "bf16 was not asked for, so there is no speed-up to name"
    if not runnable:
        return "bf16 does not fit"
    gains = []
    if picked.speedup is not None:
        gains.append(f"{picked.speedup:.2f}x as fast as bf16")
        if picked.step_speedup is not None:
            gains.append(f"{picked.step_speedup:.2f}x for the whole RL step")
    best = min(runnable, key=lambda c: c.makespan_s or 0.0)
    if best.layout != picked.layout:
        ratio = (best.makespan_s or 0.0) / (picked.makespan_s or 1.0)
        gains.append(f"{ratio:.2f}x as fast as the best bf16,{_layout(best, choices)}")
    return ", ".join(gains)


def _of_the_step(picked: Choice) -> list[str]:
    """A sentence on the speed-up of the whole RL step, for two shares of the rollout in it (Amdahl's law)."""
    if picked.step_speedup is not None or picked.speedup is None or picked.speedup < 1 + NO_FASTER:
        return []
    steps = [f"{1 / (1 - share + share / picked.speedup):.2f}x" for share in STEP_SHARES]
    half, most = [f"{share:.0%}" for share in STEP_SHARES]
    gain = f"{steps[0]} as fast if {half} of it is rollout with bf16, {steps[1]} if {most} is"
    return [f"The whole RL step becomes {gain}; --train-s and --logprob-s work it out."]


def _why_not_fp8(picked: Choice, choices: Sequence[Choice], budget: RiskBudget, profile: Profile) -> str:
    others = [c for c in choices if c.precision != "bf16"]
    if not others:
        return "no other precision was asked for"
    if not any(c.available for c in others):
        return "no FP8 precision can run here"
    others = [c for c in _compared(choices, picked, profile) if c.precision != "bf16"]
    faster = [c for c in others if c.seconds < picked.seconds]
    within = [c for c in faster if not _refused(c, budget)]
    gain = max((picked.seconds / c.seconds - 1 for c in within), default=0.0)
    if gain > NO_FASTER:
        return (
            f"FP8 is not worth it here: within the risk budget ({budget.accept}) it gains {gain:.1%}, and less than "
            f"{LEAST_GAIN:.0%} does not pay for a mismatch"
        )
    if len(faster) > len(within):
        return f"faster precisions are outside the risk budget ({budget.accept})"
    return "FP8 is not worth it here"


def _refused(choice: Choice, budget: RiskBudget) -> bool:
    """True if the budget rules out a choice that can run."""
    return not budget.accepts(cast("Level", choice.risk))


def _passed_over(choices: Sequence[Choice], chosen: int, budget: RiskBudget, profile: Profile) -> list[str]:
    """The reason why each other precision was not taken, on its fastest layout among those that `_compared` gives."""
    picked, sentences = choices[chosen], []
    compared, of = _compared(choices, picked, profile), " for the whole RL step" if picked.rl_step_s is not None else ""
    for precision in dict.fromkeys(c.precision for c in compared if c.precision != picked.precision):
        runnable = [c for c in compared if c.precision == precision]
        choice = min(runnable, key=lambda c: c.seconds)
        name = f"{choice.precision}{_layout(choice, choices)}"
        gain = picked.seconds / choice.seconds
        if gain > 1 + NO_FASTER and _refused(choice, budget):
            sentences.append(f"{name} would be {gain:.2f}x as fast{of}, but its mismatch risk is {choice.risk}.")
        elif gain > 1 + NO_FASTER:
            sentences.append(f"{name} is only {gain - 1:.1%} faster{of}, which does not pay for its mismatch.")
        elif picked.precision == "bf16" and gain > 1 - SLOWER:
            sentences.append(f"{name} is no faster{of}: {gain:.2f}x the speed of bf16.")
    return sentences


def _compared(choices: Sequence[Choice], picked: Choice, profile: Profile) -> list[Choice]:
    """The choices that can run; only those on measured layouts if the picked one is."""
    any_layout = _unmeasured(picked, profile)
    return [c for c in choices if c.makespan_s is not None and (any_layout or not _unmeasured(c, profile))]


def _not_measured(choices: Sequence[Choice], chosen: int, budget: RiskBudget, profile: Profile) -> list[str]:
    """A sentence on the fastest of the layouts that were passed over because nobody measured them, if it is faster than
    the chosen one.
    """
    picked = choices[chosen]
    if _unmeasured(picked, profile):
        return []
    stood_back = [c for c in choices if c.makespan_s is not None and _unmeasured(c, profile)]
    stood_back = [c for c in stood_back if _refused(picked, budget) or not _refused(c, budget)]
    if not stood_back:
        return []
    best = min(stood_back, key=lambda c: c.seconds)
    gain = picked.seconds / best.seconds
    if gain <= 1 + NO_FASTER:
        return []
    name = f"{best.precision}{_layout(best, choices)}"
    doubt = f"that layout was not measured, and its times are in doubt by {profile.layout_doubt(*best.cut):.0%}"
    return [f"{name} is predicted {gain:.2f}x as fast, but {doubt}: what was measured goes first."]


def _unmeasured(choice: Choice, profile: Profile) -> bool:
    return profile.layout_doubt(*choice.cut) > 0


def _layout_extrapolated(choice: Choice, profile: Profile) -> bool:
    return profile.layout_error(*choice.cut) > 0


def _network(picked: Choice, gpus_per_node: int | None) -> list[str]:
    if gpus_per_node is None or picked.tensor_parallel <= gpus_per_node:
        return []
    crossing = f"tensor_parallel_size {picked.tensor_parallel} crosses nodes of {gpus_per_node} GPUs"
    link = f"{NETWORK_BANDWIDTH * 8 / 1e9:.0f} Gb/s a GPU"
    return [f"The network: {crossing}, so all-reduces are modelled for {link}, not measured."]


def _left_in_bf16(choices: Sequence[Choice], shape: ModelShape) -> list[str]:
    """Sentences on the linears that FP8 weights leave in BF16, each with the tensor_parallel_sizes it holds for."""
    layouts: dict[str, list[int]] = {}
    for choice in choices:
        if choice.available and (what := left_in_bf16(shape, choice.preset, choice.tensor_parallel)):
            layouts.setdefault(what, []).append(choice.tensor_parallel)
    where = " at tensor_parallel_size {}" if several_layouts(choices) else ""
    return [
        f"FP8 weights{where.format(', '.join(map(str, sorted(set(sizes)))))}: {what}."
        for what, sizes in layouts.items()
    ]


def _caveats(choices: Sequence[Choice], timed: Rollout, profile: Profile) -> list[str]:
    sentences = []
    if profile.kind == "datasheet":
        sentences.append(
            "Uncalibrated: times come from the GPU's datasheet and generic efficiencies, so trust the order of "
            "magnitude and the direction."
        )
        return sentences
    if timed.extrapolated or any(c.extrapolated and not _layout_extrapolated(c, profile) for c in choices):
        what = f" ({'; '.join(timed.extrapolated)})" if timed.extrapolated else ""
        sentences.append(
            f"Part of this workload lies outside of what the profile {profile.label} was measured for{what}."
        )
    sizes = sorted({c.tensor_parallel for c in choices if c.available and profile.layout_error(c.tensor_parallel)})
    if sizes:
        named = ", ".join(map(str, sizes))
        sentences.append(
            f"No measurement of tensor_parallel_size {named} was fitted on {profile.gpu}: times there are "
            "extrapolated, and their intervals wider."
        )
    if any(c.available and c.expert_parallel for c in choices):
        sentences.append(
            f"No measurement of expert parallelism was fitted on {profile.gpu}: its busiest GPU is modelled for even "
            "routing, and the intervals are wider."
        )
    return sentences


def _layout(choice: Choice, choices: Sequence[Choice]) -> str:
    """The words that name a choice's layout; empty if all choices share one."""
    if not several_layouts(choices):
        return ""
    replicas = f"{choice.data_parallel} replicas" if choice.data_parallel > 1 else "1 replica"
    return f" on {replicas} of {choice.sizes}"


def _seconds(choice: Choice) -> str:
    return f"{seconds(choice.makespan_s)} s ({seconds(choice.makespan_low_s)} to {seconds(choice.makespan_high_s)})"
