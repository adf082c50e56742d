"""A trainer's weights for a measurement: random tensors under the names and shapes of a model's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fp8plan.runtime.apply.weight_sync.manifest import Entry, Manifest

if TYPE_CHECKING:
    import torch

SCALE = 0.02  # standard deviation, as language models are initialised


def checkpoint_entries(config: Mapping[str, Any]) -> Manifest:
    """Names, dtypes and shapes that transformers would save for a config.json, without making the tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    whole = AutoConfig.for_model(**{"pad_token_id": None} | config)  # Qwen3-Next's has no default for it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    saved = revert_weight_conversion(model, model.state_dict())
    if config.get("tie_word_embeddings"):
        saved.pop("lm_head.weight", None)
    return tuple(Entry(name, "bfloat16", tuple(x.shape)) for name, x in saved.items())  # as sync_weights takes them


def random_weights(manifest: Manifest, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Gaussian matrices, vectors around 1."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, dtype, shape in manifest:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        tensors[name] = tensor.normal_(1.0 if len(shape) == 1 else 0.0, SCALE, generator=generator)
    return tensors
