"""A look at live weights with nothing to compare them with: are they sound, and did only syncs change them?"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from fp8plan.runtime.worker.facts import digest

if TYPE_CHECKING:
    import torch

PART: Final = 1 << 24  # elements that are looked at together: 64 MB of float32


def examine(worker: Any) -> dict[str, Any]:
    """Examine every parameter of a worker's model.

    unsound: parameter -> what is wrong with it: NaN or Inf, a matrix of zeros, a scale that is not above 0
    changed: parameters that are not what they were when this was last called, though no sync has come between
    since:   whether there was such a call
    """
    model = worker.model_runner.get_model()
    version = getattr(getattr(worker, "_fp8plan_live", None), "version", None)
    unsound, digests = {}, {}
    for name, tensor in model.named_parameters():
        digests[name] = digest(tensor.data)
        if wrong := _wrong(name, tensor.data):
            unsound[name] = wrong
    before, known = getattr(worker, "_fp8plan_examined", (None, {}))
    since = bool(known) and before == version
    worker._fp8plan_examined = version, digests
    changed = [name for name, found in digests.items() if since and known.get(name, found) != found]
    return {"unsound": unsound, "changed": changed, "since": since}


def _wrong(name: str, tensor: torch.Tensor) -> str | None:
    """Say what is wrong with a parameter; None for integers (packed weights), which say nothing."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return None
    least, most = torch.inf, -torch.inf
    for part in tensor.detach().reshape(-1).split(PART):
        low, high = (float(x) for x in part.float().aminmax())  # NaN, if any is
        if not (isfinite(low) and isfinite(high)):
            return "NaN or Inf"
        least, most = min(least, low), max(most, high)
    if "scale" in name.rpartition(".")[2] and least <= 0:
        return "a scale that is not above 0"
    if tensor.dim() > 1 and least == most == 0:  # a norm may begin at zeros
        return "zeros alone"
    return None
