"""A copy of a live model to return to: every tensor, and the objects that a reload makes anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Snapshot:
    """Of a model, on `device` ("cpu" costs a copy over the bus, "cuda" the model's memory once more)."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        once = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
        self._tensors = [(tensor, tensor.detach().to(device, copy=True)) for tensor in once.values()]
        # On a CPU a layer's packed weights hang on its attributes.
        owners = [
            x for layer in model.modules() for x in (layer, getattr(layer, "quant_method", None)) if x is not None
        ]
        self._attributes: list[tuple[Any, dict[str, Any]]] = [(owner, dict(vars(owner))) for owner in owners]

    def restore(self) -> None:
        for owner, attributes in self._attributes:
            vars(owner).update(attributes)
        for tensor, value in self._tensors:
            tensor.data.copy_(value)
