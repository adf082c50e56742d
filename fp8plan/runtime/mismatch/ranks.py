"""Exchange between ranks, the processes that train together. `group` is theirs; None: all; ALONE: this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from fp8plan.errors import ConfigError
from fp8plan.runtime.mismatch.histogram import FloatArray

ALONE: Final = object()  # the group of a process that exchanges nothing, although torch.distributed may be up


def several(group: Any = None) -> bool:
    """Return True if torch.distributed is up, and the group is not ALONE."""
    from torch import distributed

    return group is not ALONE and bool(distributed.is_available() and distributed.is_initialized())


def rank(group: Any = None) -> int:
    """The number of this process; before torch.distributed is up, what its launcher says. 0 alone."""
    from torch import distributed

    if group is ALONE:
        return 0
    return int(distributed.get_rank(group) if several() else os.environ.get("RANK") or 0)


def all_reduced(vector: FloatArray, group: Any = None) -> FloatArray:
    """The sum over the ranks of a float64 vector; itself without torch.distributed."""
    import torch
    from torch import distributed

    if not several(group):
        return vector
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    tensor = torch.from_numpy(vector).to(device)
    distributed.all_reduce(tensor, group=group)
    found: FloatArray = tensor.cpu().numpy()
    return found


def gathered(own: Any, settings: Mapping[str, Any], group: Any = None) -> list[Any]:
    """The `own` of each rank, in order; every rank must call it. Without torch.distributed: [own].

    Raises ConfigError, on all ranks, if one has other settings than the first; it names that rank and the setting.
    """
    from torch import distributed

    if not several(group):
        return [own]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, (settings, own), group=group)
    _refuse_other_settings([one for one, _ in found])
    return [one for _, one in found]


def raise_first(refusal: Exception | None, group: Any = None) -> NoReturn:
    """Raise this rank's refusal, or else a ConfigError that quotes the first rank's that has one.

    Every rank must call it, and one must have a refusal.
    """
    texts = gathered(None if refusal is None else f"{type(refusal).__name__}: {refusal}", {}, group)
    if refusal is not None:
        raise refusal
    number, text = next((number, text) for number, text in enumerate(texts) if text is not None)
    raise ConfigError(f"rank {number} of the group refused its batch, so no rank takes this step: {text}")


def _refuse_other_settings(settings: Sequence[Mapping[str, Any]]) -> None:
    for number, found in enumerate(settings):
        for name, value in found.items():
            if value != settings[0][name]:
                raise ConfigError(
                    f"ranks correct with different settings: rank 0 has {name}={settings[0][name]!r}, rank {number} "
                    f"{value!r}; give the same to all"
                )
