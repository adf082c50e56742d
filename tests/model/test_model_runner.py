from __future__ import annotations

from dataclasses import replace

from measured_families import shape_of

from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import model_runner

H200 = find_gpu("h200")


def test_0_26_takes_v2_for_dense_models_and_a_few_with_experts() -> None:
    """vLLM 0.26's list; tests/model/memory/test_families.py has what twelve engines ran."""
    qwen3 = ModelShape.from_hf("Qwen3-30B-A3B")
    assert model_runner(qwen3, H200, "0.26.0") == "v1"
    assert model_runner(replace(qwen3, model_type="qwen2_moe"), H200, "0.26.0") == "v2"
    assert model_runner(ModelShape.from_hf("Qwen3-8B"), H200, "0.26.0") == "v2"
    assert model_runner(shape_of("nvidia/Nemotron-H-8B-Base-8K"), H200, "0.26.0") == "v1"


def test_from_0_30_on_v2_runs_every_model_on_a_gpu() -> None:
    for model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "nvidia/Nemotron-H-8B-Base-8K"):
        assert model_runner(shape_of(model), H200, "0.30.0") == "v2"
    assert model_runner(ModelShape.from_hf("Qwen3-8B"), find_gpu("cpu"), "0.30.0") == "v1"
