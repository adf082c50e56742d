"""A comparison of live weights with a trainer's tensors, which are not written (runtime.doctor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8plan.runtime.weight_sync.shared import Twins
from fp8plan.runtime.worker.live_weights import Samples
from fp8plan.runtime.worker.prepare import Prepared

if TYPE_CHECKING:
    import torch


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
