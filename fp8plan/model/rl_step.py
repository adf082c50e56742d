"""The other parts of an RL step: log-prob recomputation, training, and the sync of new weights to the engine.

The parts run one after the other (synchronous RL), so their seconds add up. In asynchronous RL the gain of a step
differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, Linear, ModelShape
from fp8plan.model.cost.base import StepBatch, WindowReads
from fp8plan.model.cost.step import StepModel
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.precision import BF16_BYTES
from fp8plan.model.schedule.windows import pairs_read

# Quantisation reads a BF16 matrix twice (amax, then scale and round) and writes FP8 once: modelled.
QUANTISE_READS = 2
# Python's seconds for each matrix, beside the GPU's. The 12,288 of Qwen3-30B-A3B took 0.206 s on an H200, the 144 of
# Qwen3-8B 0.014 s (docs/evidence/weight_sync.md).
MATRIX_SECONDS = 15e-6


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The other parts of a synchronous step as the user measured them: seconds, or tokens per second of the batch.

    Training and log-probs must both be given, because a missing part would look like one that takes no time. 0 seconds
    means that the trainer has no such part.

    train_s, logprob_s:                       seconds a step
    train_tokens_per_s, logprob_tokens_per_s: prompt + response tokens per second, instead of seconds
    sync_bandwidth:                           bytes/s at which new BF16 weights reach one engine GPU
    max_lag: versions of the policy that a token may be behind the trainer, if training is asynchronous (`tune`)
    """

    train_s: float | None = None
    logprob_s: float | None = None
    train_tokens_per_s: float | None = None
    logprob_tokens_per_s: float | None = None
    sync_bandwidth: float = 50e9  # one 400 Gbit/s network port, or PCIe 5.0 x16 less its overhead
    max_lag: int = 4  # as in TRL's AsyncGRPO

    def __post_init__(self) -> None:
        for name in ("train_s", "logprob_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; allowed: a number of seconds of at least 0")
        for name in ("train_tokens_per_s", "logprob_tokens_per_s", "sync_bandwidth"):
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


def weight_sync_seconds(model: StepModel, times: StepTimes, recalibrate_kv: bool = True) -> dict[str, float]:
    """Cost of new weights on one engine GPU: {"transfer", "quantise", "kv_scales"} in seconds. Modelled, not measured.

    transfer:  the rank's BF16 weights at `times.sync_bandwidth` (the engine quantises after it receives)
    quantise:  for FP8 weights: the quantised matrices read in BF16 and written in FP8, at the datasheet's bandwidth,
               and Python's time for each of them
    kv_scales: for FP8 KV, if `recalibrate_kv`: one full step that prefills requests of max_model_len, to observe K, V
    """
    shape, gpu, precision = model.shape, model.gpu, model.precision
    tp = model.limits.tensor_parallel_size
    bf16_bytes = shape.num_parameters * BF16_BYTES / tp
    parts = {"transfer": bf16_bytes / times.sync_bandwidth, "quantise": 0.0, "kv_scales": 0.0}
    if precision.weights != "bf16":
        for matrix, number in _quantised(shape, model.limits):
            written = precision.linear_bytes(matrix.n, matrix.k, True)
            traffic = QUANTISE_READS * matrix.n * matrix.k * BF16_BYTES + written
            parts["quantise"] += number * (traffic / gpu.memory_bandwidth + MATRIX_SECONDS)
    if precision.kv == "fp8" and recalibrate_kv:
        longest = model.limits.max_model_len or shape.context.derived()
        parts["kv_scales"] = float(model.seconds(full_prefill(shape, model.limits, longest))[0])
    return parts


def _quantised(shape: ModelShape, limits: EngineLimits) -> list[tuple[Linear, int]]:
    """The matrices of one rank that FP8 weights quantise, and the number of each."""
    matrices = [(matrix, 1) for matrix in shape.linears(limits.tensor_parallel_size)]
    for experts, layers in shape.parts_of(Experts):
        copies = experts.most_on_a_rank(limits.expert_ranks) * layers
        linears = experts.expert_linears(shape.hidden_size, limits.expert_slices)
        matrices += [(matrix, copies) for matrix in linears]
    return [(matrix, copies * matrix.layers) for matrix, copies in matrices if matrix.quantised]


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
