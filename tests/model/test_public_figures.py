"""Figures that others published of vLLM, each with its source."""

from __future__ import annotations

import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import gpu
from fp8plan.model.kv_cache.layers import model_caches
from fp8plan.model.kv_cache.plan import plan_kv_cache
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.weights import loaded_weight_bytes
from fp8plan.model.precision import PRESETS

BF16 = PRESETS["bf16"]
GIB = 1 << 30


def test_qwen3_30b_a3b_on_four_gpus_loads_14_25_gib() -> None:
    """github.com/vllm-project/vllm/issues/17469: vLLM 0.8.5 on four A10s, "Model loading took 14.2474 GiB" on each."""
    loaded = loaded_weight_bytes(ModelShape.from_hf("Qwen/Qwen3-30B-A3B"), BF16, 4) / GIB
    assert loaded == pytest.approx(14.2474, abs=0.002)
    assert round(loaded, 2) == 14.25


def test_deepseek_v2_lite_takes_0_95_gib_for_32768_tokens() -> None:
    """github.com/vllm-project/vllm/issues/15871: "max seq len (32768), (0.95 GiB KV cache is needed"."""
    limits = EngineLimits.for_gpu(gpu("h200"))
    caches, rules = model_caches(ModelShape.from_hf("deepseek-ai/DeepSeek-V2-Lite"), BF16, limits, 32768)
    plan = plan_kv_cache(caches, rules, num_blocks=0)
    assert round(plan.blocks_of_request(32768) * plan.block_bytes / GIB, 2) == 0.95


def test_gemma_4_31b_takes_225280_bytes_a_token_on_each_of_four_gpus() -> None:
    """github.com/vllm-project/vllm-metal/issues/505: one request of 262,144 tokens needs 220.0 GiB on one device where
    windows are kept whole, which are 901,120 bytes a token. A quarter of it on each of four is the figure of issue 38.
    """
    shape = ModelShape.from_hf("google/gemma-4-31B-it")
    assert shape.kv_bytes_per_token(BF16, 1) * 262_144 / GIB == 220.0
    assert shape.kv_bytes_per_token(BF16, 4) == 225_280
