"""GPU memory of one rank of vLLM: weights, activation peak, CUDA graphs, and the KV blocks that are left.

The formula is the engine's own (determine_available_memory in vllm/v1/worker/gpu_worker.py, get_kv_cache_configs in
vllm/v1/core/kv_cache_utils.py):

    available = ceil(total memory * gpu_memory_utilization) - weights - activation peak - non-torch - CUDA graphs
    num_gpu_blocks = available // bytes of a block

The engine measures the terms on the GPU. Here they are modelled from the shapes:
- weights: every tensor, with the allocator's rounding, and DeepGEMM's workspace;
- activation peak: the buffers alive at the two peaks of profile_run, from the source;
- non-torch and CUDA graphs: constants measured on H200s with vLLM 0.26 (profiles/h200_sxm/vllm-0.26.0: first_look and
  families) and 0.33 (the rollouts of profiles/h200_sxm/vllm-0.33.0), and from public logs for several ranks.
The CUDA context, NCCL, and allocations after profiling (a dense model's graphs, block tables) are not counted. They use
the share that gpu_memory_utilization leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits, cudagraph_capture_sizes, model_runner
from fp8plan.model.memory.activations import activation_peak_bytes
from fp8plan.model.memory.kv_plan import KvPlan, plan_kv_cache
from fp8plan.model.memory.kv_specs import model_caches
from fp8plan.model.precision import BF16_BYTES, FP8_BLOCK, FP8_BYTES, Precision
from fp8plan.model.shards import why_not_shardable
from fp8plan.version import DEFAULT_VERSION, has

MIB, GIB = 1 << 20, 1 << 30

# vLLM's estimate of CUDA graph memory (profile_cudagraph_memory). V1: the larger first capture, and for each kind its
# second graph times the number of further ones. The sizes agree with 51 + 51 graphs of Qwen3-30B-A3B (658 MiB in BF16,
# 758 in FP8) and a public log of Qwen3-8B. Other families took 556 to 918 MiB.
CUDAGRAPH_FIRST_BYTES, PIECEWISE_BYTES, FULL_BYTES = 58 * MIB, 4 * MIB, 8 * MIB
# V2: bytes of a layer in a piecewise graph; a full graph has twice as many. That is how seven models of 8 to 48 layers
# took 172 to 1,282 MiB with vLLM 0.33. Two were off by more than 60 MiB: Qwen3-1.7B (456 MiB, 590 here) and Qwen3-14B
# (1,450 MiB, 1,066 here).
LAYER_GRAPH_BYTES = 960 * MIB / (36 * 153)  # 51 + 51 graphs of Qwen3-8B
CUDAGRAPH_FP8_BYTES = 2 * MIB  # that FP8 weights add to a full graph


def cudagraph_reserve_bytes(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, engine_version: str = DEFAULT_VERSION
) -> int:
    """Bytes set aside for CUDA graphs before the KV pool is sized (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1).

    The V2 model runner reserves none before vLLM 0.29. Every size is captured piecewise, and sizes up to max_num_seqs
    also as full graphs.
    """
    captured = cudagraph_capture_sizes(shape, gpu, limits, engine_version)
    runner = model_runner(shape, gpu, engine_version)
    sizes = [size for size in captured if size <= 512]  # the 83 graphs of gpt-oss took no more than 51 of others
    if not sizes or (runner == "v2" and not has(engine_version, "V2 reserves memory for CUDA graphs")):
        return 0
    full = sum(size <= limits.max_num_seqs for size in sizes)
    fp8 = 0 if precision.weights == "bf16" else CUDAGRAPH_FP8_BYTES
    if runner == "v1":
        return CUDAGRAPH_FIRST_BYTES + (len(sizes) - 1) * PIECEWISE_BYTES + (full - 1) * (FULL_BYTES + fp8)
    return int(len(shape.layers) * (len(sizes) + 2 * full) * LAYER_GRAPH_BYTES) + full * fp8


# With FP8 weights or KV, vLLM loads DeepGEMM with the model, whose cuBLASLt workspace (csrc/jit/device_runtime.hpp)
# counts as weights. MLA has it in BF16 too, as MLAAttention always has an FP8 quantiser.
DEEPGEMM_WORKSPACE_BYTES = 32 * MIB

# PyTorch's caching allocator (c10/cuda/CUDACachingAllocator): tensors of 10 MiB or more get blocks of whole 2 MiB. The
# allocator splits off no tail of up to 1 MiB, nor any from 20 MiB on (vLLM loads with max_split_size_mb=20).
ALLOCATOR_LARGE_BYTES = 10 * MIB
ALLOCATOR_ROUND_BYTES = 2 * MIB
ALLOCATOR_TAIL_BYTES = 1 * MIB
ALLOCATOR_SPLIT_BYTES = 20 * MIB


def loaded_weight_bytes(
    shape: ModelShape,
    precision: Precision,
    tensor_parallel_size: int = 1,
    expert_ranks: int = 1,
    has_deep_gemm: bool = True,
) -> int:
    """Bytes that loading the model allocates on one rank.

    These are weights, the rotary table, the allocator's rounding, and DeepGEMM's workspace. Engines took 2 MiB less to
    16 MiB more, and 534 MiB more for Gemma 3 (see `_rotary_bytes`).

    expert_ranks:  as in `ModelShape.weight_bytes`
    has_deep_gemm: DeepGEMM supports the GPU. An A100 has no such workspace (the numbers of vllm issue 42058)
    """
    total = shape.weight_bytes(precision, tensor_parallel_size, expert_ranks) + _rotary_bytes(shape)
    tensors = _tensors(shape, precision, tensor_parallel_size, expert_ranks)
    total += sum(count * _unused_tail_bytes(size) for size, count in tensors)
    deep_gemm = (precision.uses_fp8 and has_deep_gemm) or shape.parts_of(LatentAttention)
    return total + (DEEPGEMM_WORKSPACE_BYTES if deep_gemm else 0)


def _rotary_bytes(shape: ModelShape) -> int:
    """Bytes of one table of rotary embeddings, as wide as the widest head.

    Not modelled: tables of half heads (GLM) or of four positions a token (Qwen3.5), a second table for windows (OLMo 3,
    Gemma 3), and linear scaling, which lengthens a table by its factor (8 in Gemma 3: 512 MiB).
    """
    widths = [attention.head_dim for attention, _ in shape.parts_of(Attention)]
    widths += [latent.qk_rope_head_dim for latent, _ in shape.parts_of(LatentAttention)]
    return shape.max_position_embeddings * max(widths, default=0) * BF16_BYTES


def _tensors(shape: ModelShape, precision: Precision, tp: int, expert_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (bytes, number) of one rank's matrices, without scales. A layer's experts are one tensor."""
    online = precision.weights != "bf16"
    table = shape.padded_vocab_size // tp * shape.hidden_size * BF16_BYTES
    yield table, 1 if shape.tie_word_embeddings else 2
    for w in shape.linears(tp):
        if w.name != "lm_head":
            yield w.elements * (FP8_BYTES if online and w.quantised else BF16_BYTES), w.layers
    for experts, layers in shape.parts_of(Experts):
        for w in experts.stored_linears(shape.hidden_size, precision, tp // expert_ranks):
            size = FP8_BYTES if online and w.quantised else BF16_BYTES
            yield experts.most_on_a_rank(expert_ranks) * w.elements * size, layers


def _unused_tail_bytes(size: int) -> int:
    """Bytes at the end of the allocator's block that a tensor of `size` bytes leaves unused."""
    tail = -size % ALLOCATOR_ROUND_BYTES
    if size < ALLOCATOR_LARGE_BYTES or (size < ALLOCATOR_SPLIT_BYTES and tail > ALLOCATOR_TAIL_BYTES):
        return 0
    return tail


MOST_UTILIZATION = 0.97  # the driver, the CUDA context and captured graphs need the rest

# Memory of the CUDA context on an idle GPU, which vLLM does not see as free: the least in engines' logs ("Free memory
# on device": 0.41 GiB on an A100, 0.51 on an H200). With several ranks NCCL takes 1.5 to 2 GiB more.
CONTEXT_BYTES = 410 * MIB

# A CPU's KV pool is given to the engine (VLLM_CPU_KVCACHE_SPACE), as fp8plan does not know the machine's memory. This
# is the default of vLLM up to 0.12; 0.30 would take 92% of the machine.
CPU_KV_CACHE_GIB = 4

MOST_HOST_BYTES = 32 << 40  # no host has more memory

# Growth of non-torch memory while profiling (kernel modules, handles) in 0.26: 230 MiB with the V2 model runner, 234 to
# 248 with V1. Later versions count all that stays, less what `activation_peak_bytes` has twice, such as cuBLAS's
# workspace: 78 to 138 MiB for dense models, 104 to 258 MiB for models with experts, with vLLM 0.33.
# For two ranks public logs show 0.30 GiB (vllm issue 15815) against 0.16 with one (PR 12126).
NON_TORCH_BYTES = {"v1": 247 * MIB, "v2": 230 * MIB}  # of 0.26, by model runner
STAYING_BYTES = 100 * MIB
NON_TORCH_PARALLEL_BYTES = 143 * MIB


# What a predicted pool may lack. 13 engines of models with recurrent layers on an H200 had from 629 MiB more to 124 MiB
# less (tests/model/memory/test_families.py), 0.6% and 0.2% of their pools; other models' were up to 2% smaller.
UNSURE_SHARE = 0.02
UNSURE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one rank, in bytes by use, and the KV pool that is left.

    requested_bytes:    bytes that gpu_memory_utilization allows the engine; on a CPU the weights and the KV pool
    weights_bytes:      "Model loading took" in the engine's log
    activation_bytes:   "peak activation"
    non_torch_bytes:    growth outside the allocator while profiling
    cudagraph_bytes:    set aside for CUDA graphs (0 with the V2 model runner before vLLM 0.29)
    kv:                 the KV cache's blocks, and the groups of layers that share them
    imposed:            EngineLimits.num_gpu_blocks gives the pool, so it is not predicted
    """

    requested_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    cudagraph_bytes: int
    kv: KvPlan
    imposed: bool

    @property
    def available_bytes(self) -> int:
        """The engine's "Available KV cache memory"; negative if not even the weights fit."""
        used = self.weights_bytes + self.activation_bytes + self.non_torch_bytes + self.cudagraph_bytes
        return self.requested_bytes - used

    @property
    def kv_bytes(self) -> int:
        return self.num_gpu_blocks * self.kv.block_bytes

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks as the engine reports them; the scheduler has one fewer (the null block)."""
        return self.kv.num_blocks

    @property
    def usable_blocks(self) -> int:
        """Blocks the scheduler can hand out."""
        return self.kv.usable_blocks

    @property
    def sure_blocks(self) -> int:
        """Blocks that the engine has even if its pool is smaller than predicted; at least 1."""
        if self.imposed:
            return self.num_gpu_blocks
        unsure = max(UNSURE_SHARE * self.num_gpu_blocks, UNSURE_BYTES / self.kv.block_bytes)
        return max(1, self.num_gpu_blocks - ceil(unsure))

    @property
    def pool_tokens(self) -> int:
        """`num_gpu_blocks * block_size`, which records call measured_kv_cache_tokens."""
        return self.num_gpu_blocks * self.kv.block_size

    @property
    def kv_cache_tokens(self) -> int:
        """The engine's "GPU KV cache size": tokens in requests of max_model_len; `pool_tokens` for one full group."""
        simple = len(self.kv.groups) == 1 and self.kv.specs[0].keeps_all
        return self.pool_tokens if simple else self.kv.tokens


def memory_plan(
    shape: ModelShape,
    precision: Precision,
    gpu: Gpu,
    limits: EngineLimits,
    longest_request: int | None = None,
    engine_version: str = DEFAULT_VERSION,
) -> MemoryPlan:
    """The memory of one rank, and its KV pool.

    longest_request: prompt + response in tokens, in place of limits.max_model_len if that is None

    Raises ConfigError if vLLM cannot cut the model so, or keep its caches in this precision. Raises CapacityError if
    the KV pool holds less than one request of max_model_len (the engine would refuse to start).
    """
    plan = _unchecked_plan(shape, precision, gpu, limits, longest_request, engine_version)
    tokens = limits.max_model_len or longest_request or 1
    if not _holds(plan, tokens):
        raise CapacityError(_does_not_fit(shape, precision, gpu, limits, plan, tokens))
    return plan


def check_share(gpu: Gpu, limits: EngineLimits) -> list[str]:
    """Warnings about a gpu_memory_utilization with which vLLM may fail to start.

    Raises ConfigError for one that exceeds the free memory (request_memory in vllm/v1/worker/utils.py). `memory_plan`
    does not check this, because it also serves records of engines that had started.
    """
    share, total = limits.gpu_memory_utilization, gpu.memory_bytes
    if gpu.is_cpu or share <= MOST_UTILIZATION:
        return []
    free = total - CONTEXT_BYTES
    if ceil(total * share) > free:
        raise ConfigError(
            f"gpu_memory_utilization is {share:g}, {total * share / GIB:.2f} GiB, and of the {total / GIB:.2f} GiB of "
            f"{gpu.product} at most {free / GIB:.2f} are free when vLLM starts, after its CUDA context; allowed: at "
            f"most {int(100 * free / total) / 100:g}; type {MOST_UTILIZATION}, which leaves room for CUDA graphs too"
        )
    left = (1 - share) * total / GIB
    warning = (
        f"gpu_memory_utilization {share:g} leaves {left:.1f} GiB of {gpu.product} for the CUDA context, CUDA graphs "
        f"and, with several ranks, NCCL: vLLM may not start; {MOST_UTILIZATION} is safer"
    )
    return [warning]


def check_pool(plan: MemoryPlan, gpu: Gpu, limits: EngineLimits) -> None:
    """Raise CapacityError if an imposed KV pool is larger than the GPU's memory.

    `memory_plan` does not check this, because the guard asks about pools that no GPU has.
    """
    memory_bytes = MOST_HOST_BYTES if gpu.is_cpu else gpu.memory_bytes
    if not plan.imposed or plan.weights_bytes + plan.kv_bytes <= memory_bytes:
        return
    most = (memory_bytes - plan.weights_bytes) // plan.kv.block_bytes - 1
    has = f"{memory_bytes / GIB:,.0f} GiB{' at most' if gpu.is_cpu else ''}"
    raise CapacityError(
        f"num_gpu_blocks {limits.num_gpu_blocks} is {plan.kv_bytes / GIB:,.0f} GiB of KV cache on each {gpu.product}, "
        f"which has {has} and holds {plan.weights_bytes / GIB:.0f} GiB of weights; allowed: at most {max(0, most)}, or "
        "leave num_gpu_blocks out"
    )


def _unchecked_plan(
    shape: ModelShape,
    precision: Precision,
    gpu: Gpu,
    limits: EngineLimits,
    longest_request: int | None,
    engine_version: str,
) -> MemoryPlan:
    shape.check_tensor_parallel(limits.tensor_parallel_size, limits.enable_expert_parallel)
    if reason := shape.why_not(precision):
        raise ConfigError(f"{precision.name}: {reason}")
    longest = limits.max_model_len or longest_request or shape.context.derived()
    caches, rules = model_caches(shape, precision, limits, longest, gpu.is_cpu, gpu.compute_capability, engine_version)
    empty = plan_kv_cache(caches, rules)
    limits = replace(limits, max_model_len=longest, block_size=rules.block_size)
    terms = _cpu_terms(shape, precision) if gpu.is_cpu else _gpu_terms(shape, precision, gpu, limits, engine_version)
    plan = MemoryPlan(**terms, kv=empty, imposed=limits.num_gpu_blocks is not None)
    if limits.num_gpu_blocks is not None:
        return replace(plan, kv=replace(empty, num_blocks=limits.num_gpu_blocks + 1))
    return replace(plan, kv=empty.within(plan.available_bytes))


def _gpu_terms(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, engine_version: str
) -> dict[str, int]:
    tp = limits.tensor_parallel_size
    if has(engine_version, "memory that stays is counted"):
        alone = STAYING_BYTES
    else:
        alone = NON_TORCH_BYTES[model_runner(shape, gpu, engine_version)]
    return {
        "requested_bytes": ceil(gpu.memory_bytes * limits.gpu_memory_utilization),
        "weights_bytes": loaded_weight_bytes(shape, precision, tp, limits.expert_ranks, not gpu.stores_fp8_only),
        "activation_bytes": activation_peak_bytes(shape, precision, gpu, limits, engine_version),
        "non_torch_bytes": alone + (NON_TORCH_PARALLEL_BYTES if tp > 1 else 0),
        "cudagraph_bytes": cudagraph_reserve_bytes(shape, precision, gpu, limits, engine_version),
    }


def _cpu_terms(shape: ModelShape, precision: Precision) -> dict[str, int]:
    """Terms of `MemoryPlan` on a CPU, where the KV pool has a fixed size."""
    weights = shape.weight_bytes(precision)
    nothing = dict.fromkeys(("activation_bytes", "non_torch_bytes", "cudagraph_bytes"), 0)
    return {"requested_bytes": weights + CPU_KV_CACHE_GIB * GIB, "weights_bytes": weights} | nothing


def _holds(plan: MemoryPlan, tokens: int) -> bool:
    return plan.usable_blocks >= plan.kv.blocks_of_request(tokens)


def _does_not_fit(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, plan: MemoryPlan, tokens: int
) -> str:
    kv, blocks = plan.kv, plan.kv.blocks_of_request(tokens)
    if plan.imposed:
        several = len(kv.groups) > 1
        shared = f"{len(kv.groups)} groups of layers share num_gpu_blocks {limits.num_gpu_blocks}"
        single = f"num_gpu_blocks {limits.num_gpu_blocks} holds {kv.usable_blocks * kv.block_size} tokens"
        return (
            f"{shared if several else single}, but one request of {tokens} tokens needs {blocks} blocks"
            f"{'' if several else f' of {kv.block_size}'}; raise num_gpu_blocks or lower max_model_len"
        )
    needed, available = (blocks + 1) * kv.block_bytes, plan.available_bytes
    left = f"available {available / GIB:.2f} GiB" if available > 0 else "and nothing is left for it"
    return (
        f"{shape.name} in {precision.name} does not fit {gpu.product} with tensor_parallel_size "
        f"{limits.tensor_parallel_size}: one request of {tokens} tokens needs {needed / GIB:.2f} GiB of KV cache, "
        f"{left} ({plan.requested_bytes / GIB:.1f} requested, weights "
        f"{plan.weights_bytes / GIB:.1f}, activations {plan.activation_bytes / GIB:.1f}, other "
        f"{(plan.non_torch_bytes + plan.cudagraph_bytes) / GIB:.1f}); try "
        f"{_ways_out(shape, precision, gpu, limits, plan, tokens)}"
    )


def _ways_out(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, plan: MemoryPlan, tokens: int
) -> str:
    """The single changes that make the model fit, in words."""

    def fits(changed: EngineLimits, wanted: Precision = precision) -> bool:
        return _holds(_unchecked_plan(shape, wanted, gpu, changed, tokens, plan.kv.rules.vllm), tokens)

    whole = limits.enable_expert_parallel
    layouts = () if gpu.is_cpu else shape.allowed_tensor_parallel(expert_parallel=whole)
    larger = (tp for tp in layouts if tp > limits.tensor_parallel_size)
    larger = (tp for tp in larger if why_not_shardable(shape, precision, tp, expert_parallel=whole) is None)
    enough = next((tp for tp in larger if fits(replace(limits, tensor_parallel_size=tp))), None)
    ways = [f"tensor_parallel_size {enough}"] if enough else []
    if not gpu.is_cpu and fits(replace(limits, gpu_memory_utilization=MOST_UTILIZATION)):
        ways.append("a higher gpu_memory_utilization")
    size = limits.tensor_parallel_size
    startable = why_not_shardable(shape, FP8_BLOCK, size, expert_parallel=whole) is None
    if gpu.has_fp8 and precision.weights == "bf16" and startable and fits(limits, FP8_BLOCK):
        ways.append("FP8 weights")
    if plan.available_bytes > 0:
        ways.append("a smaller max_model_len")
    *others, last = ways or ["a GPU with more memory"]
    return f"{', '.join(others)} or {last}" if others else last
