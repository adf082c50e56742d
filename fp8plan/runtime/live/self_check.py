"""After a sync: are the live weights the ones that were sent? A sample of them is compared, bit for bit.

While the stream passes, a window of each sampled tensor is kept; afterwards the live bits are compared with what the
reference quantiser (fp8plan.runtime.quantize) makes of it. Both are on the engine's device, and nothing waits for it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from fp8plan.runtime.live.binding import Binding, Move
from fp8plan.runtime.quantize import BLOCK, dequantize
from fp8plan.runtime.quantize_groups import quantized

if TYPE_CHECKING:
    import torch

# Rows and columns of a window: 2 MiB in all for 16 samples.
WINDOW = (BLOCK, 4 * BLOCK)


class Samples:
    """count tensors of a binding, chosen by seed: as many different ones over the steps as there are."""

    def __init__(self, binding: Binding, count: int, seed: int) -> None:
        chance = random.Random(seed)
        names = list(binding.moves)
        self._chosen = {
            name: chance.choice(moves)
            for name in chance.sample(names, min(count, len(names)))
            if (moves := binding.moves[name])
        }
        self._chance = chance
        self._kept: list[tuple[str, Move, torch.Tensor, tuple[slice, ...]]] = []

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a window of a tensor that passes, if it is one of the chosen."""
        move = self._chosen.get(name)
        if move is None:
            return
        part = tensor[tuple(slice(*extent) for extent in move.source)].reshape(move.target.shape)
        window = tuple(self._slice(size, most) for size, most in zip(part.shape, WINDOW[-part.dim() :], strict=True))
        self._kept.append((name, move, part[window].clone(), window))

    def _slice(self, size: int, most: int) -> slice:
        start = self._chance.randrange(0, size, BLOCK)
        return slice(start, min(start + most, size))

    def compare(self) -> dict[str, Any]:
        """tensors compared, names that differ, and the RMS error of the quantised ones (a fraction; None without)."""
        import torch

        if not self._kept:
            return {"compared": 0, "differ": [], "weight_error": None}
        differ, error, size = [], [], []
        for _, move, sent, window in self._kept:
            live = move.target[window]
            if move.scale is None:
                differ.append((live.view(torch.uint8) != sent.view(torch.uint8)).any())
                continue
            blocks = tuple(slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in window)
            q, scale = quantized(sent)
            differ.append((q.view(torch.uint8) != live.view(torch.uint8)).any() | (scale != move.scale[blocks]).any())
            kept = dequantize(live.contiguous(), move.scale[blocks].contiguous(), torch.float32)
            error.append((kept - sent.float()).square().sum())
            size.append(sent.float().square().sum())
        found = torch.stack(differ).tolist()
        fraction = (torch.stack(error).sum() / torch.stack(size).sum()).sqrt().item() if error else None
        return {
            "compared": len(found),
            "differ": [name for (name, *_), other in zip(self._kept, found, strict=True) if other],
            "weight_error": fraction,
        }
