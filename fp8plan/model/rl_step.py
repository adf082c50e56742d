"""One RL step around the rollout: log-prob recomputation, training, and bringing the new weights to the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.batch import StepBatch
from fp8plan.model.precision import BF16_BYTES
from fp8plan.model.step import StepModel

# Quantisation reads BF16 and writes FP8 once, twice over the weights (amax, then scale and round): modelled.
QUANTISE_READS = 2


@dataclass(frozen=True, slots=True)
class Trainer:
    """The other parts of a step, as the user measured them: seconds, or tokens per second over the whole batch.

    train_s, logprob_s:                       seconds a step
    train_tokens_per_s, logprob_tokens_per_s: prompt + response tokens per second, instead of seconds
    sync_bandwidth:                           bytes/s at which new BF16 weights reach one engine GPU
    """

    train_s: float | None = None
    logprob_s: float | None = None
    train_tokens_per_s: float | None = None
    logprob_tokens_per_s: float | None = None
    sync_bandwidth: float = 50e9  # one 400 Gbit/s network port, or PCIe 5.0 x16 less its overhead

    def __post_init__(self) -> None:
        for name in ("train_s", "logprob_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < np.inf:
                raise ConfigError(f"{name} is {value!r}; allowed: a number of seconds of at least 0")
        for name in ("train_tokens_per_s", "logprob_tokens_per_s", "sync_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < np.inf:
                raise ConfigError(f"{name} is {value!r}; allowed: a number above 0")
        for name in ("train", "logprob"):
            if getattr(self, f"{name}_s") is not None and getattr(self, f"{name}_tokens_per_s") is not None:
                raise ConfigError(f"both {name}_s and {name}_tokens_per_s are given; give one of them")

    def seconds(self, tokens: int) -> float:
        """Log-prob recomputation + training of a batch of that many prompt + response tokens."""
        return _seconds(self.train_s, self.train_tokens_per_s, tokens) + _seconds(
            self.logprob_s, self.logprob_tokens_per_s, tokens
        )


def _seconds(seconds: float | None, tokens_per_s: float | None, tokens: int) -> float:
    if tokens_per_s is not None:
        return tokens / tokens_per_s
    return seconds or 0.0


def weight_sync_seconds(model: StepModel, trainer: Trainer, recalibrate_kv: bool = True) -> dict[str, float]:
    """Cost of new weights on one engine GPU: {"transfer", "quantise", "kv_scales"} in seconds. Modelled, not measured.

    transfer:  the rank's BF16 weights at `trainer.sync_bandwidth` (the engine quantises what it receives)
    quantise:  FP8 weights only: BF16 read, FP8 written, at the datasheet's HBM bandwidth
    kv_scales: FP8 KV only, if `recalibrate_kv`: one full step of prefill to observe K and V
    """
    shape, gpu, precision = model.shape, model.gpu, model.precision
    tp = model.limits.tensor_parallel_size
    bf16_bytes = shape.num_parameters * BF16_BYTES / tp
    parts = {"transfer": bf16_bytes / trainer.sync_bandwidth, "quantise": 0.0, "kv_scales": 0.0}
    if precision.weights == "fp8_block":
        traffic = QUANTISE_READS * bf16_bytes + shape.weight_bytes(precision, tp)
        parts["quantise"] = traffic / gpu.memory_bandwidth
    if precision.kv == "fp8" and recalibrate_kv:
        parts["kv_scales"] = float(model.seconds(_one_prefill(model.limits.max_num_batched_tokens))[0])
    return parts


def _one_prefill(tokens: int) -> StepBatch:
    one = np.ones(1, dtype=np.int64)
    return StepBatch(
        decode_requests=0 * one,
        decode_kv_tokens=0 * one,
        prefill_tokens=tokens * one,
        prefill_requests=one,
        prefill_kv_tokens=tokens * one,
        prefill_pairs=tokens * (tokens + 1) // 2 * one,
        sampled_requests=one,
    )
