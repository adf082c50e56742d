"""Live weights beside those that were sent: a sample after each sync, or all of them (runtime.apply.doctor).

Only weights that are written in place are compared: a window of each tensor is kept while the stream passes. Tensors
that are written as they come (BF16, or a trainer's E4M3 and scales) must be live bit for bit. Quantised ones are
multiplied with their live scales and compared with the sent ones, so that a wrong quantiser shows.

The bound on an element's error: a block's scale s is at most max(amax, AMAX_FLOOR) / 448. E4M3 has 3 bits of mantissa.
Between 2^e and 2^(e+1) its values are 2^(e-3) apart, and rounding misses by at most 1/17 of the element (halfway above
2^e). Below 2^-6 all values are 2^-9 apart, which misses by up to s / 1024. Hence

    |q s - w| <= |w| / 16 + max(amax of the window, AMAX_FLOOR) / 448 / 1024

1/16 leaves room for float32's roundings. The bound holds for all weights that were rounded once. Weights rounded twice
break it: with DeepGEMM's E8M0 scales, 9% of Gaussian elements do. A limit on the RMS error could not tell the two apart
(3.7% when rounded twice, up to 5.9% when rounded once), so the RMS error is reported and not judged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from math import hypot
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.model.precision import E4M3_MAX
from fp8plan.runtime.apply.quantize.block_fp8 import AMAX_FLOOR, BLOCK
from fp8plan.runtime.apply.weight_sync.manifest import Entry
from fp8plan.runtime.apply.weight_sync.shared import Twins
from fp8plan.runtime.apply.worker.binding import Binding, Move
from fp8plan.runtime.apply.worker.prepare import Prepared

if TYPE_CHECKING:
    import torch

VECTOR: Final = (BLOCK,)
MATRIX: Final = (BLOCK, 4 * BLOCK)  # one row of blocks: 1 MiB of BF16 in 8 samples

MOST_OF_ITSELF: Final = 1 / 16
MOST_OF_AMAX: Final = 2**-10 / E4M3_MAX


class _Window(NamedTuple):
    """The part of a tensor that is compared: `size` rows and columns from `corner` of the move's target on."""

    name: str
    move: Move
    corner: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the window of a tensor that was sent."""
        target = self.move.target
        if tensor.shape != target.shape:
            tensor = tensor[tuple(slice(*extent) for extent in self.move.source)].reshape(target.shape)
        return _cut(tensor, self.corner, self.size)

    def live(self) -> torch.Tensor:
        return _cut(self.move.target, self.corner, self.size)

    def scales(self) -> torch.Tensor:
        assert self.move.scale is not None
        blocks = tuple(-(-size // BLOCK) for size in self.size)
        return _cut(self.move.scale, tuple(start // BLOCK for start in self.corner), blocks)


class Samples:
    """A sample of `count` tensors of a manifest. Each `seed` chooses others.

    seconds: time that choosing, keeping and comparing have taken so far

    Only tensors written in place are chosen, so a model that vLLM reloads whole has no samples.
    """

    def __init__(self, manifest: Sequence[Entry], binding: Binding, count: int, seed: int) -> None:
        begun, chance = time.perf_counter(), random.Random(seed)
        # More are drawn than asked for, as vLLM may have to load some of them.
        numbers = chance.sample(range(len(manifest)), min(8 * count, len(manifest)))
        able = [number for number in numbers if binding.moves.get(manifest[number].name)]
        self._chosen = {
            number: _window(manifest[number].name, chance.choice(binding.moves[manifest[number].name]), chance)
            for number in able[:count]
        }
        self._kept: list[tuple[_Window, torch.Tensor]] = []
        self.seconds = time.perf_counter() - begun

    def take(self, positions: Mapping[int, int], tensors: Sequence[torch.Tensor]) -> None:
        """Keep a window of those tensors of a chunk that are among the chosen.

        positions: number in the manifest -> position in the chunk, which has hundreds of tensors; few are looked for
        """
        begun = time.perf_counter()
        for number, window in self._chosen.items():
            at = positions.get(number)
            if at is not None:
                self._kept.append((window, window.of(tensors[at]).clone()))
        self.seconds += time.perf_counter() - begun

    def compare(self) -> dict[str, Any]:
        """Return how many tensors were compared, which differ, and the quantised ones' RMS error (a fraction or None).

        Windows of one shape are compared together, as each launch takes longer than its work.
        """
        import torch

        begun = time.perf_counter()
        if not self._kept:
            return {"compared": 0, "differ": [], "weight_error": None}
        groups: dict[Any, list[tuple[_Window, torch.Tensor]]] = {}
        for window, sent in self._kept:
            groups.setdefault((window.move.scale is None, window.size, sent.dtype), []).append((window, sent))
        rows = [_bits(group) if plain else _errors(group) for (plain, *_), group in groups.items()]
        figures = torch.cat(rows).tolist()  # waits for the GPU
        names = [window.name for group in groups.values() for window, _ in group]
        error, size = (hypot(*(row[at] for row in figures)) for at in (2, 3))
        self.seconds += time.perf_counter() - begun
        return {
            "compared": len(names),
            "differ": [name for name, row in zip(names, figures, strict=True) if not _fits(*row)],
            "weight_error": error / size if size else None,
        }


def _fits(excess: float, amax: float, error: float, norm: float) -> bool:
    """Return True if a window equals the sent one, by its row of `_errors`. NaN does not. Zeros must stay zeros."""
    return excess <= MOST_OF_AMAX * max(amax, AMAX_FLOOR) if amax else excess <= 0


def _errors(group: Sequence[tuple[_Window, torch.Tensor]]) -> torch.Tensor:
    """Compare quantised windows: [windows, 4], largest |q s - w| - |w| / 16, largest |w|, norms of q s - w and of w."""
    import torch

    original = torch.stack([sent for _, sent in group]).float()
    scales = torch.stack([window.scales() for window, _ in group]).repeat_interleave(BLOCK, -1)
    error = torch.stack([window.live() for window, _ in group]).float()
    error.mul_(scales[..., : original.shape[-1]]).sub_(original)
    size, both = original.abs(), (1, 2)
    norms = [torch.linalg.vector_norm(matrix, dim=both) for matrix in (error, original)]
    return torch.stack([error.abs_().sub_(size, alpha=MOST_OF_ITSELF).amax(both), size.amax(both), *norms], -1)


def _bits(group: Sequence[tuple[_Window, torch.Tensor]]) -> torch.Tensor:
    """Compare copied windows: [windows, 4] as `_errors`, 1 if any bit differs, and zeros."""
    import torch

    live = torch.stack([window.live() for window, _ in group]).view(torch.uint8)
    differs = (live != torch.stack([sent for _, sent in group]).view(torch.uint8)).flatten(1).any(1, keepdim=True)
    return torch.nn.functional.pad(differs.float(), (0, 3))


def _window(name: str, move: Move, chance: random.Random) -> _Window:
    sides = [
        _side(size, most, chance)
        for size, most in zip(move.target.shape, (VECTOR, MATRIX)[move.target.dim() > 1], strict=False)
    ]
    return _Window(name, move, tuple(start for start, _ in sides), tuple(size for _, size in sides))


def _side(size: int, most: int, chance: random.Random) -> tuple[int, int]:
    """Choose a window's start, at a block, and its length, at most `most`.

    It is shorter only at the edge of a tensor of other than whole blocks. So most models' windows have one shape.
    """
    last = size if size % BLOCK else size - min(size, most) + 1
    start = chance.randrange(0, last, BLOCK)
    return start, min(most, size - start)


def _cut(tensor: torch.Tensor, corner: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return tensor[corner : corner + size] by one operation: a slice of each dimension would add microseconds."""
    strides = tensor.stride()
    at = tensor.storage_offset() + sum(start * stride for start, stride in zip(corner, strides, strict=True))
    return tensor.as_strided(size, strides, at)


class Comparison:
    """A comparison of live weights with a stream of tensors, by a window of each that a sync would write in place."""

    def __init__(self, prepared: Prepared, device: torch.device) -> None:
        self._prepared, self._device = prepared, device
        self._samples = Samples(prepared.manifest, prepared.binding, len(prepared.manifest), seed=0)
        self._twins = Twins(prepared.shared)
        self._apart: list[tuple[str, str]] = []

    def take(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors, by their numbers in the manifest."""
        moved = self._prepared.as_written(numbers, tensors, self._device)
        self._apart += self._twins.take(self._prepared.sharing(numbers, moved))
        self._samples.take({number: at for at, number in enumerate(numbers)}, moved)

    def result(self) -> dict[str, Any]:
        """Return how many tensors were compared, and the names of those that differ.

        apart: pairs of the trainer's own that differ, and share one storage in the engine
        """
        result, of = self._samples.compare(), len(self._prepared.manifest)
        apart = [list(pair) for pair in self._apart]
        return {"compared": result["compared"], "differ": result["differ"], "of": of, "apart": apart}
