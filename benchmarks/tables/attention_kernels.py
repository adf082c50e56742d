"""Rollouts of Qwen3-8B with FP8 weights and an FP8 cache on three attention kernels, from committed files.

    python -m benchmarks.tables.attention_kernels

`git show 4f9b9518:benchmarks/gpu/lease/jobs/attention.sh` measured them on H200s with vLLM 0.26. Prompts are the same
in every rollout, so that all but the first find them in the prefix cache, and time decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.tables import markdown
from fp8plan import jsonl
from fp8plan.model.attention_backend import Backend
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.library import load_profile
from fp8plan.model.setup import EngineSetup

MEASURED = Path(__file__).resolve().parents[1] / "results" / "attention_backends.jsonl"
MODEL, GPU, PRECISION, VERSION = "Qwen/Qwen3-8B", "h200_sxm", "fp8_block+fp8_kv", "0.26.0"
CLASSES = {
    "FlashAttentionImpl": Backend.FLASH_ATTN,
    "FlashInferImpl": Backend.FLASHINFER,
    "TritonAttentionImpl": Backend.TRITON_ATTN,
}


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts of one size on one card, with prompts and responses of `tokens` each.

    seconds: kernel -> the median of all rollouts but the first
    """

    card: str
    requests: int
    tokens: int
    seconds: dict[Backend, float]


def measured() -> list[Rollouts]:
    """The rollouts of each card and size."""
    sizes: dict[tuple[str, int, int], dict[Backend, float]] = {}
    for row in jsonl.rows(MEASURED):
        if row["what"] == "rollouts":
            seconds = sizes.setdefault((row["gpu_uuid"], row["requests"], row["tokens"]), {})
            seconds[CLASSES[row["attention"]]] = median(row["seconds"][1:])
    return [Rollouts(*size, seconds) for size, seconds in sizes.items()]


def table() -> str:
    """The seconds of each size on each kernel."""
    cards = list(dict.fromkeys(rollouts.card for rollouts in measured()))
    heads = ("card", "requests", "tokens of a prompt, and of a response", *(f"{kernel}, s" for kernel in Backend))
    lines = []
    for rollouts in measured():
        cells = [f"{rollouts.seconds[kernel]:.2f}" if kernel in rollouts.seconds else "-" for kernel in Backend]
        lines.append((str(cards.index(rollouts.card) + 1), f"{rollouts.requests}", f"{rollouts.tokens:,}", *cells))
    return markdown.table(heads, lines)


def decode_seconds(rollouts: Rollouts) -> float:
    """Seconds of decode attention in such a rollout with FlashAttention 3, as the cost model has them."""
    requests, tokens = rollouts.requests, rollouts.tokens
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=4096)
    setup = EngineSetup(MODEL, GPU, PRECISION, limits, engine_version=VERSION)
    profile, _ = load_profile(setup.gpu, VERSION, True)
    step, none, every = np.arange(tokens), np.zeros(tokens), np.full(tokens, float(requests))
    batch = StepBatch(every, requests * (tokens + step).astype(float), none, none, none, none, every, follows=step > 0)
    return float(setup.step_model(profile).timed(batch).breakdown()["attention"].sum())


def triton_over_flashinfer() -> list[float]:
    """Seconds of decode attention with Triton over those with FlashInfer, for each size that has all three kernels.

    A kernel's attention is FlashAttention 3's by the model, and the measured difference of the rollouts.
    """
    ratios = []
    for rollouts in measured():
        if len(rollouts.seconds) == len(Backend):
            least = decode_seconds(rollouts) - rollouts.seconds[Backend.FLASH_ATTN]
            triton, flashinfer = (rollouts.seconds[kernel] for kernel in (Backend.TRITON_ATTN, Backend.FLASHINFER))
            ratios.append((least + triton) / (least + flashinfer))
    return ratios


def triton_decode() -> float:
    """The geometric mean of `triton_over_flashinfer`."""
    return exp(fmean(map(log, triton_over_flashinfer())))


if __name__ == "__main__":
    print(table())
    print(f"\ndecode with Triton over FlashInfer: {triton_over_flashinfer()}, mean {triton_decode():.2f}")
