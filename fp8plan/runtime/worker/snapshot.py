"""A copy of a live model to return to: every tensor, and the objects that a reload makes anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8plan.runtime.worker.places import Places

if TYPE_CHECKING:
    import torch


class Snapshot:
    """Of a model, on `device` ("cpu" costs a copy over the bus, "cuda" the model's memory once more)."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        once = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
        self._tensors = [(tensor, tensor.detach().to(device, copy=True)) for tensor in once.values()]
        self._places = Places(model)  # on a CPU a layer's packed weights hang on its attributes

    def restore(self) -> None:
        """The model has its tensors of before again, those that CUDA graphs have captured, with the values of before.
        What holds copies of them must be refreshed (native_reload.refresh)."""
        self._places.put_back()
        for tensor, value in self._tensors:
            tensor.data.copy_(value)
