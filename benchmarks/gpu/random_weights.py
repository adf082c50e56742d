"""A trainer's weights for a measurement: random tensors under a Qwen3 checkpoint's names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.weight_sync.manifest import Entry, Manifest

if TYPE_CHECKING:
    import torch

SCALE = 0.02  # standard deviation, as language models are initialised


def checkpoint_entries(config: Mapping[str, Any]) -> Manifest:
    """Names and shapes of a Qwen3 checkpoint, dense or MoE, from its config.json. Raises ConfigError for others."""
    if config.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise ConfigError(f"no names are known for {config.get('model_type')!r}; allowed: qwen3, qwen3_moe")
    return tuple(Entry(name, "bfloat16", shape) for name, shape in _shapes(config))


def random_weights(manifest: Manifest, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Gaussian matrices, norms around 1."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    found = {}
    for name, _, shape in manifest:
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        found[name] = tensor.normal_(1.0 if len(shape) == 1 else 0.0, SCALE, generator=generator)
    return found


def _shapes(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for number in range(c["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for part, shape in {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "q_norm": (head,),
            "k_norm": (head,),
        }.items():
            yield f"{layer}.self_attn.{part}.weight", shape
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        experts = c.get("num_experts")
        if experts:
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
        inner = c["moe_intermediate_size"] if experts else c["intermediate_size"]
        for prefix in [f"{layer}.mlp.experts.{e}" for e in range(experts)] if experts else [f"{layer}.mlp"]:
            yield f"{prefix}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.up_proj.weight", (inner, hidden)
            yield f"{prefix}.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (c["vocab_size"], hidden)
