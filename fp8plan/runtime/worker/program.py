"""The writes of one chunk of tensors into a live model, made once and run every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8plan.runtime.quantize.targets import CopyTargets, QuantizeTargets
from fp8plan.runtime.weight_sync.checkpoint import Part
from fp8plan.runtime.weight_sync.manifest import Entry
from fp8plan.runtime.worker.binding import Move

if TYPE_CHECKING:
    import torch


class Program:
    """The writes of one chunk.

    entries, numbers: of the chunk's tensors
    moves:     name -> how it is written in place (fp8plan.runtime.worker.binding)
    parts:     of the tensors that `run` flags (weight_sync.checkpoint.Part)
    matrices:  which of the parts are matrices
    native:    (position in the chunk, name) of tensors that go through vLLM's loader
    positions: number in the manifest -> position in the chunk
    """

    def __init__(self, entries: Sequence[Entry], numbers: Sequence[int], moves: Mapping[str, tuple[Move, ...]]) -> None:
        self.positions = {number: at for at, number in enumerate(numbers)}
        self.native = [(at, e.name) for at, e in enumerate(entries) if e.name not in moves]
        found = [(at, e, move) for at, e in enumerate(entries) for move in moves.get(e.name, ())]
        quantised, copied = ([x for x in found if (x[2].scale is None) == plain] for plain in (False, True))
        self._quantised, self._copied = ([(at, _part(move, e.shape)) for at, e, move in x] for x in (quantised, copied))
        scales = [move.scale for _, _, move in quantised if move.scale is not None]
        self._quantise = QuantizeTargets([move.target for _, _, move in quantised], scales)
        self._copy = CopyTargets([move.target for _, _, move in copied])
        self.parts = [Part(e.name, move.source) for _, e, move in (*quantised, *copied)]
        self.matrices = [is_matrix(move.target.shape) for _, _, move in (*quantised, *copied)]

    def run(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Queue the writes. Return what each part holds, int32 [len(parts)] on the device (quantize.targets)."""
        import torch

        flags = torch.zeros(len(self.parts), dtype=torch.int32, device=device)
        count = len(self._quantised)
        self._quantise.run([part(tensors[at]) if part else tensors[at] for at, part in self._quantised], flags[:count])
        self._copy.run([part(tensors[at]) if part else tensors[at] for at, part in self._copied], flags[count:])
        return flags


def is_matrix(shape: Sequence[int]) -> bool:
    """Return True for a shape with two dimensions of more than one element: no vector, such as a bias or a norm."""
    return sum(size > 1 for size in shape) > 1


def _part(move: Move, shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that cuts out what a move takes, as a vector or matrix; None if it takes all, as it is."""
    if tuple(move.target.shape) == shape and all(
        extent == (0, n) for extent, n in zip(move.source, shape, strict=True)
    ):
        return None
    window = tuple(slice(*extent) for extent in move.source)
    return lambda tensor: tensor[window].reshape(move.target.shape)
