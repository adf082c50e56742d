"""Windows of attention, and their chunks: what is read inside, and which blocks of a group that takes."""

from __future__ import annotations

from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec, blocks_of_window


def tokens_read(group: Spec, before: int, after: int) -> int:
    """The number of tokens whose keys the queries of positions [before, after) read."""
    return after - skipped_tokens(group, before)


def pairs_read(group: Spec, before: int, after: int) -> int:
    """Query-key pairs of the queries of positions [before, after)."""
    return _pairs_below(group, after) - _pairs_below(group, before)


def _pairs_below(group: Spec, position: int) -> int:
    window = group.window
    if group.kind == "sliding":
        growing = min(position, window)
        return growing * (growing + 1) // 2 + (position - growing) * window
    rest = position % window
    return position // window * (window * (window + 1) // 2) + rest * (rest + 1) // 2


def skipped_tokens(group: Spec, processed: int) -> int:
    """Leading tokens that no later token reads once `processed` are computed (`get_num_skipped_tokens`)."""
    if group.kind == "sliding":
        return max(0, processed - group.window + 1)
    if group.kind == "chunked":
        return processed // group.window * group.window
    return 0


def admission_cap(group: Spec, limits: EngineLimits) -> int:
    """The most blocks that the check of the whole prompt asks for (`max_admission_blocks_per_request`); -1: no cap.

    vLLM also cuts it by max_model_len. That never matters: no request is longer.
    """
    in_flight = limits.max_num_batched_tokens * (2 if limits.async_scheduling else 1)
    return blocks_of_window(group, in_flight) if group.window else -1
