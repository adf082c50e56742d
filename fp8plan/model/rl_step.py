"""The other parts of an RL step: log-prob recomputation, training, and the sync of new weights to the engine.

The parts run one after the other (synchronous RL), so their seconds add up. In asynchronous RL the gain of a step
differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, Linear, ModelShape
from fp8plan.model.cost.base import StepBatch, WindowReads
from fp8plan.model.cost.front import HTTP, OWN
from fp8plan.model.cost.step import StepModel
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, Precision
from fp8plan.model.schedule.windows import pairs_read
from fp8plan.model.weight_changes import (
    DEFAULT_OPTIMIZER,
    Changed,
    TopK,
    changed,
    check_optimizer,
    e4m3_patch_bytes,
    frame_bytes,
    one_step,
    patch_bytes,
)
from fp8plan.model.weights import EMBEDDING, LAYERS, LM_HEAD, Weights, normal
from fp8plan.options import TRAINER, Option, group_of

if TYPE_CHECKING:
    from fp8plan.model.setup import EngineSetup
    from fp8plan.model.validate.records import Record

# Quantisation reads a BF16 matrix twice (amax, then scale and round) and writes FP8 once: modelled.
QUANTISE_READS = 2
# Python's seconds for each matrix, beside the GPU's. The 12,288 of Qwen3-30B-A3B took 0.206 s on an H200, the 144 of
# Qwen3-8B 0.014 s (docs/evidence/weight_sync.md).
MATRIX_SECONDS = 15e-6
# Further seconds for each matrix that the trainer quantises itself and sends as E4M3: the 2,112 of fp8plan/moe-7b took
# 0.15 s in all on an H200 (benchmarks/results/slow_links_gpu.jsonl).
SENT_FP8_SECONDS = 50e-6
# Seconds of both sides in a sync of patches, beside the link's: for each BF16 byte of the trainer, each matrix and each
# byte of patches. `python -m benchmarks.tables.slow_links` fits them to syncs of two models on an H200. They
# serve all GPUs, as launches take most of the time.
COMPARED_SECONDS, PATCHED_SECONDS, PATCH_BYTE_SECONDS = 5.58e-12, 270e-6, 1.22e-9

UNITS: Final = {"M": 1e6, "G": 1e9, "T": 1e12}
# 25Gb/s, as well as the spellings 25Gbps, 25Gbit/s, 25 GBps and 3GByte/s. The case of b alone says bits or bytes.
LINK: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(?:(b)(?:its?)?|(B)(?:ytes?)?)(?:/s|/sec|ps)\s*")
# Program that calls the engine (fp8plan.model.cost.front.INSIDE) -> trainer that sends the new weights; None: fp8plan
# sends them. verl (BucketedWeightSender) and TRL (VLLMGeneration.sync_weights, VLLMClient) send all weights in BF16.
SENDERS: Final = {
    **dict.fromkeys((OWN, HTTP)),
    **dict.fromkeys(("verl", "verl-stock"), "verl"),
    **dict.fromkeys(("trl", "trl-stock", "server", "server-stock"), "TRL"),
}
MAX_LAG: Final = 4  # as in TRL's AsyncGRPO
MOST_LOG: Final = math.log(1000)  # most that measured syncs correct, as a log
DEFAULT_LINK: Final = "400Gb/s"  # a network port of that speed; PCIe 5.0 x16 less its overhead is as fast


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The other parts of a synchronous step as the user measured them: seconds, or tokens per second of the batch.

    Training and log-probs must both be given, because a missing part would look like one that takes no time. 0 seconds
    means that the trainer has no such part.

    train_s, logprob_s:                       seconds a step
    train_tokens_per_s, logprob_tokens_per_s: prompt + response tokens per second, instead of seconds
    max_lag: versions of the policy that a token may be behind the trainer, if training is asynchronous (`tune`)
    """

    train_s: Annotated[float | None, Option(TRAINER, "training, seconds a step")] = None
    logprob_s: Annotated[float | None, Option(TRAINER, "log-probs, seconds a step")] = None
    train_tokens_per_s: Annotated[float | None, Option(TRAINER)] = None
    logprob_tokens_per_s: Annotated[float | None, Option(TRAINER)] = None
    max_lag: Annotated[
        int, Option(TRAINER, "policy versions that a token may be behind, in asynchronous training", f"{MAX_LAG}")
    ] = MAX_LAG

    def __post_init__(self) -> None:
        for name in ("train_s", "logprob_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; allowed: a number of seconds of at least 0")
        for name in ("train_tokens_per_s", "logprob_tokens_per_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise ConfigError(f"{name} is {value!r}; allowed: a number above 0")
        whole("max_lag", self.max_lag)
        missing = {}
        for part, name in {"training": "train", "the log-probs": "logprob"}.items():
            times = [x for x in (f"{name}_s", f"{name}_tokens_per_s") if getattr(self, x) is not None]
            if len(times) > 1:
                raise ConfigError(f"both {' and '.join(times)} are given; give one of them")
            if not times:
                missing[part] = name
        if missing:
            give = " and ".join(f"{name}_s or {name}_tokens_per_s" for name in missing.values())
            flags = " ".join(f"--{name}-s SECONDS" for name in missing.values())
            raise ConfigError(
                f"the RL step lacks the time of {' and '.join(missing)}; give {give} (on the command line {flags}; "
                "0 if the trainer has no such part)"
            )

    def seconds(self, tokens: int) -> float:
        """Seconds of log-prob recomputation and training. tokens: prompt + response tokens of the batch"""
        parts = ((self.train_s, self.train_tokens_per_s), (self.logprob_s, self.logprob_tokens_per_s))
        return sum(tokens / rate if rate is not None else seconds or 0.0 for seconds, rate in parts)


STEP_OPTIONS: Final = group_of(StepTimes)


class Mode(StrEnum):
    """A way in which new weights reach an engine."""

    DENSE_BF16 = "dense BF16"
    DENSE_FP8 = "dense FP8"
    DELTA = "delta"
    TOP_K = "top-k"

    @property
    def dense(self) -> bool:
        return self in (Mode.DENSE_BF16, Mode.DENSE_FP8)

    @property
    def lossless(self) -> bool:
        """True if an engine has all changes after a sync."""
        return self is not Mode.TOP_K


@dataclass(frozen=True, slots=True)
class WeightSync:
    """The way of new weights to an engine.

    link:          bandwidth to one engine GPU, in bits ("25Gb/s") or bytes ("3GB/s")
    learning_rate: None: syncs are dense
    optimizer:     one of fp8plan.model.weight_changes.OPTIMIZERS
    weights:       kind of matrix -> a sample, as fp8plan.model.weights.sampled returns; other kinds: normal ones
    measured:      measured shares of changed values over the theory's
    sender:        a value of SENDERS; it sends all weights in BF16
    top_k:         settings of sparse syncs; None: all syncs are lossless
    """

    link: str = DEFAULT_LINK
    learning_rate: float | None = None
    optimizer: str = DEFAULT_OPTIMIZER
    weights: Mapping[str, Weights] = field(default_factory=dict)
    measured: float = 1.0
    sender: str | None = None
    top_k: TopK | None = None

    def __post_init__(self) -> None:
        match = LINK.fullmatch(self.link) if isinstance(self.link, str) else None
        if match is None or float(match[1]) == 0:
            allowed = "a number above 0 with Mb/s, Gb/s or Tb/s (bits) or MB/s, GB/s or TB/s (bytes)"
            raise ConfigError(f"link is {self.link!r}; allowed: {allowed}; type: 25Gb/s")
        if self.learning_rate is not None and not (is_number(self.learning_rate) and self.learning_rate >= 0):
            raise ConfigError(f"learning_rate is {self.learning_rate!r}; allowed: a number of at least 0, such as 1e-6")
        check_optimizer(self.optimizer)

    @property
    def bandwidth(self) -> float:
        """Bytes/s to one engine GPU."""
        match = LINK.fullmatch(self.link)
        assert match is not None
        return float(match[1]) * UNITS[match[2]] / (8 if match[3] else 1)

    def changed(self, matrix: str, top_k: TopK | None = None) -> Changed:
        """Return the shares of a matrix's values that a late step changes, or a sparse sync sends.

        matrix: its name in a ModelShape
        top_k:  as TopK.in_shares returns; None: a sync sends all changes
        """
        kind, residual = matrix if matrix in (EMBEDDING, LM_HEAD) else LAYERS, top_k and top_k.residual
        step = one_step(self.optimizer, hidden=kind == LAYERS)
        share = changed(step.times(self.learning_rate or 0.0), self.weights.get(kind, normal()), residual or 0.0)
        share = Changed(*(min(1.0, self.measured * part) for part in share))
        return share if top_k is None or top_k.share is None else share.limited(top_k.share)


class SyncCost(NamedTuple):
    """The cost of one sync in one mode.

    bytes: those that one engine GPU receives
    parts: {"transfer", "quantise", "patch", "kv_scales"} in seconds
    """

    mode: Mode
    bytes: float
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def pays_below(self, other: SyncCost) -> float:
        """Return the bandwidth in bytes/s below which this mode is faster than `other`, which sends more.

        0: it never is; infinity: it always is.
        """
        fixed = (self.seconds - self.parts["transfer"]) - (other.seconds - other.parts["transfer"])
        if self.bytes >= other.bytes:
            return 0.0
        return (other.bytes - self.bytes) / fixed if fixed > 0 else float("inf")


def sync_costs(model: StepModel, sync: WeightSync, recalibrate_kv: bool = True) -> list[SyncCost]:
    """Return the modes in which new weights can reach one engine GPU, the fastest first. Modelled, not measured.

    Without a learning rate, and with a trainer's own `sync.sender`, the only mode is DENSE_BF16: the engine quantises
    after it receives. Else there are DENSE_FP8, for FP8 weights that the trainer quantises, and DELTA: patches of what
    has changed, from a copy on the trainer's GPU, which is taken to be like the engine's. Vectors, under 0.1% of a
    model, are left out of a delta.
    With `sync.top_k` there is TOP_K, too: patches of a part of what has changed.

    transfer:  the rank's bytes over `sync.link`
    quantise:  for FP8 weights: the quantised matrices read in BF16 and written in FP8, at the datasheet's bandwidth,
               and Python's time for each of them; for DENSE_FP8 also SENT_FP8_SECONDS
    patch:     for a delta: COMPARED_SECONDS of the trainer's bytes, PATCHED_SECONDS of each matrix and
               PATCH_BYTE_SECONDS of the patches. For top-k both states and the trainer's weights are read once more to
               choose, and each matrix takes PATCHED_SECONDS again
    kv_scales: for FP8 KV, if `recalibrate_kv`: one full step that prefills requests of max_model_len, to observe K, V

    Raises ConfigError as TopK.in_shares.
    """
    shape, limits, precision, memory = model.shape, model.limits, model.precision, model.gpu.memory_bandwidth
    bf16_bytes = shape.num_parameters * BF16_BYTES / limits.tensor_parallel_size
    fp8_bytes, quantise, quantised, patch, choice = bf16_bytes, 0.0, 0, 0.0, 0.0
    rate = sync.learning_rate
    for matrix, number in rank_matrices(shape, limits):
        stored = matrix.elements * BF16_BYTES
        if _in_fp8(matrix, precision):
            stored = precision.linear_bytes(matrix.n, matrix.k, True)
            quantise += number * ((QUANTISE_READS * matrix.elements * BF16_BYTES + stored) / memory + MATRIX_SECONDS)
            fp8_bytes -= number * (matrix.elements * BF16_BYTES - stored)
            quantised += number
        if rate is not None:
            patch += number * (COMPARED_SECONDS * matrix.elements * BF16_BYTES + PATCHED_SECONDS)
            choice += number * ((2 * stored + matrix.elements * BF16_BYTES) / memory + PATCHED_SECONDS)
    kv_scales = 0.0
    if precision.kv == "fp8" and recalibrate_kv:
        longest = limits.max_model_len or shape.context.derived()
        kv_scales = float(model.seconds(full_prefill(shape, limits, longest))[0])

    def cost(mode: Mode, nbytes: float, **own: float) -> SyncCost:
        parts = {"transfer": nbytes / sync.bandwidth, "quantise": quantise, "patch": 0.0, "kv_scales": kv_scales}
        return SyncCost(mode, nbytes, parts | own)

    def by_patches(mode: Mode, seconds: float, top_k: TopK | None = None) -> SyncCost:
        nbytes = delta_bytes(shape, precision, limits, sync, top_k)
        return cost(mode, nbytes, patch=seconds + nbytes * PATCH_BYTE_SECONDS)

    costs = [cost(Mode.DENSE_BF16, bf16_bytes)]
    if rate is None or sync.sender is not None:
        return costs
    if quantised:
        costs.append(cost(Mode.DENSE_FP8, fp8_bytes, quantise=quantise + quantised * SENT_FP8_SECONDS))
    costs.append(by_patches(Mode.DELTA, patch))
    if sync.top_k is not None:
        costs.append(by_patches(Mode.TOP_K, patch + choice, _in_shares(sync.top_k, shape, precision)))
    return sorted(costs, key=lambda cost: cost.seconds)


def delta_bytes(
    shape: ModelShape, precision: Precision, limits: EngineLimits, sync: WeightSync, top_k: TopK | None = None
) -> float:
    """Return the bytes of a delta for one rank: patches of all matrices. top_k: as WeightSync.changed takes it"""
    total = 0.0
    for matrix, number in rank_matrices(shape, limits):
        n, k, share = matrix.n, matrix.k, sync.changed(matrix.name, top_k)
        in_fp8 = _in_fp8(matrix, precision)
        if in_fp8:
            own = e4m3_patch_bytes(n, k, share, precision.weight_block)
        else:
            own = patch_bytes(n, k, BF16_BYTES, share.bf16)
        total += number * own
    return total


def changes_of(records: Sequence[Record], shape: ModelShape, sync: WeightSync) -> float:
    """The measured shares of changed values over those of `sync`, from the syncs before a model's rollouts.

    It is the median over records with `delta_bytes`, whose learning rate and optimiser are taken to be those of `sync`.
    1.0 without such a record.
    """
    if not any(record.fields.get("delta_bytes") for record in records):
        return 1.0
    from scipy.optimize import brentq

    def missed(log: float, setup: EngineSetup, measured: float) -> float:
        own = replace(sync, measured=math.exp(log))
        return delta_bytes(setup.shape, setup.precision, EngineLimits(), own) - measured

    logs = []
    for record in records:
        measured, setup = record.fields.get("delta_bytes"), record.setup
        if measured and setup.shape.is_like(shape):
            low, high = (missed(end, setup, measured) for end in (-MOST_LOG, MOST_LOG))
            inside = low < 0 < high
            logs.append(brentq(missed, -MOST_LOG, MOST_LOG, (setup, measured)) if inside else np.sign(-low) * MOST_LOG)
    return math.exp(float(np.median(logs))) if logs else 1.0


def _in_shares(top_k: TopK, shape: ModelShape, precision: Precision) -> TopK:
    """The settings for each matrix of the model. Scales are not thinned: all of them may change."""
    matrices, scales, (height, width) = [], 0.0, precision.weight_block
    for matrix, number in rank_matrices(shape, EngineLimits()):
        item = FP8_BYTES if _in_fp8(matrix, precision) else BF16_BYTES
        matrices.append((matrix.n, matrix.k, item, number))
        if item == FP8_BYTES:
            rows, columns = -(-matrix.n // height), -(-matrix.k // width)
            scales += number * (frame_bytes(rows, columns, 4) + 4 * rows * columns)
    return top_k.in_shares(matrices, scales)


def _in_fp8(matrix: Linear, precision: Precision) -> bool:
    return precision.weights != "bf16" and matrix.quantised


def rank_matrices(shape: ModelShape, limits: EngineLimits) -> list[tuple[Linear, int]]:
    linears = shape.linears(limits.tensor_parallel_size)
    matrices = [(matrix, 1) for matrix in linears]
    if not shape.tie_word_embeddings:
        matrices += [(replace(matrix, name=EMBEDDING), 1) for matrix in linears if matrix.name == LM_HEAD]
    for experts, layers in shape.parts_of(Experts):
        copies = experts.most_on_a_rank(limits.expert_ranks) * layers
        linears = experts.expert_linears(shape.hidden_size, limits.expert_slices)
        matrices += [(matrix, copies) for matrix in linears]
    return [(matrix, copies * matrix.layers) for matrix, copies in matrices]


def full_prefill(shape: ModelShape, limits: EngineLimits, longest: int) -> StepBatch:
    """One step that fills the token budget with whole prompts of `longest` tokens, the last one shorter."""
    tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * longest)
    whole, last = divmod(tokens, longest)
    requests = whole + (last > 0)
    nothing, every, chunks = (np.array([count]) for count in (0, tokens, requests))
    windows = []
    for kind, window in dict.fromkeys((cache.kind, cache.window) for cache in shape.caches() if cache.window):
        spec = Spec(kind, 1, window=window)
        pairs = np.array([whole * pairs_read(spec, 0, longest) + pairs_read(spec, 0, last)])
        windows.append(WindowReads(kind, window, nothing, every, pairs))
    pairs = np.array([(whole * longest * (longest + 1) + last * (last + 1)) // 2])  # causal attention
    return StepBatch(nothing, nothing, every, chunks, every, pairs, chunks, tuple(windows))
