"""The few things a Monitor must know of the other processes that train with it."""

from __future__ import annotations

import os
from typing import Any


def rank(group: Any = None) -> int:
    """Of this process in `group` (None: all); before torch.distributed is up, what its launcher says. 0 alone."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank(group))
    return int(os.environ.get("RANK") or 0)


def merged(figures: dict[str, float | None], tokens: int, group: Any = None) -> dict[str, float | None]:
    """Figures of all ranks of `group`: the largest of those that end in _max, the least of those that end in _min, of
    the others the mean weighted by the ranks' tokens, as trainers average metrics. A rank without tokens has no say.

    Every rank of the group must call it.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return figures
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, (tokens, figures), group=group)
    return combined([one for one in found if one[0]] or found[:1])


def combined(found: list[tuple[int, dict[str, float | None]]]) -> dict[str, float | None]:
    """As `merged`, of (tokens, figures) of some ranks."""
    merged: dict[str, float | None] = {}
    for name in dict.fromkeys(name for _, figures in found for name in figures):
        known = [(tokens, x) for tokens, figures in found if (x := figures.get(name)) is not None]
        values = [x for _, x in known]
        if not values:
            merged[name] = None
        elif name.endswith(("_max", "_min")):
            merged[name] = (max if name.endswith("_max") else min)(values)
        else:
            weight = sum(tokens for tokens, _ in known)
            merged[name] = sum(tokens * x for tokens, x in known) / weight if weight else values[0]
    return merged
