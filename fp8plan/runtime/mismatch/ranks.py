"""The few things a Monitor must know of the other processes that train with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fp8plan.errors import ConfigError


def rank(group: Any = None) -> int:
    """Of this process in `group` (None: all); before torch.distributed is up, what its launcher says. 0 alone."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank(group))
    return int(os.environ.get("RANK") or 0)


def gathered(own: Any, settings: Mapping[str, Any], group: Any = None) -> list[Any]:
    """What each rank of `group` (None: all) has, in order; every one of them must call it. Alone: [own].

    Raises ConfigError, on all of them, that names the first rank whose settings are not the first one's, and which.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, (settings, own), group=group)
    _refuse_other_settings([one for one, _ in found])
    return [one for _, one in found]


def _refuse_other_settings(settings: Sequence[Mapping[str, Any]]) -> None:
    for number, found in enumerate(settings):
        for name, value in found.items():
            if value != settings[0][name]:
                raise ConfigError(
                    f"ranks correct with different settings: rank 0 has {name}={settings[0][name]!r}, rank {number} "
                    f"{value!r}; give the same to all"
                )
