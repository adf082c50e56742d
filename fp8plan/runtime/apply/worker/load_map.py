"""The map of a trainer's tensors into a live vLLM model, found by asking vLLM's own loaders.

vLLM renames, shards and fuses while it loads: q, k and v become rows of one matrix, 384 expert matrices two tensors.
`trace` puts the model's parameters back into checkpoint format on the meta device, hands `model.load_weights` meta
tensors with the trainer's names and shapes, and notes every copy that it makes. No byte is moved and the live tensors
are not touched, so this is also the dry run that shows errors of a manifest before anything is sent.

The parameters in checkpoint format are what vLLM itself records for its layerwise reload
(vllm/model_executor/model_loader/reload: the same functions from 0.30 to 0.33).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]  # (start, stop) in every dimension of a tensor


class Copy(NamedTuple):
    """One copy that a loader makes: `source` box of the trainer's tensor -> `target` box of module.param."""

    module: str
    param: str
    target: Box
    source: Box


@dataclass(frozen=True, slots=True)
class LoadMap:
    """The places that the tensors of a manifest go to.

    copies:   manifest name -> the copies made of it; none for a tensor that vLLM leaves out
    modules:  manifest name -> modules that it is loaded into
    homes:    manifest name -> (module, param) that it fills
    sent:     manifest name -> meta tensor
    opaque:   modules with a loader that does more than copy boxes
    shapes:   (module, param) -> shape in checkpoint format, of every parameter of the model
    dtypes:   (module, param) -> dtype in checkpoint format
    covered:  (module, param) -> elements that the manifest fills, each counted once
    taken:    manifest name -> elements of it that are copied somewhere
    past:     (module, param) that model code writes itself, past the parameter's loader (vllm_reload.NativeReload)
    shared:   groups of names that are written to one place of the live model, where the last one would win
    """

    copies: Mapping[str, tuple[Copy, ...]]
    modules: Mapping[str, tuple[str, ...]]
    homes: Mapping[str, tuple[tuple[str, str], ...]]
    sent: Mapping[str, torch.Tensor]
    opaque: frozenset[str]
    shapes: Mapping[tuple[str, str], tuple[int, ...]]
    dtypes: Mapping[tuple[str, str], torch.dtype]
    covered: Mapping[tuple[str, str], int]
    taken: Mapping[str, int]
    past: frozenset[tuple[str, str]]
    shared: tuple[tuple[str, ...], ...]


def trace(model: torch.nn.Module, sent: Mapping[str, torch.Tensor]) -> LoadMap:
    """Find the LoadMap of tensors. Raises ConfigError, with its name, for one that a loader does not take.

    sent: manifest name -> meta tensor
    """
    import torch

    load: Any = model.load_weights  # a method of vLLM's models
    sources = {_storage(tensor): name for name, tensor in sent.items()}
    seen: list[tuple[str, torch.Tensor, torch.Tensor, bool]] = []
    now, loading = "", list[Any]()
    live = _storages(model)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal now
        for name, tensor in sent.items():
            now = name
            yield name, tensor

    def note(to: torch.Tensor, of: torch.Tensor) -> None:
        seen.append((now, to, of, bool(loading)))

    with checkpoint_format(model) as parameters, _recording(note), torch.no_grad():
        for tensor in parameters.values():
            _note_calls(tensor, loading)
        homes = {_storage(tensor): home for home, tensor in parameters.items()}
        try:
            load(stream())
        except Exception as error:
            shape = list(sent[now].shape) if now else []
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise ConfigError(
                f"vLLM's loader does not take {now} of shape {shape} ({reason}); allowed: the names and shapes of the "
                "Hugging Face checkpoint that this engine was started with"
            ) from error
        shapes = {home: tuple(tensor.shape) for home, tensor in parameters.items()}
        dtypes = {home: tensor.dtype for home, tensor in parameters.items()}

    copies: dict[str, list[Copy]] = {name: [] for name in sent}
    fed: dict[str, dict[tuple[str, str], None]] = {name: {} for name in sent}
    covered, taken = dict.fromkeys(shapes, 0), dict.fromkeys(copies, 0)
    opaque, past = set(), set()
    places: dict[Hashable, dict[Box, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, to, of, by_loader in seen:
        home = homes.get(_storage(to))
        if home is None:
            continue  # a loader's own temporary
        fed[name][home] = None
        taken[name] += to.numel()
        if not by_loader:
            past.add(home)
        target = box(to, shapes[home])
        writers = [] if target is None else places[live.get(home, home), shapes[home]][target]
        if not writers:
            covered[home] += to.numel()
        writers.append(name)
        whose = sources.get(_storage(of))
        source = None if whose is None else box(of, sent[whose].shape)
        if target is None or source is None or whose != name or _extent(target) != _extent(source):
            opaque.add(home[0])
        else:
            copies[name].append(Copy(*home, target, source))
    return LoadMap(
        {name: tuple(made) for name, made in copies.items()},
        {name: tuple(dict.fromkeys(module for module, _ in places)) for name, places in fed.items()},
        {name: tuple(places) for name, places in fed.items()},
        sent,
        frozenset(opaque),
        shapes,
        dtypes,
        covered,
        taken,
        frozenset(past),
        shared_of(places.values()),
    )


def _storages(model: torch.nn.Module) -> dict[tuple[str, str], int]:
    """Return (module, param) -> address of its live values. Tied parameters have one address."""
    return {
        (module, name): tensor.data_ptr()
        for module, layer in model.named_modules()
        for name, tensor in layer._parameters.items()
        if tensor is not None and tensor.data_ptr()
    }


def shared_of(storages: Iterable[Mapping[Box, Sequence[str]]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names whose boxes overlap.

    storages: for each storage, the boxes in it that are written -> names that write them
    """
    sets = list[Sequence[str]]()
    for boxes in storages:
        reaching: list[Box] = []  # earlier boxes that reach into the rows of the next
        for target in sorted(boxes):
            sets.append(boxes[target])
            reaching = [other for other in reaching if not target or other[0][1] > target[0][0]]
            sets += [(*boxes[target], *boxes[other]) for other in reaching if _overlap(target, other)]
            reaching.append(target)
    return joined(sets)


def joined(sets: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Join sets that have a member in common. Return those of two members and more, each and all sorted."""
    groups = defaultdict[str, list[str]](list)
    for member, leader in leaders(sets).items():
        groups[leader].append(member)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1))


def _overlap(box: Box, other: Box) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(box, other, strict=True))


def leaders(sets: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return member -> the member that stands for all that share a set with it, or a chain of sets."""
    above: dict[str, str] = {}

    def top(member: str) -> str:
        while above.setdefault(member, member) != member:
            above[member] = member = above[above[member]]
        return member

    for first, *others in sets:
        for other in others:
            above[top(other)] = top(first)
        top(first)
    return {member: top(member) for member in above}


def box(view: torch.Tensor, shape: Sequence[int]) -> Box | None:
    """Return the box that a view covers of a contiguous tensor of `shape`; None for a transposed or strided view."""
    offset, extents = int(view.storage_offset()), []
    strides = [(s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n != 1]
    for dimension, size in enumerate(shape):
        stride = prod(shape[dimension + 1 :])
        start, offset = divmod(offset, stride) if stride else (0, 0)
        extent = strides.pop(0)[1] if strides and strides[0][0] == stride and size != 1 else 1
        if start + extent > size:
            return None
        extents.append((start, start + extent))
    return None if strides or offset else tuple(extents)


@contextmanager
def checkpoint_format(model: torch.nn.Module) -> Iterator[dict[tuple[str, str], torch.Tensor]]:
    """Give the model meta parameters in checkpoint format, inside of this `with`; yield {(module, param): tensor}."""
    parameters: dict[tuple[str, str], torch.Tensor] = {}
    saved = [(layer, layer._parameters, layer._buffers) for layer in model.modules()]
    try:
        for module, layer in model.named_modules():
            twins, buffers = _metadata(layer)
            layer.__dict__["_parameters"], layer.__dict__["_buffers"] = twins, buffers
            parameters |= {(module, name): tensor for name, tensor in twins.items() if tensor is not None}
        yield parameters
    finally:
        for layer, params, buffers in saved:
            layer.__dict__["_parameters"], layer.__dict__["_buffers"] = params, buffers


def _metadata(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one layer's parameters and buffers in checkpoint format, with vLLM's loaders before it wrapped them."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    params, buffers = get_layerwise_info(layer).restore_metadata
    # vLLM never moves SKIP_TENSORS. A bias among them gets a twin to copy to. Expert tables stay, as loaders read them.
    kept = {name: tensor for name, tensor in layer._parameters.items() if name in SKIP_TENSORS and tensor is not None}
    twins = {}
    for name, tensor in {**params, **kept}.items():
        twins[name] = twin = restore_layer_refs(to_meta_tensor(tensor), layer)
        if hasattr(twin, "weight_loader"):
            twin.weight_loader = _get_original_loader(twin)
    return twins, {**buffers, **{name: tensor for name, tensor in layer._buffers.items() if name in SKIP_TENSORS}}


def _note_calls(parameter: Any, loading: list[Any]) -> None:
    """Keep the parameter in `loading` while its loader runs. vLLM's reload sees only loads through it."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(parameter, "weight_loader", default_weight_loader)

    @wraps(loader)
    def counted(*args: Any, **kwargs: Any) -> Any:
        loading.append(parameter)
        try:
            return loader(*args, **kwargs)
        finally:
            loading.pop()

    parameter.weight_loader = counted


@contextmanager
def _recording(note: Any) -> Iterator[None]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                note(args[0], args[1])
            return func(*args, **(kwargs or {}))

    mode: Any = Recorder  # torch's own __init__ has no annotations
    with mode():
        yield


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(extents: Box) -> list[int]:
    return [stop - start for start, stop in extents if stop - start != 1]
