"""Top-k with error feedback: a sync that sends the most useful changes, and keeps the others for later ones.

For links on which even exact patches are too slow (Stich et al., Sparsified SGD with memory, arXiv 1809.07599). The
error that is fed back is the difference between the trainer's weights and the base, which is what the engines hold. So
nothing more has to be stored: a change that was left out is still a difference at the next sync, and competes again.

A change is worth the squared error of the weight that it takes away, (held - exact)^2 - (new - exact)^2. `exact` is the
trainer's value, before it is quantised. An E4M3 code that has just crossed the middle between two values is worth
little; one that has drifted on is worth more.

Either the number of changes that are sent is bounded, or the error that stays. Vectors, matrices that vLLM must reload,
and blocks whose scale has changed are always sent exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from typing import TYPE_CHECKING

from fp8plan.errors import ConfigError
from fp8plan.model.weight_changes import TopK, frame_bytes
from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK, scale_shape
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits, flat
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX, Entry, Manifest, dtype_name

if TYPE_CHECKING:
    from torch import Tensor


def for_each_matrix(top_k: TopK, manifest: Manifest) -> TopK:
    """Return settings that hold for each matrix of a manifest.

    Raises ConfigError if nbytes is less than headers, digests and vectors take.
    """
    # Scales count as if all of them changed.
    parts = [(entry, *flat(entry.shape), entry.nbytes // entry.numel) for entry in manifest]
    matrices = [(rows, columns, item, 1) for entry, rows, columns, item in parts if _thinned(entry)]
    rest = sum(frame_bytes(*sizes) + entry.nbytes for entry, *sizes in parts if not _thinned(entry))
    return top_k.in_shares(matrices, rest)


def _thinned(entry: Entry) -> bool:
    return len(entry.shape) > 1 and not entry.name.endswith(SCALE_SUFFIX)


@dataclass(slots=True)
class Residual:
    """Squares of what the engines lack, and of the trainer's weights, summed over matrices."""

    lacking: float = 0.0
    weights: float = 0.0

    @property
    def relative(self) -> float:
        """The RMS of what a sync has left out, over that of the weights. 0 without top_k."""
        return sqrt(self.lacking / self.weights) if self.lacking else 0.0


def refuse_codes(name: str, dtype: str) -> None:
    """Raise ConfigError for a trainer's E4M3, whose exact values are not known. dtype: as Entry has it"""
    if dtype.startswith("float8"):
        raise ConfigError(f"{name} is {dtype}; allowed with top_k: BF16, FP16 or FP32, to know its error")


def thinned(
    new: Mapping[str, Tensor], held: Mapping[str, Tensor], exact: Tensor, top_k: TopK, residual: Residual
) -> Tensor:
    """Return a tensor that is `held` but for its most useful changes to `new`, and add the rest to `residual`.

    new, held: a tensor by name, or E4M3 [..., N, K] followed by its scales; alike in shapes, on one device
    exact:     the trainer's values, BF16, FP16 or FP32 [..., N, K]
    top_k:     the share of the values that may change, rounded up, or the residual that may stay

    Raises ConfigError as refuse_codes.
    """
    import torch

    name, tensor = next(iter(new.items()))
    refuse_codes(name, dtype_name(exact.dtype))
    if tensor.dim() < 2:
        return tensor
    weights = float(torch.linalg.vector_norm(exact, dtype=torch.float32)) ** 2
    words, base = bits(tensor.contiguous()).flatten(), bits(held[name]).flatten().clone()
    places = (words != base).nonzero().flatten()
    target = exact.flatten()[places.to(exact.device)].to(places.device).float()
    before, after = (whole.flatten()[places].float() for whole in (held[name], tensor.contiguous()))
    always = torch.zeros_like(places, dtype=torch.bool)
    if len(new) > 1:
        at = _blocks(places, tensor.shape)
        old_scales, scales = (side[name + SCALE_SUFFIX].flatten()[at] for side in (held, new))
        before, after, always = before * old_scales, after * scales, scales != old_scales
    worth = torch.where(always, torch.inf, (before - target).square() - (after - target).square())
    order = worth.argsort(descending=True, stable=True)
    # The squares that the engine lacks if the last 0, 1, 2, ... changes wait.
    lacking = torch.nn.functional.pad((after - before)[order].flip(0).double().square().cumsum(0), (1, 0))
    may_wait = places.numel() - int(always.sum())
    if top_k.share is not None:
        waiting = max(0, may_wait - ceil(top_k.share * tensor.numel()))
    else:
        most = (top_k.residual or 0.0) ** 2 * weights if isfinite(weights) else 0.0
        waiting = min(may_wait, int((lacking <= most).sum()) - 1)
    sent = order[: places.numel() - waiting]
    base[places[sent]] = words[places[sent]]
    residual.weights += weights
    residual.lacking += float(lacking[waiting])
    return base.view(tensor.dtype).view(tensor.shape)


def _blocks(places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the number of each place's scale. shape: of the codes [..., N, K]"""
    rows, columns = shape[-2:]
    matrix, row, column = places // (rows * columns), places // columns % rows, places % columns
    height, width = scale_shape(rows, columns)
    return (matrix * height + row // BLOCK) * width + column // BLOCK
