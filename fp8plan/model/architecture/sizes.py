"""The sizes of a model by their names, as `fp8plan models --json` prints them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fp8plan.model.architecture.parts import Attention, Experts, Mlp
from fp8plan.model.architecture.shape import ModelShape


def sizes_of(shape: ModelShape) -> dict[str, Any]:
    """The sizes of a model, and its parts with how often each occurs. Those of attention and MLPs stand apart too where
    all layers are alike.
    """
    sizes: dict[str, Any] = {"name": shape.name, "model_type": shape.model_type, "num_layers": shape.num_layers}
    sizes["hidden_size"] = shape.hidden_size
    sizes |= _alike(shape)
    names = ("vocab_size", "tie_word_embeddings", "max_position_embeddings", "source", "num_parameters")
    sizes |= {name: getattr(shape, name) for name in names}
    experts = shape.parts_of(Experts)
    sizes["experts"] = asdict(experts[0][0]) | {"layers": experts[0][1]} if len(experts) == 1 else None
    return sizes | {"parts": [{"part": type(x).__name__, "number": n, **asdict(x)} for x, n in shape.counted]}


def _alike(shape: ModelShape) -> dict[str, Any]:
    """The sizes that all layers of full attention with dense MLPs or experts share; {} for other models."""
    dense, attentions = shape.parts_of(Mlp), shape.parts_of(Attention)
    others = len(shape.counted) - len(dense) - len(shape.parts_of(Experts)) - len(attentions)
    if others or len(attentions) != 1 or len(dense) > 1 or attentions[0][0].window or attentions[0][0].chunk:
        return {}
    attention = attentions[0][0]
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": dense[0][0].inner if dense else 0,
        "qk_norm": attention.qk_norm != "none",
        "attention_bias": attention.qkv_bias,
    }
