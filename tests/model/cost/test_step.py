"""Engine steps: laws of the whole step time, for every kind of profile coefficients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uniform_models import resized

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Mlp
from fp8plan.model.cost.attention import FLASH_ATTENTION_3
from fp8plan.model.cost.base import QUANTITIES, Component, Cost, StepBatch, gradient_of, p_norm
from fp8plan.model.cost.collective import all_reduce_cost, with_network
from fp8plan.model.cost.host import layer_cost
from fp8plan.model.cost.power import bytes_bound, flops_bound
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_BLOCK_KV, PRESETS, Precision
from fp8plan.model.profile.library import datasheet_profile, load_profile
from fp8plan.model.profile.profile import HOST_PACE, PACES, Profile, between
from fp8plan.model.setup import EngineSetup

FIELDS = QUANTITIES
QWEN = "Qwen/Qwen3-8B"
FAST = 2.6e-4  # seconds of a fast host's loop


def batch_of(rows: list[tuple[int, int, int, int]]) -> StepBatch:
    """Steps of (decode requests, context of each, prefill tokens, context before them)."""
    decode, context, new, before = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    chunks = np.minimum(new, 1)
    pairs = new * before + new * (new + 1) // 2
    return StepBatch(decode, decode * context, new, chunks, new + before * chunks, pairs, decode + chunks)


def take(batch: StepBatch, index: object) -> StepBatch:
    return StepBatch(*(getattr(batch, name)[index] for name in FIELDS))


def changed(batch: StepBatch, **fields: object) -> StepBatch:
    return replace(batch, **fields)  # type: ignore[arg-type]


def model(
    name: str = QWEN,
    precision: Precision = BF16,
    card: Gpu | None = None,
    profile: Profile | None = None,
    **limits: object,
) -> StepModel:
    card = card or find_gpu("h200")
    shape = ModelShape.from_hf(name)
    return StepModel(shape, card, precision, EngineLimits(**limits), profile or datasheet_profile(card))  # type: ignore[arg-type]


rows = st.tuples(st.integers(0, 1024), st.integers(1, 32000), st.integers(0, 8000), st.integers(0, 16000))
batches = st.lists(rows.filter(lambda row: row[0] + row[2] > 0), min_size=1, max_size=12).map(batch_of)


@st.composite
def models(draw: st.DrawFn) -> StepModel:
    """Any precision on several models and GPUs, each coefficient off by up to a factor of 3."""
    card = find_gpu(draw(st.sampled_from(["h200", "h20", "b200", "l40s"])))
    name = draw(st.sampled_from([QWEN, "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.2-1B"]))
    profile = datasheet_profile(card)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = 3 ** rng.uniform(-1, 1, len(profile.coefficients))
    values = {
        key: min(value * factor, 1.0) if key.endswith("_efficiency") else value * factor
        for (key, value), factor in zip(profile.coefficients.items(), factors, strict=True)
    }
    # A step in pieces, each a graph, that costs more launches than one without graphs is another machine's.
    values |= dict.fromkeys(PACES, 1.0)  # a pace below 1 would be another GPU's
    values["host.piecewise_layer_seconds"] = min(values[f"host.{x}_layer_seconds"] for x in ("piecewise", "eager"))
    return model(
        name,
        draw(st.sampled_from(list(PRESETS.values()))),
        card,
        replace(profile, coefficients=values),
        tensor_parallel_size=draw(st.sampled_from([1, 4])),
        async_scheduling=draw(st.booleans()),
        enforce_eager=draw(st.booleans()),
    )


@given(models(), batches)
def test_never_below_the_datasheet(step: StepModel, batch: StepBatch) -> None:
    seconds = step.seconds(batch)
    assert (seconds > bytes_bound(step, batch)).all()
    assert (seconds > flops_bound(step, batch)).all()


@given(models(), batches)
def test_breakdown_adds_up(step: StepModel, batch: StepBatch) -> None:
    parts = step.timed(batch).breakdown()
    assert all((part >= 0).all() for part in parts.values())
    np.testing.assert_allclose(sum(parts.values()), step.seconds(batch), rtol=1e-12)


@given(models(), batches, st.randoms(use_true_random=False))
def test_rows_are_independent(step: StepModel, batch: StepBatch, random: object) -> None:
    seconds = step.seconds(batch)
    order = list(range(len(seconds)))
    random.shuffle(order)  # type: ignore[attr-defined]
    np.testing.assert_allclose(step.seconds(take(batch, order)), seconds[order], rtol=1e-12)
    for row in range(len(seconds)):
        np.testing.assert_allclose(step.seconds(take(batch, [row])), seconds[[row]], rtol=1e-12)


@given(models(), batches, st.integers(1, 5000))
def test_more_work_never_costs_less(step: StepModel, batch: StepBatch, more: int) -> None:
    smooth = {**step.profile.kernel_backends, "gemm.fp8_block": "triton"}
    step = replace(step, profile=replace(step.profile, kernel_backends=smooth))
    seconds = step.seconds(batch)
    kv = changed(batch, decode_kv_tokens=batch.decode_kv_tokens + more)
    request = changed(kv, decode_requests=batch.decode_requests + 1, sampled_requests=batch.sampled_requests + 1)
    prefill = changed(
        batch,
        prefill_tokens=batch.prefill_tokens + more,
        prefill_kv_tokens=batch.prefill_kv_tokens + more,
        prefill_pairs=batch.prefill_pairs + more * batch.prefill_kv_tokens + more * (more + 1) // 2,
    )
    # More requests may fill the SMs of FlashAttention 3 better, at best twice as well (test_attention.py).
    cut = step.profile.backend(f"attention.{step.precision.kv}") == FLASH_ATTENTION_3
    better = step.timed(batch).breakdown()["attention"] / 2 if cut else 0.0
    # cuBLAS splits K of fewer rows only. (DeepGEMM's cliffs are in test_gemm.py; here another kernel stands in.)
    split = step.profile.coefficients.get("gemm.bf16.split_seconds", 0.0) * (5 * step.shape.num_layers + 1)
    for larger, gain in ((kv, better), (request, better + split), (prefill, split)):
        assert (step.seconds(larger) >= seconds * (1 - 1e-12) - gain).all()
    deeper = replace(step, shape=resized(step.shape, num_layers=step.shape.num_layers + 1))
    assert (deeper.seconds(batch) > seconds * (1 - 1e-12)).all()


@given(st.sampled_from([QWEN, "Qwen/Qwen3-30B-A3B"]), st.sampled_from(list(PRESETS.values())), rows, rows)
def test_two_steps_cost_no_less_than_one_with_both(name: str, precision: Precision, a: object, b: object) -> None:
    # Tile quantisation alone can break this: two grids may fit the GPU better than one. By less than 1%.
    halves = batch_of([(max(row[0], 1), *row[1:]) for row in (a, b)])  # type: ignore[index]
    both = StepBatch(*(getattr(halves, field).sum(keepdims=True) for field in FIELDS))
    # So can CUDA graphs, which small steps have and their sum has not: without any.
    step = model(name, precision, max_num_seqs=2048, enforce_eager=True)
    assert step.seconds(both).item() <= 1.01 * step.seconds(halves).sum()


@settings(max_examples=12)
@given(models(), batches, st.integers(0, 99))
def test_gradient_by_finite_differences(step: StepModel, batch: StepBatch, seed: int) -> None:
    weights = np.random.default_rng(seed).uniform(0.1, 100, len(batch.decode_requests))

    def log_gpu(model: StepModel) -> float:
        return float(np.log(weights @ model.timed(batch).on_gpu))

    total = np.exp(log_gpu(step))
    gradient = {name: value / total for name, value in step.timed(batch)._gpu_gradient(weights).items()}
    base, small, kinks = log_gpu(step), 1e-6, 0
    for name, slope in gradient.items():
        value = step.profile.coefficients[name]
        sides = [
            replace(step.profile, coefficients={**step.profile.coefficients, name: value * (1 + s)})
            for s in (small, -small)
            if not (name.endswith("_efficiency") and value * (1 + s) > 1)
        ]
        signs = [1 if side.coefficients[name] > value else -1 for side in sides]
        slopes = [
            sign * (log_gpu(replace(step, profile=side)) - base) / small
            for side, sign in zip(sides, signs, strict=True)
        ]
        kinks += not any(slope == pytest.approx(x, abs=1e-3) for x in slopes)
    assert kinks == 0


def test_a_fast_gpu_does_not_hide_an_uncertain_host() -> None:
    """The interval's upper end is at least the host's own where the host sets the pace, whatever the precision."""
    batch, weights = batch_of([(8, 1000, 0, 0)]), np.full(1, 500.0)
    name = "Qwen/Qwen3-0.6B"
    for precision in (BF16, FP8_BLOCK_KV):
        step = model(name, precision=precision, tensor_parallel_size=8)
        scheduling, launching = step._host(batch)
        host = Component("host", scheduling + launching, None)
        low, high = step.timed(batch).interval(weights, 1.645)
        assert low < weights @ step.seconds(batch) < high
        total = weights @ host.seconds()
        assert high >= 0.999 * total * np.exp(1.645 * step.timed(batch)._sigma(gradient_of([host], weights), total))


def test_the_interval_widens_with_the_model_error() -> None:
    batch, weights = batch_of([(64, 4000, 0, 0)]), np.full(1, 100.0)
    step = model()
    nothing = {name: {name: 0.0} for name in step.profile.coefficients}
    exact = replace(step, profile=replace(step.profile, model_error=0.0, log_covariance=nothing))
    seconds = weights @ step.seconds(batch)
    assert exact.timed(batch).interval(weights, 1.645) == pytest.approx((seconds, seconds))
    low, high = step.timed(batch).interval(weights, 1.645)
    assert np.log(high / seconds) == pytest.approx(np.log(seconds / low), rel=1e-3)  # but for a trace of the host
    assert np.log(high / seconds) > 1.645 * step.profile.model_error


def test_decode_is_padded_to_captured_graphs_and_not_beyond() -> None:
    batch = batch_of([(500, 1, 0, 0), (511, 1, 0, 0)])
    gemm = model().timed(batch).breakdown()["gemm"]
    assert gemm[0] == gemm[1]
    eager = model(enforce_eager=True).timed(batch).breakdown()["gemm"]
    assert eager[0] < eager[1] <= gemm[1]


@pytest.mark.parametrize(
    ("name", "layers", "experts", "quantised"),
    [(QWEN, 36, 0, 4 * 36), ("Qwen/Qwen3-30B-A3B", 48, 48, 4 * 48), ("Qwen/Qwen3-1.7B", 28, 0, 4 * 28)],
)
def test_what_the_host_launches(name: str, layers: int, experts: int, quantised: int) -> None:
    """Decode is one graph; with a short prompt it runs in pieces; what no graph holds is launched kernel by kernel."""
    batch = batch_of([(128, 1000, 0, 0), (128, 1000, 60, 0), (128, 1000, 800, 0), (600, 1000, 0, 0)])
    for precision in (BF16, FP8_BLOCK):
        step = model(name, precision)
        costs = step._host(batch)[1].partials
        assert costs.pop("host.pace").tolist() == sum(costs.values()).tolist()
        seconds = {key: step.profile.coefficients[key] for key in costs}
        counts = {key.removeprefix("host."): (values / seconds[key]).round(6).tolist() for key, values in costs.items()}
        expected = {
            "piecewise_layer_seconds": [0, layers, 0, 0],
            "eager_layer_seconds": [0, 0, layers, layers],
            "eager_expert_layer_seconds": [0, 0, experts, experts],
            "eager_quantise_seconds": [0, 0, quantised, quantised],
        }
        if precision is BF16:
            del expected["eager_quantise_seconds"]
        assert counts == {key: values for key, values in expected.items() if any(values)}


@pytest.mark.parametrize(
    ("name", "mixer", "number"),
    [
        ("Qwen/Qwen3.5-9B", "delta_net", 24),
        ("nvidia/Nemotron-H-8B-Base-8K", "mamba2", 24),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "mla", 27),
    ],
)
def test_other_mixers_than_attention_take_the_host_longer(name: str, mixer: str, number: int) -> None:
    """Their kernels are launched one by one unless the step is one graph."""
    step, coefficient = model(name), f"host.{mixer}.layer_seconds"
    batch = batch_of([(128, 1000, 0, 0), (128, 1000, 60, 0), (128, 1000, 800, 0)])
    counts = step._host(batch)[1].partials[coefficient] / step.profile.coefficient(coefficient)
    assert counts.round(6).tolist() == [0, number, number]
    assert coefficient not in model().cost(batch).partials


def test_launches_overlap_the_gpu_even_where_the_schedule_does_not() -> None:
    """One long prefill: its GPU time hides the launches. Two steps of few requests without graphs: they do not."""
    batch = batch_of([(0, 1, 16000, 0), (2, 100, 0, 0)])
    step = model(async_scheduling=False, enforce_eager=True)
    scheduling, launching = (x.seconds for x in step._host(batch))
    gpu_s = sum(part for name, part in step.timed(batch).breakdown().items() if name != "host")
    seconds = step.seconds(batch)
    assert seconds[0] == pytest.approx(scheduling[0] + gpu_s[0], rel=1e-4)
    assert seconds[1] == pytest.approx(scheduling[1] + launching[1], rel=0.02)
    assert gpu_s[1] < launching[1]


def in_order(batch: StepBatch) -> StepBatch:
    return changed(batch, follows=np.full(batch.decode_requests.size, True))


def seconds_of_a_queue_of_two(gpu_s: np.ndarray, host_s: np.ndarray, in_parts: np.ndarray) -> float:
    """The end of steps that vLLM schedules and launches while the step before runs: it keeps two of them in its queue.

    in_parts: whether the GPU begins a step before all of it is launched
    """
    host, running, last = 0.0, 0.0, 0.0  # the ends of what was launched, of the last step but one, and of the last
    for on_gpu, on_host, parts in zip(gpu_s, host_s, in_parts, strict=True):
        host = max(host, running) + on_host
        running, last = last, max(last + on_gpu, host) if parts else max(last, host) + on_gpu
    return last


# Qwen3-30B-A3B decodes for longer than the host needs, Qwen3-1.7B for little longer. Its prompts are short.
@pytest.mark.parametrize(("name", "prompt"), [("Qwen/Qwen3-30B-A3B", 650), (QWEN, 800), ("Qwen/Qwen3-1.7B", 800)])
@pytest.mark.parametrize("prompts_at", [(6,), (6, 7, 8), (6, 8, 10), (3, 9, 10)])
def test_prompts_that_join_decode_take_as_long_as_in_a_queue_of_two(
    name: str, prompt: int, prompts_at: tuple[int, ...]
) -> None:
    """Nearly: where both need as long, the GPU waits for a late host."""
    batch = in_order(batch_of([(200, 1500, prompt if i in prompts_at else 0, 0) for i in range(16)]))
    step = model(name, profile=load_profile(find_gpu("h200"))[0].on_host(FAST))
    timed = step.timed(batch)
    host_s = timed.scheduling.seconds + timed.launching.seconds
    expected = seconds_of_a_queue_of_two(timed.on_gpu, host_s, timed.launching.seconds > 0)
    assert step.seconds(batch).sum() == pytest.approx(expected, rel=0.025)


def test_a_long_step_before_hides_launches() -> None:
    rows = [(240, 2000, 0, 0), (240, 2000, 650, 0), (241, 2000, 0, 0)]
    batch = batch_of(rows)
    profile = load_profile(find_gpu("h200"))[0].on_host(0.0006)  # slow, so that a launch outlasts the GPU's work
    step = model("Qwen/Qwen3-30B-A3B", profile=profile)
    alone, after = step.seconds(batch), step.seconds(in_order(batch))
    spare = alone[0] - step.timed(batch).scheduling.seconds[0]
    assert alone[1] - after[1] == pytest.approx(spare, rel=0.2)
    assert after[[0, 2]].tolist() == alone[[0, 2]].tolist()  # in one graph, and so launched in time anyway
    assert after[1] > step.timed(batch).on_gpu[1]
    assert step.timed(in_order(batch)).rows(slice(1, 3)).seconds()[0] == alone[1]  # nothing before it


@pytest.mark.parametrize(
    ("name", "asynchronous"), [("Qwen/Qwen3-30B-A3B", False), ("Qwen/Qwen3-Next-80B-A3B-Instruct", True)]
)
def test_a_host_that_waits_for_the_gpu_has_no_lead(name: str, asynchronous: bool) -> None:
    batch, step = batch_of([(200, 2000, 0, 0), (200, 2000, 650, 0)]), model(name, async_scheduling=asynchronous)
    assert step.seconds(in_order(batch)).tolist() == step.seconds(batch).tolist()


def test_slopes_of_steps_in_order_by_finite_differences() -> None:
    """A step's coefficients move the next step, too."""
    batch = in_order(batch_of([(240, 2000, 0, 0), (240, 2000, 650, 0), (241, 2000, 700, 0), (242, 2000, 100, 0)]))
    weights, small = np.array([3.0, 1.0, 2.0, 1.0]), 1e-5
    profile = load_profile(find_gpu("h200"))[0]
    inside = {name: 0.999 * value for name, value in profile.coefficients.items()}  # no efficiency is at its bound of 1
    step = model("Qwen/Qwen3-30B-A3B", profile=replace(profile, coefficients=inside))

    def total(name: str, log: float) -> float:
        values = step.profile.coefficients | {name: step.profile.coefficients[name] * np.exp(log)}
        return float(weights @ replace(step, profile=replace(step.profile, coefficients=values)).seconds(batch))

    found, partials = step.timed(batch).gradient(weights), step.cost(batch).partials
    assert found.keys() == partials.keys()
    for name, slope in found.items():
        expected = (total(name, small) - total(name, -small)) / (2 * small)
        assert slope == pytest.approx(expected, abs=1e-7)
        assert weights @ partials[name] == pytest.approx(expected, abs=1e-7)


def test_a_sum_of_powers_does_not_overflow() -> None:
    parts = [Cost(np.array([3e200, 0.0]), {"a": np.array([3e200, 0.0])}), Cost(np.array([4e200, 0.0]), {})]
    found = p_norm(8, *parts)
    assert found.seconds.tolist() == [pytest.approx(4e200 * (1 + 0.75**8) ** 0.125), 0.0]
    assert np.isfinite(found.partials["a"]).all()


def test_eager_small_steps_wait_for_the_host() -> None:
    batch = batch_of([(1, 100, 0, 0)])
    name = "meta-llama/Llama-3.2-1B"
    graph, eager = (model(name, enforce_eager=flag).seconds(batch).item() for flag in (False, True))
    assert eager > graph
    serial = model(name, async_scheduling=False).seconds(batch).item()
    assert serial > graph


def test_small_batches_gain_less_than_their_bytes() -> None:
    """Qwen3-8B on an H200, 8 requests: 5.8 ms a step in BF16, 4.3 in FP8 (`batch 8` of its profile's validation/).

    Not calibrated: each within two standard deviations of its prediction, and the gain well under 2x.
    """
    batch = batch_of([(8, 8 * 640, 0, 0)])
    times = []
    for precision, measured in ((BF16, 5.8e-3), (FP8_BLOCK_KV, 4.3e-3)):
        step = model(precision=precision)
        low, high = step.timed(batch).interval(np.ones(1), 2.0)
        assert low < measured < high
        times.append(step.seconds(batch).item())
    assert 1.0 < times[0] / times[1] < 1.6


def test_tensor_parallel_is_faster_but_pays_for_its_all_reduces() -> None:
    batch = batch_of([(64, 4000, 0, 0)])
    one, four = (model(tensor_parallel_size=tp) for tp in (1, 4))
    assert "collective" not in one.timed(batch).breakdown()
    assert four.timed(batch).breakdown()["collective"].item() > 0
    assert one.seconds(batch) / 4 < four.seconds(batch) < one.seconds(batch)
    nvlink, pcie = (model(card=find_gpu(name), tensor_parallel_size=4) for name in ("h100", "l40s"))
    assert pcie.timed(batch).breakdown()["collective"].item() > 5 * nvlink.timed(batch).breakdown()["collective"].item()
    for step, link in ((nvlink, "nvlink"), (pcie, "pcie")):
        gradient = gradient_of(step._gpu_components(batch), np.ones(1))
        used = {name for name in gradient if name.startswith("collective")}
        assert used == {f"collective.{link}.latency_seconds", f"collective.{link}.bandwidth_efficiency"}


def test_beyond_a_node_all_reduces_cross_the_network() -> None:
    batch, weights = batch_of([(64, 4000, 0, 0)]), np.ones(1)
    h100 = find_gpu("h100")
    inside, across = (
        model(card=replace(h100, gpus_per_node=node), tensor_parallel_size=16, name="Qwen/Qwen3-8B") for node in (16, 8)
    )
    fast, slow = (step.timed(batch).breakdown()["collective"].item() for step in (inside, across))
    assert slow > 3 * fast
    used = {x for x in gradient_of(across._gpu_components(batch), weights) if x.startswith("collective")}
    assert {x.split(".")[1] for x in used} == {"nvlink", "network"}
    wide, narrow = (np.log(np.divide(*step.timed(batch).interval(weights, 1.645)[::-1])) for step in (across, inside))
    assert wide > narrow + 0.1
    one_each = model(card=replace(h100, gpus_per_node=1), tensor_parallel_size=2)
    used = {x for x in gradient_of(one_each._gpu_components(batch), weights) if x.startswith("collective")}
    assert {x.split(".")[1] for x in used} == {"network"}


def test_a_profile_that_knows_its_network_keeps_it() -> None:
    own = {"collective.network.latency_seconds": 1e-3}
    known = replace(model().profile, coefficients=model().profile.coefficients | own)
    found = with_network(known)
    assert found.coefficients["collective.network.latency_seconds"] == 1e-3
    assert found.coefficients["collective.network.bandwidth_efficiency"] < 1
    with pytest.raises(ProfileError, match=r"collective\.network"):
        all_reduce_cost(np.ones(1), 16, find_gpu("h100"), model().profile)


def test_a_layout_that_nobody_measured_is_named_and_wider() -> None:
    batch, weights = batch_of([(64, 4000, 0, 0)]), np.ones(1)
    calibrated = load_profile(find_gpu("h200"), "0.26.0")[0].on_unknown_host(FAST, 0.0)  # no doubt about the host
    widths = []
    for size in (1, 2, 4, 8):
        step = model(card=find_gpu("h200"), tensor_parallel_size=size, profile=calibrated)
        low, high = step.timed(batch).interval(weights, 1.645)
        widths.append(np.log(high / low) / 2)
        assert (calibrated.layout_error(size) == 0) == (size == 1)
        seen = replace(calibrated, tensor_parallel=[1, size])
        assert seen.layout_error(size) == 0
        low, high = replace(step, profile=seen).timed(batch).interval(weights, 1.645)
        assert np.log(high / low) / 2 <= np.hypot(widths[0], 0.06)  # all-reduces are not measured either
    assert widths[0] < 0.08
    assert 0.1 < widths[1] < 0.16
    assert 0.16 < widths[2] < 0.21
    assert 0.20 < widths[3] < 0.27


def test_hull() -> None:
    batch = batch_of([(64, 4000, 0, 0)])
    assert "nothing was measured" in model().outside_hull(batch)[0]
    measured = replace(
        model().profile,
        kind="calibrated",
        hull={"gemm": {"m": (1, 512)}, "attention": {"decode_kv_tokens": (1.0, 1e6)}},
    )
    step = model(profile=measured)
    assert step.outside_hull(batch) == []
    reasons = step.outside_hull(batch_of([(64, 4000, 0, 0), (600, 4000, 0, 0)]))
    assert [reason.split(":")[0] for reason in reasons] == ["gemm", "attention"]
    sizes = model(profile=replace(measured, hull={"gemm": {"m": (8, 512), "n": (6144, 24576), "k": (4096, 12288)}}))
    assert sizes.outside_hull(batch_of([(1, 100, 0, 0)])) == ["gemm: n 4096 to 24576, measured 6144 to 24576"]


def test_no_fp8_gpu_and_missing_kernel() -> None:
    batch = batch_of([(1, 100, 0, 0)])
    with pytest.raises(ConfigError, match="no FP8 tensor cores"):
        model(precision=FP8_BLOCK, card=find_gpu("a100")).seconds(batch)
    whole = model().profile
    partly = {name: value for name, value in whole.coefficients.items() if not name.startswith("gemm.fp8_block")}
    covariance = between(whole.log_covariance, partly)
    profile = replace(whole, kind="calibrated", coefficients=partly, log_covariance=covariance)
    assert model(profile=profile).seconds(batch).item() > 0
    with pytest.raises(ProfileError, match=r"fp8_block.*fp8plan calibrate --gpu auto"):
        model(precision=FP8_BLOCK, profile=profile).seconds(batch)


def test_no_steps_take_no_time() -> None:
    assert model().seconds(batch_of([])).shape == (0,)


def test_a_hundred_times_the_steps_take_a_few_times_as_long() -> None:
    few, many = batch_of_steps(30), batch_of_steps(3000)
    step = model(precision=FP8_BLOCK_KV)

    def ratio(time_of: Callable[[StepBatch], Any]) -> float:
        pairs = [(_elapsed(lambda: time_of(few)), _elapsed(lambda: time_of(many))) for _ in range(20)]
        return min(many for _, many in pairs) / min(few for few, _ in pairs)

    assert ratio(step.seconds) < 8  # about 2 (1 and 2 ms); a loop over steps would take 100 times as long
    assert ratio(lambda batch: step.timed(batch).interval(np.ones(len(batch.decode_requests)), 1.645)) < 8


def batch_of_steps(count: int) -> StepBatch:
    """Steps of random sizes."""
    rng = np.random.default_rng(0)
    new = np.where(rng.random(count) < 0.2, rng.integers(1, 1000, count), 0)
    columns = (rng.integers(1, 513, count), rng.integers(1000, 20000, count), new, np.zeros(count))
    return batch_of(np.stack(columns, axis=1).astype(int).tolist())


def _elapsed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def test_small_kernels_of_a_rank_of_two_are_those_of_half_the_model() -> None:
    shape = ModelShape.from_hf(QWEN)
    ((attention, _),), ((mlp, _),) = shape.parts_of(Attention), shape.parts_of(Mlp)
    half = resized(
        shape,
        num_attention_heads=attention.heads // 2,
        num_key_value_heads=attention.kv_heads // 2,
        intermediate_size=mlp.inner // 2,
    )
    m, card = np.array([1, 700]), find_gpu("h200")
    profile = datasheet_profile(card)
    whole, split = (layer_cost(m, x, tp, card, profile).seconds for x, tp in ((shape, 2), (half, 1)))
    np.testing.assert_allclose(whole, split)


def test_each_group_of_caches_has_a_block_table_of_each_request() -> None:
    setup = EngineSetup("ibm-granite/granite-4.0-h-tiny", "h200", BF16)
    built = setup.step_model(load_profile(setup.gpu)[0])
    assert built.cache_groups == len(setup.kv_plan(0).groups) == 10  # 4 layers of attention, 36 of Mamba 2
    batch = batch_of([(200, 300, 0, 0)])
    seconds = built.profile.coefficient("host.groups.request_seconds")
    found = built.timed(batch).scheduling.partials["host.groups.request_seconds"].item()
    assert found == pytest.approx(200 * 9 * seconds * built.profile.coefficient(HOST_PACE))
    assert "host.groups.request_seconds" not in model().timed(batch).scheduling.partials


def test_layers_plan_their_own_parts_where_windows_differ() -> None:
    """All layers of gpt-oss, of which half have a window; none of Qwen3. FlashAttention 3 is Hopper's."""
    batch = batch_of([(8, 500, 0, 0), (0, 1, 700, 0)])
    name = "attention_schedule.launch_seconds"
    found = model("fp8plan/gpt-oss-20b-bf16").cost(batch).partials[name]
    assert found[0] == pytest.approx(24 * datasheet_profile(find_gpu("h200")).coefficient(name), rel=0.01)
    assert found[1] > 0
    assert name not in model().cost(batch).partials
    assert name not in model("fp8plan/gpt-oss-20b-bf16", card=find_gpu("b200")).cost(batch).partials
