"""GPUs without FP8 tensor cores: what is planned there, what is not, and whose limit that is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.attention_backend import AMPERE_HEADS, why_no_fp8_kv
from fp8plan.model.cost.attention import attention_cost, cache_cost
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.power import flops_bound
from fp8plan.model.distributions import Fixed
from fp8plan.model.emit.vllm import vllm_kwargs
from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.precision import BF16, FP8_KV, PRESETS
from fp8plan.model.profile.library import WIDENED_KV, datasheet_profile, load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Z90
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Workload

SMALL, DENSE = "fp8plan/dense-50m", "Qwen/Qwen3-8B"
WORK = Workload(4, 2, Fixed(64), Fixed(64))
A100 = find_gpu("a100")
FULL, LATENT = "full", "latent"
EVERY = (*gpus(), find_gpu("cpu"), replace(A100, compute_capability=(8, 6)), replace(A100, compute_capability=(7, 5)))


def limit_named(reason: str) -> bool:
    """Tell whether a sentence begins with whose limit it tells: vLLM's or fp8plan's."""
    return re.match(r"(vLLM|fp8plan)\b", reason) is not None


@pytest.mark.parametrize("card", EVERY, ids=lambda g: f"{g.name}-{g.architecture}")
def test_a_precision_is_planned_or_refused_by_whose_limit_it_is(card: Gpu) -> None:
    for precision in PRESETS.values():
        reason = card.why_not(precision)
        assert reason is None or limit_named(reason)
        assert "tensor cores" not in (reason or "")
        if card.compute_capability is None or card.compute_capability >= (8, 0):
            assert reason is None or precision.weights != "bf16"  # a KV cache is storage


@pytest.mark.parametrize(
    ("card", "model"),
    [*product(("l40s", "a100", "a100_pcie", "h20", "cpu"), (SMALL,)), ("a100", "fp8plan/gpt-oss-20b-bf16")],
)
def test_every_row_of_a_plan_is_timed_or_says_whose_limit_it_is(card: str, model: str) -> None:
    answer = plan(model, card, WORK)
    for row in answer.choices:
        assert row.available == (row.reason is None)
        assert row.reason is None or limit_named(row.reason)
        assert "no FP8 tensor cores" not in (row.reason or "")


@pytest.fixture(scope="module")
def starved() -> Plan:
    """A plan for an A100 whose BF16 pool is too small."""
    work = Workload(16, 8, Fixed(500), Fixed(1500))
    return plan(DENSE, A100, work, limits=EngineLimits(gpu_memory_utilization=0.35, max_num_seqs=128))


def test_an_fp8_kv_cache_on_ampere_holds_twice_the_tokens_and_is_timed_with_a_wide_band(starved: Plan) -> None:
    rows = {row.precision: row for row in starved.choices}
    bf16, fp8 = rows["bf16"], rows["fp8_kv"]
    # As on the A100 of vllm issue 42058, where 389,872 tokens became 779,760.
    assert (fp8.kv_cache_tokens or 0) - 2 * (bf16.kv_cache_tokens or 0) in (0, 16)
    assert (bf16.preemptions or 0) > 2 * (fp8.preemptions or 0)
    assert fp8.extrapolated
    assert (fp8.speedup_high or 0) > 1.6 * (fp8.speedup_low or 1)  # FP8 with a measured kernel: 1.2
    assert sum("the tokens that it holds are certain" in reason for reason in starved.reasons) == 1
    assert (starved.kv_scales, fp8.refused_by) == ("unit", {})
    emitted = json.loads(starved.emit("vllm", "fp8_kv"))
    assert emitted["engine_args"]["attention_backend"] == "FLASHINFER"
    assert "RolloutEngine" not in " ".join(emitted["notes"])  # it does not measure the scales there
    assert any("K and V scales" in warning for warning in starved.warnings)


@pytest.mark.parametrize("target", ["verl", "trl"])
def test_verl_and_trl_run_an_fp8_kv_cache_there_with_fixed_scales(target: str) -> None:
    answer = plan(SMALL, A100, WORK, target=target)
    assert answer.kv_scales == "unit"
    text = answer.emit(target, "fp8_kv")
    assert "K and V scales stay at 1.0" in text
    assert "fp8plan measures the K and V scales" not in text


def decode_ratio(card: Gpu, profile: Profile) -> tuple[float, float]:
    """FP8's seconds of decode attention over BF16's, and the standard deviation of its log, at long contexts."""
    part = next(x for x, _ in ModelShape.from_hf(DENSE).parts_of(Attention))
    zero = np.zeros(1, dtype=np.int64)
    names = ("prefill_tokens", "prefill_requests", "prefill_kv_tokens", "prefill_pairs")
    requests = np.array([128])
    batch = StepBatch(
        decode_requests=requests,
        decode_kv_tokens=requests * 12_000,
        sampled_requests=requests,
        **dict.fromkeys(names, zero),
    )
    own, base = (attention_cost(batch, part, p, 1, card, profile) for p in (FP8_KV, BF16))
    gradient = {name: float(x[0] / own.seconds[0]) for name, x in own.partials.items()}
    g = np.array(list(gradient.values()))
    return float(own.seconds[0] / base.seconds[0]), float(np.sqrt(g @ profile.covariance(list(gradient)) @ g))


def test_the_band_holds_half_of_bf16s_time_and_half_as_much_again() -> None:
    setup = EngineSetup(SMALL, A100, FP8_KV)
    profile = setup.step_model(load_profile(A100)[0]).profile
    assert profile.assumes("attention.fp8")
    assert not load_profile(A100)[0].coefficients.keys() & {f"{WIDENED_KV}launch_seconds"}
    ratio, sd = decode_ratio(A100, profile)
    low, high = ratio * np.exp(-Z90 * sd), ratio * np.exp(Z90 * sd)
    assert 0.75 < ratio < 1.0
    assert low < 0.52
    assert high > 1.5


def test_every_ampere_gpu_has_that_kernel_and_no_other_gpu() -> None:
    for capability in ((8, 0), (8, 6), (8, 7)):
        sheet = datasheet_profile(replace(A100, compute_capability=capability))
        assert sheet.kernel_backends["attention.fp8"] == "flashinfer"
        assert f"{WIDENED_KV}decode_sm_bandwidth" in sheet.coefficients
    assert f"{WIDENED_KV}decode_sm_bandwidth" not in datasheet_profile(find_gpu("l40s")).coefficients


def test_queries_stay_in_bf16_where_kernels_widen_the_cache() -> None:
    part = next(x for x, _ in ModelShape.from_hf(DENSE).parts_of(Attention))
    for name, quantised in (("a100", False), ("h200", True)):
        card = find_gpu(name)
        cost = cache_cost(np.array([64]), part, FP8_KV, 1, card, load_profile(card)[0])
        assert ("quantise_query.launch_seconds" in cost.partials) == quantised
    zero = np.zeros(1, dtype=np.int64)
    batch = StepBatch(np.array([8]), np.array([9000]), zero, zero, zero, zero, np.array([8]))
    profile = load_profile(A100)[0]
    in_bf16, in_fp8 = (flops_bound(EngineSetup(SMALL, A100, p).step_model(profile), batch) for p in (BF16, FP8_KV))
    assert in_bf16 == in_fp8  # not at a rate of FP8 that it does not have


@settings(max_examples=50)
@given(
    head_dims=st.sets(st.sampled_from([64, 80, 96, 128, 192, 256, 512]), max_size=3),
    sinks=st.booleans(),
    latent=st.booleans(),
    minor=st.sampled_from([0, 6, 7]),
)
def test_flashinfer_is_the_only_kernel_on_ampere(head_dims: set[int], sinks: bool, latent: bool, minor: int) -> None:
    kinds = [LATENT if latent else FULL]
    reason = why_no_fp8_kv(kinds, head_dims, sinks=sinks, capability=(8, minor))
    wrong = sorted(head_dims - set(AMPERE_HEADS))
    assert (reason is None) == (not wrong and not sinks and not latent)
    if reason is not None:
        assert reason.startswith(
            f"vLLM's only kernel for an FP8 KV cache on compute capability 8.{minor} is FlashInfer's"
        )
        assert ("sinks" in reason, "latent" in reason) == (sinks, latent)
        assert all(str(size) in reason for size in wrong)
    assert why_no_fp8_kv(kinds, {128}, sinks=sinks, capability=(8, 9)) is None


def test_the_engine_is_told_its_kernel_where_there_is_one_only() -> None:
    limits = EngineLimits(max_model_len=1024)

    def told(name: str, precision: str) -> object:
        return vllm_kwargs(EngineSetup(SMALL, name, precision, limits)).get("attention_backend")

    assert told("a100", "fp8_kv") == "FLASHINFER"
    assert {told("a100", "bf16"), told("h200", "fp8_kv"), told("l40s", "fp8_kv"), told("cpu", "fp8_kv")} == {None}


def test_memory_of_a_cache_that_no_kernel_reads_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="FlashInfer's, which takes no attention sinks there"):
        EngineSetup("fp8plan/gpt-oss-20b-bf16", A100, FP8_KV).memory(1024)
