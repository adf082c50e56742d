from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.activations import activation_peak_bytes
from fp8plan.model.precision import BF16, PRESETS

H200 = find_gpu("h200")
QWEN3_8B = ModelShape.from_hf("Qwen3-8B")
QWEN3_30B = ModelShape.from_hf("Qwen3-30B-A3B")

small = st.sampled_from(["Qwen3-0.6B", "Qwen3-8B", "Llama-3.2-1B", "Qwen3-30B-A3B"]).map(ModelShape.from_hf)
precisions = st.sampled_from(list(PRESETS.values()))


@given(small, precisions, st.integers(2048, 16384), st.integers(1, 1024))
def test_activations_grow_with_the_budget_and_the_batch(shape, precision, tokens, sequences) -> None:
    limits = EngineLimits(max_num_batched_tokens=tokens, max_num_seqs=sequences)
    peak = activation_peak_bytes(shape, precision, H200, limits)
    assert peak <= activation_peak_bytes(shape, precision, H200, replace(limits, max_num_batched_tokens=2 * tokens))
    assert peak <= activation_peak_bytes(shape, precision, H200, replace(limits, max_num_seqs=2 * sequences))


def test_activation_peak_is_the_widest_layer_or_the_sampler() -> None:
    # Measured at a budget of 16384, where the layers decide. A quarter of the batch changes nothing there.
    wide = activation_peak_bytes(QWEN3_8B, BF16, H200, EngineLimits(max_num_seqs=256), "0.26.0")
    assert wide == pytest.approx(1_707_098_624, rel=0.04)
    # At a small budget the logits of 1024 rows dominate; MoE models (V1 runner) copy them to FP32 four times.
    few = EngineLimits(max_num_batched_tokens=1024)
    assert activation_peak_bytes(QWEN3_8B, BF16, H200, few, "0.26.0") == pytest.approx(1024 * 151936 * 2, rel=0.2)
    assert activation_peak_bytes(QWEN3_30B, BF16, H200, few, "0.26.0") > 1024 * 151936 * 18


def test_from_0_30_on_logits_are_copied_to_fp32_and_the_counts_of_tokens_are_counted() -> None:
    few = EngineLimits(max_num_batched_tokens=1024)
    logits_and_counts = 1024 * 151936 * (2 + 4 + 4 + 1 / 8)
    assert activation_peak_bytes(QWEN3_8B, BF16, H200, few, "0.30.0") == pytest.approx(logits_and_counts, rel=0.05)
