"""Figures that others published of vLLM, each with its source."""

from __future__ import annotations

from typing import Any

import pytest

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import plan_kv_cache
from fp8plan.model.memory.kv_specs import model_caches
from fp8plan.model.memory.plan import loaded_weight_bytes
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
    limits = EngineLimits.for_gpu(find_gpu("h200"))
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


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA_4: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256, "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    },
    "E4B": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256,
    },
    "26B-A4B": {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True,
        "num_experts": 128, "moe_intermediate_size": 704, "top_k_experts": 8, "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "towers", "billions"), [("E2B", 0.45, 5.1), ("E4B", 0.45, 8), ("26B-A4B", 0, 25.2)])
def test_gemma_4_has_the_parameters_of_its_model_card(name: str, towers: float, billions: float) -> None:
    """Gemma 4's model card: "5.1B with embeddings", "8B with embeddings" and 25.2B; of E2B and E4B with the vision
    encoder (about 150M) and the audio encoder (about 300M). Sizes are those that transformers writes to the checkpoints
    (src/transformers/models/gemma4/convert_gemma4_weights.py, commit 0f3f0632)."""
    config = GEMMA_4[name] | {
        "model_type": "gemma4_text", "vocab_size": 262_144, "head_dim": 256, "sliding_window": 512,
        "max_position_embeddings": 131_072,
    }  # fmt: skip
    total = ModelShape.from_config(config, name, "transformers").num_parameters / 1e9 + towers
    assert total == pytest.approx(billions, rel=0.015)
    assert round(ModelShape.from_hf("google/gemma-4-31B").num_parameters / 1e9, 1) == 30.7


def test_longcat_flash_has_the_parameters_of_its_model_card() -> None:
    """LongCat-Flash's model card: 560 billion parameters in all, 27 billion active on average."""
    config = {
        "model_type": "longcat_flash", "vocab_size": 131_072, "hidden_size": 6144, "num_layers": 28,
        "num_attention_heads": 64, "ffn_hidden_size": 12_288, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_topk": 12, "n_routed_experts": 512,
        "zero_expert_num": 256, "expert_ffn_hidden_size": 2048, "max_position_embeddings": 131_072,
    }  # fmt: skip
    shape = ModelShape.from_config(config, "LongCat-Flash", "hub")
    assert round(shape.num_parameters / 1e9) == 561
    [(experts, layers)] = shape.parts_of(Experts)
    assert (layers, experts.experts_per_token, experts.choices_per_token) == (28, 8, 12)
    idle = layers * (experts.num_experts - experts.experts_per_token) * 3 * experts.intermediate_size * 6144
    assert (shape.num_parameters - idle - shape.vocab_size * 6144) / 1e9 == pytest.approx(27, rel=0.02)
