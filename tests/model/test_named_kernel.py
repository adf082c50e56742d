"""The attention kernel that a plan names, and what FP8 caches cost with it."""

from __future__ import annotations

from math import exp
from typing import Final

import numpy as np
import pytest
from uniform_models import uniform

from benchmarks.tables import attention_kernels, probe
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.attention_backend import (
    KEEPS_SCALES,
    TRITON_DECODE,
    Backend,
    kernels,
    named_backend,
    why_fixed_kv_scales,
)
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.mixers import mixer_costs
from fp8plan.model.distributions import Fixed
from fp8plan.model.emit.job import scales_in
from fp8plan.model.emit.vllm import vllm_kwargs
from fp8plan.model.hardware import find_gpu, gpus
from fp8plan.model.plan.planner import plan
from fp8plan.model.precision import BF16, FP8_KV
from fp8plan.model.profile.library import load_profile
from fp8plan.model.risk.expected import UNIT_SCALES_SD, RiskBudget
from fp8plan.model.risk.theory import clipped_keys
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Workload

CLIPPED, PLAIN = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B"
WORKLOAD = Workload(prompts=8, samples_per_prompt=8, prompt_lengths=Fixed(512), response_lengths=Fixed(2048))
HEADS: Final = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
REPLACED = ("b200", "l40s", "rtx4090", "rtx5090")


@pytest.mark.parametrize("model", [name for name in bundled_models() if not name.startswith("fp8plan/")])
def test_no_engine_keeps_scales_that_clip_its_keys_where_another_kernel_measures_them(model: str) -> None:
    shape = ModelShape.from_hf(model)
    for gpu in gpus():
        fixed = why_fixed_kv_scales(gpu, FP8_KV, shape)
        assert not (fixed and clipped_keys(shape)) or gpu.stores_fp8_only
        assert named_backend(gpu, BF16, shape) is None
        if named_backend(gpu, FP8_KV, shape) == Backend.TRITON_ATTN:
            assert clipped_keys(shape)
            assert not fixed


@pytest.mark.parametrize("gpu", REPLACED)
def test_a_plan_names_triton_for_keys_that_scales_of_one_clip(gpu: str) -> None:
    engine = EngineSetup(CLIPPED, gpu, FP8_KV)
    assert vllm_kwargs(engine)["attention_backend"] == "TRITON_ATTN"
    assert scales_in("trl", engine, "unit") == "calibrated"
    made = plan(CLIPPED, gpu, WORKLOAD, budget=RiskBudget(accept="high"))
    assert any("TRITON_ATTN" in warning for warning in made.warnings)
    assert not any("taken to stay at 1.0" in warning for warning in made.warnings)
    (choice,) = (choice for choice in made.choices if choice.precision == "fp8_kv")
    assert choice.kl_k3 < 0.1 < choice.unit_kv_scales["kl_k3"]


@pytest.mark.parametrize(("model", "gpu"), [(PLAIN, "b200"), (PLAIN, "h200_sxm"), (CLIPPED, "h200_sxm")])
def test_elsewhere_a_plan_leaves_the_choice_to_vllm(model: str, gpu: str) -> None:
    assert "attention_backend" not in vllm_kwargs(EngineSetup(model, gpu, FP8_KV))


def test_decode_lasts_longer_with_triton() -> None:
    """The same layer without a bias is read by FlashInfer, in less time."""
    gpu = find_gpu("l40s")
    profile, _ = load_profile(gpu, strict=False)
    none, requests, read = np.zeros(1), np.full(1, 64.0), np.full(1, 64 * 2000.0)
    batch = StepBatch(requests, read, none, none, none, none, requests)
    triton, flashinfer = (
        float(mixer_costs(batch, layer, FP8_KV, 1, gpu, profile)["attention"].seconds[0])
        for layer in (uniform(**HEADS, attention_bias=True), uniform(**HEADS))
    )
    assert 1.2 < triton / flashinfer <= TRITON_DECODE


def test_the_kernel_of_a_layer_is_the_one_that_the_plan_names() -> None:
    for name in REPLACED:
        gpu, shapes = find_gpu(name), [ModelShape.from_hf(model) for model in (CLIPPED, PLAIN)]
        used = [kernels(gpu, FP8_KV, shape)[shape.layers[0].mixer] for shape in shapes]
        assert used == [Backend.TRITON_ATTN, KEEPS_SCALES]


def test_heads_of_several_sizes_are_read_by_triton_without_flash_attention_4() -> None:
    """Gemma4Config in vllm/model_executor/models/config.py: one kernel for all layers."""
    shape = ModelShape.from_hf("google/gemma-4-31B-it")
    for name, backend in {"l40s": Backend.TRITON_ATTN, "rtx5090": Backend.TRITON_ATTN, "b200": KEEPS_SCALES}.items():
        assert set(kernels(find_gpu(name), FP8_KV, shape).values()) == {backend}
        assert named_backend(find_gpu(name), FP8_KV, shape) is None


@pytest.mark.parametrize("gpu", ["l40s", "b200"])
def test_triton_is_named_only_instead_of_flashinfer(gpu: str) -> None:
    """gpt-oss has biased keys and sinks, which FlashInfer refuses below 9.0: there Triton is vLLM's choice."""
    shape = ModelShape.from_hf("fp8plan/gpt-oss-20b-bf16")
    assert set(kernels(find_gpu(gpu), FP8_KV, shape).values()) == {Backend.TRITON_ATTN}
    assert (named_backend(find_gpu(gpu), FP8_KV, shape) is None) == (gpu == "l40s")


def test_a_plan_without_an_fp8_cache_does_not_speak_of_its_kernel() -> None:
    made = plan(CLIPPED, "l40s", WORKLOAD, precisions=["bf16"])
    assert not any("TRITON_ATTN" in warning for warning in made.warnings)


def test_constants_are_what_was_measured() -> None:
    assert attention_kernels.triton_decode() == pytest.approx(TRITON_DECODE, abs=0.05)
    assert probe.unit_sd() == pytest.approx(UNIT_SCALES_SD, abs=0.005)


def test_scales_of_one_that_clip_nothing_do_not_move_the_expected_mismatch() -> None:
    """The mean of the measured models is within their spread of 1."""
    ratios = probe.unit_log_ratios()
    assert 1 / exp(UNIT_SCALES_SD) < exp(sum(ratios) / len(ratios)) < exp(UNIT_SCALES_SD)
