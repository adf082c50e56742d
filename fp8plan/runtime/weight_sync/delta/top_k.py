"""Top-k with error feedback: a sync that sends the most useful changes, and keeps the others for later ones.

For links on which even exact patches are too slow (Stich et al., Sparsified SGD with memory, arXiv 1809.07599). The
error that is fed back is the difference between the trainer's weights and the base, which is what the engines hold. So
nothing more has to be stored: a change that was left out is still a difference at the next sync, and competes again.

A change is worth the squared error of the weight that it takes away, (held - exact)^2 - (new - exact)^2. `exact` is the
trainer's value, before it is quantised. An E4M3 code that has just crossed the middle between two values is worth
little; one that has drifted on is worth more.

Vectors, matrices that vLLM must reload, and blocks whose scale has changed are always sent exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from typing import TYPE_CHECKING, Final

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.runtime.quantize.block_fp8 import BLOCK, scale_shape
from fp8plan.runtime.weight_sync.delta.patch import GAPS_2, HEADER, LARGEST
from fp8plan.runtime.weight_sync.delta.tiles import DIGEST_BYTES, bits, tiles
from fp8plan.runtime.weight_sync.manifest import SCALE_SUFFIX, Entry, Manifest, dtype_name

if TYPE_CHECKING:
    from torch import Tensor

PLACE_BYTES: Final = 2  # of a place in GAPS_2, and of a skip: a patch takes the shortest form


@dataclass(frozen=True, slots=True)
class TopK:
    """Settings of a sparse sync. Give exactly one.

    share:  largest share of a matrix's values that a sync sends
    nbytes: largest bytes of a sync. All matrices get the same share. Blocks with new scales, and matrices that vLLM
            must reload, come on top

    Raises ConfigError for other values.
    """

    share: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.nbytes is None):
            raise ConfigError("top_k needs one of its two settings; type: TopK(share=1e-4) or TopK(nbytes=20_000_000)")
        if self.share is not None and not (is_number(self.share) and 0 < self.share <= 1):
            raise ConfigError(f"share is {self.share!r}; allowed: a number above 0, up to 1")
        if self.nbytes is not None and not (is_number(self.nbytes) and isfinite(self.nbytes) and self.nbytes > 0):
            raise ConfigError(f"nbytes is {self.nbytes!r}; allowed: a number of bytes above 0")

    def share_of(self, manifest: Manifest) -> float:
        """Return the share of a matrix's values that one sync sends.

        Raises ConfigError if nbytes is less than headers, digests and vectors take.
        """
        if self.share is not None:
            return self.share
        assert self.nbytes is not None
        matrices = [entry for entry in manifest if _thinned(entry)]
        fixed = sum(8 * HEADER + DIGEST_BYTES * _tiles(entry) for entry in manifest)
        fixed += sum(entry.nbytes for entry in manifest if not _thinned(entry))
        # Skips, and the value by which a share is rounded up.
        fixed += sum(
            PLACE_BYTES * (entry.numel // LARGEST[GAPS_2] + 1) + entry.nbytes // entry.numel for entry in matrices
        )
        each = sum(entry.nbytes + PLACE_BYTES * entry.numel for entry in matrices)
        if self.nbytes <= fixed:  # scales are counted, too: all of them may change
            raise ConfigError(f"nbytes is {self.nbytes}; allowed for this model: more than {fixed}")
        return min(1.0, (self.nbytes - fixed) / each)


def _thinned(entry: Entry) -> bool:
    return len(entry.shape) > 1 and not entry.name.endswith(SCALE_SUFFIX)


def _tiles(entry: Entry) -> int:
    height, width = tiles(entry.shape, entry.nbytes // entry.numel)
    return height * width


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
    new: Mapping[str, Tensor], held: Mapping[str, Tensor], exact: Tensor, share: float, residual: Residual
) -> Tensor:
    """Return a tensor that is `held` but for its most useful changes to `new`, and add the rest to `residual`.

    new, held: a tensor by name, or E4M3 [..., N, K] followed by its scales; alike in shapes, on one device
    exact:     the trainer's values, BF16, FP16 or FP32 [..., N, K]
    share:     of the values, rounded up, that may change

    Raises ConfigError as refuse_codes.
    """
    import torch

    name, tensor = next(iter(new.items()))
    refuse_codes(name, dtype_name(exact.dtype))
    if tensor.dim() < 2:
        return tensor
    residual.weights += float(torch.linalg.vector_norm(exact, dtype=torch.float32)) ** 2
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
    count = min(places.numel(), int(always.sum()) + ceil(share * tensor.numel()))
    order = worth.argsort(descending=True, stable=True)
    sent, left = order[:count], order[count:]
    base[places[sent]] = words[places[sent]]
    residual.lacking += float((after - before)[left].square().sum())
    return base.view(tensor.dtype).view(tensor.shape)


def _blocks(places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the number of each place's scale. shape: of the codes [..., N, K]"""
    rows, columns = shape[-2:]
    matrix, row, column = places // (rows * columns), places // columns % rows, places % columns
    height, width = scale_shape(rows, columns)
    return (matrix * height + row // BLOCK) * width + column // BLOCK
