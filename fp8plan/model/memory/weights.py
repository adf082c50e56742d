"""Bytes that loading a model allocates on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, Precision

MIB = 1 << 20

# FP8, of weights or of KV alone, makes vLLM load DeepGEMM with the model; its cuBLASLt workspace (DeepGEMM's
# csrc/jit/device_runtime.hpp) then counts as weights. Measured: 32 MiB over the tensors in all FP8 engines, and none in
# BF16. With MLA there is no such step: DeepSeek-V2-Lite's two engines loaded as much as each other, and 36 MiB more
# than their tensors. (MLAAttention has an FP8 quantiser in any case.)
DEEPGEMM_WORKSPACE_BYTES = 32 * MIB

# PyTorch's caching allocator (c10/cuda/CUDACachingAllocator): tensors of 10 MiB or more get blocks of whole 2 MiB, and
# a tail of up to 1 MiB is not split off. vLLM loads with max_split_size_mb=20: from there on no tail is.
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
    """Bytes that loading the model allocates on one rank: weights, rotary table, the allocator's rounding, and
    DeepGEMM's workspace.

    expert_ranks:  as in `ModelShape.weight_bytes`
    has_deep_gemm: DeepGEMM supports the GPU. It does not support an A100, where an FP8 KV cache was seen to hold
                   779,760 tokens instead of 389,872 (vllm issue 42058), which leaves no room for a workspace

    Measured against it: 0.1 MB more in BF16 (the scales of the attention layers, each rounded up to 512 bytes), 12.7 MB
    more for Qwen3-8B in FP8; 2 MiB less to 16 MiB more for five other families, and 534 MiB more for Gemma 3 (see
    `_rotary_bytes`).
    """
    total = shape.weight_bytes(precision, tensor_parallel_size, expert_ranks) + _rotary_bytes(shape)
    tensors = _tensors(shape, precision, tensor_parallel_size, expert_ranks)
    total += sum(count * _unused_tail_bytes(size) for size, count in tensors)
    deep_gemm = (precision.uses_fp8 and has_deep_gemm) or shape.parts_of(LatentAttention)
    return total + (DEEPGEMM_WORKSPACE_BYTES if deep_gemm else 0)


def _rotary_bytes(shape: ModelShape) -> int:
    """Bytes of one table of rotary embeddings, as wide as the widest head.

    Not known here: tables of half heads (GLM), of four positions a token (Qwen3.5), a second one for windows (OLMo 3,
    Gemma 3), and linear scaling, whose table is longer by its factor (8 of Gemma 3: 512 MiB).
    """
    widths = [attention.head_dim for attention, _ in shape.parts_of(Attention)]
    widths += [latent.qk_rope_head_dim for latent, _ in shape.parts_of(LatentAttention)]
    return shape.max_position_embeddings * max(widths, default=0) * BF16_BYTES


def _tensors(shape: ModelShape, precision: Precision, tp: int, expert_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs (bytes, how many) of one rank's matrices, without scales. A layer's experts are one tensor."""
    online = precision.weights != "bf16"
    table = shape.padded_vocab_size // tp * shape.hidden_size * BF16_BYTES
    yield table, 1 if shape.tie_word_embeddings else 2
    for w in shape.linears(tp):
        if w.name != "lm_head":
            yield w.elements * (FP8_BYTES if online and w.quantised else BF16_BYTES), w.layers
    for experts, layers in shape.parts_of(Experts):
        for w in shape.stored_expert(experts, precision, tp // expert_ranks):
            yield experts.most_on_a_rank(expert_ranks) * w.elements * (FP8_BYTES if online else BF16_BYTES), layers


def _unused_tail_bytes(size: int) -> int:
    """Bytes at the end of the allocator's block that a tensor of `size` bytes keeps from others."""
    tail = -size % ALLOCATOR_ROUND_BYTES
    if size < ALLOCATOR_LARGE_BYTES or (size < ALLOCATOR_SPLIT_BYTES and tail > ALLOCATOR_TAIL_BYTES):
        return 0
    return tail
