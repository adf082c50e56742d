"""The attention kernel of a model's layers, by vLLM's choice or the plan's, and whether it reads new K and V scales.

vLLM's rules are those of vllm/platforms/cuda.py (_get_backend_priorities), v1/attention/backends/fa_utils.py
(get_flash_attn_version, flash_attn_supports_kv_cache_dtype) and flashinfer.py, 0.30 and 0.32. They assume that
FlashInfer is installed, as vLLM's CUDA wheel demands, and that it can load its kernels for SM100.

`kv_cache_dtype="fp8"` (E4M3) on Hopper, by kind of cache (vllm/v1/attention/backends, read, not run):
full, sliding, chunked: FlashAttention 3 reads FP8, with sinks too, up to a head size of 256 (flash_attn.py:
    supports_kv_cache_dtype; fa_utils.py: get_flash_attn_version). For larger heads vLLM takes FlashInfer (no sinks on
    Hopper) or Triton. If a model has one head size only, 0.26 chooses FlashAttention 4, which has FP8 on Blackwell
    only.
latent: FlashMLA reads FP8, in blocks of 64 tokens (mla/flashmla.py). With another block size Triton reads it
    (triton_mla.py). FlashAttention cannot (flashattn_mla.py).
latent with an indexer: "fp8" means the layout fp8_ds_mla of FlashMLA's sparse kernel, in blocks of 64
    (flashmla_sparse.py; _canonicalize_sparse_mla_kv_cache_dtype in mla_attention.py). The indexer's keys are always
    FP8. On compute capability 10.x vLLM prefers FlashInfer's kernels for FP8, which read plain E4M3: in blocks of 64
    with an indexer, of 32 without.
state: never FP8; it has its own option (MambaDType in vllm/config/cache.py).

On compute capability 8.0 to 8.8 (Ampere) FlashInfer is the only kernel that reads E4M3, and vLLM chooses it (run on
A100s: vllm issue 42058, pull request 24577). FlashAttention 2 refuses (flash_attn_supports_kv_cache_dtype), and Triton
has no E4M3 ("fp8e4nv") below 8.9. FlashInfer widens E4M3 to BF16 and keeps Q in BF16 (get_q_data_type in
flashinfer.py). It takes heads of 64, 128 and 256, no sinks below 9.0, and no MLA below 10.0.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Final

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.hardware import FIRST_FP8_CAPABILITY, Gpu, dotted
from fp8plan.model.precision import Precision
from fp8plan.model.risk.theory import clipped
from fp8plan.version import DEFAULT_VERSION, has


class Backend(StrEnum):
    """A kernel for attention with K and V for each head, by vLLM's name (`attention_backend`)."""

    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"
    TRITON_ATTN = "TRITON_ATTN"


KEEPS_SCALES: Final = Backend.FLASHINFER
FLASHINFER_HEADS: Final = (64, 128, 256, 512)  # numbers in a head (get_supported_head_sizes)
AMPERE_HEADS: Final = (64, 128, 256)  # those with an FP8 kernel on Ampere, where vLLM lets 512 through
MOST_FA3_HEAD: Final = 256  # numbers in a head; FlashAttention 4 takes over above, on Hopper
MOST_FA4_HEAD: Final = 512
USUAL_ATTENTION: Final = Attention(heads=32, kv_heads=8, head_dim=128)  # stands for a model that is not known
# Decode with Triton's kernel, times FlashInfer's: the geometric mean of 1.2 (256 requests of 768 tokens) and 1.8 (64 of
# 3,072), from rollouts of Qwen3-8B on an H200 with vLLM 0.26 (benchmarks/tables/attention_kernels.py).
TRITON_DECODE: Final = 1.5
TRITON_NAMED: Final = (
    "plans with an FP8 KV cache name attention_backend=TRITON_ATTN, whose scales fp8plan's engines measure after each "
    "sync. FlashInfer, vLLM's own choice, keeps scales of 1.0, which clip this model's keys. Decode attention is taken "
    f"to last {TRITON_DECODE} times as long as with FlashInfer"
)
HOPPER, BLACKWELL_DATA_CENTER, BLACKWELL_WITHOUT_HBM = 9, 10, 12  # major compute capabilities
FLASHMLA_BLOCK: Final = 64  # tokens
FLASHINFER_MLA_BLOCK: Final = 32  # tokens
SMALLEST_BLOCK: Final = 16  # of FlashAttention and Triton: tokens
FLASH_ATTENTION_4: Final = (HOPPER, BLACKWELL_DATA_CENTER)


def attention_backend(
    capability: tuple[int, int], head_dim: int, fp8_kv: bool = False, sinks: bool = False
) -> Backend | None:
    """The kernel that vLLM chooses for a layer by itself; None if none of Backend reads it.

    capability: compute capability of the GPU
    head_dim:   numbers in a head
    fp8_kv:     the cache is E4M3
    sinks:      the layer has attention sinks
    """
    order = [Backend.FLASH_ATTN, Backend.FLASHINFER, Backend.TRITON_ATTN]
    if capability[0] == BLACKWELL_DATA_CENTER:
        order = [Backend.FLASHINFER, Backend.FLASH_ATTN, Backend.TRITON_ATTN]
    return next((backend for backend in order if _takes(backend, capability, head_dim, fp8_kv, sinks)), None)


def _takes(backend: Backend, capability: tuple[int, int], head_dim: int, fp8_kv: bool, sinks: bool) -> bool:
    """True if vLLM lets a kernel run such a layer."""
    major = capability[0]
    if backend == Backend.FLASHINFER:
        return head_dim in FLASHINFER_HEADS and (not sinks or major >= HOPPER)
    if backend == Backend.TRITON_ATTN:
        return not fp8_kv or capability >= FIRST_FP8_CAPABILITY  # Triton has no E4M3 below
    newer = major in FLASH_ATTENTION_4  # or FlashAttention 3, on Hopper. Other GPUs have FlashAttention 2
    most = MOST_FA4_HEAD if newer else MOST_FA3_HEAD
    return head_dim % 8 == 0 and head_dim <= most and (newer or not (fp8_kv or sinks))


def vllms_kernels(gpu: Gpu, precision: Precision, shape: ModelShape | None) -> dict[Attention, Backend | None]:
    """The kernel that vLLM chooses by itself for each kind of attention layer; None: a CPU's, or none of Backend.

    If heads have several sizes, vLLM takes Triton for all layers on GPUs without FlashAttention 4 (Gemma4Config in
    vllm/model_executor/models/config.py).

    shape: None: a model that the cost model does not know
    """
    layers = [USUAL_ATTENTION] if shape is None else [attention for attention, _ in shape.parts_of(Attention)]
    capability = gpu.compute_capability
    if capability is None:
        return dict.fromkeys(layers)
    if len({layer.head_dim for layer in layers}) > 1 and capability[0] not in FLASH_ATTENTION_4:
        return dict.fromkeys(layers, Backend.TRITON_ATTN)
    fp8_kv = precision.kv == "fp8"
    return {layer: attention_backend(capability, layer.head_dim, fp8_kv, layer.sinks) for layer in layers}


def kernels(gpu: Gpu, precision: Precision, shape: ModelShape | None) -> dict[Attention, Backend | None]:
    """The kernel that reads the cache of each kind of attention layer: vLLM's choice, or the one that a plan names.

    Plans name Triton, whose scales are measured after each sync, where FlashInfer's scales of 1.0 would clip the keys.
    Other models lose nothing at 1.0, and Triton is slower (docs/evidence/risk.md). Ampere's Triton has no E4M3.

    shape: as in `vllms_kernels`
    """
    chosen = vllms_kernels(gpu, precision, shape)
    if precision.kv == "fp8" and not gpu.stores_fp8_only:
        clips = [layer for layer, backend in chosen.items() if backend == KEEPS_SCALES and clipped(layer)]
        chosen |= dict.fromkeys(clips, Backend.TRITON_ATTN)
    return chosen


def named_backend(gpu: Gpu, precision: Precision, shape: ModelShape | None) -> Backend | None:
    """The kernel that a plan names in vLLM's `attention_backend`; None: it leaves the choice to vLLM.

    shape: as in `vllms_kernels`
    """
    if precision.kv == "fp8" and gpu.stores_fp8_only:  # the only kernel that reads this cache
        return Backend.FLASHINFER
    replaced = kernels(gpu, precision, shape) != vllms_kernels(gpu, precision, shape)
    return Backend.TRITON_ATTN if replaced else None


def kernel_block(capability: tuple[int, int] | None, latent: bool, fp8_kv: bool, indexed: bool = False) -> int:
    """Tokens in the smallest block of the kernel that vLLM chooses (get_supported_kernel_block_sizes).

    capability: compute capability of the GPU; None: Hopper's
    latent:     layers keep latents (MLA)
    indexed:    an indexer picks the tokens of latents
    """
    if not latent:
        return SMALLEST_BLOCK
    if indexed:
        return FLASHMLA_BLOCK
    major = HOPPER if capability is None else capability[0]
    if major == BLACKWELL_DATA_CENTER:
        return FLASHINFER_MLA_BLOCK
    return FLASHMLA_BLOCK if major == HOPPER and fp8_kv else SMALLEST_BLOCK  # elsewhere Triton's


def why_no_fp8_kv(
    kinds: Collection[str],
    head_dims: Collection[int] = (),
    vllm: str = DEFAULT_VERSION,
    *,
    sinks: bool = False,
    shorter_values: bool = False,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """The reason why vLLM cannot run a model's caches with kv_cache_dtype="fp8"; None if it can.

    kinds:      the kinds of its caches (model.architecture.mixers.CacheKind)
    head_dims:  of the attention layers except MLA
    sinks:      attention has sinks
    shorter_values: the values of a head are shorter than its keys
    capability: compute capability of the GPU; None: Hopper's
    """
    kinds = set(kinds)
    if kinds <= {"state"}:
        return (
            f"no layer keeps keys and values, and vLLM {vllm} has no FP8 for the states of recurrent layers "
            "(MambaDType in vllm/config/cache.py)"
        )
    if capability is not None and capability < FIRST_FP8_CAPABILITY:
        return _why_not_by_flashinfer("latent" in kinds, head_dims, sinks, capability)
    head_sizes, major = set(head_dims), HOPPER if capability is None else capability[0]
    if shorter_values and not has(vllm, "FP8 KV of values shorter than keys"):
        return f"vLLM {vllm} keeps values that are shorter than keys in BF16, whatever kv_cache_dtype says"
    if shorter_values and major == BLACKWELL_DATA_CENTER:
        return (
            f"vLLM {vllm} reads values that are shorter than keys with FlashAttention 4 on such a GPU, which "
            "takes no FP8 KV cache (flash_attn_diffkv.py)"
        )
    several_sizes = len(head_sizes) > 1 and max(head_sizes) > MOST_FA3_HEAD and major == HOPPER
    if several_sizes and not has(vllm, "FP8 KV for heads of several sizes on Hopper"):
        sizes = " and ".join(map(str, sorted(head_sizes)))
        return (
            f"vLLM {vllm} reads heads of {sizes} numbers with FlashAttention 4 on Hopper, which takes no FP8 KV cache "
            "there (Gemma4Config in vllm/model_executor/models/config.py)"
        )
    unknown_kernel = len(head_sizes) == 1 and max(head_sizes) > MOST_FA3_HEAD and kinds != {"latent"}
    if unknown_kernel and not has(vllm, "FP8 KV for heads above 256 on Hopper"):
        if capability is not None and capability[0] != HOPPER:
            return (
                f"fp8plan does not know which kernel of vLLM {vllm} reads heads of {max(head_sizes)} numbers in FP8 on "
                f"compute capability {dotted(capability)}"
            )
        return (
            f"fp8plan does not know whether vLLM {vllm} reads heads of {max(head_sizes)} numbers in FP8 on Hopper: it "
            "chooses FlashAttention 4 for them (get_flash_attn_version in vllm/v1/attention/backends/fa_utils.py)"
        )
    return None


def _why_not_by_flashinfer(
    latent: bool, head_dims: Collection[int], sinks: bool, capability: tuple[int, int]
) -> str | None:
    """The reason why FlashInfer, the only kernel for it, cannot read an FP8 cache; None if it can."""
    wrong = sorted(set(head_dims) - set(AMPERE_HEADS))
    lacks = [
        "no latent attention" if latent else "",
        "no attention sinks" if sinks else "",
        f"heads of {', '.join(map(str, AMPERE_HEADS))}, not {', '.join(map(str, wrong))}" if wrong else "",
    ]
    if not any(lacks):
        return None
    return (
        f"vLLM's only kernel for an FP8 KV cache on compute capability {dotted(capability)} is "
        f"FlashInfer's, which takes {' and '.join(filter(None, lacks))} there"
    )


def why_not_indexed(capability: tuple[int, int], fp8_kv: bool) -> str | None:
    """The reason why no kernel of vLLM reads latents whose tokens an indexer picks; None if one does.

    The kernels are those of _get_backend_priorities in platforms/cuda.py. The one of compute capability 12.x keeps
    FP8 even if it is told "auto" (_canonicalize_sparse_mla_kv_cache_dtype in mla_attention.py).
    """
    here = f"on compute capability {dotted(capability)} for latents whose tokens an indexer picks"
    if capability < (HOPPER, 0):
        return f"vLLM has no kernel {here}"
    if capability[0] == BLACKWELL_WITHOUT_HBM and not fp8_kv:
        return f"vLLM's only kernel {here} keeps them in FP8"
    return None


def why_fixed_kv_scales(gpu: Gpu, precision: Precision, shape: ModelShape | None) -> str | None:
    """The reason why an engine keeps the K and V scales that it starts with; None if it reads new ones.

    FlashInfer takes both as numbers (`k_scale=layer._k_scale_float` in flashinfer.py), which CUDA graphs
    of decode steps capture.

    shape: as in `vllms_kernels`
    """
    if precision.kv != "fp8" or KEEPS_SCALES not in kernels(gpu, precision, shape).values():
        return None
    return (
        f"vLLM reads an FP8 KV cache with FlashInfer on {gpu.product}, whose CUDA graphs keep the K and V scales "
        "that the engine was started with, so that fp8plan cannot change them after a weight sync"
    )
