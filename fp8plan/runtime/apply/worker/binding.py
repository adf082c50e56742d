"""The shortcut past vLLM's layerwise reload: which live tensors are written directly, and how.

vLLM reloads a layer by filling a new BF16 copy of it, quantising that with a dozen torch kernels and copying the result
over the live tensors. If the live tensors have the checkpoint's layout, the same bits can be written to them straight
from the trainer's tensor: one read, one write. Layers of another or unknown layout are left to vLLM.

Shapes do not show the layout: some kernels swap halves of a matrix, some keep packed copies beside it. So `refused`
tries it: vLLM reloads one module of each kind with random weights. The result is compared with a write in place, and
the module is put back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8plan.errors import LostEngineError
from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK, scale_shape, stands_alone
from fp8plan.runtime.apply.quantize.targets import quantized
from fp8plan.runtime.apply.weight_sync.delta.places import Window
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX, Entry
from fp8plan.runtime.apply.worker.load_map import Box, Copy, LoadMap
from fp8plan.runtime.apply.worker.vllm_reload import NativeReload, Places

if TYPE_CHECKING:
    import torch


class Move(NamedTuple):
    """One matrix or vector written in place: tensor[source] -> target, quantised if it has a scale to write."""

    source: Box
    target: torch.Tensor
    scale: torch.Tensor | None


class WholeTiles(NamedTuple):
    """The tiles of a sent tensor that lie whole in a live part (weight_sync.delta.tiles).

    live: bit patterns of their values, an integer dtype [rows, columns]
    sent: their rows and columns among the tensor's tiles
    """

    live: torch.Tensor
    sent: tuple[slice, slice]


class Target(NamedTuple):
    """The live part that a move writes, for patches. tiles: None: no tile lies whole in it"""

    window: Window
    tiles: WholeTiles | None


@dataclass(frozen=True, slots=True)
class Binding:
    """The way of every tensor of a manifest into the live model.

    moves:  manifest name -> its moves; other names go through vLLM's loader
    native: modules that vLLM's layerwise reload loads -> why
    direct: modules whose live tensors are written in place
    """

    moves: Mapping[str, tuple[Move, ...]]
    native: Mapping[str, str]
    direct: frozenset[str]


def bind(model: torch.nn.Module, load_map: LoadMap, manifest: Sequence[Entry], left: Mapping[str, str]) -> Binding:
    """Return the Binding of a traced manifest. left: modules that are left to vLLM -> why"""
    layers = dict(model.named_modules())
    moves: dict[str, tuple[Move, ...]] = {}
    native = dict.fromkeys(load_map.opaque, "its loader does more than copy") | dict(left)
    by_name = {entry.name: entry for entry in manifest}
    for name, copies in load_map.copies.items():
        try:
            moves[name] = tuple(
                move
                for copy in copies
                for move in _moves(layers[copy.module], copy, by_name[name], load_map)
                if copy.module not in native
            )
        except NotInPlaceError as reason:
            native = dict.fromkeys(load_map.modules[name], str(reason)) | native
    # All modules that one tensor feeds are loaded in the same way.
    while (
        mixed := {m for fed in load_map.modules.values() if not native.keys().isdisjoint(fed) for m in fed}
        - native.keys()
    ):
        native |= dict.fromkeys(mixed, "shares a tensor with a module that vLLM loads")
    everywhere = {module for fed in load_map.modules.values() for module in fed}
    kept = {name: writes for name, writes in moves.items() if native.keys().isdisjoint(load_map.modules[name])}
    return Binding(kept, native, frozenset(everywhere - native.keys()))


class NotInPlaceError(Exception):
    """A live tensor without the checkpoint's layout. The message says how it is laid out."""


def _moves(layer: torch.nn.Module, copy: Copy, entry: Entry, load_map: LoadMap) -> Iterator[Move]:
    import torch

    home = (copy.module, copy.param)
    shape, dtype, whole = load_map.shapes[home], load_map.dtypes[home], load_map.sent[entry.name].shape
    live, scale = layer._parameters.get(copy.param), layer._parameters.get(copy.param + SCALE_SUFFIX)
    if live is None or tuple(live.shape) != shape or not live.is_contiguous():
        raise NotInPlaceError(f"vLLM keeps no {copy.param} of the checkpoint's shape")
    if live.dtype == dtype and entry.dtype == str(dtype).removeprefix("torch."):
        for source, target in _matrices(copy.source, copy.target):
            yield Move(source, _view(live.data, target), None)
        return
    if live.dtype == dtype:
        raise NotInPlaceError(f"vLLM keeps {copy.param} as {live.dtype}, and {entry.dtype} is sent")
    if live.dtype != torch.float8_e4m3fn or scale is None or not _fits(scale, shape):
        raise NotInPlaceError(f"vLLM keeps {copy.param} as {live.dtype}, with other scales than blocks of {BLOCK}")
    if not _stands_alone(copy.target, shape) or (entry.dtype != "bfloat16" and not _stands_alone(copy.source, whole)):
        raise NotInPlaceError(f"parts of {copy.param} share blocks of {BLOCK} x {BLOCK}")
    for source, target in _matrices(copy.source, copy.target):
        q, s = _view(live.data, target), _view(scale.data, _scale_box(target))
        if entry.name.endswith(SCALE_SUFFIX):
            yield Move(_scale_box(source), s, None)
        else:
            yield Move(source, q, None if entry.dtype == "float8_e4m3fn" else s)


def _fits(scale: torch.Tensor, shape: Sequence[int]) -> bool:
    import torch

    expected = (*shape[:-2], *scale_shape(*shape[-2:])) if len(shape) > 1 else None
    return scale.dtype == torch.float32 and tuple(scale.shape) == expected


def _stands_alone(box: Box, shape: Sequence[int]) -> bool:
    rows, columns = (slice(*extent) for extent in box[-2:])
    return stands_alone(shape[-2:], rows, columns)


def _matrices(source: Box, target: Box) -> Iterator[tuple[Box, Box]]:
    """Split a copy into copies of vectors and matrices, one for each index of the leading dimensions."""
    heads = (product(*([(i, i + 1) for i in range(*extent)] for extent in box[:-2])) for box in (source, target))
    for head, target_head in zip(*heads, strict=True):
        yield (*head, *source[-2:]), (*target_head, *target[-2:])


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for start, _ in box[:-2]:
        tensor = tensor[start]
    for dimension, (start, stop) in enumerate(box[-2:]):
        tensor = tensor.narrow(dimension, start, stop - start)
    return tensor


def _scale_box(box: Box) -> Box:
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))


# Attributes that a reload may make anew: flags, and a kernel's settings, whose scales are refreshed after every sync
# (vllm_reload.refresh_expert_scales).
HARMLESS = ("_already_called_process_weights_after_loading", "moe_kernel", "moe_quant_config")


def refused(worker: Any, load_map: LoadMap, binding: Binding) -> dict[str, str]:
    """Return the kinds of modules that must not be written in place -> why. This holds for all modules of a kind.

    load_map: of BF16 tensors, as vLLM's loaders take no others. E4M3 and scales are written to the same places

    Raises LostEngineError if a trial failed and the live weights could not be put back.
    """
    layers = dict(worker.model_runner.get_model().named_modules())
    samples = {(kind(layers[m]), _shapes(layers[m])): m for m in sorted(binding.direct, reverse=True)}
    reasons: dict[str, str] = {}
    for (name, _), module in samples.items():
        if name not in reasons and (reason := _why_not(worker, layers, module, load_map, binding)):
            reasons[name] = reason
    return reasons


def derived_from(model: torch.nn.Module) -> dict[str, str]:
    """Return the modules whose weights others keep in a computed form -> why vLLM must load them.

    Latent attention multiplies by matrices made of its kv_b_proj, which the end of vLLM's reload makes anew.
    """
    attention = [layer for layer in model.modules() if "MLA" in type(layer).__name__]
    sources = [getattr(layer, "kv_b_proj", None) for layer in attention]
    return {
        name: "latent attention keeps matrices made of it"
        for name, layer in model.named_modules()
        if any(layer is source for source in sources)
    }


def kind(layer: torch.nn.Module) -> str:
    """Name a layer's class, quantisation method and kernel, which decide how its live tensors are laid out."""
    method = getattr(layer, "quant_method", None)
    kernel = getattr(method, "fp8_linear", None)
    backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
    parts = [type(part).__name__ for part in (layer, method, kernel) if part is not None]
    if backend is not None:
        parts.append(str(backend))
    return " / ".join(parts)


def _shapes(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Return names, shapes and dtypes: a kernel may lay matrices of other shapes out in another way."""
    return tuple((name, tuple(t.shape), t.dtype) for name, t in layer._parameters.items() if t is not None)


def _why_not(
    worker: Any,
    layers: dict[str, torch.nn.Module],
    module: str,
    load_map: LoadMap,
    binding: Binding,
) -> str | None:
    """Reload one module with random weights, and return why it must not be written in place, if so."""
    import torch

    layer = layers[module]
    sent = {name: tensor for name, tensor in load_map.sent.items() if module in load_map.modules[name]}
    if odd := [tensor for tensor in sent.values() if not tensor.is_floating_point()]:
        return f"no trial can be made with {odd[0].dtype}"
    sources = {name: _random(tensor, worker.device, seed) for seed, (name, tensor) in enumerate(sent.items())}
    fed = [layers[name] for name in sorted({name for source in sent for name in load_map.modules[source]})]
    with torch.no_grad(), _put_back(worker.model_runner.get_model(), fed) as places:
        reload = NativeReload(worker, load_map.past)
        reload.open()
        reload.load(sources.items())
        reload.close([module])
        hidden = places.changed(layer, getattr(layer, "quant_method", None))
        if hidden := [name for name in hidden if name not in HARMLESS]:
            return f"a reload also sets {', '.join(hidden)}"
        for name, source in sources.items():
            if not all(_equal(move, source) for move in binding.moves[name]):
                return f"vLLM's kernel lays {name} out in its own way"
    return None


def _random(like: torch.Tensor, device: torch.device, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    tensor = torch.empty_like(like, device=device).normal_(0.0, 0.02, generator=generator)
    return tensor * torch.linspace(0.5, 2.0, like.shape[-1], device=device, dtype=like.dtype)


def _equal(move: Move, source: torch.Tensor) -> bool:
    import torch

    part = source[tuple(slice(*extent) for extent in move.source)].reshape(move.target.shape)
    if move.scale is None:
        return part.dtype == move.target.dtype and torch.equal(part, move.target)
    ((q, scale),) = quantized([part])
    return torch.equal(q.view(torch.uint8), move.target.view(torch.uint8)) and torch.equal(scale, move.scale)


@contextmanager
def _put_back(model: torch.nn.Module, fed: Sequence[torch.nn.Module]) -> Iterator[Places]:
    """At the end, put back the tensors and attributes of all modules, and the values in the `fed` ones.

    Raises LostEngineError if that fails.
    """
    import torch

    places = Places(model)
    tensors = [t for layer in fed for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield places
    finally:
        try:
            places.put_back()
            for tensor, value in values:
                tensor.data.copy_(value)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # an error of a kernel shows here, not in a rollout
        except Exception as error:
            raise LostEngineError(f"the weights could not be put back after a trial: {error}") from error
