from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
from kv_families import FAMILIES, KIMI_FULL, NEMOTRON, built
from kv_oracle import VLLM, Shape, of_ours, plan, specs

from fp8plan.model.architecture.mixers import Cache
from fp8plan.model.memory.kv_plan import plan_kv_cache
from fp8plan.model.memory.kv_specs import KvRules, LayerCache, in_bytes

MAX_MODEL_LEN, BUDGET = 32768, 2048
CPU_KERNEL_BLOCK = 32  # cpu_attn.py
BF16, FP32 = 2, 4
GIB = 1 << 30
LATENT = 512 + 64


def full(kv_heads: int, head_dim: int) -> Cache:
    return Cache("full", 2 * kv_heads * head_dim)


def sliding(kv_heads: int, head_dim: int, window: int) -> Cache:
    return Cache("sliding", 2 * kv_heads * head_dim, window)


def state(convolved: int, kernel: int, recurrent: int) -> Cache:
    return Cache("state", state_bytes=convolved * (kernel - 1) * BF16 + recurrent * FP32)


DELTA_NET = state(2 * 16 * 128 + 32 * 128, 4, 32 * 128 * 128)
MAMBA_OF_NEMOTRON = state(128 * 64 + 2 * 8 * 128, 4, 128 * 64 * 128)
GRANITE = state(128 * 64 + 2 * 128, 4, 128 * 64 * 128)
LFM2 = "vvfvvfvvfvfvfvfv"
KDA = state(3 * 32 * 128, 4, 32 * 128 * 128)

CACHES: dict[str, list[Cache]] = {
    "Qwen3-8B": [full(8, 128)] * 36,
    "gpt-oss-20b": [sliding(8, 64, 128), full(8, 64)] * 12,
    "Gemma 3 12B": ([sliding(8, 256, 1024)] * 5 + [full(8, 256)]) * 8,
    "Gemma 2 9B": [sliding(8, 256, 4096), full(8, 256)] * 21,
    "OLMo-3-7B": ([sliding(32, 128, 4096)] * 3 + [full(32, 128)]) * 8,
    "Llama-4-Scout": ([Cache("chunked", 2 * 8 * 128, 8192)] * 3 + [full(8, 128)]) * 12,
    "Qwen3-Next-80B": ([DELTA_NET] * 3 + [full(2, 256)]) * 12,
    "DeepSeek-V2-Lite": [Cache("latent", LATENT)] * 27,
    "Kimi-Linear-48B": [Cache("latent", LATENT) if i in KIMI_FULL else KDA for i in range(1, 28)],
    "Nemotron-H-8B": [{"*": full(8, 128), "M": MAMBA_OF_NEMOTRON}[kind] for kind in NEMOTRON if kind != "-"],
    "Granite-4-H-Small": ([GRANITE] * 5 + [full(8, 128)] + [GRANITE] * 4) * 4,
    "Falcon-H1-7B": [full(2, 128), state(3072 + 2 * 256, 4, 3072 * 256)] * 44,
    "LFM2-1.2B": [full(8, 64) if kind == "f" else state(2048, 3, 0) for kind in LFM2],
}
OF_MAMBA_2 = ("Nemotron-H-8B", "Granite-4-H-Small", "Falcon-H1-7B")


def rules_of(config, block_size: int) -> KvRules:
    """Our settings for an engine on a CPU, whose platform changes some of what it is given."""
    budget = config.scheduler_config.max_num_batched_tokens
    return KvRules(
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=budget,
        block_size=block_size,
        enable_prefix_caching=config.cache_config.enable_prefix_caching,
        async_scheduling=config.max_in_flight_tokens > budget,
        kernel_block=CPU_KERNEL_BLOCK,
        vllm=VLLM,
    )


@pytest.mark.vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_planned_as_by_the_layers_that_vllm_builds(name: str) -> None:
    latent = any(cache.kind == "latent" for cache in CACHES[name])
    # A CPU has no prefix caching with MLA.
    config, block_size, layers = built(FAMILIES[name], MAX_MODEL_LEN, BUDGET, prefix_caching=not latent)
    rules = rules_of(config, block_size)
    checkpoint = "Mamba 2 has a checkpoint block" if name in OF_MAMBA_2 else ""
    caches = [in_bytes(cache, BF16)._replace(checkpoint=checkpoint) for cache in CACHES[name]]
    for available in (2 * GIB, 5 * GIB + 12345, 60 * GIB):
        assert of_ours(plan_kv_cache(caches, rules).within(available)) == plan(config, layers, available)


def _sparse_layers(config, kv_cache_dtype: str):
    """DeepSeek-V3.2's specs by its layers' own methods: no CPU builds sparse attention."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    config.cache_config.block_size = 64
    latent = SimpleNamespace(
        kv_cache_dtype=kv_cache_dtype,
        head_size=LATENT,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
    )
    keys = SimpleNamespace(cache_config=config.cache_config, head_dim=128 + 128 // 128 * 4, dtype=torch.uint8)
    config.model_config.dtype = torch.bfloat16
    pair = (MLAAttention.get_kv_cache_spec(latent, config), DeepseekV32IndexerCache.get_kv_cache_spec(keys, config))
    return {str(place): spec for place, spec in enumerate(pair * 61)}


@pytest.mark.vllm
@pytest.mark.parametrize(("kv_cache_dtype", "kv_bytes"), [("auto", 2), ("fp8_ds_mla", 1)])
def test_an_indexer_has_a_cache_of_its_own(kv_cache_dtype: str, kv_bytes: int) -> None:
    rules = KvRules(163840, 16384, block_size=64, kernel_block=64, vllm=VLLM)
    config, _ = specs([], [], rules)
    layers = _sparse_layers(config, kv_cache_dtype)
    caches = [in_bytes(Cache("latent", LATENT), kv_bytes, sparse=True), LayerCache("latent", 132)] * 61
    assert of_ours(plan_kv_cache(caches, rules).within(30 * GIB)) == plan(config, layers, 30 * GIB)


@pytest.mark.vllm
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_qwen3_5_by_vllms_calculators(prefix_caching: bool) -> None:
    """Its module needs torchvision, which the tests go without."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator

    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4)
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", "float32")
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    rules = KvRules(40960, 16384, enable_prefix_caching=prefix_caching, vllm=VLLM)
    theirs = ([LayerCache("state", state_bytes=size)] * 3 + [LayerCache("full", 2 * 4 * 256 * BF16)]) * 8
    config, layers = specs(theirs, [Shape(4, 256 * BF16)] * 32, rules)
    caches = [in_bytes(cache, BF16) for cache in ([DELTA_NET] * 3 + [full(4, 256)]) * 8]
    assert of_ours(plan_kv_cache(caches, rules).within(60 * GIB)) == plan(config, layers, 60 * GIB)
