"""Precisions that a cache can have in vLLM, read in the source of 0.26 and 0.30 (vllm/v1/attention/backends).

What `kv_cache_dtype="fp8"`, which is E4M3, does on Hopper, by kind of cache:

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

On compute capability 8.0 to 8.8 (Ampere) FlashInfer is the only kernel that reads E4M3, and vLLM takes it by itself.
FlashAttention 2 refuses (flash_attn_supports_kv_cache_dtype asks for FlashAttention 3 or 4). So do Triton and Triton's
MLA: their constructors ask for 8.9, as Triton has no E4M3 ("fp8e4nv") below. FlashInfer widens E4M3 to BF16 by integer
instructions (fast_dequant_f8f16x4 in its vec_dtypes.cuh) and keeps Q in BF16 (get_q_data_type in flashinfer.py). It
takes heads of 64, 128 and 256, no sinks below 9.0, and no MLA below 10.0. Its kernels for heads of 512 came to Ampere
with flashinfer pull request 5044 (September 2026), after vLLM 0.26. It was run on A100s: vllm issue 42058 (0.26,
389,872 tokens of KV become 779,760) and pull request 24577.

Read, not run: which kernels are right or fast in FP8 is for a probe to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from fp8plan.model.architecture.linear import Cache
from fp8plan.model.hardware import FIRST_FP8_CAPABILITY
from fp8plan.model.kv_cache.specs import LayerCache, VllmVersion

FLASHMLA_BLOCK: Final = 64  # tokens
SMALLEST_BLOCK: Final = 16  # of FlashAttention and Triton: tokens
CPU_BLOCK: Final = 32  # tokens; vllm/v1/attention/backends/cpu_attn.py
MOST_FA3_HEAD_DIM: Final = 256
FLASHINFER_HEAD_DIMS: Final = (64, 128, 256)  # that have an FP8 kernel on Ampere


def why_no_fp8_kv(
    caches: Iterable[Cache | LayerCache],
    head_dims: Collection[int] = (),
    vllm: VllmVersion = "0.26",
    *,
    sinks: bool = False,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Say why vLLM cannot run these caches with kv_cache_dtype="fp8", or None if it can.

    head_dims:  those of the attention layers that are no MLA
    sinks:      attention has sinks
    capability: compute capability of the GPU; None: Hopper's
    """
    kinds = {cache.kind for cache in caches}
    if kinds <= {"state"}:
        return (
            f"no layer keeps keys and values, and vLLM {vllm} has no FP8 for the states of recurrent layers "
            "(MambaDType in vllm/config/cache.py)"
        )
    if capability is not None and capability < FIRST_FP8_CAPABILITY:
        return _why_not_by_flashinfer("latent" in kinds, head_dims, sinks, capability)
    only = set(head_dims)
    if vllm == "0.26" and len(only) == 1 and max(only) > MOST_FA3_HEAD_DIM and kinds != {"latent"}:
        if capability is not None and capability[0] != 9:
            name = ".".join(map(str, capability))
            return (
                f"fp8plan does not know which kernel of vLLM 0.26 reads heads of {max(only)} numbers in FP8 on compute "
                f"capability {name}"
            )
        return (
            f"fp8plan does not know whether vLLM 0.26 reads heads of {max(only)} numbers in FP8 on Hopper: it chooses "
            "FlashAttention 4 for them (get_flash_attn_version in vllm/v1/attention/backends/fa_utils.py)"
        )
    return None


def _why_not_by_flashinfer(
    latent: bool, head_dims: Collection[int], sinks: bool, capability: tuple[int, int]
) -> str | None:
    """Say why FlashInfer cannot read an FP8 cache where it is vLLM's only kernel that could, or None if it can."""
    wrong = sorted(set(head_dims) - set(FLASHINFER_HEAD_DIMS))
    lacks = [
        "no latent attention" if latent else "",
        "no attention sinks" if sinks else "",
        f"heads of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}, not {', '.join(map(str, wrong))}" if wrong else "",
    ]
    if not any(lacks):
        return None
    return (
        f"vLLM's only kernel for an FP8 KV cache on compute capability {'.'.join(map(str, capability))} is "
        f"FlashInfer's, which takes {' and '.join(filter(None, lacks))} there"
    )


def kernel_block(caches: Iterable[Cache | LayerCache], kv_bytes: int, sparse: bool = False) -> int:
    """Tokens in the smallest block of the attention kernel that vLLM takes on Hopper, if block_size is not given.

    sparse: an indexer picks the tokens of latents
    """
    latent = any(cache.kind == "latent" for cache in caches)
    return FLASHMLA_BLOCK if latent and (sparse or kv_bytes == 1) else SMALLEST_BLOCK
