"""Which modules may be written in place: those where that gives, bit for bit, what vLLM's own reload gives.

The layout of live tensors cannot be told from their shapes (some kernels swap halves of a matrix, some keep packed
copies beside it), so it is tried: one module of each kind is reloaded by vLLM with random weights, compared with what
writing in place would have left there, and put back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8plan.runtime.live.binding import Binding
from fp8plan.runtime.live.load_map import LoadMap
from fp8plan.runtime.live.native_reload import NativeReload
from fp8plan.runtime.manifest import SCALE_SUFFIX, Entry
from fp8plan.runtime.quantize_groups import quantized

if TYPE_CHECKING:
    import torch

# What a reload makes anew on a layer or its quantisation method, and may: flags, and a kernel's settings, whose scales
# are refreshed after every sync (native_reload.refresh_expert_scales).
HARMLESS = ("_already_called_process_weights_after_loading", "moe_kernel", "moe_quant_config")


def refused(worker: Any, manifest: Sequence[Entry], found: LoadMap, binding: Binding) -> dict[str, str]:
    """Kinds of modules that must not be written in place, with why; modules of the same kind stand or fall together."""
    model = worker.model_runner.get_model()
    layers = dict(model.named_modules())
    if any("MLA" in type(layer).__name__ for layer in layers.values()):  # its absorbed matrices are made from weights
        return {kind(layers[module]): "latent attention keeps derived weights" for module in binding.direct}
    samples = {kind(layers[module]): module for module in sorted(binding.direct, reverse=True)}
    reasons = {}
    for what, module in samples.items():
        entries = [entry for entry in manifest if module in found.modules.get(entry.name, ())]
        entries = [entry for entry in entries if not entry.name.endswith(SCALE_SUFFIX)]
        if reason := _why_not(worker, layers[module], entries, binding):
            reasons[what] = reason
    return reasons


def kind(layer: torch.nn.Module) -> str:
    """Class, quantisation method and kernel: what decides how a layer's live tensors are laid out."""
    method = getattr(layer, "quant_method", None)
    kernel = getattr(method, "fp8_linear", None)
    backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
    parts = [type(layer).__name__]
    parts += [] if method is None else [type(method).__name__]
    parts += [] if kernel is None else [type(kernel).__name__]
    return " / ".join([*parts, *([] if backend is None else [str(backend)])])


def _why_not(worker: Any, layer: torch.nn.Module, entries: Sequence[Entry], binding: Binding) -> str | None:
    import torch

    method = getattr(layer, "quant_method", None)
    sources = {entry.name: _random(entry, worker.device, seed) for seed, entry in enumerate(entries)}
    with _put_back(layer, method) as changed, torch.no_grad():
        reload = NativeReload(worker)
        reload.open()
        try:
            reload.load(sources.items())
        finally:
            reload.close()
        if hidden := [name for name in changed() if name not in HARMLESS]:
            return f"a reload also sets {', '.join(hidden)}"
        for name, source in sources.items():
            if not all(_equal(move, source) for move in binding.moves[name]):
                return f"vLLM's kernel lays {name} out in its own way"
    return None


def _random(entry: Entry, device: torch.device, seed: int) -> torch.Tensor:
    """Gaussian weights in which every block has another size."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    tensor = torch.empty(entry.shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=generator)
    return tensor * torch.linspace(0.5, 2.0, entry.shape[-1], device=device, dtype=torch.bfloat16)


def _equal(move: Any, source: torch.Tensor) -> bool:
    import torch

    part = source[tuple(slice(*extent) for extent in move.source)].reshape(move.target.shape)
    if move.scale is None:
        return move.target.dtype != torch.bfloat16 or torch.equal(part, move.target)
    ((q, scale),) = quantized([part])
    return torch.equal(q.view(torch.uint8), move.target.view(torch.uint8)) and torch.equal(scale, move.scale)


@contextmanager
def _put_back(layer: torch.nn.Module, method: Any) -> Iterator[Any]:
    """Afterwards the layer's tensors and attributes, and its method's, are what they were. Gives a function that lists
    the attributes that are other objects by now."""
    tensors = [
        (tensor, tensor.detach().clone())
        for tensor in (*layer._parameters.values(), *layer._buffers.values())
        if tensor is not None
    ]
    owners = [owner for owner in (layer, method) if owner is not None]
    before = [dict(vars(owner)) for owner in owners]

    def changed() -> list[str]:
        return [
            name
            for owner, was in zip(owners, before, strict=True)
            for name, value in vars(owner).items()
            if value is not was.get(name) and not _same(value, was.get(name))
        ]

    try:
        yield changed
    finally:
        for owner, was in zip(owners, before, strict=True):
            vars(owner).clear()
            vars(owner).update(was)
        for tensor, value in tensors:
            tensor.data.copy_(value)


def _same(value: Any, before: Any) -> bool:
    """Equal plain settings; objects and tensors count as other."""
    return type(value) is type(before) and isinstance(value, (bool, int, float, str, list, tuple)) and value == before
