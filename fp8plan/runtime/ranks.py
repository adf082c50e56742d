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
