"""The reasons of a plan in plain sentences: the choice and its gain, the other choices, the time, the caveats.

A speed-up is named over the best BF16 first, then over BF16 on the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.collective import NETWORK_BANDWIDTH
from fp8plan.model.cost.grounds import MOST_UNSEEN, UNSEEN
from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import Answer, Choice, SpeedUp, seconds, several_layouts
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.syncs import sync_sentences
from fp8plan.model.plan.turn_sentences import turn_sentences
from fp8plan.model.plan.ways import sentence
from fp8plan.model.precision import Stored
from fp8plan.model.profile.profile import UNCALIBRATED, Profile
from fp8plan.model.risk.expected import LEAST_GAIN, MismatchRisk
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.rollout import TAIL_SHARE, Rollout
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import left_in_bf16

NO_FASTER = 0.005  # gains below half a percent are not worth a sentence of their own
SLOWER = 0.01  # smaller losses are not either
STEP_SHARES = (0.5, 0.8)  # shares of a rollout in an RL step
LEAST_SHARE, MOST_PARTS = 0.005, 3  # of the grounds that a sentence names, and of the parts of each

COMPONENTS = {
    "attention": "attention over the KV cache",
    "recurrent": "recurrent layers",
    "kv_write": "writing the KV cache",
    "gemm": "linear layers",
    "moe": "experts",
    "lm_head": "lm_head",
    "quantise": "quantising activations",
    "overhead": "small kernels",
    "sampling": "sampling",
    "draft": "the draft head",
    "collective": "all-reduce",
    "routes": "copying the chosen experts",
    "host": "waiting for the host",
    "front": "the front end",
    "tools": "waiting for tools",
}


def whole_or_sliced(answer: Answer) -> list[str]:
    """A sentence on expert parallelism or its absence, if the chosen layout is faster for it."""
    picked = answer.picked
    other = (picked.tensor_parallel, picked.data_parallel, not picked.expert_parallel)
    rest = next((c for c in answer.choices if c.precision == picked.precision and c.layout == other), None)
    if rest is None:
        return []
    if picked.expert_parallel and rest.reason is not None:
        return [f"Without expert parallelism this layout cannot run: {rest.reason}."]
    if rest.makespan_s is None or rest.seconds < picked.seconds * (1 + NO_FASTER):
        return []
    whole, sliced = "expert parallelism", "a slice of every expert on each GPU"
    way, other_way = (whole, sliced) if picked.expert_parallel else (sliced, whole)
    gain = answer.gain(picked, rest).over(other_way + answer.of_the_step)
    why = _difference(answer.rollout(picked), answer.rollout(rest))
    return [f"{way[0].upper()}{way[1:]} is {gain}: {why}."]


def _difference(mine: Rollout, theirs: Rollout) -> str:
    """The words for the largest saving of the first of two rollouts."""
    if mine.preemptions < theirs.preemptions:
        return f"it has {mine.preemptions:,} preemptions instead of {theirs.preemptions:,}"
    part, own, other = _moved(mine, theirs)
    return f"it spends {seconds(own)} s on {part} instead of {seconds(other)} s" if own else f"it needs no {part}"


def _moved(mine: Rollout, theirs: Rollout) -> tuple[str, float, float]:
    """The part on which the first of two rollouts saves most time, and the seconds that each spends on it."""
    own, other = ({name: share * run.makespan_s for name, share in run.parts.items()} for run in (mine, theirs))
    most = max(other, key=lambda name: other[name] - own.get(name, 0.0))
    return COMPONENTS[most], own.get(most, 0.0), other[most]


def where_from(answer: Answer) -> list[str]:
    """Sentences on the preemptions that FP8 saves, and on the parts of the time of a rollout and of its tail."""
    sentences, picked, rollout = [], answer.picked, answer.rollout(answer.picked)
    bf16 = answer.bf16
    if bf16 is not None and bf16.preemptions and (picked.preemptions or 0) < bf16.preemptions:
        sentences.append(
            f"The KV cache holds {picked.kv_cache_tokens:,} tokens instead of {bf16.kv_cache_tokens:,} with bf16, "
            f"so preemptions fall from {bf16.preemptions:,} to {picked.preemptions:,}."
        )
    sentences.append(f"The time goes to {_largest(rollout.parts)}.")
    if "front" in rollout.parts:
        sentences.append(f"The front end (--inside) takes {rollout.parts['front']:.1%} of it.")
    if rollout.tail_fraction > TAIL_SHARE:
        sentences.append(
            f"{rollout.tail_fraction:.0%} of the rollout is tail: nothing waits, and fewer than a quarter of the "
            f"requests still run. There the time goes to {_largest(rollout.tail_parts)}."
        )
    return sentences


def _largest(parts: dict[str, float]) -> str:
    named = [f"{COMPONENTS[name]} ({share:.0%})" for name, share in parts.items() if share >= 0.1]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def slower(answer: Answer) -> list[str]:
    """A sentence on each precision that is slower than bf16 on the chosen layout, and on the part that takes longer."""
    compared = [c for c in answer.choices if c.gain is not None and c.layout == answer.picked.layout]
    bf16 = next((answer.rollout(c) for c in compared if c.precision == "bf16"), None)
    than = "bf16 on the chosen layout" if several_layouts(answer.choices) else "bf16"
    sentences = []
    for choice in compared:
        if bf16 is None or choice.gain is None or choice.gain.ratio >= 1 - SLOWER:
            continue
        part, less, more = _moved(bf16, answer.rollout(choice))
        other = f", and bf16 {seconds(less)} s" if less else ""
        sentences.append(
            f"{choice.precision} is {choice.gain.percent(than)}: it spends {seconds(more)} s on {part}{other}."
        )
    return sentences


def limits_matter(setup: EngineSetup, rollout: Rollout) -> tuple[str, ...]:
    """A sentence that names `fp8plan tune`, if the limits cost this rollout LEAST_GAIN of its time or more."""
    costs = list[str]()
    largest, most = max(setup.cudagraph_sizes, default=0), rollout.timeline.decode_requests.max(initial=0)
    if 0 < largest < most and rollout.parts.get("host", 0.0) >= LEAST_GAIN:
        costs.append(f"the GPU waits for the host in steps of more than {largest:,} requests, which have no CUDA graph")
    if rollout.recomputed_tokens >= LEAST_GAIN * rollout.output_tokens:
        costs.append(f"{rollout.preemptions:,} preemptions lose {rollout.recomputed_tokens:,} tokens of work")
    if not costs:
        return ()
    return (f"Other limits may be faster: {', and '.join(costs)}. fp8plan tune searches them.",)


def explain(
    answer: Answer,
    risk: MismatchRisk,
    corrections: Sequence[str],
    request: PlanRequest,
    tried: Sequence[Candidate] = (),
) -> tuple[str, ...]:
    """The sentences of a plan: the choice and its gain, the others, where the time goes, the risk, the caveats.

    Each ratio names its baseline, and has its 90% interval.

    risk: of the chosen choice; corrections: sentences on its correction
    tried: the candidates behind the choices; empty: no sentence on other limits and on the sync
    """
    choices, picked, profile, shape = answer.choices, answer.picked, answer.profile, request.shape
    timed, subject = answer.rollout(picked), f"The chosen {picked.precision}'s mismatch risk"
    in_fp8 = next((c.setup.shape for c in tried if c.setup.precision.weights != "bf16"), shape)
    return (
        _headline(answer, shape.stored, request.remedies),
        *([sentence(picked, answer, request.remedies, subject)] if not answer.budget.accepts(picked.risk) else ()),
        *_of_the_step(picked),
        *([] if shape.stored is None else _as_stored(shape.stored)),
        *_passed_over(answer, request.remedies),
        *slower(answer),
        *_not_measured(answer),
        *whole_or_sliced(answer),
        *where_from(answer),
        *(turn_sentences(answer, tried[answer.chosen]) if tried and picked.turns else ()),
        *_left_in_bf16(choices, in_fp8),
        *_returned_experts(picked),
        *([shape.note] if shape.note else []),
        *(f"Mismatch: {reason}." for reason in risk.reasons),
        *(f"Correction: {note}." for note in corrections),
        *_of_a_sample(timed),
        *_grounds(picked, profile),
        *_caveats(choices, timed, profile),
        *_estimated(choices, profile),
        *_network(picked, request.card.gpus_per_node),
        *(limits_matter(tried[answer.chosen].setup, timed) if tried else ()),
        *(sync_sentences(tried, tried[answer.chosen], request.sync) if tried and request.sync else ()),
    )


def _headline(answer: Answer, stored: Stored | None, remedies: Remedies) -> str:
    picked, budget = answer.picked, answer.budget
    words = remedies.words(picked.preset.weights != "bf16")
    name = f"{picked.precision}{words and ' with '}{words}{_where(picked, answer.choices)}"
    doubt = f", {UNCALIBRATED}" if answer.profile.is_uncalibrated else ""
    if not budget.accepts(picked.risk):
        return (
            f"No precision stays within the risk budget ({budget.accept}): {name} has the lowest expected KL, and its "
            f"risk is {picked.risk}. It takes {_seconds(picked)} for the rollout{doubt}."
        )
    rollout = f"{name}: {_seconds(picked)} for the rollout{doubt}"
    if picked.precision != "bf16":
        return " ".join([f"Choose {rollout}.", *_gains(answer, stored)])
    why_not = _why_not_fp8(answer)
    if faster := _over_another_layout(answer):
        return " ".join([f"Choose {rollout}.", *faster, f"{why_not[0].upper()}{why_not[1:]}."])
    return f"Stay with {rollout}; {why_not}."


def _gains(answer: Answer, stored: Stored | None) -> list[str]:
    """Sentences on the speed-up over the baseline, and behind it over bf16 on the same layout if that is another."""
    picked = answer.picked
    bf16 = [c for c in answer.choices if c.precision == "bf16"]
    runnable = [c for c in bf16 if c.makespan_s is not None]
    if not bf16:
        return ["bf16 was not asked for, so there is no speed-up to name."]
    if stored is not None:
        return [f"There is no speed-up to name, as the checkpoint holds its weights in {stored.label}."]
    if not runnable:
        return ["bf16 does not fit, so there is no speed-up to name."]
    if elsewhere := _over_another_layout(answer):
        return [*elsewhere, *_of_both(picked.gain, picked.step_gain, "bf16 on the same layout")]
    than = ("the observed bf16" if answer.observed else "the best bf16") + ", on the same layout"
    return _of_both(picked.gain, picked.step_gain, than if several_layouts(answer.choices) else "bf16")


def _over_another_layout(answer: Answer) -> list[str]:
    """A sentence on the speed-up over the baseline, if its layout is not the chosen one. Call it if bf16 can run."""
    runnable = [c for c in answer.choices if c.precision == "bf16" and c.makespan_s is not None]
    picked = answer.picked
    best = min(runnable, key=lambda c: c.seconds) if answer.baseline is None else answer.choices[answer.baseline]
    if best.layout == picked.layout:
        return []
    layout = _where(best, answer.choices)
    than = f"bf16{layout}, as observed" if answer.observed else f"the best bf16,{layout}"
    gain = answer.gain(picked, best)
    subject = "The whole RL step" if answer.of_the_step else "It"
    return [f"{subject} is {gain.over(than)}{_doubt(gain)}."]


def _of_both(gain: SpeedUp | None, step: SpeedUp | None, than: str) -> list[str]:
    """Sentences on the speed-up of the rollout, and on that of the RL step."""
    sentences = [] if gain is None else [f"It is {gain.over(than)}{_doubt(gain)}."]
    return sentences + ([] if step is None else [f"The whole RL step is {step.over(f'with {than}')}{_doubt(step)}."])


def _doubt(gain: SpeedUp) -> str:
    """The words for a gain that may be none."""
    return ", and may be no faster: its interval holds 1.00" if gain.in_doubt and round(gain.ratio, 2) >= 1 else ""


def _of_the_step(picked: Choice) -> list[str]:
    """Sentences on the speed-up of the whole RL step, for two shares of the rollout in it (Amdahl's law)."""
    gain = picked.best_gain
    if picked.step_gain is not None or gain is None or gain.ratio < 1 + NO_FASTER:
        return []
    less, more = (gain.of_step(share).over("with bf16") for share in STEP_SHARES)
    half, most = STEP_SHARES
    return [
        f"The whole RL step becomes {less} if {half:.0%} of it is rollout there. It becomes {more} if {most:.0%} is.",
        "Give --train-s and --logprob-s to have the whole RL step worked out.",
    ]


def _where(choice: Choice, choices: Sequence[Choice]) -> str:
    """The words for a choice's layout; empty if all choices share it."""
    if not several_layouts(choices):
        return ""
    replicas = f"{choice.data_parallel} replicas" if choice.data_parallel > 1 else "1 replica"
    return f" on {replicas} of {choice.sizes}"


def _as_stored(stored: Stored) -> list[str]:
    """Sentences on an FP8 checkpoint: how to compare it, and the KV cache that it asks for."""
    weights, with_cache = (precision.name for precision in stored.precisions)
    compare = f"vLLM loads this checkpoint as it is; to compare with BF16 weights, plan {stored.bf16_model} too."
    cache = (
        f"The checkpoint asks for an FP8 KV cache, which vLLM takes unless it is told otherwise: that is {with_cache}, "
        f"and {weights} needs kv_cache_dtype bfloat16."
    )
    return [compare, *([cache] if stored.kv_fp8 else [])]


def _why_not_fp8(answer: Answer) -> str:
    budget = answer.budget
    picked, others = answer.picked, [c for c in answer.choices if c.precision != "bf16"]
    if not others:
        return "no other precision was asked for"
    if not any(c.available for c in others):
        return "no FP8 precision is planned here"
    others = [c for c in _compared(answer) if c.precision != "bf16"]
    faster = [c for c in others if c.seconds < picked.seconds]
    accepted = [c for c in faster if budget.accepts(c.risk)]
    if any(picked.seconds / c.seconds - 1 > NO_FASTER for c in accepted):
        return (
            f"FP8 is not worth it here: within the risk budget ({budget.accept}) it gains less than {LEAST_GAIN:.0%}"
            f"{answer.of_the_step}, which does not pay for a mismatch"
        )
    if len(faster) > len(accepted):
        return f"faster precisions are outside the risk budget ({budget.accept})"
    return f"FP8 is not worth it here: it gains nothing{answer.of_the_step}"


def _passed_over(answer: Answer, own: Remedies) -> list[str]:
    """The reason why each other precision was not chosen, on its fastest layout among the `_compared` ones."""
    picked, compared, sentences = answer.picked, _compared(answer), []
    for precision in dict.fromkeys(c.precision for c in compared if c.precision != picked.precision):
        choice = min((c for c in compared if c.precision == precision), key=lambda c: c.seconds)
        gain, than = answer.gain(choice, picked), f"the chosen {picked.precision}{answer.of_the_step}"
        name = f"{choice.precision}{_where(choice, answer.choices)}"
        if gain.ratio > 1 + NO_FASTER and not answer.budget.accepts(choice.risk):
            sentences.append(f"{name} would be {gain.over(than)}. {sentence(choice, answer, own)}")
        elif gain.ratio > 1 + NO_FASTER:
            sentences.append(f"{name} is only {gain.percent(than)}. That does not pay for its mismatch.")
        elif picked.precision == "bf16" and gain.ratio > 1 - SLOWER:
            sentences.append(f"{name} is no faster: it is {gain.over(than)}.")
    return sentences


def _compared(answer: Answer) -> list[Choice]:
    """The choices that can run; only those on measured layouts if the chosen one is."""
    any_layout = _unmeasured(answer.picked, answer.profile)
    runnable = [c for c in answer.choices if c.makespan_s is not None]
    return [c for c in runnable if any_layout or not _unmeasured(c, answer.profile)]


def _not_measured(answer: Answer) -> list[str]:
    """A sentence on the fastest unmeasured layout, if it is faster than the chosen one."""
    picked, profile, budget = answer.picked, answer.profile, answer.budget
    if _unmeasured(picked, profile):
        return []
    stood_back = [c for c in answer.choices if c.makespan_s is not None and _unmeasured(c, profile)]
    stood_back = [c for c in stood_back if not budget.accepts(picked.risk) or budget.accepts(c.risk)]
    if not stood_back:
        return []
    best = min(stood_back, key=lambda c: c.seconds)
    gain = answer.gain(best, picked)
    if gain.ratio <= 1 + NO_FASTER:
        return []
    name = f"{best.precision}{_where(best, answer.choices)}"
    than = f"the chosen {picked.precision}{answer.of_the_step}"
    doubt = f"That layout was not measured, and its times are in doubt by {profile.layout_error(*best.cut):.0%}"
    return [f"{name} is predicted {gain.over(than)}. {doubt}: what was measured goes first."]


def _unmeasured(choice: Choice, profile: Profile) -> bool:
    return profile.layout_error(*choice.cut) > 0


def _network(picked: Choice, gpus_per_node: int) -> list[str]:
    if picked.tensor_parallel <= gpus_per_node:
        return []
    crossing = f"tensor_parallel_size {picked.tensor_parallel} crosses nodes of {gpus_per_node} GPUs"
    link = f"{NETWORK_BANDWIDTH * 8 / 1e9:.0f} Gb/s a GPU"
    return [f"The network: {crossing}, so all-reduces are modelled for {link}, not measured."]


def _left_in_bf16(choices: Sequence[Choice], shape: ModelShape) -> list[str]:
    """Sentences on the linears that FP8 weights leave in BF16, each with the tensor_parallel_sizes it holds for."""
    layouts: dict[str, list[int]] = {}
    for choice in choices:
        if choice.available and (linears := left_in_bf16(shape, choice.preset, choice.tensor_parallel)):
            layouts.setdefault(linears, []).append(choice.tensor_parallel)
    where = " at tensor_parallel_size {}" if several_layouts(choices) else ""
    return [
        f"FP8 weights{where.format(', '.join(map(str, sorted(set(sizes)))))}: {linears}."
        for linears, sizes in layouts.items()
    ]


def _returned_experts(picked: Choice) -> list[str]:
    routes = picked.routed_experts
    if routes is None:
        return []
    sent = f"the trainer gets {routes['token']:,} bytes for each token, {routes['rollout'] / 1e9:.2g} GB in all"
    memory = f"{routes['device'] / 1e6:,.0f} MB more of each GPU, and up to {routes['host'] / 1e9:.2g} GB of its host"
    return [f"Router replay: {sent}. A replica needs {memory}. Its time is fitted to rollouts of one slow host."]


def _of_a_sample(timed: Rollout) -> list[str]:
    """A sentence on a batch that was too large to be simulated whole."""
    if timed.simulated == 1:
        return []
    sentence = (
        f"A sample of {100 * timed.simulated:.2g}% of the responses was simulated, from all over the batch, and the "
        f"others go at its pace: that leaves the time open by {timed.sampling_sd:.1%} (one standard deviation), which "
        "the intervals contain."
    )
    return [sentence]


def _grounds(picked: Choice, profile: Profile) -> list[str]:
    """A sentence on what the chosen time rests on, with the largest parts that were not measured or imported."""
    if not picked.rests_on or profile.kind == "datasheet":
        return []
    grounds = []
    for ground, share in picked.rests_on["shares"].items():
        parts = {name: part.get(ground, 0.0) for name, part in picked.rests_on["kernels"].items()}
        largest = sorted(parts, key=lambda name: -parts[name])[:MOST_PARTS]
        named = ", ".join(COMPONENTS[name] for name in largest if parts[name] >= LEAST_SHARE)
        if share >= LEAST_SHARE:
            grounds.append(f"{share:.0%} {ground}" + (f" ({named})" if named and ground in UNSEEN else ""))
    return [f"The time rests on: {', '.join(grounds)}."]


def _caveats(choices: Sequence[Choice], timed: Rollout, profile: Profile) -> list[str]:
    if profile.kind == "datasheet":
        source = "times come from the GPU's datasheet and generic efficiencies"
        return [f"Uncalibrated: {source}, so trust the order of magnitude and the direction."]
    sentences = []
    if any(c.extrapolated and _outside(c, profile) for c in choices):
        ranges = f" ({'; '.join(timed.extrapolated)})" if timed.extrapolated else ""
        sentences.append(
            f"Part of this workload lies outside of what the profile {profile.label} was measured for{ranges}."
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


def _outside(choice: Choice, profile: Profile) -> bool:
    """True if kernels or shapes outside of the measurements take much of an extrapolated choice's time.

    The datasheet lends every import some kernels, which `_grounds` names.
    """
    if choice.expert_parallel or choice.tensor_parallel not in profile.tensor_parallel:
        return False
    beyond = choice.rests_on.get("shares", {}).get("extrapolated", 0.0) > MOST_UNSEEN
    return beyond or not choice.rests_on or profile.kind == "calibrated"


def _estimated(choices: Sequence[Choice], profile: Profile) -> list[str]:
    """A sentence on an FP8 KV cache whose attention was not timed on this GPU."""
    if not profile.assumes("attention.fp8") or not any(c.available and c.preset.kv == "fp8" for c in choices):
        return []
    sentence = (
        f"FP8 KV cache on {profile.gpu}: the tokens that it holds are certain. The time of its attention is an "
        "estimate, wide enough for half of BF16's and for half as much again. vLLM's kernel there was not timed: "
        "FlashInfer, which widens E4M3 to BF16 in software."
    )
    return [sentence]


def _seconds(choice: Choice) -> str:
    low, high = seconds(choice.makespan_low_s), seconds(choice.makespan_high_s)
    return f"{seconds(choice.makespan_s)} s (90%: {low} to {high})"
