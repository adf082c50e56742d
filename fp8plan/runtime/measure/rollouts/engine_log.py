"""Facts from the log of a vLLM engine: memory, start-up times and the kernels it picked.

The patterns are those of vLLM 0.26 (vllm/v1/worker/gpu_worker.py, vllm/v1/core/kv_cache_utils.py,
vllm/platforms/cuda.py, vllm/model_executor/kernels/linear/__init__.py); a line that is not there is left out.
"""

from __future__ import annotations

import re
from typing import Final

from fp8plan.model.precision import Precision

# Field -> pattern with the number as its only group. GiB are 2^30 bytes, rounded by vLLM to two decimals.
NUMBERS: Final = {
    "model_loading_gib": r"Model loading took ([\d.]+) GiB",
    "model_loading_s": r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds",
    "available_kv_cache_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "kv_cache_size_tokens": r"KV cache size: ([\d,]+) tokens",
    "maximum_concurrency": r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x",
    "free_gib": r"Free memory on device \S* ?\(([\d.]+)/[\d.]+ GiB\) on startup",
    "total_gib": r"Free memory on device \S* ?\([\d.]+/([\d.]+) GiB\) on startup",
    "requested_gib": r"GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)",
    "weights_gib": r"Actual usage is ([\d.]+) GiB for weight",
    "peak_activation_gib": r"([\d.]+) GiB for peak activation",
    "non_torch_gib": r"([\d.]+) GiB for non-torch memory",
    "cuda_graphs_gib": r"([\d.]+) GiB for CUDAGraph memory",
    "cuda_graphs_estimated_gib": r"CUDA graph pool memory: [\d.]+ GiB \(actual\), ([\d.]+) GiB \(estimated\)",
    "graph_capture_s": r"Graph capturing finished in (\d+) secs",
    "compile_s": r"torch\.compile took ([\d.]+) s in total",
    "engine_init_s": r"init engine \(.*?\) took ([\d.]+) s",
    "flash_attention_version": r"Using FlashAttention version (\d+)",
}

LINEAR: Final = r"Selected (\w+) for (?:Fp8|Online|PerBlock)\w*"
ATTENTION: Final = r"Using (\w+) attention backend"
MOE: Final = r"Using (.+?) (?:Fp8 |Unquantized )?MoE backend"
E8M0: Final = r"DeepGEMM E8M0 (enabled|disabled)"


def engine_numbers(log: str) -> dict[str, float]:
    """NUMBERS found in a log: field -> number; of several, the last."""
    found = {name: re.findall(pattern, log) for name, pattern in NUMBERS.items()}
    return {name: float(values[-1].replace(",", "")) for name, values in found.items() if values}


def kernel_backends(log: str, preset: Precision) -> dict[str, str]:
    """Kernel, as a Profile names it -> implementation, as vLLM names it. vLLM does not name its BF16 GEMM."""
    attention = f"attention.{preset.kv}"
    wanted = {f"gemm.{preset.gemm_dtype}": LINEAR, attention: ATTENTION, f"moe.{preset.gemm_dtype}": MOE}
    found = {kernel: re.findall(pattern, log) for kernel, pattern in wanted.items()}
    return {kernel: names[-1] for kernel, names in found.items() if names}


def model_runner(log: str) -> str:
    """The model runner that a log tells of: only the newer one names itself (vllm/v1/worker/gpu_worker.py).

    The two have different costs per step.
    """
    return "V2" if "Using V2 Model Runner" in log else "V1"


def uses_e8m0(log: str, preset: Precision) -> bool | None:
    """Return True if DeepGEMM ran with power-of-two scales; None if the log does not say or no weight is FP8."""
    said = re.findall(E8M0, log)
    return said[-1] == "enabled" if said and preset.weights != "bf16" else None
