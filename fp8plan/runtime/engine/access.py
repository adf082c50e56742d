"""Access to an engine: for rollouts, or for one procedure that changes it, and for neither while it sleeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError
from fp8plan.runtime.weight_sync.state import SyncState

TAGS: Final = ("weights", "kv_cache")  # of vLLM's sleep


def refuse_shut_down(state: SyncState) -> None:
    """Raises LostEngineError after shutdown()."""
    if state.shut_down:
        raise LostEngineError("the engine was shut down; make another with from_plan")


def refuse_dead(state: SyncState) -> None:
    """Raises NotServingError if there is no engine to do anything with."""
    if state.dead:
        raise NotServingError("the engine has died; call sync_weights with all weights, which starts it again")


@contextmanager
def generating(state: SyncState, only: bool = False) -> Iterator[None]:
    """Count a generate as running. Raises NotServingError while the weights must not be used.

    only: refuse while another generate runs, too
    """
    with state.lock:
        if only and state.generating:
            raise NotServingError("another generate is running; wait for it")
        refuse_dead(state)
        if state.asleep:
            raise NotServingError("the engine sleeps; call wake_up")
        if state.running:
            raise NotServingError("a sync is running; wait for it")
        if state.refusal is not None:
            raise NotServingError(f"{state.refusal}; call sync_weights with all weights")
        state.generating += 1
    try:
        yield
    finally:
        with state.lock:
            state.generating -= 1


@contextmanager
def alone(state: SyncState, busy: int) -> Iterator[None]:
    """Keep everybody else away from the engine. busy: unfinished requests that vLLM counts.

    Raises SyncError while there are any, or while another procedure runs.
    """
    with state.lock:
        if state.running:
            raise SyncError("another sync is running; wait for it. The weights that it leaves will serve")
        if found := max(busy, state.generating):
            serve = "the old weights serve" if state.refusal is None else "the engine still refuses to generate"
            raise SyncError(f"{found} requests are running; finish or abort them before. Nothing was sent; {serve}")
        state.running = True
    try:
        yield
    finally:
        state.running = False


@contextmanager
def falling_asleep(state: SyncState, level: int) -> Iterator[bool]:
    """Keep account of vLLM being put to sleep; yield whether there is anything to do.

    If it fails, nobody knows what is left: the engine counts as asleep, and refuses to generate until a wake-up and a
    complete sync. Raises ConfigError for levels other than 1 and 2, SyncError if the engine sleeps in another way.
    """
    refuse_dead(state)
    if level not in (1, 2):
        raise ConfigError(
            f"level is {level!r}; allowed: 1, which keeps the weights on the host, and 2, which drops them"
        )
    if state.asleep:  # vLLM would ignore it
        if state.asleep != frozenset(TAGS) or level > state.sleep_level:
            asleep = ", ".join(sorted(state.asleep))
            level_now = f"level {state.sleep_level}" if state.sleep_level else "perhaps not all of it"
            raise SyncError(f"the engine sleeps already ({asleep}, {level_now}); call wake_up before")
        yield False
        return
    before = state.refusal
    state.refusal = "the engine was put to sleep, and that has not ended"
    # Who is interrupted may have put it to sleep all the same; to wake up what is awake does no harm.
    state.asleep, state.sleep_level = frozenset(TAGS), 0
    yield True
    state.sleep_level = level
    state.refusal = before if level < 2 else "the engine slept at level 2, which drops its weights"


def asleep_of(state: SyncState, tags: Sequence[str] | None) -> list[str]:
    """Return those of vLLM's tags (all, unless given) that sleep. Raises ConfigError for tags that there are not."""
    refuse_dead(state)
    if isinstance(tags, str) or (wrong := [tag for tag in tags or () if tag not in TAGS]):
        given = tags if isinstance(tags, str) else wrong[0]
        raise ConfigError(f"tags: {given!r}; allowed: a list of {', '.join(TAGS)}, or None for all")
    return [tag for tag in TAGS if tag in state.asleep and tag in (TAGS if tags is None else tags)]


def refuse_asleep(state: SyncState, kv_amax: Any, scored: Any) -> None:
    """Raises SyncError if what a sync writes to, or runs on, sleeps."""
    if not state.asleep or state.dead:
        return
    runs = scored is not None or (state.fp8_kv and kv_amax is None)
    if "weights" in state.asleep or runs:
        instead = "" if "weights" in state.asleep else ", or give kv_amax and nothing scored"
        raise SyncError(
            f"the engine sleeps ({', '.join(sorted(state.asleep))}); call wake_up{instead}. Nothing was sent"
        )
