"""vLLM's sleep and wake-up, and what they leave of weights, KV cache and KV scales."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.weight_sync.calls import Procedure, rpc
from fp8plan.runtime.apply.weight_sync.kv_calibration import rescaled
from fp8plan.runtime.apply.weight_sync.state import Event, SyncState, refuse_dead

TAGS: Final = ("weights", "kv_cache")  # the parts that vLLM puts to sleep


@contextmanager
def falling_asleep(state: SyncState, level: int) -> Iterator[bool]:
    """Note that vLLM is put to sleep; yield False if it sleeps already.

    If that fails, the engine counts as asleep and refuses to generate until a wake-up and a complete sync.
    Raises ConfigError for levels other than 1 and 2, SyncError if the engine sleeps in part or at a lower level.
    """
    refuse_dead(state)
    if level not in (1, 2):
        raise ConfigError(
            f"level is {level!r}; allowed: 1, which keeps the weights on the host, and 2, which drops them"
        )
    if state.asleep:  # vLLM would ignore the call
        if state.asleep != frozenset(TAGS) or level > state.sleep_level:
            asleep = ", ".join(sorted(state.asleep))
            level_now = f"level {state.sleep_level}" if state.sleep_level else "perhaps not all of it"
            raise SyncError(f"the engine sleeps already ({asleep}, {level_now}); call wake_up before")
        yield False
        return
    state.note(Event.BEGIN, "the engine was put to sleep, and that has not ended")
    state.note(Event.WRITE)
    # An interrupted call may still have put it to sleep. Waking an engine that is awake does no harm.
    state.asleep, state.sleep_level = frozenset(TAGS), 0
    yield True
    state.sleep_level = level
    if level < 2:
        state.note(Event.RESTORE)
    else:
        state.note(Event.END, "the engine slept at level 2, which drops its weights")


def asleep_of(state: SyncState, tags: Sequence[str] | None) -> list[str]:
    """Return those of the tags (None: of all) that sleep. Raises ConfigError for tags that vLLM does not have."""
    refuse_dead(state)
    if isinstance(tags, str) or (unknown := [tag for tag in tags or () if tag not in TAGS]):
        wrong = tags if isinstance(tags, str) else unknown[0]
        raise ConfigError(f"tags: {wrong!r}; allowed: a list of {', '.join(TAGS)}, or None for all")
    return [tag for tag in TAGS if tag in state.asleep and tag in (TAGS if tags is None else tags)]


def woken(state: SyncState, tags: Collection[str]) -> Procedure:
    """Mend what vLLM's wake_up leaves: arbitrary bytes in the KV cache, and scales of 1.0. tags: the parts that woke"""
    if "kv_cache" in tags:
        state.soiled = True
        yield from rpc("fp8plan_zero_kv")
        state.soiled = False
    yield from rescaled(state)
    state.asleep -= frozenset(tags)
