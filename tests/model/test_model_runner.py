from __future__ import annotations

from dataclasses import replace

from measured_families import shape_of

from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import model_runner

H200 = find_gpu("h200")


def test_v2_is_for_dense_models_and_a_few_with_experts() -> None:
    """vLLM 0.26's list; tests/model/memory/test_families.py has what twelve engines ran."""
    qwen3 = ModelShape.from_hf("Qwen3-30B-A3B")
    assert model_runner(qwen3, H200) == "v1"
    assert model_runner(replace(qwen3, model_type="qwen2_moe"), H200) == "v2"
    assert model_runner(ModelShape.from_hf("Qwen3-8B"), H200) == "v2"


def test_recurrent_layers_and_cpus_have_v1() -> None:
    assert model_runner(shape_of("nvidia/Nemotron-H-8B-Base-8K"), H200) == "v1"
    assert model_runner(ModelShape.from_hf("Qwen3-8B"), find_gpu("cpu")) == "v1"
