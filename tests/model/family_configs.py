"""The configs that transformers makes for each family, and their shapes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from fp8plan.model.architecture import ModelShape

# Config classes whose defaults make no model -> what they lack. Of Gemma 4 those with per-layer embeddings are refused.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"num_key_value_heads": 8},
}


def config_of(name: str, changes: Mapping[str, Any]) -> Any:
    """The config of transformers' own class: vLLM, once imported, puts its own in CONFIG_MAPPING for some families."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    own = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES[name]
    return getattr(transformers, own)(**NEEDED.get(name, {}) | dict(changes))


def shape_of(config: Any, name: str = "test") -> ModelShape:
    return ModelShape.from_config(config.to_dict(), name, f"{name}/config.json")
