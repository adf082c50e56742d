"""Windows and chunks of attention: the tokens that are read inside, and when a decoding request needs other blocks."""

from __future__ import annotations

from fp8plan.model.memory.kv_specs import Spec


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


def next_change(group: Spec, computed: int, lag: int) -> int:
    """The next number of computed tokens at which a decoding request may take or free a block of the group.

    lag: tokens in flight while it decodes: 1 under asynchronous scheduling. A block leaves the window only when the
    step that made it useless has been processed.
    """
    size = group.block_size
    take = computed // size * size + size
    if group.kind == "sliding":
        return min(take, _next(computed, group.window - 1 + lag, size))
    if group.kind == "chunked":
        return min(take, _next(computed, lag, group.window))
    if group.kind == "state":
        return min(take, _next(computed, 1 + lag, size))
    return take


def _next(above: int, start: int, period: int) -> int:
    """The least of start + period, start + 2 * period, ... that is greater than `above`."""
    return start + max((above - start) // period + 1, 1) * period
