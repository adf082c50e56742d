"""MLA: laws, and where its decode is bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8plan.model.architecture.parts import Indexer, LatentAttention
from fp8plan.model.cost.base import Cost, StepBatch
from fp8plan.model.cost.mixers import decode_flops, latent_bytes, latent_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import BF16, FP8_KV, Precision
from fp8plan.model.profile.library import datasheet_profile

H200 = find_gpu("h200")
PROFILE = datasheet_profile(H200)
V3 = LatentAttention(128, 1536, 512, 128, 64, 128)  # DeepSeek-V3
LITE = LatentAttention(16, 0, 512, 128, 64, 128)  # DeepSeek-V2-Lite


def decode(requests: float, context: float) -> StepBatch:
    return StepBatch(*(np.array([float(x)]) for x in (requests, requests * context, 0, 0, 0, 0, requests)))


def prefill(tokens: float, context: float = 0.0) -> StepBatch:
    pairs = tokens * context + tokens * (tokens + 1) / 2
    return StepBatch(*(np.array([float(x)]) for x in (0, 0, tokens, 1, tokens + context, pairs, 1)))


def cost(batch: StepBatch, latent: LatentAttention = LITE, precision: Precision = BF16, tp: int = 1) -> Cost:
    return latent_cost(batch, latent, precision, tp, H200, PROFILE)


@pytest.mark.parametrize("precision", [BF16, FP8_KV])
def test_decode_is_above_its_bytes_and_its_flops(precision: Precision) -> None:
    """A latent of 576 numbers for all heads, which 128 heads make a matter of the tensor cores."""
    assert latent_bytes(LITE, precision) == 576 * precision.kv_element_bytes
    assert decode_flops(V3, 1) == 2 * 128 * (576 + 512)
    for latent in (V3, LITE):
        seconds = cost(decode(128, 8000), latent, precision).seconds.item()
        assert seconds > 128 * 8000 * latent_bytes(latent, precision) / H200.memory_bandwidth
        assert seconds > 128 * 8000 * decode_flops(latent, 1) / H200.bf16_flops
    assert cost(decode(128, 8000), V3).seconds > 1.4 * cost(decode(128, 8000), LITE).seconds


def test_a_rank_reads_every_latent_and_computes_its_heads_of_them() -> None:
    batch = decode(128, 8000)
    whole, rank = (cost(batch, V3, tp=tp).seconds.item() for tp in (1, 8))
    assert 128 * 8000 * latent_bytes(V3, BF16) / H200.memory_bandwidth < rank < whole
    # Fewer heads than a tile has rows gain nothing but what is copied for each.
    kernels = [x.seconds - x.partials["mla.bf16.absorbed_passes"] for x in (cost(batch, V3, tp=tp) for tp in (2, 8))]
    assert kernels[0].item() == pytest.approx(kernels[1].item(), rel=1e-9)


@pytest.mark.parametrize("precision", [BF16, FP8_KV])
def test_what_is_copied_around_attention_goes_by_the_heads_of_a_rank(precision: Precision) -> None:
    """Queries of a latent's width for each request and head, keys and values for each prompt token and head."""
    name = f"mla.{precision.kv}"
    passes, row = (PROFILE.coefficient(f"{name}.{x}") for x in ("absorbed_passes", "prefill_row_seconds"))
    found = cost(decode(256, 300), precision=precision).partials[f"{name}.absorbed_passes"].item()
    assert found == pytest.approx(passes * 256 * 16 * 576 * 2 / H200.memory_bandwidth)
    for tp in (1, 2):
        found = cost(prefill(4000), precision=precision, tp=tp).partials[f"{name}.prefill_row_seconds"].item()
        assert found == pytest.approx(row * 4000 * 16 / tp)


def test_prefill_after_a_cached_prefix_also_projects_the_prefix() -> None:
    alone, after = (cost(prefill(2000, context)).seconds.item() for context in (0, 6000))
    pairs = 2 * 2000 * 6000 * 16 * (192 + 128) / H200.bf16_flops
    projected = 2 * 6000 * LITE.dequantised_elements(1) / H200.bf16_flops
    assert after - alone > pairs + projected


def test_an_indexer_bounds_what_attention_reads_but_looks_at_every_token() -> None:
    sparse = replace(V3, indexer=Indexer(64, 128, 2048))
    dense, short, long = (
        cost(decode(64, x), y).seconds.item() for x, y in ((60000, V3), (30000, sparse), (60000, sparse))
    )
    assert short < long < dense
    follower = replace(V3, shares_index=True)
    assert cost(decode(64, 30000), follower).seconds == cost(decode(64, 60000), follower).seconds
    assert cost(decode(64, 60000), follower).seconds.item() < long


def test_partials_are_the_derivatives_and_idle_steps_cost_nothing() -> None:
    assert cost(decode(0, 0)).seconds.item() == 0
    batch = StepBatch(*(a + b for a, b in zip(_arrays(decode(40, 3000)), _arrays(prefill(900, 100)), strict=True)))
    latent, step = replace(V3, indexer=Indexer(64, 128, 2048)), -1e-6
    base = cost(batch, latent)
    for name, partial in base.partials.items():
        moved = replace(PROFILE, coefficients=PROFILE.coefficients | {name: PROFILE.coefficients[name] * (1 + step)})
        change = latent_cost(batch, latent, BF16, 1, H200, moved).seconds - base.seconds
        np.testing.assert_allclose(change / step, partial, rtol=1e-3, atol=1e-5 * base.seconds.item())


def _arrays(batch: StepBatch) -> list[np.ndarray]:
    names = ("decode_requests", "decode_kv_tokens", "prefill_tokens", "prefill_requests", "prefill_kv_tokens")
    return [getattr(batch, name) for name in (*names, "prefill_pairs", "sampled_requests")]
