"""GPU memory of one vLLM 0.26 rank: weights, activation peak, CUDA graphs, and the KV blocks that are left.

The formula is the engine's own (determine_available_memory in vllm/v1/worker/gpu_worker.py, get_num_blocks in
vllm/v1/core/kv_cache_utils.py):

    available = ceil(total memory * gpu_memory_utilization) - weights - activation peak - non-torch - CUDA graphs
    num_gpu_blocks = available // (block_size * KV bytes per token)

The engine measures the terms on the GPU. Here they are modelled from the shapes:
- weights: every tensor, with the allocator's rounding; for online FP8 an allowance measured on one model.
- activation peak: the buffers alive at the two peaks of profile_run, written down from the source. Of the kernels'
  scratch only the cuBLAS workspace is modelled.
- non-torch and CUDA graphs: constants from public logs, see below.
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
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, FP32_BYTES, Precision

MIB = 1 << 20
GIB = 1 << 30

# PyTorch's cuBLAS workspace on Hopper (CUDA semantics, "cuBLAS workspaces": 32 MiB there, 8 MiB before).
CUBLAS_WORKSPACE_BYTES = 32 * MIB

# Growth of non-torch memory while profiling (kernel modules, handles). Public vLLM logs show 0.05 to 0.20 GiB on one
# rank (0.16 on an H100 in vllm-project/vllm PR 12126) and 0.30 with two (issue 15815). From elsewhere, not measured.
NON_TORCH_BYTES = 160 * MIB
NON_TORCH_PARALLEL_BYTES = 307 * MIB

# vLLM's estimate of CUDA graph memory, V1 model runner only. Read off public logs ("Estimated CUDA graph memory"):
# 0.52, 0.64 and 0.78 GiB for 86 graphs (the first is Qwen3-8B), 0.37 for 54, 0.22 for 15. Spread about 0.15 GiB.
CUDAGRAPH_BASE_BYTES = 154 * MIB
CUDAGRAPH_BYTES_PER_GRAPH = 5.5 * MIB

# PyTorch's caching allocator (c10/cuda/CUDACachingAllocator): tensors of 10 MiB or more get blocks of whole 2 MiB, and
# a tail of up to 1 MiB is not split off. vLLM loads with max_split_size_mb=20: from there on no tail is.
ALLOCATOR_LARGE_BYTES = 10 * MIB
ALLOCATOR_ROUND_BYTES = 2 * MIB
ALLOCATOR_TAIL_BYTES = 1 * MIB
ALLOCATOR_SPLIT_BYTES = 20 * MIB

# Online FP8 frees each BF16 weight after quantising it, and the allocator may put an FP8 weight of 20 MiB or more into
# a freed block that is up to 20 MiB too big. Measured with vLLM 0.26 on an H200: Qwen3-8B loads 9.4 GiB where the
# arithmetic gives 8.80, over 108 such weights. One model only, so an estimate elsewhere.
ONLINE_FP8_SLACK_BYTES = 5.8 * MIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of one rank goes, in bytes, and the KV pool that is left.

    requested_bytes:    what gpu_memory_utilization allows the engine
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
    tp = limits.tensor_parallel_size
    shape.check_tensor_parallel(tp)
    plan = MemoryPlan(
        requested_bytes=ceil(gpu.memory_bytes * limits.gpu_memory_utilization),
        weights_bytes=loaded_weight_bytes(shape, precision, tp),
        activation_bytes=activation_peak_bytes(shape, precision, limits),
        non_torch_bytes=NON_TORCH_BYTES if tp == 1 else NON_TORCH_PARALLEL_BYTES,
        cudagraph_bytes=cudagraph_reserve_bytes(shape, limits),
        kv_bytes_per_token=shape.kv_bytes_per_token(precision, tp),
        block_size=limits.block_size,
        num_gpu_blocks=0 if limits.num_gpu_blocks is None else limits.num_gpu_blocks + 1,
        imposed=limits.num_gpu_blocks is not None,
    )
    if not plan.imposed:
        blocks = max(0, plan.available_bytes // (limits.block_size * plan.kv_bytes_per_token))
        plan = replace(plan, num_gpu_blocks=blocks)
    tokens = limits.max_model_len or longest_request or 1
    if plan.usable_blocks < ceil(tokens / limits.block_size):
        raise CapacityError(_does_not_fit(shape, precision, gpu, limits, plan, tokens))
    return plan


def loaded_weight_bytes(shape: ModelShape, precision: Precision, tensor_parallel_size: int = 1) -> int:
    """What loading the model allocates on one rank: weights, rotary table, the allocator's rounding and FP8's slack."""
    rotary_table = shape.max_position_embeddings * shape.head_dim * BF16_BYTES
    total = shape.weight_bytes(precision, tensor_parallel_size) + rotary_table
    for size, count, quantised in _tensors(shape, precision, tensor_parallel_size):
        total += count * _unused_tail_bytes(size)
        if quantised and size >= ALLOCATOR_SPLIT_BYTES:
            total += int(count * ONLINE_FP8_SLACK_BYTES)
    return total


def _tensors(shape: ModelShape, precision: Precision, tp: int) -> list[tuple[int, int, bool]]:
    """(bytes, how many, stored in FP8) of one rank's matrices, without scales. A layer's experts are one tensor."""
    online = precision.weights != "bf16"
    copies = shape.experts.num_experts if shape.experts else 0
    matrices = [(w, 1) for w in shape.linears(tp) if w.name != "lm_head"]
    matrices += [(w, copies) for w in shape.expert_linears(tp)]
    table = shape.padded_vocab_size // tp * shape.hidden_size * BF16_BYTES
    tensors = [(table, 1 if shape.tie_word_embeddings else 2, False)]
    for w, in_one in matrices:
        quantised = online and w.quantised
        tensors.append((in_one * w.n * w.k * (FP8_BYTES if quantised else BF16_BYTES), w.layers, quantised))
    return tensors


def _unused_tail_bytes(size: int) -> int:
    """Bytes at the end of the allocator's block that a tensor of `size` bytes keeps from others."""
    tail = -size % ALLOCATOR_ROUND_BYTES
    if size < ALLOCATOR_LARGE_BYTES or (size < ALLOCATOR_SPLIT_BYTES and tail > ALLOCATOR_TAIL_BYTES):
        return 0
    return tail


def activation_peak_bytes(shape: ModelShape, precision: Precision, limits: EngineLimits) -> int:
    """Peak of PyTorch's allocations in profile_run: a forward pass of max_num_batched_tokens, then the sampler.

    The expert workspace persists (vllm/v1/worker/workspace.py), so it counts in both. Attention is skipped, or writes
    into the buffers listed here.
    """
    tokens, tp = limits.max_num_batched_tokens, limits.tensor_parallel_size
    workspace = _expert_workspace_bytes(shape, precision, tokens, tp)
    sampler = _sampler_bytes(shape, tokens, min(tokens, limits.max_num_seqs), tp)
    return workspace + max(_forward_bytes(shape, tokens, tp), sampler) + CUBLAS_WORKSPACE_BYTES


def _forward_bytes(shape: ModelShape, tokens: int, tp: int) -> int:
    """BF16 rows alive at the widest point of a layer.

    Attention: residual, fused qkv, its normed and rotated copy, attention output. Dense MLP: residual, fused gate_up,
    SwiGLU's output. MoE: residual, input, output (the experts' own buffers are the workspace). FP8 copies of a layer's
    input are made when a wider BF16 buffer has gone, so they do not raise the peak.
    """
    rows = {w.name: w for w in shape.linears(tp)}
    widths = [shape.hidden_size + 2 * rows["qkv_proj"].n + rows["o_proj"].k]
    for name in ("gate_up_proj", "shared_gate_up_proj"):
        if name in rows:
            widths.append(shape.hidden_size + rows[name].n + rows[name].n // 2)
    if shape.experts:
        widths.append(3 * shape.hidden_size)
    return tokens * max(widths) * BF16_BYTES


def _expert_workspace_bytes(shape: ModelShape, precision: Precision, tokens: int, tp: int) -> int:
    """Buffers of the Triton experts (fused_moe/experts/triton_moe.py, workspace_shapes), vLLM's default on Hopper."""
    if not shape.experts:
        return 0
    w13, w2 = shape.expert_linears(tp)
    rows = tokens * shape.experts.experts_per_token
    workspace = rows * (max(w2.k, w13.k) + max(w13.n, w13.k)) * BF16_BYTES
    if precision.weights == "bf16":
        return workspace
    return workspace + (tokens * w13.k + rows * w2.k) * FP8_BYTES  # quantised inputs of the two GEMMs


def _sampler_bytes(shape: ModelShape, tokens: int, rows: int, tp: int) -> int:
    """Hidden states of all tokens, those of the sampled rows, logits, and what the sampler makes of the logits.

    Dense models run vLLM's V2 model runner, whose sampler works on the BF16 logits in place (v1/worker/gpu/sample).
    MoE models run V1, whose warm-up makes FP32 logits, probabilities and noise (v1/sample/ops/topk_topp_sampler.py).
    """
    hidden = (tokens + rows) * shape.hidden_size * BF16_BYTES
    element = BF16_BYTES + (3 * FP32_BYTES if shape.experts else 0)
    before_gather = rows * shape.padded_vocab_size // tp * BF16_BYTES if tp > 1 else 0
    return hidden + before_gather + rows * shape.padded_vocab_size * element


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


def cudagraph_reserve_bytes(shape: ModelShape, limits: EngineLimits) -> int:
    """What vLLM sets aside for CUDA graphs before it sizes the KV pool (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1).

    0 for dense models: the V2 model runner's profile_cudagraph_memory returns 0. MoE models run V1, which captures
    every size piecewise and those up to max_num_seqs in full as well.
    """
    sizes = cudagraph_capture_sizes(limits)
    if not shape.experts or not sizes:
        return 0
    graphs = len(sizes) + sum(size <= limits.max_num_seqs for size in sizes)
    return int(CUDAGRAPH_BASE_BYTES + graphs * CUDAGRAPH_BYTES_PER_GRAPH)


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
        f"{(plan.non_torch_bytes + plan.cudagraph_bytes) / GIB:.1f}); try {_ways_out(shape, precision, gpu, limits)}"
    )


def _ways_out(shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits) -> str:
    larger = [tp for tp in shape.allowed_tensor_parallel() if tp > limits.tensor_parallel_size]
    ways = [f"tensor_parallel_size {larger[0]}"] if larger else []
    if limits.gpu_memory_utilization < 0.95:
        ways.append("a higher gpu_memory_utilization")
    ways.append("a smaller max_model_len or max_num_batched_tokens")
    if gpu.has_fp8 and precision.weights == "bf16":
        ways.append("FP8 weights")
    return ", ".join(ways)
