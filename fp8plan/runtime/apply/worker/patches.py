"""Patches of a worker's live weights: the places and values of a sparse sync, written where a dense one writes.

A tensor may be cut over ranks and fused with others. A move of the load map (apply.worker.binding) maps a box of it
to a part of a live tensor. A place of a patch is written by each move whose box holds it. Afterwards each move reads
its part back, and compares the digests of all tiles that lie whole in its box. Tensors that vLLM must reload come
whole, together with all others of their modules.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError, some
from fp8plan.runtime.apply.quantize.targets import FINITE, NOT_FINITE, content
from fp8plan.runtime.apply.weight_sync.delta.parts import cuts_of, sums
from fp8plan.runtime.apply.weight_sync.delta.patch import Change, unpacked
from fp8plan.runtime.apply.weight_sync.delta.places import Span, Window, write_values
from fp8plan.runtime.apply.weight_sync.delta.tiles import TILE, digests, flat, matrix
from fp8plan.runtime.apply.weight_sync.manifest import Entry, dtype_named, is_matrix
from fp8plan.runtime.apply.weight_sync.shared import apart_by_digests, refuse_apart
from fp8plan.runtime.apply.worker.binding import Move, Target, WholeTiles
from fp8plan.runtime.apply.worker.facts import digest
from fp8plan.runtime.apply.worker.prepare import Prepared
from fp8plan.runtime.apply.worker.vllm_reload import NativeReload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WRITTEN_BYTES: Final = 2**24  # of patches that are written together: a changed value takes some 50 bytes meanwhile


class Patches:
    """The patches of one open sync.

    modules: those whose tensors have all come, for vLLM's reload
    """

    def __init__(self, prepared: Prepared, device: torch.device, new_reload: Callable[[], NativeReload]) -> None:
        self._prepared, self._device, self._new_reload = prepared, device, new_reload
        self._written: dict[int, Tensor] = {}  # number in the manifest -> digests
        self._changed: set[str] = set()  # names of tensors that got new values
        self._not_finite: list[tuple[list[str], Tensor]] = []  # names, and how many values each of them has
        self._whole: list[tuple[Entry, Tensor]] = []  # tensors that came whole, and their flags
        self._native: dict[str, Tensor] = {}  # tensors for vLLM's reload, the last of each name
        self.seconds = 0.0

    def load(self, numbers: Sequence[int], patches: Sequence[Tensor]) -> None:
        """Write patches, by their tensors' numbers in the manifest. Raises ConfigError for other bytes."""
        batch: dict[int, Tensor] = {}
        size = 0
        for number, patch in zip(numbers, patches, strict=True):
            # A chain has several patches of a tensor: the later one is written after the earlier one.
            if number in batch or size >= WRITTEN_BYTES:
                self._load(batch)
                batch, size = {}, 0
            batch[number] = patch
            size += len(patch)
        self._load(batch)

    def _load(self, batch: Mapping[int, Tensor]) -> None:
        entries = [self._prepared.manifest[number] for number in batch]
        made = unpacked(list(batch.values()), entries, self._device)
        parts, places, words = [], [], []
        for number, entry, each in zip(batch, entries, made, strict=True):
            self._written[number] = each.digests
            if not each.words.numel():  # an unchanged tensor, to be looked at
                continue
            self._changed.add(entry.name)
            if entry.name in self._prepared.reloads:
                if each.places is not None:
                    raise ConfigError(f"{entry.name} came as a patch, and vLLM must reload it")
                self._native[entry.name] = each.words.view(dtype_named(entry.dtype)).view(entry.shape)
            for part, _ in self._targets(entry):
                if each.places is None:
                    part.matrix.copy_(each.words.view(flat(entry.shape))[slice(*part.rows), slice(*part.columns)])
                else:
                    parts.append(part)
                    places.append(each.places)
                    words.append(each.words)
        write_values(parts, places, words)
        self._note_values(entries, made)

    def _targets(self, entry: Entry) -> tuple[Target, ...]:
        """Return the live parts of a tensor, which are the same in every sync."""
        targets = self._prepared.targets
        if entry.name not in targets:
            moves = self._prepared.binding.moves.get(entry.name, ())
            targets[entry.name] = tuple(target_of(move, entry.shape) for move in moves)
        return targets[entry.name]

    def _note_values(self, entries: Sequence[Entry], made: Sequence[Change]) -> None:
        """Let the device look for values that `finish` refuses."""
        import torch

        by_dtype: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for entry, each in zip(entries, made, strict=True):
            if not each.words.numel():
                continue
            if each.places is None:
                self._whole.append((entry, content(each.words.view(dtype_named(entry.dtype)).float())))
            else:
                by_dtype[entry.dtype][entry.name] = each.words
        for dtype, words in by_dtype.items():
            values = torch.cat(list(words.values())).view(dtype_named(dtype)).float()
            cuts = cuts_of([len(each) for each in words.values()], values.device)
            self._not_finite.append((list(words), sums(~values.isfinite(), cuts)))

    @property
    def modules(self) -> set[str]:
        return {module for name in self._native for module in self._prepared.reloads[name]}

    def reload(self) -> NativeReload | None:
        """Hand the tensors that vLLM must reload to its reload, and return that; None without any.

        A chain of patches may hold a tensor several times, and vLLM's reload takes each only once.
        """
        if not self._native:
            return None
        reload = self._new_reload()
        reload.open()
        reload.load(self._native.items())
        return reload

    def finish(self, count: int) -> dict[str, Any]:
        """Check all patches, and return the result. count: patches that were sent

        Raises ConfigError for patches that did not come, values that are not finite, matrices of zeros, two tensors of
        one storage that differ, and live tensors that differ although no patch has changed them.
        """
        begun = time.perf_counter()
        if len(self._written) != count:
            raise ConfigError(f"{len(self._written)} patches of {count} have come")
        flags = [(entry, int(flag)) for entry, flag in self._whole]
        not_finite = [entry.name for entry, flag in flags if flag == NOT_FINITE]
        for tensors, counts in self._not_finite:
            not_finite += [name for name, values in zip(tensors, counts.tolist(), strict=True) if values]
        if not_finite:
            raise ConfigError(f"not finite: {not_finite[0]}; allowed: no NaN, no Inf")
        for entry, flag in flags:
            if flag != FINITE and is_matrix(entry.shape):
                raise ConfigError(f"all zeros: {entry.name}")
        digests_of = {self._prepared.manifest[number].name: own for number, own in self._written.items()}
        refuse_apart(apart_by_digests(self._prepared.shared, digests_of, self._changed))
        names, live, sent = [], [], []
        for number, own in self._written.items():
            entry = self._prepared.manifest[number]
            for _, whole_tiles in self._targets(entry):
                if whole_tiles is not None:
                    names.append(entry.name)
                    live.append(whole_tiles.live)
                    sent.append(own[whole_tiles.sent])
        differ = dict.fromkeys(name for name, same in zip(names, alike(live, sent), strict=True) if not same)
        refuse_foreign([name for name in differ if name not in self._changed])
        self.seconds += time.perf_counter() - begun
        return {"compared": len(names), "differ": list(differ), "weight_error": None}


def target_of(move: Move, shape: Sequence[int]) -> Target:
    """Return a move's target. shape: of the tensor that is sent"""
    live, sides = matrix(move.target), (TILE[0], TILE[1] // move.target.element_size())
    spans, whole = box(move, shape), flat(shape)
    tiles = [_whole_tiles(span, side, size) for span, side, size in zip(spans, sides, whole, strict=True)]
    part = Window(live, *spans, whole[1])
    if any(start >= stop for start, stop in tiles):
        return Target(part, None)
    rows, columns = (
        slice(start * side - begin, min(stop * side, size) - begin)
        for (start, stop), side, size, (begin, _) in zip(tiles, sides, whole, spans, strict=True)
    )
    sent_rows, sent_columns = (slice(*span) for span in tiles)
    return Target(part, WholeTiles(live[rows, columns], (sent_rows, sent_columns)))


def box(move: Move, shape: Sequence[int]) -> tuple[Span, Span]:
    """Return the rows and columns of the sent tensor that a move takes, with leading dimensions counted as rows."""
    *leading, rows, columns = [(0, 1), *move.source] if len(shape) == 1 else move.source
    first = 0
    for (start, _), size in zip(leading, shape, strict=False):
        first = first * size + start
    height = shape[-2] if len(shape) > 1 else 1
    return (first * height + rows[0], first * height + rows[1]), columns


def alike(live: Sequence[Tensor], sent: Sequence[Tensor]) -> list[bool]:
    """Return for each live part if it has the digests that were sent."""
    import torch

    if not live:
        return []
    ours, theirs = (torch.cat([each.flatten() for each in some]).to(live[0].device) for some in (digests(live), sent))
    same = (ours == theirs).cpu().split([each.numel() for each in sent])  # one answer of the GPU for all
    return [bool(each.all()) for each in same]


def _whole_tiles(span: Span, side: int, size: int) -> Span:
    """Return the tiles that lie in a span of a side of `size`; the last tile may be cut by the side's end."""
    start, stop = span
    return -(-start // side), -(-stop // side) if stop == size else stop // side


def refuse_foreign(names: Sequence[str]) -> None:
    """Raises ConfigError for tensors that are not as the last sync left them."""
    if names:
        raise ConfigError(f"something else than a sync has written to {some(names)} of the live weights")


class Untouched:
    """The digests of some modules' parameters after the last sync that wrote to them.

    They are of modules that vLLM reloads, in layouts of its own, so that no patch can check them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._digests: dict[str, dict[str, int]] = {}  # module -> its parameters -> digest

    def note(self, modules: Iterable[str], written: Collection[str]) -> None:
        """Note the parameters of modules as they are now. written: modules that this sync wrote to"""
        for module in sorted(modules):
            if module in written or module not in self._digests:
                self._digests[module] = self._now(module)

    def changed(self, turn: int, every: int) -> list[str]:
        """Return the parameters that have changed, among one in `every` modules. turn: chooses these modules"""
        names = []
        for number, (module, noted) in enumerate(self._digests.items()):
            if number % every == turn % every:
                names += [name for name, own in self._now(module).items() if noted.get(name) != own]
        return names

    def _now(self, module: str) -> dict[str, int]:
        parameters = self._model.get_submodule(module)._parameters
        return {f"{module}.{name}": digest(tensor.data) for name, tensor in parameters.items() if tensor is not None}
