from __future__ import annotations

import pytest
from measured_families import shape_of

from fp8plan.model.architecture import ModelShape
from fp8plan.model.memory.plan import loaded_weight_bytes
from fp8plan.model.precision import BF16, FP8_KV

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "tp", "gib"),
    [
        ("Qwen3-8B", 1, 15.27),  # "Model loading took 15.27 GiB memory", vLLM 0.15 and 0.19
        ("Llama-3.1-8B-Instruct", 1, 14.9889),  # vLLM PR 17122
        ("Qwen3-30B-A3B", 4, 14.2474),  # vLLM issue 17469
        ("Qwen2.5-32B-Instruct", 2, 30.7098),  # vLLM issue 15815: 192 MiB of it are the allocator's rounding
    ],
)
def test_bf16_weights_equal_what_vllm_logs(name: str, tp: int, gib: float) -> None:
    assert loaded_weight_bytes(ModelShape.from_hf(name), BF16, tp) / GIB == pytest.approx(gib, abs=0.005)


def test_fp8_of_the_kv_cache_alone_takes_weight_memory_too() -> None:
    shape = ModelShape.from_hf("Qwen3-8B")
    # DeepGEMM is loaded as soon as anything is FP8.
    assert loaded_weight_bytes(shape, FP8_KV) - loaded_weight_bytes(shape, BF16) == 33_554_432


def test_mla_loads_deepgemm_whatever_the_precision() -> None:
    shape = shape_of("deepseek-ai/DeepSeek-V2-Lite")
    assert loaded_weight_bytes(shape, FP8_KV) == loaded_weight_bytes(shape, BF16)
