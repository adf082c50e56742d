"""Precisions that a cache can have in vLLM on Hopper, read in the source of 0.26 and 0.30 (vllm/v1/attention/backends).

What `kv_cache_dtype="fp8"` does, by kind of cache:

full, sliding, chunked: FlashAttention 3 reads FP8, with attention sinks too, up to a head size of 256 (flash_attn.py:
    supports_kv_cache_dtype; fa_utils.py: get_flash_attn_version). Larger heads need FlashAttention 4, which vLLM gives
    FP8 on Blackwell only. It then takes FlashInfer (head sizes 64, 128, 256 and 512, no sinks on Hopper), or else
    Triton (any head size, and sinks). So it is for Gemma 4, which has two head sizes (Gemma4Config in
    vllm/model_executor/models/config.py). 0.26 asks without the head size where there is one only, so it chooses
    FlashAttention 4 all the same. Windows get FP8 like all others; kv_cache_dtype_skip_layers can except them.
latent: FlashMLA reads FP8, in blocks of 64 tokens; FlashAttention, which reads BF16, does not (mla/flashmla.py,
    flashattn_mla.py). With another block size given, Triton reads it (triton_mla.py).
latent with an indexer: FlashMLA's sparse kernel reads the layout fp8_ds_mla, in blocks of 64, and "fp8" means that one
    (flashmla_sparse.py; _canonicalize_sparse_mla_kv_cache_dtype in mla_attention.py). The indexer's own keys are FP8 in
    any case.
state: never. Its options are auto, float32, float16 and bfloat16 (MambaDType in vllm/config/cache.py), apart from
    kv_cache_dtype. The convolution's part has the model's dtype. So has the recurrent part, but for Nemotron-H and
    Qwen3.5, whose configs say (float32 if Nemotron-H's does not), and for KDA (float32).

Read, not run: which kernels are right or fast in FP8 is for a probe to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from fp8plan.model.architecture.linear import Cache
from fp8plan.model.kv_cache.specs import LayerCache, VllmVersion

FLASHMLA_BLOCK: Final = 64  # tokens
SMALLEST_BLOCK: Final = 16  # of FlashAttention and Triton: tokens
CPU_BLOCK: Final = 32  # tokens; vllm/v1/attention/backends/cpu_attn.py
MOST_FA3_HEAD_DIM: Final = 256


def why_no_fp8_kv(
    caches: Iterable[Cache | LayerCache], head_dims: Collection[int] = (), vllm: VllmVersion = "0.26"
) -> str | None:
    """Say why vLLM on Hopper cannot run these caches with kv_cache_dtype="fp8", or None if it can.

    head_dims: those of the attention layers that are no MLA
    """
    kinds = {cache.kind for cache in caches}
    if kinds <= {"state"}:
        return (
            f"no layer keeps keys and values, and vLLM {vllm} has no FP8 for the states of recurrent layers "
            "(MambaDType in vllm/config/cache.py)"
        )
    only = set(head_dims)
    if vllm == "0.26" and len(only) == 1 and max(only) > MOST_FA3_HEAD_DIM and kinds != {"latent"}:
        return (
            f"all heads have {max(only)} numbers, for which vLLM 0.26 chooses FlashAttention 4, and whether that reads "
            "FP8 on Hopper is not known (get_flash_attn_version in vllm/v1/attention/backends/fa_utils.py)"
        )
    return None


def kernel_block(caches: Iterable[Cache | LayerCache], kv_bytes: int, sparse: bool = False) -> int:
    """Tokens in the smallest block of the attention kernel that vLLM takes on Hopper, if block_size is not given.

    sparse: an indexer picks the tokens of latents
    """
    latent = any(cache.kind == "latent" for cache in caches)
    return FLASHMLA_BLOCK if latent and (sparse or kv_bytes == 1) else SMALLEST_BLOCK
