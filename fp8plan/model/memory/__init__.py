"""GPU memory of one vLLM 0.26 rank: weights, activation peak, CUDA graphs, and the KV blocks that are left.

The formula is the engine's own (determine_available_memory in vllm/v1/worker/gpu_worker.py, get_kv_cache_configs in
vllm/v1/core/kv_cache_utils.py):

    available = ceil(total memory * gpu_memory_utilization) - weights - activation peak - non-torch - CUDA graphs
    num_gpu_blocks = available // bytes of a block

The engine measures the terms on the GPU. Here they are modelled from the shapes:
- weights: every tensor, with the allocator's rounding, and DeepGEMM's workspace;
- activation peak: the buffers alive at the two peaks of profile_run, from the source;
- non-torch and CUDA graphs: constants measured on one H200 with vLLM 0.26.0 (profiles/h200_sxm/vllm-0.26.0: first_look
  and families), and from public logs for several ranks.
The CUDA context, NCCL, and allocations after profiling (a dense model's graphs, block tables) are not counted. They
live in the share that gpu_memory_utilization leaves.
"""

from fp8plan.model.memory.activations import activation_peak_bytes
from fp8plan.model.memory.plan import (
    CPU_KV_CACHE_GIB,
    MemoryPlan,
    check_pool,
    check_share,
    cudagraph_capture_sizes,
    cudagraph_reserve_bytes,
    loaded_weight_bytes,
    memory_plan,
)

__all__ = [
    "CPU_KV_CACHE_GIB",
    "MemoryPlan",
    "activation_peak_bytes",
    "check_pool",
    "check_share",
    "cudagraph_capture_sizes",
    "cudagraph_reserve_bytes",
    "loaded_weight_bytes",
    "memory_plan",
]
