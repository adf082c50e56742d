"""Likely causes, from facts, why a rollout was slower than predicted, or why its FP8 gains little.

Causes outside the prediction explain a gap: a compile, a kernel or scales that the profile was not
measured with, more preemptions than the lengths call for, prefixes of turns that the cache lost. Causes inside the
prediction explain a small gain: no CUDA graphs, preemptions, a small pool, a prefix cache that is off or too small,
batches at which FP8 is not ahead, a long tail. The cost of a cause inside is the difference to a prediction without
it. Costs overlap (a larger pool also ends preemptions), so they do not add up. A tail and an idle engine are no fault:
their sentences name the lever of the trainer that would gain, and its price.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from statistics import median
from typing import Final, NamedTuple

from fp8plan.errors import CapacityError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import capture_size_for
from fp8plan.model.plan.choice import seconds, speed_up
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.expected import LEAST_GAIN
from fp8plan.model.rollout import TAIL_SHARE, Simulated
from fp8plan.model.setup import EngineSetup
from fp8plan.model.tune.cut import bias, cut_after
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation, Prediction, again, fallback, with_blocks
from fp8plan.runtime.watch.guard.prefix_cache import OFF, Lost, PrefixUse, lost_prefixes
from fp8plan.schemas import Cause as Logged

# Preemptions per response. The predicted schedule is never wrong by so many.
MANY_PREEMPTIONS: Final = 0.05
ABORTED: Final = 0.05  # share of the responses in the tail that is cut off
IDLE_SHARE: Final = 0.25  # of the time from one rollout's end to the next one's, from which on an idle engine is named
LEAST_LOSS: Final = 0.05  # least cost of a cause within the prediction, as a share of the predicted makespan
FEWER: Final = 3  # powers of two that are tried below the requests that ran at once


class Cause(StrEnum):
    """The kinds of causes, by their names in logs."""

    COMPILING = "compiling"
    CUDA_GRAPHS_OFF = "cuda_graphs_off"
    PREEMPTION = "preemption"
    SMALL_BATCH = "small_batch"
    KERNEL_FALLBACK = "kernel_fallback"
    E8M0 = "e8m0"
    KV_POOL = "kv_pool"
    PREFIX = "prefix"
    TAIL = "tail"
    IDLE = "idle"
    ARRIVALS = "arrivals"
    MACHINE = "machine"
    UNKNOWN = "unknown"


class LikelyCause(NamedTuple):
    """One likely cause.

    sentence: the numbers and the remedy
    lost_s:   seconds of the rollout that it explains; None: not known, or not the rollout's
    gap:      True if it may explain a gap, because the prediction does not contain it
    of_fp8:   the FP8 parts, "weights" or "kv", without which it disappears; empty: BF16 has it, too
    """

    cause: Cause
    sentence: str
    lost_s: float | None = None
    gap: bool = True
    of_fp8: tuple[str, ...] = ()


class Case(NamedTuple):
    """One rollout and its circumstances.

    anchored: measured rollouts have corrected the prediction
    as_fast:  there is no gap to explain, also after a cold start
    """

    facts: EngineFacts
    observation: Observation
    prediction: Prediction
    profile: Profile
    anchored: bool
    as_fast: bool

    @property
    def gap_s(self) -> float:
        """Seconds that the rollout took beyond its prediction."""
        return self.observation.seconds - self.prediction.makespan_s

    @property
    def least_s(self) -> float:
        """The least cost of a cause within the prediction, in seconds."""
        return LEAST_LOSS * self.prediction.makespan_s

    def again(self, setup: EngineSetup) -> Simulated:
        """The same work predicted on another engine."""
        return again(setup, self.observation, self.profile, self.prediction.ran.schedules)


def causes(case: Case) -> tuple[LikelyCause, ...]:
    """The likely causes: those of a gap first, then the rest, each by cost; UNKNOWN for a gap without any.

    Without an anchor a gap may be the profile's, so it is not UNKNOWN.
    """
    likely = [*_of_the_engine(case), *_lost_prefixes(case)]
    if not case.as_fast:
        likely += _disturbances(case)
        known = [each for each in likely if each.gap]
        rest = case.gap_s - sum(each.lost_s or 0.0 for each in known)
        # The cost of late requests is known, so they do not hide the rest.
        late = all(each.cause == Cause.ARRIVALS for each in known)
        if late and rest >= case.gap_s / 2 and case.anchored:
            text = f"{seconds(rest)} s more than predicted, and nothing that was looked at explains it"
            likely.append(LikelyCause(Cause.UNKNOWN, f"{text}: {_looking(case.facts)}"))
    inside = (*_in_the_prediction(case), *_small_prefix_cache(case), *_tail(case))
    likely += [each for each in inside if (each.lost_s or 0.0) >= case.least_s]
    likely += (*_no_gain(case), *_idle(case))
    return tuple(sorted(likely, key=lambda each: (not each.gap, -(each.lost_s or 0.0))))


def _of_the_engine(case: Case) -> Iterator[LikelyCause]:
    """Yield differences between this engine and those that the profile was measured with."""
    facts, profile = case.facts, case.profile
    for kernel, runs in facts.kernel_backends.items():
        if text := fallback(kernel, profile.kernel_backends.get(kernel), runs):
            part = {"fp8": ("kv",), "fp8_block": ("weights",)}.get(kernel.partition(".")[2], ())
            yield LikelyCause(Cause.KERNEL_FALLBACK, text, of_fp8=part)
    if facts.cudagraph_mode == "PIECEWISE" and not facts.eager:
        text = "CUDA graphs are PIECEWISE, the profile was measured with FULL_AND_PIECEWISE: leave cudagraph_mode unset"
        yield LikelyCause(Cause.CUDA_GRAPHS_OFF, text)
    if facts.e8m0 and facts.preset.weights != "bf16" and not facts.setup.e8m0:
        text = (
            "DeepGEMM runs with power-of-two scales (E8M0): weights are quantised a second time, to 3.7% RMS error "
            "instead of 2.6%. The profile was measured with FP32 scales, and what E8M0 costs in speed was not: set "
            "VLLM_USE_DEEP_GEMM_E8M0=0 before vLLM is imported"
        )
        yield LikelyCause(Cause.E8M0, text, gap=False)


def _lost_prefixes(case: Case) -> Iterator[LikelyCause]:
    """Yield more prompt tokens that were computed again than predicted."""
    ran = case.prediction.ran
    use = PrefixUse.of(case.observation, ran)
    if use is None or not (use.more_than_expected or use.is_rewritten):
        return
    with suppress(CapacityError):
        use = use.beside(case.again(with_blocks(case.prediction.setup, ran.memory.kv.usable_blocks // 2)))
    lost = lost_prefixes(use)
    if lost is not None:
        yield LikelyCause(Cause.PREFIX, lost.sentence)


def _small_prefix_cache(case: Case) -> Iterator[LikelyCause]:
    """Yield a prefix cache that is off or too small for the turns, as predicted."""
    prediction, observation = case.prediction, case.observation
    if observation.turns is None:
        return
    ran = prediction.setup
    if ran.limits.enable_prefix_caching:
        use = PrefixUse.of(observation, prediction.ran)
        if use is None or use.more_than_expected or use.is_rewritten:
            return
        better, lost = with_blocks(ran, observation.blocks(prediction.ran.memory.kv)), lost_prefixes(use)
    else:
        better, lost = replace(ran, limits=replace(ran.limits, enable_prefix_caching=True)), OFF
    if lost is None:
        return
    least = case.again(better).rollout.makespan_s
    times = f"{seconds(prediction.makespan_s)} s predicted, {seconds(least)} s with all prefixes kept"
    text = f"{lost.says}; {times}: {lost.todo}"
    yield LikelyCause(Cause.PREFIX, text, prediction.makespan_s - least, gap=False)


def lost_prefixes_in(named: Iterable[LikelyCause | Logged]) -> Lost | None:
    """The lost prefixes among the causes of a verdict, or of a logged one; None without any."""
    sentences = (each.sentence for each in named if each.cause == Cause.PREFIX)
    sentence = next(sentences, None)
    return None if sentence is None else Lost.of(sentence)


def _disturbances(case: Case) -> Iterator[LikelyCause]:
    """Yield events of this rollout that no prediction contains."""
    observation, prediction = case.observation, case.prediction
    if files := observation.compiled_files:
        text = (
            f"{files} files of kernels were compiled during the rollout: VLLM_DEEP_GEMM_WARMUP=full compiles at start, "
            "and kernels stay where VLLM_CACHE_ROOT, TRITON_CACHE_DIR and TRTLLM_DG_CACHE_DIR outlive the job"
        )
        yield LikelyCause(Cause.COMPILING, text)
    came = observation.arrival_s or 0.0
    if came >= case.least_s:
        text = (
            f"the last request came {seconds(came)} s after the first, and the prediction begins with all of them: "
            "work before the engine is slow (templates, tokens, calls between processes), or answers take several turns"
        )
        yield LikelyCause(Cause.ARRIVALS, text, min(came, case.gap_s))
    expected = prediction.rollout.preemptions
    if observation.preemptions > 2 * expected + MANY_PREEMPTIONS * len(observation.response_lengths):
        text = (
            f"{observation.preemptions:,} preemptions, {expected:,} predicted in a pool of "
            f"{prediction.kv_cache_tokens:,} tokens: other requests shared the engine, or the pool is smaller"
        )
        yield LikelyCause(Cause.PREEMPTION, text)


def machine(facts: EngineFacts, shares: Sequence[float], low: float, high: float) -> LikelyCause | None:
    """The finding that the first rollouts are not as the profile predicts; None if they are.

    shares:    achieved / predicted speed of the first rollouts
    low, high: the ends of the profile's 90% interval, as shares of the predicted speed
    """
    share = median(shares)
    if low <= share <= high:
        return None
    text = (
        f"this machine makes {share:.0%} of the tokens/s that the profile predicts (allowed: {low:.0%} to {high:.0%}). "
        f"The first {len(shares)} rollouts are the reference from now on"
    )
    if share < low:
        text += f". For more speed {_looking(facts)}"
    if facts.preset.uses_fp8:
        text += f". Only a measured bf16 rollout shows what {facts.precision} gains here (fp8plan plan --observed)"
    return LikelyCause(Cause.MACHINE, text, gap=False)


def _looking(facts: EngineFacts) -> str:
    """The words for where to look for a loss that nothing explains."""
    cpu = find_gpu(facts.gpu).is_cpu
    where, gpu = ("the host (top)", "cpu") if cpu else ("the GPU and the host (nvidia-smi, top)", "auto")
    return f"look for other processes on {where}, or measure this machine (fp8plan calibrate --gpu {gpu})"


def _in_the_prediction(case: Case) -> Iterator[LikelyCause]:
    """Yield causes that slow the prediction itself, with the difference to a prediction without each."""
    facts, prediction, makespan = case.facts, case.prediction, case.prediction.makespan_s
    cpu = find_gpu(facts.gpu).is_cpu
    larger = "VLLM_CPU_KVCACHE_SPACE" if cpu else "gpu_memory_utilization or tensor_parallel_size"
    if facts.eager and not cpu:
        ran = prediction.setup
        graphs = case.again(replace(ran, limits=replace(ran.limits, enforce_eager=False))).rollout.makespan_s
        text = (
            f"CUDA graphs are off: {seconds(makespan)} s predicted without them, {seconds(graphs)} with: leave "
            "enforce_eager and cudagraph_mode unset"
        )
        yield LikelyCause(Cause.CUDA_GRAPHS_OFF, text, makespan - graphs, gap=False)
    yield from _larger_graphs(case)
    few = prediction.rollout.preemptions <= MANY_PREEMPTIONS * len(case.observation.response_lengths)
    if prediction.rollout.preemptions and not (few and case.observation.turns):  # a small pool costs turns prefixes
        blocks = case.observation.blocks(prediction.ran.memory.kv)
        roomy = case.again(with_blocks(prediction.setup, blocks)).rollout
        fewer = _fewer_at_once(case) if makespan - roomy.makespan_s >= case.least_s else ""
        text = (
            f"{case.observation.preemptions:,} preemptions ({prediction.rollout.preemptions:,} predicted) in a pool of "
            f"{prediction.kv_cache_tokens:,} tokens: {seconds(makespan)} s predicted, {seconds(roomy.makespan_s)} in a "
            f"pool that holds all: raise {larger}{fewer}"
        )
        yield LikelyCause(Cause.PREEMPTION, text, makespan - roomy.makespan_s, gap=False)
    try:
        planned = case.again(facts.setup)
    except CapacityError:  # it ran, although predicted not to fit
        return
    if prediction.kv_cache_tokens < planned.memory.kv_cache_tokens:
        rest = "before the engine starts, or plan with the gpu_memory_utilization it gets"
        fix = f"raise {larger}" if cpu else f"free the GPU of other processes {rest}"
        text = (
            f"the KV pool holds {prediction.kv_cache_tokens:,} tokens instead of {planned.memory.kv_cache_tokens:,}: "
            f"{seconds(makespan)} s predicted, {seconds(planned.rollout.makespan_s)} with those: {fix}"
        )
        yield LikelyCause(Cause.KV_POOL, text, makespan - planned.rollout.makespan_s, gap=False)


def _larger_graphs(case: Case) -> Iterator[LikelyCause]:
    """Yield steps of more requests than the largest CUDA graph has."""
    ran, most = case.prediction.setup, int(case.prediction.rollout.timeline.decode_requests.max(initial=0))
    largest = max(ran.cudagraph_sizes, default=0)
    if not 0 < largest < most:
        return
    size = capture_size_for(most)
    try:
        larger = case.again(replace(ran, limits=replace(ran.limits, max_cudagraph_capture_size=size))).rollout
    except CapacityError:
        return
    text = (
        f"steps of more than {largest:,} requests have no CUDA graph: {seconds(case.prediction.makespan_s)} s "
        f"predicted, {seconds(larger.makespan_s)} with max_cudagraph_capture_size {size}"
    )
    yield LikelyCause(Cause.CUDA_GRAPHS_OFF, text, case.prediction.makespan_s - larger.makespan_s, gap=False)


def _fewer_at_once(case: Case) -> str:
    """The words for the best lower max_num_seqs, of FEWER powers of two, by its prediction."""
    ran, most = case.prediction.setup, max(int(plan.running.max()) for plan in case.prediction.ran.schedules)
    powers = [2**k for k in range((most - 1).bit_length())][-FEWER:]
    fewer = {n: replace(ran, limits=replace(ran.limits, max_num_seqs=n)) for n in powers}
    times = {n: again(setup, case.observation, case.profile).rollout.makespan_s for n, setup in fewer.items()}
    if not times:
        return ""
    best = min(times, key=lambda n: times[n])
    gains = times[best] <= case.prediction.makespan_s - case.least_s
    words = "or lower max_num_seqs" if gains else "as a lower max_num_seqs gains little"
    return f", {words} ({seconds(times[best])} s at {best})"


def _tail(case: Case) -> Iterator[LikelyCause]:
    """Yield a tail in which few requests run, with the gain and the price of aborting the last responses."""
    ran, batch = case.prediction.ran, case.observation.batch
    rollout, responses = ran.rollout, len(batch.responses)
    last = max(1, round(ABORTED * responses))
    # Of a sample it is not known when each response ends; of turns not what a cut changes.
    unknown = any(plan.sampled or plan.timed for plan in ran.schedules)
    if rollout.tail_fraction <= TAIL_SHARE or last == responses or unknown:
        return
    cut = cut_after(responses - last, batch.split(len(ran.schedules)), ran.schedules, ran.model)
    saved, lost = rollout.makespan_s - cut.rollout.makespan_s, bias(batch.responses, cut.ended)
    text = (
        f"{rollout.tail_fraction:.0%} of the rollout has fewer than {TAIL_SHARE:.0%} of the requests: aborting the "
        f"last {last:,} of {responses:,} responses would save {saved / rollout.makespan_s:.0%} ({seconds(saved)} s) "
        f"and lose {lost.long_lost:.0%} of the longest tenth, mean length {lost.mean_shift:+.0%}; other levers: "
        "fp8plan tune --workload"
    )
    yield LikelyCause(Cause.TAIL, text, saved, gap=False)


def _idle(case: Case) -> Iterator[LikelyCause]:
    """Yield an engine that waited long for its trainer, with the gain and the price of training beside it."""
    idle, rollout = case.observation.idle_s or 0.0, case.observation.seconds
    step = idle + rollout
    if idle < IDLE_SHARE * step:
        return
    saved = min(idle, rollout)
    text = (
        f"the engine was idle for {seconds(idle)} s before this rollout of {seconds(rollout)} s: training while the "
        f"next batch is rolled out (one step off-policy) would save up to {seconds(saved)} s, {saved / step:.0%} of "
        "both, if the trainer has GPUs of its own; every token is then a step old"
    )
    yield LikelyCause(Cause.IDLE, text, gap=False)


def _no_gain(case: Case) -> Iterator[LikelyCause]:
    """Yield a batch at which, by the prediction, FP8 gains nothing."""
    prediction, bf16 = case.prediction, case.prediction.instead.get("bf16")
    if bf16 is None or prediction.tokens_per_s >= bf16.output_tokens_per_s * (1 + LEAST_GAIN):
        return
    gain = speed_up(bf16, prediction.rollout, case.profile).over("bf16")
    text = (
        f"{case.facts.precision} is predicted {gain} on these batches, {prediction.mean_batch:.0f} responses at a time "
        f"on average: {seconds(prediction.makespan_s)} s against {seconds(bf16.makespan_s)}; run bf16, or more "
        "responses per engine"
    )
    yield LikelyCause(Cause.SMALL_BATCH, text, prediction.makespan_s - bf16.makespan_s, gap=False)
