"""After a sync: are the live weights the ones that were sent? A sample of them is compared, bit for bit.

While the stream passes, a window of each sampled tensor is kept; afterwards the live bits are compared with what the
reference quantiser (fp8plan.runtime.quantize) makes of it. Both are on the engine's device, and nothing waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8plan.runtime.live.binding import Binding, Move
from fp8plan.runtime.manifest import Entry
from fp8plan.runtime.quantize import BLOCK, dequantize
from fp8plan.runtime.quantize_groups import quantized

if TYPE_CHECKING:
    import torch

# Rows and columns of a window: 2 MiB in all for 16 samples.
WINDOW = (BLOCK, 4 * BLOCK)


class _Kept(NamedTuple):
    """A window that passed: `sent` of a tensor, and the live tensors that should hold it."""

    name: str
    sent: torch.Tensor
    live: torch.Tensor
    scale: torch.Tensor | None


class Samples:
    """count tensors of a manifest, chosen by seed: other ones every step."""

    def __init__(self, manifest: Sequence[Entry], binding: Binding, count: int, seed: int) -> None:
        chance = random.Random(seed)
        # A few more than asked for, as tensors that vLLM loads cannot be compared.
        numbers = chance.sample(range(len(manifest)), min(8 * count, len(manifest)))
        able = [number for number in numbers if binding.moves.get(manifest[number].name)]
        self._chosen = {
            number: (manifest[number].name, chance.choice(binding.moves[manifest[number].name]))
            for number in able[:count]
        }
        self._chance = chance
        self._kept: list[_Kept] = []

    def take(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Keep a window of those tensors of a chunk that are among the chosen."""
        if self._chosen.keys().isdisjoint(numbers):
            return
        for number, tensor in zip(numbers, tensors, strict=True):
            if number in self._chosen:
                self._kept.append(self._window(*self._chosen[number], tensor))

    def _window(self, name: str, move: Move, tensor: torch.Tensor) -> _Kept:
        part = tensor[tuple(slice(*extent) for extent in move.source)].reshape(move.target.shape)
        window = tuple(self._slice(size, most) for size, most in zip(part.shape, WINDOW[-part.dim() :], strict=True))
        blocks = tuple(slice(x.start // BLOCK, -(-x.stop // BLOCK)) for x in window)
        scale = None if move.scale is None else move.scale[blocks]
        return _Kept(name, part[window].clone(), move.target[window], scale)

    def _slice(self, size: int, most: int) -> slice:
        start = self._chance.randrange(0, size, BLOCK)
        return slice(start, min(start + most, size))

    def compare(self) -> dict[str, Any]:
        """tensors compared, names that differ, and the RMS error of the quantised ones (a fraction; None without).

        Windows of one shape are compared together: on a GPU a dozen launches for each would take longer than the work.
        """
        import torch

        if not self._kept:
            return {"compared": 0, "differ": [], "weight_error": None}
        groups: dict[Any, list[_Kept]] = {}
        for kept in self._kept:
            groups.setdefault((kept.sent.shape, kept.sent.dtype, kept.scale is None), []).append(kept)
        differ, errors = [], []
        for (_, _, plain), group in groups.items():
            sent, live = (torch.stack([kept[at] for kept in group]) for at in (1, 2))
            if plain:
                differ.append((live.view(torch.uint8) != sent.view(torch.uint8)).flatten(1).any(1))
                continue
            scale = torch.stack([kept.scale for kept in group if kept.scale is not None])
            q, wanted = map(torch.stack, zip(*quantized(list(sent)), strict=True))
            other = (q.view(torch.uint8) != live.view(torch.uint8)).flatten(1).any(1)
            differ.append(other | (wanted != scale).flatten(1).any(1))
            error = dequantize(live, scale, torch.float32) - sent
            errors.append(torch.stack((error.square().sum(), sent.float().square().sum())))
        sums = torch.stack(errors).sum(0) if errors else torch.zeros(2, device=differ[0].device)
        *found, lost, size = torch.cat([*(flags.float() for flags in differ), sums]).tolist()  # one wait for the GPU
        names = [kept.name for group in groups.values() for kept in group]
        return {
            "compared": len(found),
            "differ": [name for name, other in zip(names, found, strict=True) if other],
            "weight_error": (lost / size) ** 0.5 if size else None,
        }
