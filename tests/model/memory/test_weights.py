from __future__ import annotations

from measured_families import shape_of

from fp8plan.model.architecture import ModelShape
from fp8plan.model.memory.plan import loaded_weight_bytes
from fp8plan.model.precision import BF16, FP8_KV


def test_fp8_of_the_kv_cache_alone_takes_weight_memory_too() -> None:
    shape = ModelShape.from_hf("Qwen3-8B")
    # DeepGEMM is loaded as soon as anything is FP8.
    assert loaded_weight_bytes(shape, FP8_KV) - loaded_weight_bytes(shape, BF16) == 33_554_432


def test_mla_loads_deepgemm_whatever_the_precision() -> None:
    shape = shape_of("deepseek-ai/DeepSeek-V2-Lite")
    assert loaded_weight_bytes(shape, FP8_KV) == loaded_weight_bytes(shape, BF16)
