"""Attention over an FP8 KV cache on CPUs without AVX-512, where vLLM has no kernel for it and says so at the start.

The cache holds E4M3 bytes, a row for each token. Before each attention the blocks that it reads become a cache in the
model's type, which holds every E4M3 value exactly, and vLLM's own kernel reads that. Scales go where they are exact,
too: K's into the softmax scale, V's onto the output. Slow, for tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fp8plan.model.precision import E4M3_MAX


def register() -> None:
    """Take the place of vLLM's kernels where they refuse an FP8 KV cache; once, and nowhere else."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    isa_of = getattr(cpu_attn, "_get_attn_isa", None)
    if isa_of is None or torch.cpu._is_avx512_supported() or hasattr(ops, "fp8plan_attention"):
        return
    write, plan, attend = (
        getattr(ops, name)
        for name in ("cpu_attn_reshape_and_cache", "cpu_attn_get_scheduler_metadata", "cpu_attention_with_kv_cache")
    )

    def isa(dtype: Any, block_size: int, head_size: int | None = None, kv_cache_dtype: str | None = None) -> str:
        found: str = isa_of(dtype, block_size, head_size)
        return found

    def write_fp8(*given: Any, k_scale: float = 1.0, v_scale: float = 1.0, kv_cache_dtype: str = "auto") -> None:
        if not _is_fp8(kv_cache_dtype):
            write(*given)
            return
        keys, values, key_cache, value_cache, slots, _ = given
        kept = slots >= 0
        for rows, stored, scale in ((keys, key_cache, k_scale), (values, value_cache, v_scale)):
            scaled = (rows[: len(slots)][kept].float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
            block, offset = slots[kept] // stored.shape[2], slots[kept] % stored.shape[2]
            stored[block, :, offset] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def plan_fp8(*given: Any, kv_cache_dtype: str = "auto", **more: Any) -> Any:
        return plan(*given, **more)

    def attend_fp8(**given: Any) -> None:
        kind, k_scale, v_scale = (given.pop(name) for name in ("kv_cache_dtype", "k_scale", "v_scale"))
        if not _is_fp8(kind):
            attend(**given)
            return
        size, dtype, longest = given["key_cache"].shape[2], given["query"].dtype, int(given["seq_lens"].max())
        table = given["block_table"][:, : -(-longest // size)]
        blocks, places = table.unique(return_inverse=True)
        used = min(longest, size)  # tokens of a block, at most
        rows = [_rows(given[name][:, :, :used], blocks, dtype) for name in ("key_cache", "value_cache")]
        kv_heads, width = rows[0].shape[1:]
        keys, values = torch.zeros(len(blocks), kv_heads, 2 * size, width, dtype=dtype).chunk(2, dim=2)
        slots = torch.arange(len(blocks))[:, None] * size + torch.arange(used)
        write(*rows, keys, values, slots.flatten(), isa(dtype, size, width))
        given |= {"key_cache": keys, "value_cache": values, "block_table": places.to(table.dtype).contiguous()}
        attend(**given | {"scale": given["scale"] * k_scale})
        given["output"].mul_(v_scale)

    cpu_attn._get_attn_isa = isa
    ops.fp8plan_attention = True
    ops.cpu_attn_reshape_and_cache, ops.cpu_attn_get_scheduler_metadata = write_fp8, plan_fp8
    ops.cpu_attention_with_kv_cache = attend_fp8


def _is_fp8(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype.startswith("fp8")


def _rows(cache: Any, blocks: Any, dtype: Any) -> Any:
    """Keys or values in these blocks of a cache, unscaled, [blocks * tokens of a block, heads, width]."""
    import torch

    values = torch.from_numpy(_e4m3_patterns(dtype)[cache[blocks].numpy()]).view(dtype)
    return values.transpose(1, 2).flatten(0, 1).contiguous()


@cache
def _e4m3_patterns(dtype: Any) -> Any:
    """Return the bit patterns that the 256 bytes of E4M3 have in another type. To look them up beats a conversion."""
    import torch

    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    return values.view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).numpy()
