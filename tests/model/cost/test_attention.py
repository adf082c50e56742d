"""Attention: laws, and how far FP8 KV is from halving the time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.model.architecture.parts import Attention
from fp8plan.model.calibrate.profile_of import UNEQUAL
from fp8plan.model.cost.attention import (
    KV_BLOCK,
    MOST_CUTS,
    UNEVEN_GROUP,
    attention_cost,
    cache_cost,
    kv_bytes_per_token,
    parts_of,
)
from fp8plan.model.cost.base import QUANTITIES, Cost, StepBatch
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.precision import BF16, FP8_KV, Precision
from fp8plan.model.profile.library import WIDE_HEADS, load_profile, profiles_path

LAYER = Attention(32, 8, 128)  # of Qwen3-8B
WIDE = Attention(16, 8, 256)  # of Gemma 3 12B
PROFILE, _ = load_profile(find_gpu("h200"))
precisions = st.sampled_from([BF16, FP8_KV])


def decode(requests: float, context: float) -> StepBatch:
    zero = np.zeros(1)
    return StepBatch(np.array([requests]), np.array([requests * context]), zero, zero, zero, zero, zero)


def prefill(tokens: float, context: float) -> StepBatch:
    zero, new = np.zeros(1), np.array([tokens])
    pairs = np.array([tokens * context + tokens * (tokens + 1) / 2])
    return StepBatch(zero, zero, new, np.ones(1), new + context, pairs, np.ones(1))


def cost(batch: StepBatch, precision: Precision, card: Gpu | None = None, tp: int = 1) -> Cost:
    card = card or find_gpu("h200")
    return attention_cost(batch, LAYER, precision, tp, card, PROFILE)


@given(st.integers(1, 1024), st.integers(1, 40000), st.integers(1, 5000), precisions)
def test_longer_contexts_never_cost_less(requests: int, context: int, more: int, precision: Precision) -> None:
    """In decode from where a longer one is not cut into more parts, which may fill the SMs better."""
    cut = context + MOST_CUTS * KV_BLOCK
    short, long = (cost(decode(requests, x), precision).seconds for x in (cut, cut + more))
    assert (long >= short).all()
    short, long = (cost(prefill(requests, x), precision).seconds for x in (context, context + more))
    assert (long >= short).all()


@given(st.integers(1, 1024), st.integers(1, 40000), precisions, st.sampled_from([1, 2, 8]))
def test_not_below_its_own_bytes(requests: int, context: int, precision: Precision, tp: int) -> None:
    read = requests * context * kv_bytes_per_token(LAYER, precision, tp)
    assert cost(decode(requests, context), precision, tp=tp).seconds.item() > read / find_gpu("h200").memory_bandwidth


def test_parts_fill_the_sms_as_flash_attention_3_cuts_them() -> None:
    """8 KV heads on 132 SMs. 8 requests: 64 heads in two parts each, one round of 128. 6: three parts, 144, of which
    12 wait for a second round. 16: one part, one round. 17: 136, of which 4 wait while 128 SMs idle; 33: two rounds."""
    requests = np.array([6.0, 8.0, 16.0, 17.0, 33.0])
    batch = StepBatch(*(requests * x for x in (1, 8192, 0, 0, 0, 0, 1)))
    assert parts_of(batch, 8 * requests, 132).tolist() == [144, 128, 128, 136, 264]


def test_17_requests_take_much_longer_than_16() -> None:
    per_request = [cost(decode(n, 2000), BF16).seconds.item() / n for n in (15, 16, 17, 32)]
    assert per_request[2] > 1.15 * per_request[1] > 1.15 * per_request[3]


def test_fp8_kv_does_not_halve_long_context_decode_on_hopper() -> None:
    """AIConfigurator 0.12.0, FlashAttention 3, 32 query and 8 KV heads, 64 requests at 8191: H200 1.38, H100 1.77."""
    batch = decode(64, 8192)
    for name, measured in (("h200", 1.38), ("h100", 1.77)):
        card, profile = find_gpu(name), load_profile(find_gpu(name))[0]
        bf16, fp8 = (attention_cost(batch, LAYER, x, 1, card, profile).seconds for x in (BF16, FP8_KV))
        ratio = bf16 / fp8
        assert ratio.item() == pytest.approx(measured, rel=0.15)


def test_near_published_h200_decode() -> None:
    """Same tables, BF16, one layer: 64 requests at 8191 490.8 us, 8 at 32767 272.6 us, 256 at 1023 272.5 us."""
    card = find_gpu("h200")
    for requests, context, measured in ((64, 8192, 490.8), (8, 32768, 272.6), (256, 1024, 272.5)):
        got = attention_cost(decode(requests, context), LAYER, BF16, 1, card, PROFILE).seconds
        assert got.item() * 1e6 == pytest.approx(measured, rel=0.15)


def test_tensor_parallel_splits_heads_until_kv_heads_run_out() -> None:
    assert [LAYER.heads_of_rank(tp) for tp in (1, 4, 8, 16)] == [(32, 8), (8, 2), (4, 1), (2, 1)]
    batch = decode(64, 20000)
    times = [cost(batch, BF16, tp=tp).seconds.item() for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] < 8 * times[3]  # the fixed part does not shrink


def test_idle_step_costs_nothing() -> None:
    assert cost(decode(0, 0), BF16).seconds.item() == 0


@settings(max_examples=15)
@given(st.integers(1, 1024), st.integers(1, 40000), st.integers(0, 4000), precisions, st.sampled_from([LAYER, WIDE]))
def test_partials_are_the_derivatives(
    requests: int, context: int, tokens: int, precision: Precision, layer: Attention
) -> None:
    a, b = decode(requests, context), prefill(tokens, context if tokens else 0)
    mixed = StepBatch(*(getattr(a, name) + getattr(b, name) for name in QUANTITIES))
    card, step = find_gpu("h200"), -1e-6  # down: an efficiency is at most 1
    profile = PROFILE
    base = attention_cost(mixed, layer, precision, 1, card, profile)
    for name, partial in base.partials.items():
        moved = replace(profile, coefficients={**profile.coefficients, name: profile.coefficients[name] * (1 + step)})
        change = attention_cost(mixed, layer, precision, 1, card, moved).seconds - base.seconds
        np.testing.assert_allclose(change / step, partial, rtol=1e-3, atol=1e-5 * base.seconds.item())


@pytest.mark.parametrize(("precision", "microseconds"), [(BF16, 259.0), (FP8_KV, 315.0)])
def test_wide_heads_are_near_what_an_engine_took(precision: Precision, microseconds: float) -> None:
    """A layer of Gemma 3 12B, 40 of 48 with a window, at 256 requests of 320 tokens: families/step_kernels.jsonl of
    profiles/h200_sxm, which no fit has seen.
    """
    batch, layers = decode(256, 320), [WIDE, *5 * [replace(WIDE, window=1024)]]
    got = [attention_cost(batch, layer, precision, 1, find_gpu("h200"), PROFILE).seconds.item() for layer in layers]
    assert np.mean(got) * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_wide_heads_cost_more_where_the_profile_knows_their_kernels() -> None:
    others = {name: value for name, value in PROFILE.coefficients.items() if not name.startswith(WIDE_HEADS)}
    without = replace(PROFILE, coefficients=others, log_covariance={})
    for layer, precision in product((LAYER, WIDE), (BF16, FP8_KV)):
        for batch, dearer in ((decode(64, 2048), True), (prefill(4096, 0), precision.kv == "fp8")):
            known, unknown = (
                attention_cost(batch, layer, precision, 1, find_gpu("h200"), profile).seconds.item()
                for profile in (PROFILE, without)
            )
            assert (known > 1.05 * unknown) if layer is WIDE and dearer else (known == unknown)


def test_few_wide_chunks_fill_no_more_than_whole_rounds_of_tiles() -> None:
    """5 query heads to a KV head, chunks of 128: 5 tiles a KV head, so 160 for four chunks, two rounds for 132 SMs."""
    layer, card = replace(LAYER, heads=40), find_gpu("h200")
    profile = PROFILE

    def seconds(chunks: int) -> float:
        tokens = 128.0 * chunks
        batch = StepBatch(*(np.array([x]) for x in (0.0, 0.0, tokens, chunks, tokens, chunks * 128 * 129 / 2, chunks)))
        return attention_cost(batch, layer, BF16, 1, card, profile).seconds.item() * 1e6

    assert seconds(3) == pytest.approx(seconds(1), rel=0.2)
    assert seconds(4) > seconds(3) + 2
    assert seconds(4) == pytest.approx(19.4, rel=0.25)  # attention_prefill.bf16 of profiles/h200_sxm


@pytest.mark.parametrize(
    ("heads", "chunk", "context", "microseconds"),
    [(32, 8192, 0, 862.0), (16, 8192, 4096, 840.7), (40, 1024, 0, 38.2), (40, 8192, 0, 1127.2), (32, 1024, 0, 28.3)],
)
def test_near_measured_h200_prefill(heads: int, chunk: int, context: int, microseconds: float) -> None:
    """One chunk, BF16, 8 KV heads of 128 (attention_prefill.bf16 of profiles/h200_sxm). 40 heads: groups of 5."""
    card, layer = find_gpu("h200"), replace(LAYER, heads=heads)
    got = attention_cost(prefill(chunk, context), layer, BF16, 1, card, PROFILE).seconds
    assert got.item() * 1e6 == pytest.approx(microseconds, rel=0.1)


def test_groups_that_do_not_divide_a_tile_and_the_longest_tile_cost_more() -> None:
    def per_pair(heads: int, kv_heads: int, chunk: int) -> float:
        layer, card = Attention(heads, kv_heads, 128), find_gpu("h200")
        seconds = attention_cost(prefill(chunk, 0), layer, BF16, 1, card, PROFILE).seconds.item()
        return seconds / (heads * chunk * (chunk + 1) / 2)

    assert per_pair(40, 8, 32768) / per_pair(32, 8, 32768) == pytest.approx(UNEVEN_GROUP, abs=0.01)
    # 8 KV heads share their tiles evenly, one leaves the SMs waiting for its longest
    assert per_pair(8, 1, 8192) > 1.05 * per_pair(64, 8, 8192)


@pytest.mark.parametrize("precision", [BF16, FP8_KV])
def test_a_rank_of_two_costs_what_a_model_of_half_the_heads_does(precision: Precision) -> None:
    half = Attention(16, 4, 128)
    card = find_gpu("h200")
    profile = PROFILE
    for batch in (decode(64, 3000), prefill(5000, 100)):
        whole, split = (attention_cost(batch, x, precision, tp, card, profile) for x, tp in ((LAYER, 2), (half, 1)))
        np.testing.assert_allclose(whole.seconds, split.seconds)
    tokens = np.array([1, 5000])
    whole, split = (cache_cost(tokens, x, precision, tp, card, profile) for x, tp in ((LAYER, 2), (half, 1)))
    np.testing.assert_allclose(whole.seconds, split.seconds)


def test_writing_the_cache_costs_what_was_measured_and_fp8_more() -> None:
    """8 KV heads of 128, 16384 tokens (kv_write, quantise_query of profiles/h200_sxm): 84 us; FP8 165 + 48 us."""
    card = find_gpu("h200")
    profile = PROFILE
    tokens = np.array([16384])
    bf16, fp8 = (cache_cost(tokens, LAYER, x, 1, card, profile).seconds.item() * 1e6 for x in (BF16, FP8_KV))
    assert bf16 == pytest.approx(84, rel=0.15)
    assert fp8 == pytest.approx(165 + 48, rel=0.15)
    assert cache_cost(np.array([0]), LAYER, FP8_KV, 1, card, profile).seconds.item() == 0


@pytest.mark.parametrize(("kv", "longer", "at_32_to_128"), [("bf16", 1.06, 1.15), ("fp8", 1.12, 1.29)])
def test_unequal_contexts_were_measured_to_take_longer(kv: str, longer: float, at_32_to_128: float) -> None:
    """Rows of lognormal contexts take longer than those of equal ones with the same sum.

    docs/limits.md says that this is not modelled.
    """
    rows = pd.read_json(profiles_path() / "h200_sxm/vllm-0.26.0/kernels/attention.jsonl", lines=True)
    rows = rows[rows.kernel == f"attention_decode.{kv}"]
    same = ["batch", "context", "heads", "kv_heads", "head_dim"]
    pairs = rows[rows["skew"] == UNEQUAL].merge(rows[rows["skew"] == "even"], on=same)
    ratio = pairs.seconds_x / pairs.seconds_y
    assert ratio.median() == pytest.approx(longer, abs=0.006)
    assert ratio[pairs.batch <= 128].median() == pytest.approx(at_32_to_128, abs=0.006)
