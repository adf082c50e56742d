"""Largest |q|, |k| and |v| of a transformers model while it runs: KV scales from the trainer's own forward.

with recording_amax(model) as amax:
    model(batch)                      # forward passes that the trainer does anyway
engine.sync_weights(weights, kv_amax=amax())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.weight_sync.kv_scales import Amax

if TYPE_CHECKING:
    import torch


@contextmanager
def recording_amax(model: torch.nn.Module) -> Iterator[Callable[[], Amax]]:
    """Record the largest magnitudes of a model's attention, over all forward passes inside of this `with`.

    Yields a function that returns {layer, as vLLM names it: [|q|, |k|, |v|]}, after RoPE and QK norms. Ranks that see
    different data must take the maximum of theirs.

    model: a transformers model whose attention goes through AttentionInterface ("sdpa", "flash_attention_2", ...).
    Raises ConfigError for another, "eager" among them.
    """
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = model.config
    name = config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys() or name == "eager":
        raise ConfigError(f"attention is {name!r}; allowed: one that transformers looks up: attn_implementation='sdpa'")
    attend = ALL_ATTENTION_FUNCTIONS[name]
    layers = {module: f"{where}.attn" for where, module in model.named_modules() if hasattr(module, "layer_idx")}
    found: dict[str, torch.Tensor] = {}

    def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if module in layers:
            with torch.no_grad():
                parts = (torch.linalg.vector_norm(x, ord=torch.inf, dtype=torch.float32) for x in (query, key, value))
                largest = torch.stack(list(parts))
                before = found.get(layers[module])
                found[layers[module]] = largest if before is None else torch.maximum(before, largest)
        return attend(module, query, key, value, *args, **kwargs)

    # Set on this table, not registered: a function that stands there, as verl's prefix grouper's, hides what is.
    ALL_ATTENTION_FUNCTIONS[name] = recording
    try:
        yield lambda: {layer: parts.tolist() for layer, parts in found.items()}
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if ALL_ATTENTION_FUNCTIONS.get(name) is not attend:  # it stood in this table
            ALL_ATTENTION_FUNCTIONS[name] = attend
