"""Linear layers: laws of the wave-quantised roofline, and a few cells of published measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.architecture import Linear, ModelShape
from fp8plan.model.calibrate.profile_of import is_held_out
from fp8plan.model.cost.gemm import (
    gemm_backend,
    gemm_cost,
    quantise_cost,
    tiling,
)
from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.precision import BF16, FP8_BLOCK, Precision
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.profile.profile import layer_name

H200 = find_gpu("h200")
PROFILE = replace(load_profile(H200)[0], layers={})  # laws of the coefficients; what was timed follows none
OF_0_26 = replace(load_profile(H200, "0.26.0")[0], layers={})
ROWS = np.arange(1, 1200)

sides = st.integers(1, 128).map(lambda blocks: 128 * blocks)
linears = st.builds(Linear, st.just("x"), sides, sides, st.integers(1, 80), st.booleans(), st.booleans())
precisions = st.sampled_from([BF16, FP8_BLOCK])


def one(n: int, k: int, layers: int = 1) -> list[Linear]:
    return [Linear("x", n, k, layers, True, False)]


@given(linears)
def test_more_rows_never_cost_less(linear: Linear) -> None:
    """But for the kernel that adds up the parts of K, where fewer rows are split."""
    seconds = gemm_cost(ROWS, [linear], BF16, H200, PROFILE).seconds
    split = PROFILE.coefficient("gemm.bf16.split_seconds") * linear.layers
    assert (np.diff(seconds) >= -1e-12 * seconds[1:] - split).all()


def plainly(m: int, linear: Linear, dtype: str, element_bytes: float, activation_bytes: float) -> float:
    """Seconds of one linear by the formula in gemm's docstring, tile by tile."""

    def of(part: str, default: float = 0.0) -> float:
        return PROFILE.coefficients.get(f"gemm.{dtype}.{part}", default)

    m, n, k = max(m, 1), linear.n, linear.k
    tiles = tiling(gemm_backend(PROFILE, dtype), *(np.array([[float(x)]]) for x in (m, n, k)), H200.sm_count)
    weights = n * k * 2.0 if dtype == "bf16" else n * k + 4 * -(-n // 128) * -(-k // 128)
    b = (weights + m * k * activation_bytes + m * n * 2) / (H200.memory_bandwidth * of("bandwidth_efficiency"))
    peak = H200.bf16_flops if dtype == "bf16" else H200.fp8_flops
    assert peak is not None
    seconds = []
    for math, loads, waves, splits in zip(*map(np.ravel, tiles), strict=True):
        a = 2 * k * math / (peak / H200.sm_count * of("compute_efficiency"))
        c = k * loads * element_bytes / of("sm_bandwidth", np.inf)
        split = of("split_seconds") if splits > 1 else 0.0
        each = of("launch_seconds") + (a**4 + b**4 + c**4) ** 0.25 + waves * of("wave_seconds") + split
        seconds.append(each)
    return linear.layers * min(seconds)


@pytest.mark.parametrize(
    ("precision", "dtype", "element", "activation"),
    [(BF16, "bf16", 2, 2), (FP8_BLOCK, "fp8_block", 1, 1 + 4 / 128)],
)
def test_the_seconds_are_those_of_the_formula(
    precision: Precision, dtype: str, element: float, activation: float
) -> None:
    """Linears that are small, wide and deep, together; 0 rows cost as much as 1.

    For 2,489 rows of "d" another exponent than 4 takes another tile.
    """
    some = [Linear("a", 128, 128, 3, True, False), Linear("b", 24576, 512, 2, True, False)]
    some += [Linear("c", 1024, 16384, 5, True, False), Linear("d", 9728, 13568, 1, True, False)]
    rows = [0, 1, 2, 17, 300, 2489, 5000]
    expected = [sum(plainly(m, linear, dtype, element, activation) for linear in some) for m in rows]
    np.testing.assert_allclose(gemm_cost(np.array(rows), some, precision, H200, PROFILE).seconds, expected, rtol=1e-12)
    twice = replace(PROFILE, layers={f"gemm.{dtype}": {layer_name((128, 128)): [[1.0, 9e3], [float(np.log(2.0))] * 2]}})
    doubled = [2 * plainly(m, some[0], dtype, element, activation) for m in rows]
    np.testing.assert_allclose(gemm_cost(np.array(rows), some[:1], precision, H200, twice).seconds, doubled, rtol=1e-12)


@pytest.mark.parametrize("card", ["h200", "a100"])  # nvjet and cublas
@given(some=st.lists(linears, min_size=1, max_size=3))
@example(some=one(1088, 2560))  # within a block of 64 rows another of nvjet's tiles becomes the cheapest
@example(some=one(18304, 12928))  # so with cublas's
@settings(max_examples=20)
def test_a_number_of_rows_costs_the_same_alone_as_beside_thousands(card: str, some: list[Linear]) -> None:
    """Thousands of rows compare their tiles at the ends of blocks, a few rows at each number."""
    gpu, rows = find_gpu(card), np.arange(1, 8192)
    profile = load_profile(gpu)[0]
    beside = gemm_cost(rows, some, BF16, gpu, profile)
    alone = [gemm_cost(part, some, BF16, gpu, profile) for part in np.array_split(rows, 50)]
    np.testing.assert_array_equal(beside.seconds, np.concatenate([cost.seconds for cost in alone]))
    for name, partial in beside.partials.items():
        np.testing.assert_array_equal(partial, np.concatenate([cost.partials[name] for cost in alone]))


def test_quantising_reads_bf16_and_writes_fp8_with_a_scale_for_128_inputs() -> None:
    some = [*one(4096, 1024, 3), *one(128, 512, 2), Linear("router", 8, 4096, 9, False, False)]
    rows = np.array([0, 1, 700])
    launch, efficiency = (PROFILE.coefficients[f"quantise.{x}"] for x in ("launch_seconds", "bandwidth_efficiency"))
    moved = rows * (3 * 1024 + 2 * 512) * (2 + 1 + 4 / 128)
    seconds = quantise_cost(rows, some, FP8_BLOCK, H200, PROFILE).seconds
    np.testing.assert_allclose(seconds, 5 * launch + moved / (H200.memory_bandwidth * efficiency), rtol=1e-12)


def test_cublas_takes_tiles_as_wide_as_fill_the_sms() -> None:
    """Layers of Qwen3-14B and Llama-3.2-1B that no fit has seen are 3% off with 96 to 1,024 rows (median)."""
    rows = pd.read_json(profiles_path() / "h200_sxm/vllm-0.26.0/kernels/gemm.jsonl", lines=True)
    rows = rows[(rows.kernel == "gemm.bf16") & is_held_out(rows) & rows.m.between(96, 1024)]
    predicted = [
        gemm_cost(np.array([m]), one(n, k), BF16, H200, OF_0_26).seconds.item()
        for m, n, k in rows[["m", "n", "k"]].astype(int).itertuples(index=False)
    ]
    assert len(rows) > 15
    assert np.median(np.abs(np.array(predicted) / rows.seconds - 1)) < 0.04
    assert gemm_backend(OF_0_26, "bf16") == gemm_backend(PROFILE, "bf16") == "nvjet"


def test_deep_gemm_has_the_cliffs_it_has_on_an_h200() -> None:
    """4096 x 12288 was measured (linear.fp8_block of profiles/h200_sxm): 36, 56, 41, 74 and 52 us."""
    rows = np.array([256, 288, 384, 448, 512])
    measured = np.array([36.0, 56.3, 41.3, 74.0, 51.7])
    linear = one(4096, 12288)
    cost = gemm_cost(rows, linear, FP8_BLOCK, H200, PROFILE) + quantise_cost(rows, linear, FP8_BLOCK, H200, PROFILE)
    np.testing.assert_allclose(cost.seconds * 1e6, measured, rtol=0.15)
    assert (np.sign(np.diff(cost.seconds)) == np.sign(np.diff(measured))).all()


def test_a_last_tile_that_is_emptier_costs_more_than_a_fuller_one() -> None:
    """4096 x 12288 in tiles of 64 x 64: 25.7 us with 80 rows, 18.4 with 112 (gemm.fp8_block of profiles/h200_sxm)."""
    emptier, fuller = gemm_cost(np.array([80, 112]), one(4096, 12288), FP8_BLOCK, H200, OF_0_26).seconds * 1e6
    assert emptier > 1.1 * fuller
    assert emptier == pytest.approx(25.7, rel=0.15)
    assert fuller == pytest.approx(18.4, rel=0.15)


def test_few_columns_are_bound_by_the_sms_that_read_them() -> None:
    """16 thread blocks for 2048 columns: two thirds of the weights of 6144 x 4096, but 13.9 and 11.2 us measured."""
    deep, wide = (
        gemm_cost(np.array([8]), one(n, k), FP8_BLOCK, H200, PROFILE).seconds for n, k in ((2048, 8192), (6144, 4096))
    )
    assert deep > wide


@given(linears, precisions)
def test_not_below_datasheet_bytes_and_flops(linear: Linear, precision: Precision) -> None:
    seconds = gemm_cost(ROWS, [linear], precision, H200, PROFILE).seconds
    stored = precision.linear_bytes(linear.n, linear.k, linear.quantised) * linear.layers
    fp8 = precision is FP8_BLOCK and linear.quantised
    peak = H200.fp8_flops if fp8 else H200.bf16_flops
    assert (seconds > stored / H200.memory_bandwidth).all()
    assert (seconds > 2.0 * ROWS * linear.n * linear.k * linear.layers / peak).all()


@given(linears, linears, precisions)
def test_layers_add_up(a: Linear, b: Linear, precision: Precision) -> None:
    together = gemm_cost(ROWS, [a, b], precision, H200, PROFILE).seconds
    apart = sum(gemm_cost(ROWS, [x], precision, H200, PROFILE).seconds for x in (a, b))
    doubled = gemm_cost(
        ROWS, [replace(a, layers=2 * a.layers), replace(b, layers=2 * b.layers)], precision, H200, PROFILE
    )
    np.testing.assert_allclose(together, apart, rtol=1e-12)
    np.testing.assert_allclose(doubled.seconds, 2 * together, rtol=1e-12)


def test_a_full_extra_wave_costs_a_step() -> None:
    # 132 SMs: 12 x 11 tiles of 128 x 128 fill them once; the 133rd tile needs another wave.
    policy = replace(PROFILE, kernel_backends={**PROFILE.kernel_backends, "gemm.fp8_block": "deep_gemm"})
    n, k = 11 * 128, 16384
    full, over = gemm_cost(np.array([12 * 128, 12 * 128 + 1]), one(n, k), FP8_BLOCK, H200, policy).seconds
    assert over > 1.2 * full


def test_fp8_saves_less_than_its_bytes_at_small_m_and_needs_quantisation() -> None:
    m = np.array([8])
    bf16 = gemm_cost(m, one(4096, 4096), BF16, H200, PROFILE).seconds
    fp8 = gemm_cost(m, one(4096, 4096), FP8_BLOCK, H200, PROFILE).seconds
    quantise = quantise_cost(m, one(4096, 4096), FP8_BLOCK, H200, PROFILE).seconds
    assert 1 < (bf16 / (fp8 + quantise)).item() < 2
    assert quantise_cost(m, one(4096, 4096), BF16, H200, PROFILE).seconds.item() == 0


@pytest.mark.parametrize(
    ("precision", "m", "n", "k", "microseconds"),
    [
        (BF16, 64, 4096, 4096, 12.0),
        (FP8_BLOCK, 64, 4096, 4096, 11.2),
        (BF16, 16, 4096, 12288, 28.4),
        (FP8_BLOCK, 16, 4096, 12288, 19.9),
        (BF16, 4096, 12288, 4096, 525.0),
        (FP8_BLOCK, 4096, 12288, 4096, 355.0),
    ],
)
def test_near_published_h200_measurements(precision: Precision, m: int, n: int, k: int, microseconds: float) -> None:
    """AIConfigurator 0.12.0's tables (vLLM BF16, SGLang fp8_block), not fitted to this GPU: within 25%."""
    rows = np.array([m])
    cost = gemm_cost(rows, one(n, k), precision, H200, PROFILE) + quantise_cost(
        rows, one(n, k), precision, H200, PROFILE
    )
    assert cost.seconds.item() * 1e6 == pytest.approx(microseconds, rel=0.25)


@given(linears, precisions, st.integers(1, 20000))
def test_partials_are_the_derivatives(linear: Linear, precision: Precision, m: int) -> None:
    profile = replace(PROFILE, coefficients={**PROFILE.coefficients, "gemm.bf16.wave_seconds": 2e-6})
    rows, step = np.array([m]), 1e-6
    base = gemm_cost(rows, [linear], precision, H200, profile)
    for name, partial in base.partials.items():
        moved = replace(profile, coefficients={**profile.coefficients, name: profile.coefficients[name] * (1 + step)})
        change = gemm_cost(rows, [linear], precision, H200, moved).seconds - base.seconds
        np.testing.assert_allclose(change / step, partial, rtol=1e-3, atol=1e-4 * base.seconds.item())


def test_no_fp8_tensor_cores_and_unknown_backend() -> None:
    a100 = find_gpu("a100")
    with pytest.raises(ConfigError, match="no FP8 tensor cores"):
        gemm_cost(ROWS, one(4096, 4096), FP8_BLOCK, a100, load_profile(a100)[0])
    odd = replace(PROFILE, kernel_backends={"gemm.bf16": "abacus"})
    with pytest.raises(ProfileError, match=r"'abacus'.*known: nvjet"):
        gemm_cost(ROWS, one(4096, 4096), BF16, H200, odd)


@pytest.mark.parametrize(
    "gpu", [card for card in gpus() if card.compute_capability >= (8, 0)], ids=lambda card: card.name
)
def test_one_token_takes_about_as_long_as_its_weights_are_read(gpu: Gpu) -> None:
    """Tiles of 64 rows made it cost as much as 64 on an H20, whose tensor cores are few for its bandwidth."""
    layers = [x for x in ModelShape.from_hf("Qwen/Qwen3-8B").linears(1) if x.name != "lm_head"]
    profile = load_profile(gpu, profiles_dir=profiles_path())[0]
    (seconds,) = gemm_cost(np.array([1]), layers, BF16, gpu, profile).seconds
    read = sum(x.layers * x.n * x.k * 2 for x in layers) / gpu.memory_bandwidth
    assert read < seconds < 1.6 * read


@pytest.mark.parametrize("name", ["a100_sxm", "l40s"])
def test_many_numbers_of_rows_cost_what_each_costs_alone(name: str) -> None:
    """Tilings are then found for blocks of rows. In some of these blocks the two ends have different ones."""
    gpu, rows = find_gpu(name), np.arange(1, 2049)
    profile = load_profile(gpu)[0]
    for n, k in ((17920, 1536), (28672, 4096), (51200, 5120)):
        together = gemm_cost(rows, one(n, k), BF16, gpu, profile).seconds
        alone = [gemm_cost(rows[at : at + 1], one(n, k), BF16, gpu, profile).seconds[0] for at in range(len(rows))]
        assert together == pytest.approx(alone, rel=1e-12)
