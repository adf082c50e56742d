"""Groups of layers that keep the same kind of cache, as vLLM's KV cache coordinator sees them.

All groups take blocks from one pool. One block of a group is one page: `block_size` tokens of each of its layers, or
one recurrent state of each. (vllm/v1/core/single_type_kv_cache_manager.py; the rules for windows and the admission
cap are the same in 0.26 and 0.30.)

States follow vLLM's mamba_cache_mode (MambaModelConfig in vllm/model_executor/models/config.py, 0.26 and 0.30):
without prefix caching it is "none", and a request holds one block whatever it computes; with prefix caching it is
"align": prefill goes in whole blocks, and a request holds the block it writes, the one it read, and under asynchronous
scheduling one more that is still in flight. The mode "all", a state for every block, is not modelled.
"""

from __future__ import annotations

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec, blocks_of_window


def check_groups(groups: tuple[Spec, ...], limits: EngineLimits) -> None:
    """Raise ConfigError for groups that are no groups, or whose prefix caching is not modelled."""
    for group in groups:
        windowed = group.kind in ("sliding", "chunked")
        if group.block_size < 1 or (group.window > 0) != windowed:
            raise ConfigError(
                f"{group} is no KV-cache group; allowed: a block_size of at least 1, and a window of at least 1 for "
                "sliding and chunked, 0 for the others"
            )
    if not limits.enable_prefix_caching:
        return
    sizes = sorted({group.block_size for group in groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"the KV-cache groups have block sizes {sizes}; with prefix caching only one size for all is modelled; "
            "set enable_prefix_caching=False"
        )
    if all(group.kind == "state" for group in groups):
        raise ConfigError(
            "prefix caching of a model without attention is not modelled (vLLM leaves it off); "
            "set enable_prefix_caching=False"
        )


def skipped_tokens(group: Spec, processed: int) -> int:
    """Tokens from the start that no later token looks at once `processed` are computed (`get_num_skipped_tokens`)."""
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


def next_change(group: Spec, computed: int, lag: int, caching: bool) -> int:
    """The least number of computed tokens above `computed` at which a decoding request's blocks in the group change.

    lag: tokens in flight while it decodes: 1 under asynchronous scheduling. A block leaves the window only when the
    step that made it useless has been processed.
    """
    size = group.block_size
    if group.kind == "state" and not caching:
        return 2**62
    take = (computed // size + 1) * size
    drop = take
    if group.kind == "sliding":
        drop = _next(computed, group.window - 1 + lag, size)
    elif group.kind == "chunked":
        drop = _next(computed, lag, group.window)
    elif group.kind == "state":
        drop = _next(computed, 1 + lag, size)
    return take if take < drop else drop


def _next(above: int, start: int, period: int) -> int:
    """The least of start + period, start + 2 * period, ... that is greater than `above`."""
    cycles = (above - start) // period + 1
    return start + (cycles if cycles > 1 else 1) * period


def tokens_read(group: Spec, before: int, after: int) -> int:
    """Tokens whose keys the queries of positions [before, after) look at together."""
    if group.kind == "sliding":
        return after - max(0, before - group.window + 1)
    return after - before // group.window * group.window


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
