"""Comparison of the kernels that an engine runs with those that its profile was measured with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from fp8plan.model.precision import Precision

# Kernels as profiles call them -> vLLM's names of the same, in its log (FLASH_ATTN) or of the class that runs it
# (FlashAttentionImpl), as a pattern. It does not name its BF16 GEMM.
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


def kernel_names(facts: Mapping[str, Any], preset: Precision) -> dict[str, str]:
    """Name the kernels of a worker's facts as profiles name them: kernel -> its implementation."""
    attention = facts.get("attention")
    found = {f"attention.{preset.kv}": attention} if attention else {}
    return found | {f"{part}.{preset.gemm_dtype}": name for part, name in facts["kernels"].items()}


def fallback(kernel: str, measured: str | None, runs: str) -> str | None:
    """Say that `runs` is not the measured kernel, and what to do about it; None if it is, or if nobody can say.

    kernel:   as profiles name it, e.g. "gemm.fp8_block"
    measured: its implementation, as the profile calls it; None: not measured
    runs:     its implementation, as vLLM calls it in its log, or the class of it
    """
    if measured not in SAME or re.search(SAME[measured], runs):
        return None
    note = next((text for pattern, text in KNOWN_FOR.items() if re.search(pattern, runs)), "")
    way = WAY_BACK.get(kernel.partition(".")[0], "the engine's log says why it was selected")
    return f"{kernel} runs on {runs}{note}; the profile was measured with {measured}: {way}"
