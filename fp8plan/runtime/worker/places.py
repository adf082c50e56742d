"""Which tensors and attributes the modules of a live model have: the objects themselves, to be put back later.

A reload that fails in the middle leaves modules with tensors that no CUDA graph has captured, and vLLM forgets the ones
before them (`_layerwise_process` raises before it puts them back, and the reload's end then drops them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Places:
    """Of all modules of a model and their quantisation methods, as they are now. Values are not copied."""

    def __init__(self, model: torch.nn.Module) -> None:
        layers = list(model.modules())
        methods = [method for layer in layers if (method := getattr(layer, "quant_method", None)) is not None]
        self._owners: list[tuple[Any, dict[str, Any]]] = [(owner, dict(vars(owner))) for owner in (*layers, *methods)]
        # vars hold the containers of a module's tensors, and a reload changes what is in them.
        self._containers: list[tuple[Any, Any]] = [
            (container, container.copy())
            for layer in layers
            for container in (layer._parameters, layer._buffers, layer._non_persistent_buffers_set)
        ]

    def put_back(self) -> None:
        """Every module has the very objects again that it had."""
        for owner, attributes in self._owners:
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, content in self._containers:
            container.clear()
            container.update(content)

    def changed(self, *owners: Any) -> list[str]:
        """Attributes of modules or methods that are something else by now."""
        return [
            name
            for owner, before in self._owners
            if any(owner is one for one in owners)
            for name, value in vars(owner).items()
            if value is not before.get(name) and not _same(value, before.get(name))
        ]


def _same(value: Any, before: Any) -> bool:
    """Equal plain settings; objects and tensors count as other."""
    return type(value) is type(before) and isinstance(value, (bool, int, float, str, list, tuple)) and value == before
