"""The batch sizes that vLLM captures as CUDA graphs, and the memory it sets aside for them."""

from __future__ import annotations

from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.model_runner import model_runner
from fp8plan.model.precision import Precision

MIB = 1 << 20

# vLLM's estimate of CUDA graph memory, V1 model runner only: the larger first capture, then the second graph of each
# kind times how many more there are (gpu_model_runner.py, profile_cudagraph_memory). Measured for 51 + 51 graphs of
# Qwen3-30B-A3B: 658 MiB in BF16, 758 in FP8. The split is chosen to agree with a public log too: 0.52 GiB for the
# 51 + 35 graphs of Qwen3-8B. That FP8's 100 MiB more belong to the full graphs is a guess. Other families took 556
# (Nemotron-H), 560 (Qwen3.5) and 918 MiB (12 layers of GLM-4.5-Air); why is not known.
CUDAGRAPH_FIRST_BYTES = 58 * MIB
CUDAGRAPH_PIECEWISE_BYTES = 4 * MIB
CUDAGRAPH_FULL_BYTES = 8 * MIB
CUDAGRAPH_FP8_BYTES = 2 * MIB


def cudagraph_capture_sizes(limits: EngineLimits) -> tuple[int, ...]:
    """Batch sizes vLLM 0.26 captures by default, ascending; () with enforce_eager.

    Source: vllm/config/vllm.py, _set_cudagraph_sizes.
    """
    if limits.enforce_eager:
        return ()
    largest = min(2 * limits.max_num_seqs, 512, limits.max_num_batched_tokens)
    sizes = {*(1, 2, 4), *range(8, 256, 8), *range(256, 513, 16)}
    sizes.add(limits.max_num_batched_tokens)  # the full budget is captured even off the grid, if it is not too large
    return tuple(sorted(size for size in sizes if size <= largest))


def cudagraph_reserve_bytes(shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits) -> int:
    """Bytes that vLLM sets aside for CUDA graphs before it sizes the KV pool
    (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1).

    0 with the V2 model runner, whose profile_cudagraph_memory returns 0. V1 captures every size piecewise and those up
    to max_num_seqs in full as well.
    """
    sizes = cudagraph_capture_sizes(limits)
    if model_runner(shape, gpu) == "v2" or not sizes:
        return 0
    more_full = sum(size <= limits.max_num_seqs for size in sizes) - 1
    full = CUDAGRAPH_FULL_BYTES + (0 if precision.weights == "bf16" else CUDAGRAPH_FP8_BYTES)
    return CUDAGRAPH_FIRST_BYTES + (len(sizes) - 1) * CUDAGRAPH_PIECEWISE_BYTES + more_full * full
