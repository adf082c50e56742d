"""The configs that transformers makes for each family, and their shapes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.families import WRAPPERS

# Config classes whose defaults make no model -> what they lack.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "hunyuan_vl_text": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "longcat_flash": {"zero_expert_type": "identity"},  # for vLLM
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_omni_moe": {"thinker_config": {"text_config": {"head_dim": 128}}},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
}

# Text models that transformers builds inside of a multimodal one only.
INSIDE = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("qwen3_omni_moe_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "paddleocr_vl_text", "hunyuan_vl_text"),
)
# A multimodal type for each of them.
WRAPPED = [name for name, text in WRAPPERS.items() if text in INSIDE and not name.endswith("_thinker")]


def config_of(name: str, changes: Mapping[str, Any]) -> Any:
    """The config of transformers' own class: vLLM, once imported, puts its own in CONFIG_MAPPING for some families."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    own = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES[name]
    return getattr(transformers, own)(**NEEDED.get(name, {}) | dict(changes))


def shape_of(config: Any, name: str = "test") -> ModelShape:
    return ModelShape.from_config(config.to_dict(), name, f"{name}/config.json")
