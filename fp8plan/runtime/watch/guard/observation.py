"""The guard's view of an engine and of one rollout, and the prediction for exactly that rollout.

The prediction has the rollout's lengths, the measured pool, and the engine's own limits. `fallback` compares the
engine's kernels with those of its profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

from fp8plan.checks import Range, in_range, is_number
from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.cost.front import OWN
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.precision import PRESETS, Precision, find_precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.remedies import NO_REMEDIES, Remedies
from fp8plan.model.rollout import Rollout, Simulated, simulate
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import batch_of, check_list
from fp8plan.model.workload import Batch
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.schemas import LENGTHS

# A profile's name of a kernel -> pattern of vLLM's names, in its log (FLASH_ATTN) or of its class (FlashAttentionImpl).
# vLLM does not name its BF16 GEMM.
SAME: Final = {
    "flash_attn": "(?i)^flash_?att",
    "flash_attn_2": "(?i)^flash_?att",
    "flash_attn_3": "(?i)^flash_?att",
    "flashinfer": "(?i)^flashinfer",
    "flashinfer_trtllm": "(?i)^flashinfer",
    "cpu_attn": "(?i)^cpu_?att",
    "deep_gemm": "(?i)deep_?gemm",
    "flashinfer_deep_gemm": "(?i)flashinfer.*deep_?gemm",
    "triton": "(?i)triton",
}

WAY_BACK: Final = {
    "gemm": "leave linear_backend, VLLM_DISABLED_KERNELS, VLLM_USE_DEEP_GEMM and VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "unset, and install flashinfer as this vLLM demands it",
    "attention": "leave attention_backend unset",
    "moe": "leave VLLM_USE_DEEP_GEMM unset, and moe_backend as a plan has it",
}

KNOWN_FOR: Final = {
    "(?i)marlin": ", which unpacks FP8 weights and multiplies in BF16",
    "(?i)triton": ", which is portable and seldom tuned for a shape",
}

COUNTS: Final = (  # of an Observation
    "preemptions", "prefix_cache_queries", "prefix_cache_hits", "rewritten_tokens", "compiled_files",
)  # fmt: skip
FINITE_OR_NONE: Final[Range] = (lambda x: abs(x) < inf, "a finite number, or None")
RANGES: Final[dict[str, Range]] = {
    "seconds": (lambda x: 0 < x < inf, "a finite number above 0"),
    **dict.fromkeys(("arrival_s", "idle_s"), FINITE_OR_NONE),
    "kl_k3": (lambda x: abs(x) < inf, "a finite number (a nan comes from log-probs that hold nan or inf), or None"),
}

A_LAYER: Final = "['model.layers.0.self_attn.attn']"


def kernel_names(facts: Mapping[str, Any], preset: Precision) -> dict[str, str]:
    """The kernels of a worker's facts by their names in profiles -> implementation."""
    attention = ", ".join(facts.get("attention", ()))
    names = {f"attention.{preset.kv}": attention} if attention else {}
    return names | {f"{part}.{preset.gemm_dtype}": name for part, name in facts["kernels"].items()}


def fallback(kernel: str, measured: str | None, runs: str) -> str | None:
    """A sentence and a remedy if `runs` is not the measured kernel; None if it is, or if that is unknown.

    kernel:   its name in profiles, e.g. "gemm.fp8_block"
    measured: the profile's name of its implementation; None: not measured
    runs:     vLLM's name of its implementation in the log, or the names of its classes
    """
    if measured not in SAME or all(re.search(SAME[measured], name) for name in runs.split(", ")):
        return None
    note = next((text for pattern, text in KNOWN_FOR.items() if re.search(pattern, runs)), "")
    way = WAY_BACK.get(kernel.partition(".")[0], "the engine's log says why it was selected")
    return f"{kernel} runs on {runs}{note}; the profile was measured with {measured}: {way}"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about a running engine, read once after its start.

    model:           hub id or folder with config.json
    gpu:             name in fp8plan.model.hardware
    engine_version:  version of vLLM
    precision:       preset name
    limits:          the engine's own; num_gpu_blocks is that of an imposed pool, and None for a measured one
    kernel_backends: kernel -> implementation, as `kernel_names` returns it; kernels without a name are left out
    e8m0:            True if DeepGEMM's scales are powers of two; None: not known, or no weight is FP8
    cudagraph_mode:  name of vLLM's CUDAGraphMode; None: not known
    not_predicted:   options of the engine that the cost model does not know (runtime.apply.engine.options)
    inside:          as in EngineSetup
    remedies:        of the engine and its trainer
    delta_bytes:     bytes of the last sync, if it sent all that had changed and nothing else; None: it did not
    kv_fixed:        the FP8 KV cache keeps the scales of the engine's start
    host_loop_s:     the loop of its host, as in RolloutRecord; None: not known
    """

    model: str
    gpu: str
    engine_version: str
    precision: str
    limits: EngineLimits
    kernel_backends: Mapping[str, str] = field(default_factory=dict)
    e8m0: bool | None = None
    cudagraph_mode: str | None = None
    not_predicted: Sequence[str] = ()
    inside: str = OWN
    remedies: Remedies = NO_REMEDIES
    delta_bytes: int | None = None
    kv_fixed: bool = False
    host_loop_s: float | None = None

    @property
    def preset(self) -> Precision:
        return find_precision(self.precision)

    @property
    def setup(self) -> EngineSetup:
        """The engine in the cost model's terms."""
        limits = replace(self.limits, enforce_eager=self.eager)
        version = self.engine_version
        return EngineSetup(self.model, self.gpu, self.precision, limits, self.inside, version, self.remedies)

    @property
    def eager(self) -> bool:
        """True if the engine runs without any CUDA graphs."""
        return self.limits.enforce_eager or self.cudagraph_mode == "NONE"


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurements of one rollout: all calls of `generate()` that belong to one batch.

    seconds:          time in which its calls ran, or the tools between them
    prompt_lengths, response_lengths: tokens of each response, in order of arrival; shape (responses,). Of a trajectory
                      of several turns they are those of the first prompt, and those that all its turns generated
    prompt_ids:       a number for each response, the same for the same prompt; None: all prompts differ
    turns:            the turns of each trajectory, as in RolloutRecord; None: each response has one
    concurrent:       most trajectories at once, as in RolloutRecord
    preemptions:      vLLM's count during the rollout
    prefix_cache_queries, prefix_cache_hits: tokens of the requests that vLLM looked up in its prefix cache when it
                      admitted them, and those of them that it had; None: not known
    rewritten_tokens: tokens of prompts that go on from an earlier prompt, and stand in the place of its answer, without
                      being that answer; None: not known
    kv_cache_tokens:  size of the measured pool, num_gpu_blocks * block_size; None: the predicted one
    compiled_files:   kernels compiled during it (`access.compiled_files`); None: not known
    arrival_s:        time from the first arrival of a request to the last, on the clock of `seconds`; None: not known,
                      or all came at once
    idle_s:           time from the end of the rollout before to its begin; None: not known, or there was none
    kl_k3:            mean k3 per token between trainer and rollout; None: not known
    sampling:         its sampling parameters, in a form that Sampling.of reads; None: not known
    kv_clipped:       layers whose K or V the engine's fixed scales clipped at the last sync

    Raises ConfigError for values that no rollout can have.
    """

    seconds: float
    prompt_lengths: Sequence[int]
    response_lengths: Sequence[int]
    prompt_ids: Sequence[int] | None = None
    preemptions: int = 0
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    rewritten_tokens: int | None = None
    kv_cache_tokens: int | None = None
    compiled_files: int | None = None
    arrival_s: float | None = None
    idle_s: float | None = None
    kl_k3: float | None = None
    sampling: Sampling | None = None
    kv_clipped: Sequence[str] = ()
    turns: Sequence[Sequence[tuple[int, int, float | None]]] | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", Sampling.of(self.sampling))
        in_range(self, RANGES)
        for name in (*COUNTS, "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None:
                if not (is_number(value) and 0 <= value == value // 1):
                    raise ConfigError(f"{name} is {value!r}; allowed: a whole number of at least 0")
                object.__setattr__(self, name, int(value))  # Prometheus' counters are floats
        check_list("kv_clipped", self.kv_clipped, A_LAYER)
        batch = self.batch
        object.__setattr__(self, "prompt_lengths", tuple(batch.prompts.tolist()))
        object.__setattr__(self, "response_lengths", tuple(batch.responses.tolist()))

    def after(self, since_s: float | None) -> Observation:
        """The same with `idle_s`, unless it is known. since_s: from the end of the rollout before to its own end"""
        if self.idle_s is not None or since_s is None:
            return self
        return replace(self, idle_s=max(0.0, since_s - self.seconds))

    @property
    def output_tokens(self) -> int:
        return sum(self.response_lengths)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def cached_share(self) -> float | None:
        """The share of the prompts' tokens that the prefix cache had; None: not known."""
        queries, hits = self.prefix_cache_queries, self.prefix_cache_hits
        return None if not queries or hits is None else hits / queries

    def blocks(self, kv: KvPlan) -> int:
        """The KV blocks that hold all responses at once, if none shares a prefix."""
        return sum(kv.blocks_of_request(tokens) for tokens in self.batch.lengths.tolist())

    @property
    def every_turn(self) -> Sequence[Sequence[tuple[int, int, float | None]]]:
        """The turns of each response, also of those with one."""
        return [[(tokens, 0, 0.0)] for tokens in self.response_lengths] if self.turns is None else self.turns

    @property
    def batch(self) -> Batch:
        """Its requests. Raises ConfigError for impossible ones."""
        return batch_of({name: getattr(self, name) for name in (*LENGTHS, "concurrent")})


def observation_of(outputs: Sequence[Any], seconds: float, **more: Any) -> Observation:
    """Make the Observation of one `generate()` from its outputs. Each sample of a prompt counts as a response.

    outputs: finished RequestOutputs of vLLM, in the order of their requests
    seconds: wall time of the call
    more:    the other fields of Observation

    Completions without tokens (aborted ones) are left out. Raises ConfigError if none has any tokens.
    """
    seen: dict[tuple[int, ...], int] = {}
    rows = []
    for output in outputs:
        prompt = tuple(output.prompt_token_ids or ())
        name = seen.setdefault(prompt, len(seen))
        rows += [(len(prompt), len(each.token_ids), name) for each in output.outputs if len(each.token_ids)]
    prompts, responses, ids = zip(*rows, strict=True) if rows else ((), (), ())
    return Observation(seconds, prompts, responses, ids, **more)


def joined(parts: Sequence[Observation]) -> Observation:
    """The observation of rollouts that ran one after the other, as one: seconds are summed, and responses listed.

    Their arrivals are counted on the clock of the summed seconds. The same prompt in two parts counts as two.
    """
    first, last = parts[0], parts[-1]
    turns, at_once = None, None
    if any(part.turns is not None for part in parts):
        turns = [trajectory for part in parts for trajectory in part.every_turn]
        at_once = max(part.batch.at_once for part in parts)
    ids: list[int] = []
    for part in parts:
        ids += (part.batch.prompt_ids + 1 + max(ids, default=-1)).tolist()
    seconds = sum(part.seconds for part in parts)
    return replace(
        last,
        seconds=seconds,
        prompt_lengths=[tokens for part in parts for tokens in part.prompt_lengths],
        response_lengths=[tokens for part in parts for tokens in part.response_lengths],
        prompt_ids=ids,
        turns=turns,
        concurrent=at_once,
        **totals(parts),
        arrival_s=seconds - last.seconds + (last.arrival_s or 0.0) if turns is None else None,
        idle_s=first.idle_s,
        kl_k3=next((part.kl_k3 for part in reversed(parts) if part.kl_k3 is not None), None),
        sampling=Sampling.mixed(part.sampling for part in parts),
    )


def totals(parts: Sequence[Observation]) -> dict[str, Any]:
    """The COUNTS of several observations together; None for one that not all of them know."""
    sums: dict[str, Any] = {}
    for name in COUNTS:
        counts = [getattr(part, name) for part in parts]
        sums[name] = None if None in counts else sum(counts)
    return sums


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for the work that ran. Speeds are in response tokens per second, low and high a 90% interval.

    setup:   the engine that ran, with its pool
    ran:     the whole prediction for it
    instead: preset name -> rollout of the same work in a precision with less FP8 and its own pool; only those that fit
    """

    setup: EngineSetup
    ran: Simulated
    instead: dict[str, Rollout]

    @property
    def rollout(self) -> Rollout:
        """The predicted rollout: its makespan, preemptions, parts and tail."""
        return self.ran.rollout

    @property
    def makespan_s(self) -> float:
        return self.rollout.makespan_s

    @property
    def tokens_per_s(self) -> float:
        return self.rollout.output_tokens_per_s

    @property
    def low_tokens_per_s(self) -> float:
        return self.rollout.output_tokens / self.rollout.makespan_high_s

    @property
    def high_tokens_per_s(self) -> float:
        return self.rollout.output_tokens / self.rollout.makespan_low_s

    @property
    def mean_batch(self) -> float:
        """Number of responses that decode together, averaged over the steps."""
        return self.rollout.output_tokens / self.rollout.num_steps / len(self.ran.schedules)

    @property
    def kv_cache_tokens(self) -> int:
        """The KV pool that the prediction is made for, in tokens."""
        return self.ran.memory.kv_cache_tokens


def predict(facts: EngineFacts, observation: Observation, profile: Profile) -> Prediction:
    """Predict the work that ran, and the same with less FP8. Raises as the parts of the cost model do."""
    setup = with_pool(facts.setup, observation.kv_cache_tokens)
    ran = again(setup, observation, profile)
    instead = {}
    for preset in fallbacks(facts.setup.precision):
        try:
            other = again(replace(facts.setup, precision=preset), observation, profile, ran.schedules)
        except CapacityError:
            continue
        instead[preset.name] = other.rollout
    return Prediction(setup, ran, instead)


def again(
    setup: EngineSetup, observation: Observation, profile: Profile, known: Sequence[Schedule] | None = None
) -> Simulated:
    """Predict the observed work on an engine. known: schedules of the same work, reused if they hold"""
    if reason := setup.gpu.why_not(setup.precision):
        raise ConfigError(f"{setup.precision.name} cannot be predicted on {setup.gpu.name}: {reason}")
    return simulate(setup.holding(observation.batch.longest), observation.batch, profile, known=known)


def with_pool(setup: EngineSetup, tokens: int | None) -> EngineSetup:
    """The same engine with a measured pool. tokens: as in Observation.kv_cache_tokens"""
    return setup if tokens is None else with_blocks(setup, setup.blocks_in(tokens) - 1)  # without vLLM's null block


def with_blocks(setup: EngineSetup, blocks: int) -> EngineSetup:
    """The same engine with a pool of `blocks` usable blocks."""
    return replace(setup, limits=replace(setup.limits, num_gpu_blocks=blocks))


def fallbacks(preset: Precision) -> list[Precision]:
    """The presets with a BF16 KV cache that have less FP8 than `preset`, fewest steps down first."""
    less = [
        other
        for other in PRESETS.values()
        if preset.uses_fp8 and other != preset and other.kv == "bf16" and other.weights in ("bf16", preset.weights)
    ]
    return sorted(less, key=lambda other: other.weights != preset.weights)
