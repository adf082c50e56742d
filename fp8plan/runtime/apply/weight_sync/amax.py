"""Recorders of the largest magnitudes that attention sees, of which KV scales are made.

AmaxRecorder runs in vLLM's worker. A trainer records them in its own forward passes:

    with recording_amax(model) as amax:
        model(batch)
    engine.sync_weights(weights, kv_amax=amax())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.kv_scales import PARTS, Amax, attention_layers

if TYPE_CHECKING:
    import torch


class AmaxRecorder:
    """A recorder of the largest |q|, |k| and |v| that each attention layer of a model gets, until `stop`.

    vLLM calls attention from Python, between the CUDA graphs, in every step that fills prompts. Only steps without
    prompts are whole graphs. So prompts with one response token show all values, and the engine's mode stays as it is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        import torch

        self._layers = dict(attention_layers(model))
        device = next(model.parameters()).device
        self._amax = torch.full((len(self._layers), len(PARTS)), -1.0, dtype=torch.float32, device=device)  # -1: none
        for number, layer in enumerate(self._layers.values()):
            layer.impl.forward = self._wrapped(layer.impl.forward, self._amax[number])

    @staticmethod
    def _wrapped(forward: Any, amax: torch.Tensor) -> Any:
        import torch

        cells = list(amax)  # views, made once: a model has dozens of layers, and each launch takes time

        def recording(layer: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            for cell, tensor in zip(cells, (query, key, value), strict=True):
                if tensor is None or not tensor.numel():
                    continue
                # Q, where attention runs in FP8, is rounded already, by up to 1/16. The margin covers 5% of that.
                if tensor.dtype == torch.float8_e4m3fn:
                    most = torch.linalg.vector_norm(tensor.float(), ord=torch.inf) * layer._q_scale
                else:
                    most = torch.linalg.vector_norm(tensor, ord=torch.inf, dtype=torch.float32)
                torch.maximum(cell, most, out=cell)
            return forward(layer, query, key, value, *args, **kwargs)

        return recording

    def stop(self) -> Amax:
        """Return the amax, and leave the layers as they were. A layer that never ran has 0; empty if none ran."""
        for layer in self._layers.values():
            del layer.impl.forward
        any_ran = bool((self._amax >= 0).any())
        return dict(zip(self._layers, self._amax.clamp(min=0).tolist(), strict=True)) if any_ran else {}


@contextmanager
def recording_amax(model: torch.nn.Module) -> Iterator[Callable[[], Amax]]:
    """Record the largest magnitudes of a model's attention, over all forward passes inside of this `with`.

    Yields a function that returns {layer, as vLLM names it: [|q|, |k|, |v|]}, after RoPE and QK norms. Ranks that see
    different data must take the maximum of theirs.

    model: a transformers model whose attention goes through AttentionInterface ("sdpa", "flash_attention_2", ...)

    Raises ConfigError for another attention, such as "eager".
    """
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = model.config
    name = config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys() or name == "eager":
        raise ConfigError(f"attention is {name!r}; allowed: one that transformers looks up: attn_implementation='sdpa'")
    attend = ALL_ATTENTION_FUNCTIONS[name]
    layers = {module: f"{where}.attn" for where, module in model.named_modules() if hasattr(module, "layer_idx")}
    recorded: dict[str, torch.Tensor] = {}

    def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if module in layers:
            with torch.no_grad():
                norms = [torch.linalg.vector_norm(t, ord=torch.inf, dtype=torch.float32) for t in (query, key, value)]
                largest = torch.stack(norms)
                before = recorded.get(layers[module], largest)
                recorded[layers[module]] = torch.maximum(before, largest)
        return attend(module, query, key, value, *args, **kwargs)

    # Set in this table, not registered: its entries, such as that of verl's prefix grouper, hide registered ones.
    ALL_ATTENTION_FUNCTIONS[name] = recording
    try:
        yield lambda: {layer: parts.tolist() for layer, parts in recorded.items()}
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if ALL_ATTENTION_FUNCTIONS.get(name) is not attend:  # it was an entry of this table, not registered
            ALL_ATTENTION_FUNCTIONS[name] = attend
