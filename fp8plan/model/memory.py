"""GPU memory of one vLLM 0.26 rank: weights, activation peak, CUDA graphs, and the KV blocks that are left.

The formula is the engine's own (determine_available_memory in vllm/v1/worker/gpu_worker.py, get_num_blocks in
vllm/v1/core/kv_cache_utils.py):

    available = ceil(total memory * gpu_memory_utilization) - weights - activation peak - non-torch - CUDA graphs
    num_gpu_blocks = available // (block_size * KV bytes per token)

The engine measures the terms on the GPU. Here they are modelled from the shapes:
- weights: every tensor, with the allocator's rounding, and DeepGEMM's workspace.
- activation peak: the buffers alive at the two peaks of profile_run, written down from the source.
- non-torch and CUDA graphs: constants measured on one H200 with vLLM 0.26.0 on 2026-11-21, as are the checks of the
  other terms (profiles/h200_sxm/vllm-0.26.0/first_look): two models, four precisions, one rank. What those six
  engines do not show, such as several ranks, is from public logs or not known, and said so below.
The CUDA context and NCCL come before the engine's first snapshot, so they do not count, and neither does what it
allocates after profiling (a dense model's graphs, block tables): both live in the share gpu_memory_utilization leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from fp8plan.errors import CapacityError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import BF16_BYTES, FP8_BLOCK, FP8_BYTES, FP32_BYTES, Precision
from fp8plan.model.shards import why_not_shardable

MOST_UTILIZATION = 0.97  # the driver, the CUDA context and captured graphs need the rest

MIB = 1 << 20
GIB = 1 << 30

# A CPU's KV pool is given to the engine (VLLM_CPU_KVCACHE_SPACE), not derived from the memory there is, which fp8plan
# does not know. As much as vLLM took up to 0.12 where nobody said; 0.30 would take 92% of the machine.
CPU_KV_CACHE_GIB = 4

# No host has more memory; how much this one has, a plan made elsewhere cannot know.
MOST_HOST_BYTES = 32 << 40

# PyTorch's cuBLAS workspace on Hopper (CUDA semantics, "cuBLAS workspaces": 32 MiB there, 8 MiB before).
CUBLAS_WORKSPACE_BYTES = 32 * MIB

# FP8, of weights or of KV alone, makes vLLM load DeepGEMM with the model; its cuBLASLt workspace (DeepGEMM's
# csrc/jit/device_runtime.hpp) then counts as weights. Measured: 32 MiB over the tensors in all four FP8 engines, none
# in BF16.
DEEPGEMM_WORKSPACE_BYTES = 32 * MIB

# Growth of non-torch memory while profiling (kernel modules, handles). Measured: 230 MiB with the V2 model runner
# (dense), 246 and 248 with V1 (MoE). Two ranks add what public logs show: 0.30 GiB with two (vllm-project/vllm issue
# 15815) against 0.16 with one (PR 12126). From elsewhere and from older versions.
NON_TORCH_BYTES = 230 * MIB
NON_TORCH_V1_BYTES = 247 * MIB
NON_TORCH_PARALLEL_BYTES = 143 * MIB

# vLLM's estimate of CUDA graph memory, V1 model runner only: the larger first capture, then the second graph of each
# kind times how many more there are (gpu_model_runner.py, profile_cudagraph_memory). Measured for 51 + 51 graphs of
# Qwen3-30B-A3B: 658 MiB in BF16, 758 in FP8. The split is chosen to agree with a public log too: 0.52 GiB for the
# 51 + 35 graphs of Qwen3-8B. That FP8's 100 MiB more belong to the full graphs is a guess.
CUDAGRAPH_FIRST_BYTES = 58 * MIB
CUDAGRAPH_PIECEWISE_BYTES = 4 * MIB
CUDAGRAPH_FULL_BYTES = 8 * MIB
CUDAGRAPH_FP8_BYTES = 2 * MIB

# PyTorch's caching allocator (c10/cuda/CUDACachingAllocator): tensors of 10 MiB or more get blocks of whole 2 MiB, and
# a tail of up to 1 MiB is not split off. vLLM loads with max_split_size_mb=20: from there on no tail is.
ALLOCATOR_LARGE_BYTES = 10 * MIB
ALLOCATOR_ROUND_BYTES = 2 * MIB
ALLOCATOR_TAIL_BYTES = 1 * MIB
ALLOCATOR_SPLIT_BYTES = 20 * MIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one rank, in bytes by use, and the KV pool that is left.

    requested_bytes:    what gpu_memory_utilization allows the engine; on a CPU what it takes, weights and KV pool
    weights_bytes:      "Model loading took" in the engine's log
    activation_bytes:   "peak activation"
    non_torch_bytes:    growth outside the allocator while profiling
    cudagraph_bytes:    what the engine sets aside for CUDA graphs (nothing for dense models: V2 model runner)
    kv_bytes_per_token: K and V of one token in all layers
    block_size:         tokens per block
    num_gpu_blocks:     as the engine reports it; the scheduler has one fewer (the null block)
    imposed:            the pool was given by EngineLimits.num_gpu_blocks instead of predicted
    """

    requested_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    cudagraph_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_gpu_blocks: int
    imposed: bool

    @property
    def available_bytes(self) -> int:
        """The engine's "Available KV cache memory"; negative if not even the weights fit."""
        taken = self.weights_bytes + self.activation_bytes + self.non_torch_bytes + self.cudagraph_bytes
        return self.requested_bytes - taken

    @property
    def kv_bytes(self) -> int:
        """The size of the KV pool in bytes."""
        return self.num_gpu_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def usable_blocks(self) -> int:
        """Blocks the scheduler can hand out."""
        return self.num_gpu_blocks - 1

    @property
    def kv_cache_tokens(self) -> int:
        """The engine's "GPU KV cache size" (which it rounds down when block_size does not divide max_model_len)."""
        return self.num_gpu_blocks * self.block_size


def memory_plan(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, longest_request: int | None = None
) -> MemoryPlan:
    """The memory of one rank, and its KV pool.

    longest_request: prompt + response in tokens; stands in for limits.max_model_len where that is None.
    Raises ConfigError if tensor_parallel_size does not divide the model, CapacityError if the KV pool holds less than
    one request of max_model_len (the engine then refuses to start).
    """
    plan = _unchecked_plan(shape, precision, gpu, limits)
    tokens = limits.max_model_len or longest_request or 1
    if not _holds(plan, tokens):
        raise CapacityError(_does_not_fit(shape, precision, gpu, limits, plan, tokens))
    return plan


def check_pool(plan: MemoryPlan, gpu: Gpu, limits: EngineLimits) -> None:
    """Raise CapacityError if an imposed KV pool is larger than the GPU's memory.

    Not a part of `memory_plan`: the guard asks what a pool would save that no GPU has.
    """
    memory_bytes = MOST_HOST_BYTES if gpu.is_cpu else gpu.memory_bytes
    if not plan.imposed or plan.weights_bytes + plan.kv_bytes <= memory_bytes:
        return
    most = (memory_bytes - plan.weights_bytes) // (plan.block_size * plan.kv_bytes_per_token) - 1
    has = f"{memory_bytes / GIB:,.0f} GiB{' at most' if gpu.is_cpu else ''}"
    raise CapacityError(
        f"num_gpu_blocks {limits.num_gpu_blocks} is {plan.kv_bytes / GIB:,.0f} GiB of KV cache on each {gpu.product}, "
        f"which has {has} and holds {plan.weights_bytes / GIB:.0f} GiB of weights; allowed: at most {max(0, most)}, or "
        "leave num_gpu_blocks out"
    )


def _unchecked_plan(shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits) -> MemoryPlan:
    tp = limits.tensor_parallel_size
    shape.check_tensor_parallel(tp)
    plan = MemoryPlan(
        **(_cpu_terms(shape, precision) if gpu.is_cpu else _gpu_terms(shape, precision, gpu, limits)),
        kv_bytes_per_token=shape.kv_bytes_per_token(precision, tp),
        block_size=limits.block_size,
        num_gpu_blocks=0 if limits.num_gpu_blocks is None else limits.num_gpu_blocks + 1,
        imposed=limits.num_gpu_blocks is not None,
    )
    if plan.imposed:
        return plan
    return replace(plan, num_gpu_blocks=max(0, plan.available_bytes // (limits.block_size * plan.kv_bytes_per_token)))


def _gpu_terms(shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits) -> dict[str, int]:
    tp = limits.tensor_parallel_size
    return {
        "requested_bytes": ceil(gpu.memory_bytes * limits.gpu_memory_utilization),
        "weights_bytes": loaded_weight_bytes(shape, precision, tp),
        "activation_bytes": activation_peak_bytes(shape, precision, gpu, limits),
        "non_torch_bytes": _non_torch_bytes(shape, tp),
        "cudagraph_bytes": cudagraph_reserve_bytes(shape, precision, limits),
    }


def _cpu_terms(shape: ModelShape, precision: Precision) -> dict[str, int]:
    """Terms of `MemoryPlan` on a CPU. The KV pool has a given size there, so the weights take nothing from it."""
    weights = shape.weight_bytes(precision)
    nothing = dict.fromkeys(("activation_bytes", "non_torch_bytes", "cudagraph_bytes"), 0)
    return {"requested_bytes": weights + CPU_KV_CACHE_GIB * GIB, "weights_bytes": weights} | nothing


def _holds(plan: MemoryPlan, tokens: int) -> bool:
    return plan.usable_blocks >= ceil(tokens / plan.block_size)


def loaded_weight_bytes(shape: ModelShape, precision: Precision, tensor_parallel_size: int = 1) -> int:
    """Bytes that loading the model allocates on one rank: weights, rotary table, the allocator's rounding, and
    DeepGEMM's workspace.

    Measured against it: 0.1 MB more in BF16 (the scales of the attention layers, each rounded up to 512 bytes), 12.7 MB
    more for Qwen3-8B in FP8.
    """
    rotary_table = shape.max_position_embeddings * shape.head_dim * BF16_BYTES
    total = shape.weight_bytes(precision, tensor_parallel_size) + rotary_table
    total += sum(count * _unused_tail_bytes(size) for size, count in _tensors(shape, precision, tensor_parallel_size))
    return total + (DEEPGEMM_WORKSPACE_BYTES if precision.uses_fp8 else 0)


def _tensors(shape: ModelShape, precision: Precision, tp: int) -> list[tuple[int, int]]:
    """The pairs (bytes, how many) of one rank's matrices, without scales. A layer's experts are one tensor."""
    online = precision.weights != "bf16"
    copies = shape.experts.num_experts if shape.experts else 0
    matrices = [(w, 1) for w in shape.linears(tp) if w.name != "lm_head"]
    matrices += [(w, copies) for w in shape.expert_linears(tp)]
    table = shape.padded_vocab_size // tp * shape.hidden_size * BF16_BYTES
    tensors = [(table, 1 if shape.tie_word_embeddings else 2)]
    for w, in_one in matrices:
        element = FP8_BYTES if online and w.quantised else BF16_BYTES
        tensors.append((in_one * w.n * w.k * element, w.layers))
    return tensors


def _unused_tail_bytes(size: int) -> int:
    """Bytes at the end of the allocator's block that a tensor of `size` bytes keeps from others."""
    tail = -size % ALLOCATOR_ROUND_BYTES
    if size < ALLOCATOR_LARGE_BYTES or (size < ALLOCATOR_SPLIT_BYTES and tail > ALLOCATOR_TAIL_BYTES):
        return 0
    return tail


def activation_peak_bytes(shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits) -> int:
    """Peak of PyTorch's allocations in profile_run: a forward pass of max_num_batched_tokens, then the sampler.

    The expert workspace persists (vllm/v1/worker/workspace.py), so it counts in both; so does cuBLAS's, from its first
    BF16 GEMM on: in a dense FP8 model that is lm_head's, after the forward pass. Measured against this: 60 MiB (4%)
    more for Qwen3-8B, whose peak is the forward pass, in every precision; 2 MiB more for Qwen3-30B-A3B (the sampler).
    """
    tokens, tp = limits.max_num_batched_tokens, limits.tensor_parallel_size
    forward, sampler = _forward_bytes(shape, precision, tokens, tp), _sampler_bytes(shape, gpu, limits)
    if precision.weights == "bf16" or shape.experts:
        forward += CUBLAS_WORKSPACE_BYTES
    return _expert_workspace_bytes(shape, tokens, tp) + max(forward, sampler + CUBLAS_WORKSPACE_BYTES)


def _forward_bytes(shape: ModelShape, precision: Precision, tokens: int, tp: int) -> int:
    """Bytes alive at the widest point of a layer, without the expert workspace.

    Attention: residual, fused qkv, its normed and rotated copy, attention output. The compiled graph is split at
    attention (compilation/backends.py), and what calls a piece holds its inputs until it returns: the attention output
    and the old residual. With them, dense MLP: residual, fused gate_up, SwiGLU's output; MoE: residual, input, output,
    and in FP8 the quantised inputs of the two GEMMs. FP8 copies of a dense layer's input are made when a wider BF16
    buffer has gone, so they do not raise the peak.
    """
    rows = {w.name: w for w in shape.linears(tp)}
    held = rows["o_proj"].k + shape.hidden_size
    widths = [shape.hidden_size + 2 * rows["qkv_proj"].n + rows["o_proj"].k]
    for name in ("gate_up_proj", "shared_gate_up_proj"):
        if name in rows:
            widths.append(held + shape.hidden_size + rows[name].n + rows[name].n // 2)
    if shape.experts:
        widths.append(held + 3 * shape.hidden_size)
        if precision.weights != "bf16":
            w13, w2 = shape.expert_linears(tp)
            widths[-1] += (w13.k + shape.experts.experts_per_token * w2.k) * FP8_BYTES // BF16_BYTES
    return tokens * max(widths) * BF16_BYTES


def _expert_workspace_bytes(shape: ModelShape, tokens: int, tp: int) -> int:
    """Buffers of the Triton experts (fused_moe/experts/triton_moe.py, workspace_shapes), vLLM's default on Hopper."""
    if not shape.experts:
        return 0
    w13, w2 = shape.expert_linears(tp)
    rows = tokens * shape.experts.experts_per_token
    return rows * (max(w2.k, w13.k) + max(w13.n, w13.k)) * BF16_BYTES


def _sampler_bytes(shape: ModelShape, gpu: Gpu, limits: EngineLimits) -> int:
    """Hidden states of all tokens, those of the sampled rows, logits, and what the sampler makes of the logits.

    Dense models run vLLM's V2 model runner, whose sampler works on the BF16 logits in place (v1/worker/gpu/sample).
    MoE models run V1, whose warm-up holds BF16 logits, FP32 logits, log-probabilities (processed_logprobs),
    probabilities and noise at once (v1/sample/ops/topk_topp_sampler.py), random hidden states for the sampled rows
    (_dummy_sampler_run), and the top-k kernel's FP32 row per multiprocessor (topk_topp_triton.py).
    """
    tokens, tp = limits.max_num_batched_tokens, limits.tensor_parallel_size
    rows, vocab = min(tokens, limits.max_num_seqs), shape.padded_vocab_size
    row = shape.hidden_size * BF16_BYTES
    before_gather = rows * vocab // tp * BF16_BYTES if tp > 1 else 0
    taken = (tokens + rows) * row + before_gather + rows * vocab * BF16_BYTES
    if shape.experts:
        taken += rows * row + 4 * rows * vocab * FP32_BYTES + min(gpu.sm_count, rows) * vocab * FP32_BYTES
    return taken


def _non_torch_bytes(shape: ModelShape, tp: int) -> int:
    alone = NON_TORCH_V1_BYTES if shape.experts else NON_TORCH_BYTES
    return alone if tp == 1 else alone + NON_TORCH_PARALLEL_BYTES


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


def cudagraph_reserve_bytes(shape: ModelShape, precision: Precision, limits: EngineLimits) -> int:
    """Bytes that vLLM sets aside for CUDA graphs before it sizes the KV pool
    (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1).

    0 for dense models: the V2 model runner's profile_cudagraph_memory returns 0. MoE models run V1, which captures
    every size piecewise and those up to max_num_seqs in full as well.
    """
    sizes = cudagraph_capture_sizes(limits)
    if not shape.experts or not sizes:
        return 0
    more_full = sum(size <= limits.max_num_seqs for size in sizes) - 1
    full = CUDAGRAPH_FULL_BYTES + (0 if precision.weights == "bf16" else CUDAGRAPH_FP8_BYTES)
    return CUDAGRAPH_FIRST_BYTES + (len(sizes) - 1) * CUDAGRAPH_PIECEWISE_BYTES + more_full * full


def _does_not_fit(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, plan: MemoryPlan, tokens: int
) -> str:
    blocks = ceil(tokens / limits.block_size)
    if plan.imposed:
        return (
            f"num_gpu_blocks {limits.num_gpu_blocks} holds {plan.usable_blocks * limits.block_size} tokens, but one "
            f"request of {tokens} tokens needs {blocks} blocks of {limits.block_size}; raise num_gpu_blocks or lower "
            "max_model_len"
        )
    needed, available = (blocks + 1) * limits.block_size * plan.kv_bytes_per_token, plan.available_bytes
    return (
        f"{shape.name} in {precision.name} does not fit {gpu.product} with tensor_parallel_size "
        f"{limits.tensor_parallel_size}: one request of {tokens} tokens needs {needed / GIB:.2f} GiB of KV cache, "
        f"available {available / GIB:.2f} GiB ({plan.requested_bytes / GIB:.1f} requested, weights "
        f"{plan.weights_bytes / GIB:.1f}, activations {plan.activation_bytes / GIB:.1f}, other "
        f"{(plan.non_torch_bytes + plan.cudagraph_bytes) / GIB:.1f}); try "
        f"{_ways_out(shape, precision, gpu, limits, plan, tokens)}"
    )


def _ways_out(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, plan: MemoryPlan, tokens: int
) -> str:
    """The changes that would make the model fit, each tried out by itself."""

    def fits(changed: EngineLimits, wanted: Precision = precision) -> bool:
        return _holds(_unchecked_plan(shape, wanted, gpu, changed), tokens)

    layouts = () if gpu.is_cpu else shape.allowed_tensor_parallel()
    larger = (tp for tp in layouts if tp > limits.tensor_parallel_size)
    larger = (tp for tp in larger if why_not_shardable(shape, precision, tp) is None)
    enough = next((tp for tp in larger if fits(replace(limits, tensor_parallel_size=tp))), None)
    ways = [f"tensor_parallel_size {enough}"] if enough else []
    if not gpu.is_cpu and fits(replace(limits, gpu_memory_utilization=MOST_UTILIZATION)):
        ways.append("a higher gpu_memory_utilization")
    startable = why_not_shardable(shape, FP8_BLOCK, limits.tensor_parallel_size) is None
    if gpu.has_fp8 and precision.weights == "bf16" and startable and fits(limits, FP8_BLOCK):
        ways.append("FP8 weights")
    if plan.available_bytes > 0:
        ways.append("a smaller max_model_len")
    return ", ".join(ways) or "a GPU with more memory"
