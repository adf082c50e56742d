"""The shortcut past vLLM's layerwise reload: the live tensors that a manifest's are written to directly, and how.

vLLM reloads a layer by filling a new BF16 copy of it, quantising that with a dozen torch kernels and copying the result
over the live tensors. Where the live tensors have the checkpoint's layout, the same bits can be written to them
straight from the trainer's tensor: one read, one write. Layers laid out in another or unknown way are left to vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from fp8plan.runtime.quantize.block_fp8 import BLOCK, scale_shape, stands_alone
from fp8plan.runtime.weight_sync.manifest import SCALE_SUFFIX, Entry
from fp8plan.runtime.worker.load_map import Box, Copy, LoadMap

if TYPE_CHECKING:
    import torch


class Move(NamedTuple):
    """One matrix or vector written in place: tensor[source] -> target, quantised where there are scales to write."""

    source: Box
    target: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Binding:
    """The way of every tensor of a manifest into the live model.

    moves:  manifest name -> its moves; a name that is not here goes through vLLM's loader
    native: modules that vLLM's layerwise reload loads -> why
    direct: modules whose live tensors are written in place
    """

    moves: Mapping[str, tuple[Move, ...]]
    native: Mapping[str, str]
    direct: frozenset[str]


def bind(model: torch.nn.Module, found: LoadMap, manifest: Sequence[Entry], left: Mapping[str, str]) -> Binding:
    """Return the Binding of a traced manifest. left: modules that are left to vLLM -> why"""
    layers = dict(model.named_modules())
    moves: dict[str, tuple[Move, ...]] = {}
    native = dict.fromkeys(found.opaque, "its loader does more than copy") | dict(left)
    by_name = {entry.name: entry for entry in manifest}
    for name, copies in found.copies.items():
        try:
            moves[name] = tuple(
                move
                for copy in copies
                for move in _moves(layers[copy.module], copy, by_name[name], found)
                if copy.module not in native
            )
        except NotInPlaceError as reason:
            native = dict.fromkeys(found.modules[name], str(reason)) | native
    # A tensor that feeds several modules goes one way.
    while mixed := {m for of in found.modules.values() if not native.keys().isdisjoint(of) for m in of} - native.keys():
        native |= dict.fromkeys(mixed, "shares a tensor with a module that vLLM loads")
    everywhere = {module for of in found.modules.values() for module in of}
    kept = {name: some for name, some in moves.items() if native.keys().isdisjoint(found.modules[name])}
    return Binding(kept, native, frozenset(everywhere - native.keys()))


class NotInPlaceError(Exception):
    """The live tensor does not have the checkpoint's layout. The message says what it has."""


def _moves(layer: torch.nn.Module, copy: Copy, entry: Entry, found: LoadMap) -> Iterator[Move]:
    import torch

    home = (copy.module, copy.param)
    shape, dtype, whole = found.shapes[home], found.dtypes[home], found.sent[entry.name]
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

    wanted = (*shape[:-2], *scale_shape(*shape[-2:])) if len(shape) > 1 else None
    return scale.dtype == torch.float32 and tuple(scale.shape) == wanted


def _stands_alone(box: Box, shape: Sequence[int]) -> bool:
    rows, columns = (slice(*extent) for extent in box[-2:])
    return stands_alone(shape[-2:], rows, columns)


def _matrices(source: Box, target: Box) -> Iterator[tuple[Box, Box]]:
    """Split a copy into copies of vectors and matrices: leading dimensions are taken apart, in step."""
    for chosen in zip(product(*map(_points, source[:-2])), product(*map(_points, target[:-2])), strict=True):
        yield (*chosen[0], *source[-2:]), (*chosen[1], *target[-2:])


def _points(extent: tuple[int, int]) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(*extent)]


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return tensor[box] as a vector or matrix."""
    for start, _ in box[:-2]:
        tensor = tensor[start]
    for dimension, (start, stop) in enumerate(box[-2:]):
        tensor = tensor.narrow(dimension, start, stop - start)
    return tensor


def _scale_box(box: Box) -> Box:
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))
