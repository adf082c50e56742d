"""The self-check after a sync: a sample of the weights written in place is compared with what was sent.

While the stream passes, a window of each sampled tensor is kept. What went in as it came must be live bit for bit:
BF16, or the E4M3 and scales of a trainer that quantises. What was quantised on the way is multiplied with its live
scales again and compared with what was sent, so that nothing of the quantiser is believed.

How far an element may be off: a block's scale s is at most max(amax, AMAX_FLOOR) / 448. E4M3 has 3 bits of mantissa:
between 2^e and 2^(e+1) its values are 2^(e-3) apart, rounding misses by half of that at most, and in the worst case,
halfway above 2^e, by 1/17 of the element. Below 2^-6 all values are 2^-9 apart, which misses by up to s / 1024. Hence

    |q s - w| <= |w| / 16 + max(amax of the window, AMAX_FLOOR) / 448 / 1024,

and so does the RMS of a window. Between 1/17 and 1/16 is room for float32's roundings (a few 1e-7). This holds for all
weights, whatever their distribution, and not for weights rounded twice: of Gaussian ones that DeepGEMM quantises again,
with E8M0 scales, 9% of the elements are outside. A limit on the RMS error could not tell those apart (they are 3.7%
off, but weights that all lie halfway 5.9% after one rounding), so that is reported and not judged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from math import hypot
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.model.precision import E4M3_MAX
from fp8plan.runtime.quantize.block_fp8 import AMAX_FLOOR, BLOCK
from fp8plan.runtime.weight_sync.manifest import Entry
from fp8plan.runtime.worker.binding import Binding, Move

if TYPE_CHECKING:
    import torch

VECTOR: Final = (BLOCK,)
MATRIX: Final = (BLOCK, 4 * BLOCK)  # one row of blocks: 1 MiB of BF16 in 8 samples

MOST_OF_ITSELF: Final = 1 / 16
MOST_OF_AMAX: Final = 2**-10 / E4M3_MAX


class _Window(NamedTuple):
    """The part of a tensor that is compared: from `corner` of what `move` writes, `size` rows and columns."""

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
    """A sample of `count` tensors of a manifest, chosen by seed: other ones every step.

    seconds: the time that all of this has taken so far

    Only tensors written in place are chosen. What vLLM's loaders make of the others is not known here, so a model that
    is reloaded whole has no samples.
    """

    def __init__(self, manifest: Sequence[Entry], binding: Binding, count: int, seed: int) -> None:
        begun, chance = time.perf_counter(), random.Random(seed)
        # A few more than asked for, as some may be vLLM's to load.
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

        Windows of one shape are compared together, and the GPU is waited for once: each launch takes longer than its
        work.
        """
        import torch

        begun = time.perf_counter()
        if not self._kept:
            return {"compared": 0, "differ": [], "weight_error": None}
        groups: dict[Any, list[tuple[_Window, torch.Tensor]]] = {}
        for window, sent in self._kept:
            groups.setdefault((window.move.scale is None, window.size, sent.dtype), []).append((window, sent))
        found = [_bits(group) if plain else _errors(group) for (plain, *_), group in groups.items()]
        figures = torch.cat(found).tolist()  # the wait
        names = [window.name for group in groups.values() for window, _ in group]
        lost, size = (hypot(*(row[at] for row in figures)) for at in (2, 3))
        self.seconds += time.perf_counter() - begun
        return {
            "compared": len(names),
            "differ": [name for name, row in zip(names, figures, strict=True) if not _fits(*row)],
            "weight_error": lost / size if size else None,
        }


def _fits(excess: float, amax: float, error: float, norm: float) -> bool:
    """Return whether a window is what was sent, by a row of `_errors`. NaN is not; zeros must be zeros."""
    return excess <= MOST_OF_AMAX * max(amax, AMAX_FLOOR) if amax else excess <= 0


def _errors(group: Sequence[tuple[_Window, torch.Tensor]]) -> torch.Tensor:
    """Compare quantised windows: [windows, 4], largest |q s - w| - |w| / 16, largest |w|, norms of q s - w and of w."""
    import torch

    wanted = torch.stack([sent for _, sent in group]).float()
    scales = torch.stack([window.scales() for window, _ in group]).repeat_interleave(BLOCK, -1)
    error = torch.stack([window.live() for window, _ in group]).float()
    error.mul_(scales[..., : wanted.shape[-1]]).sub_(wanted)
    size, both = wanted.abs(), (1, 2)
    norms = [torch.linalg.vector_norm(x, dim=both) for x in (error, wanted)]
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

    It is shorter only at the edge of a tensor of other than whole blocks, so that most models' windows have one shape.
    """
    last = size if size % BLOCK else size - min(size, most) + 1
    start = chance.randrange(0, last, BLOCK)
    return start, min(most, size - start)


def _cut(tensor: torch.Tensor, corner: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return tensor[corner : corner + size] by one operation: a slice of each dimension would add microseconds."""
    strides = tensor.stride()
    at = tensor.storage_offset() + sum(start * stride for start, stride in zip(corner, strides, strict=True))
    return tensor.as_strided(size, strides, at)
