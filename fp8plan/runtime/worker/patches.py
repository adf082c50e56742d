"""Patches of a worker's live weights: the places and values of a sparse sync, written where a dense one writes.

A tensor may be cut over ranks and fused with others. A move of the load map (runtime.worker.binding) maps a box of it
to a part of a live tensor. A place of a patch is written by each move whose box holds it. Afterwards each move reads
its part back, and compares the digests of all tiles that lie whole in its box. Tensors that vLLM must reload come
whole, together with all others of their modules.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.quantize.targets import FINITE, content
from fp8plan.runtime.weight_sync.delta.patch import Change, sums, unpacked
from fp8plan.runtime.weight_sync.delta.places import Part, Span, write
from fp8plan.runtime.weight_sync.delta.tiles import TILE, bits, digests, flat
from fp8plan.runtime.weight_sync.manifest import Entry, dtype_named
from fp8plan.runtime.worker.binding import Move
from fp8plan.runtime.worker.prepare import Prepared, is_matrix
from fp8plan.runtime.worker.vllm_reload import NativeReload

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Patches:
    """The patches of one open sync.

    modules: those whose tensors have all come, for vLLM's reload
    """

    def __init__(self, prepared: Prepared, device: torch.device, new_reload: Callable[[], NativeReload]) -> None:
        self._prepared, self._device, self._new_reload = prepared, device, new_reload
        self._written: dict[int, Tensor] = {}  # number in the manifest -> digests
        self._not_finite: list[tuple[list[str], Tensor]] = []  # names, and how many values each of them has
        self._matrices: list[tuple[str, Tensor]] = []  # those that came whole, and their flags
        self._native: dict[str, Tensor] = {}  # tensors for vLLM's reload, the last of each name
        self.seconds = 0.0

    def load(self, numbers: Sequence[int], patches: Sequence[Tensor]) -> None:
        """Write patches, by their tensors' numbers in the manifest. Raises ConfigError for other bytes."""
        batch: dict[int, Tensor] = {}
        for number, patch in zip(numbers, patches, strict=True):
            if number in batch:  # of a chain: the later patch is written after the earlier one
                self._load(batch)
                batch = {}
            batch[number] = patch
        self._load(batch)

    def _load(self, batch: Mapping[int, Tensor]) -> None:
        """Write patches of different tensors together."""
        entries = [self._prepared.manifest[number] for number in batch]
        made = unpacked(list(batch.values()), entries, self._device)
        parts, places, words = [], [], []
        for number, entry, each in zip(batch, entries, made, strict=True):
            if entry.name in self._prepared.reloads:
                if each.places is not None:
                    raise ConfigError(f"{entry.name} came as a patch, and vLLM must reload it")
                self._native[entry.name] = each.words.view(dtype_named(entry.dtype)).view(entry.shape)
            for move in self._prepared.binding.moves.get(entry.name, ()):
                part = part_of(move, entry.shape)
                if each.places is None:
                    part.matrix.copy_(each.words.view(flat(entry.shape))[slice(*part.rows), slice(*part.columns)])
                else:
                    parts.append(part)
                    places.append(each.places)
                    words.append(each.words)
            self._written[number] = each.digests
        write(parts, places, words)
        self._note_values(entries, made)

    def _note_values(self, entries: Sequence[Entry], made: Sequence[Change]) -> None:
        """Let the device look for values that `finish` refuses."""
        import torch

        by_dtype: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for entry, each in zip(entries, made, strict=True):
            by_dtype[entry.dtype][entry.name] = each.words
            if each.places is None and is_matrix(entry.shape):
                self._matrices.append((entry.name, content(each.words.view(dtype_named(entry.dtype)).float())))
        for dtype, words in by_dtype.items():
            values = torch.cat(list(words.values())).view(dtype_named(dtype)).float()
            cuts = torch.tensor([0, *accumulate(len(each) for each in words.values())], device=values.device)
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

        Raises ConfigError for patches that did not come, values that are not finite, matrices of zeros, and live
        tensors that differ.
        """
        begun = time.perf_counter()
        if len(self._written) != count:
            raise ConfigError(f"{len(self._written)} patches of {count} have come")
        for tensors, counts in self._not_finite:
            if bad := [name for name, count in zip(tensors, counts.tolist(), strict=True) if count]:
                raise ConfigError(f"not finite: {bad[0]}; allowed: no NaN, no Inf")
        for name, flag in self._matrices:
            if int(flag) != FINITE:
                raise ConfigError(f"all zeros: {name}")
        names, live, sent = [], [], []
        for number, own in self._written.items():
            entry = self._prepared.manifest[number]
            for move in self._prepared.binding.moves.get(entry.name, ()):
                for part, wanted in whole_tiles(move, own, entry.shape):
                    names.append(entry.name)
                    live.append(part)
                    sent.append(wanted)
        differ = [name for name, same in zip(names, alike(live, sent), strict=True) if not same]
        self.seconds += time.perf_counter() - begun
        return {"compared": len(names), "differ": list(dict.fromkeys(differ)), "weight_error": None}


def part_of(move: Move, shape: Sequence[int]) -> Part:
    """Return a move's target, as a part of the tensor that was sent. shape: of that tensor"""
    return Part(matrix(move), *box(move, shape), flat(shape)[1])


def box(move: Move, shape: Sequence[int]) -> tuple[Span, Span]:
    """Return the rows and columns of the sent tensor that a move takes, with leading dimensions counted as rows."""
    *leading, rows, columns = [(0, 1), *move.source] if len(shape) == 1 else move.source
    first = 0
    for (start, _), size in zip(leading, shape, strict=False):
        first = first * size + start
    height = shape[-2] if len(shape) > 1 else 1
    return (first * height + rows[0], first * height + rows[1]), columns


def matrix(move: Move) -> Tensor:
    """Return a move's target as a matrix of bit patterns."""
    target = bits(move.target)
    return target.unsqueeze(0) if target.dim() == 1 else target


def whole_tiles(move: Move, sent: Tensor, shape: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a move's live part, and the digests that were sent, of the tiles that lie whole in its box."""
    live, whole, item = matrix(move), flat(shape), move.target.element_size()
    sides = (TILE[0], TILE[1] // item)
    spans = [_whole_tiles(span, side, size) for span, side, size in zip(box(move, shape), sides, whole, strict=True)]
    if any(start >= stop for start, stop in spans):
        return
    cuts = [
        slice(start * side - begin, min(stop * side, size) - begin)
        for (start, stop), side, size, (begin, _) in zip(spans, sides, whole, box(move, shape), strict=True)
    ]
    yield live[cuts[0], cuts[1]], sent[slice(*spans[0]), slice(*spans[1])]


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
