"""The KV cache that the layers of whole models keep, and the rules for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_families import shape_of

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Indexer, LatentAttention, Layer, Mlp
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import plan_kv_cache
from fp8plan.model.memory.kv_specs import LayerCache, layer_caches, model_caches, why_not_kept
from fp8plan.model.precision import BF16, FP8_KV
from fp8plan.model.setup import EngineSetup

DEEPSEEK = shape_of("deepseek-ai/DeepSeek-V2-Lite")
NEMOTRON = shape_of("nvidia/Nemotron-H-8B-Base-8K")
QWEN3_5 = shape_of("Qwen/Qwen3.5-9B")
QWEN3 = ModelShape.from_hf("Qwen3-8B")


def sparse(indexer: Indexer | None) -> ModelShape:
    mixer = LatentAttention(16, 0, 512, 128, 64, 128, indexer=indexer, shares_index=indexer is None)
    return replace(DEEPSEEK, layers=(Layer(mixer, Mlp(64)),) * 2)


def test_a_layer_keeps_what_its_mixer_does() -> None:
    assert layer_caches(QWEN3, FP8_KV) == (LayerCache("full", 2 * 8 * 128),) * 36
    kinds = [cache.kind for cache in layer_caches(NEMOTRON, BF16)]
    assert (kinds.count("state"), kinds.count("full")) == (24, 4)  # and the 24 MLPs nothing


def test_an_indexer_keeps_keys_of_its_own_and_packs_fp8_latents() -> None:
    keys = LayerCache("latent", 128 + 4)
    assert layer_caches(sparse(Indexer(64, 128, 2048)), BF16) == (LayerCache("latent", 576 * 2), keys) * 2
    assert layer_caches(sparse(Indexer(64, 128, 2048)), FP8_KV) == (LayerCache("latent", 656), keys) * 2
    assert layer_caches(sparse(None), FP8_KV) == (LayerCache("latent", 656),) * 2


def test_fp8_latents_are_kept_in_the_kernels_blocks() -> None:
    def block_size(given: int, on_cpu: bool = False) -> int:
        limits = EngineLimits(block_size=given)
        return plan_kv_cache(*model_caches(DEEPSEEK, FP8_KV, limits, 4096, on_cpu), num_blocks=100).block_size

    assert [block_size(given) for given in (16, 64, 128)] == [64, 64, 128]
    assert block_size(128, on_cpu=True) == 128


def test_rules_are_those_of_the_machine_and_of_the_engines_version() -> None:
    on_gpu, on_cpu = (model_caches(QWEN3, BF16, EngineLimits(), 4096, cpu)[1] for cpu in (False, True))
    assert (on_gpu.kernel_block, on_cpu.kernel_block) == (16, 32)
    assert on_gpu.max_model_len == 4096
    assert [EngineSetup("Qwen/Qwen3-8B", gpu).kv_plan(9).rules.vllm for gpu in ("h200", "cpu")] == ["0.33.0", "0.30.0"]
    older = EngineSetup("Qwen/Qwen3-8B", "h200", engine_version="0.31.0")
    assert older.kv_plan(9).rules.vllm == older.memory(512).kv.rules.vllm == "0.31.0"


def test_a_state_for_every_block_is_not_modelled() -> None:
    with pytest.raises(ConfigError, match=r"enable_prefix_caching is True.*'all'.*allowed: False"):
        model_caches(NEMOTRON, BF16, EngineLimits(), 4096, vllm="0.26.0")
    assert plan_kv_cache(*model_caches(NEMOTRON, BF16, EngineLimits(), 4096), num_blocks=100).keeps_states
    off = model_caches(NEMOTRON, BF16, EngineLimits(enable_prefix_caching=False), 4096, vllm="0.26.0")
    assert plan_kv_cache(*off, num_blocks=100).block_size == 1040
    assert plan_kv_cache(*model_caches(QWEN3_5, BF16, EngineLimits(), 4096), num_blocks=100).keeps_states


def test_a_model_of_states_alone_has_no_fp8_kv_cache() -> None:
    mamba = replace(NEMOTRON, layers=NEMOTRON.layers[:1])
    assert "MambaDType" in (why_not_kept(mamba, FP8_KV) or "")
    assert why_not_kept(mamba, BF16) is None
    with pytest.raises(ConfigError, match="allowed: a precision with a BF16 KV cache"):
        model_caches(mamba, FP8_KV, EngineLimits(enable_prefix_caching=False), 4096)
