"""The state of an engine's weights: the events that lead from one state to the next, and who may use the engine then.

    SERVING, REFUSED --BEGIN--> OPEN --WRITE--> WRITING --CHECK--> CHECKED --SERVE--> SERVING

A sync that ends without new weights returns to the state before it, unless it has overwritten that state's weights.
Between two syncs weights serve or are refused. The trainer's process, a server's front end and each worker keep such a
state. `after` is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fp8plan.errors import LostEngineError, NotServingError, SyncError
from fp8plan.runtime.apply.weight_sync.delta.base import Base
from fp8plan.runtime.apply.weight_sync.kv_scales import Scales
from fp8plan.runtime.apply.weight_sync.manifest import Manifest
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings


class State(StrEnum):
    """A state of an engine's weights."""

    SERVING = "serving"
    OPEN = "open"  # a sync has begun and written nothing
    WRITING = "writing"  # the weights are a mixture
    CHECKED = "checked"  # all new weights are here, as they were sent; KV scales and prefix cache are of the old ones
    REFUSED = "refused"  # no sync is open, and the weights must not be used
    DEAD = "dead"  # the engine's process has ended
    CLOSED = "closed"  # its owner has shut the engine down, for good


class Event(StrEnum):
    """A thing that happens to an engine's weights."""

    BEGIN = "begin"  # a sync begins. An earlier one that is still open has ended
    WRITE = "write"  # it is about to write a tensor
    CHECK = "check"  # all tensors have come, and the live ones equal them
    SERVE = "serve"  # the new weights serve
    END = "end"  # the sync ends without new weights
    RESTORE = "restore"  # as END, and the weights from before the sync are live
    REFUSE = "refuse"  # something other than a sync has made the weights unusable
    DIE = "die"
    START = "start"  # the engine was started again, with the weights of its checkpoint
    CLOSE = "close"


OPEN_STATES: Final = frozenset((State.OPEN, State.WRITING, State.CHECKED))
UNDER_WAY: Final = "an update of the weights is under way"
DIED: Final = "the engine has died; the next sync_weights starts it again"
SHUT_DOWN: Final = "the engine was shut down; make another with from_plan"
UNUSABLE: Final = "the weights are not to be used"
RESTARTED: Final = "the engine was started again, with the weights of its checkpoint"


@dataclass(frozen=True, slots=True)
class Weights:
    """The state of an engine's weights.

    why:    the reason why they must not be used; None while they serve
    before: the state before the open sync; None without one
    whole:  False from the first write of the last sync on, until the weights from before it are restored
    """

    state: State = State.SERVING
    why: str | None = None
    before: Weights | None = None
    whole: bool = True

    @property
    def is_open(self) -> bool:
        """Return whether a sync is open."""
        return self.state in OPEN_STATES


_STEPS: Final = {
    (State.OPEN, Event.WRITE): State.WRITING,
    (State.OPEN, Event.CHECK): State.CHECKED,  # patches of nothing
    (State.WRITING, Event.WRITE): State.WRITING,
    (State.WRITING, Event.CHECK): State.CHECKED,
    (State.CHECKED, Event.SERVE): State.SERVING,
}
_OF_A_SYNC: Final = frozenset((Event.BEGIN, Event.WRITE, Event.CHECK, Event.SERVE))


def after(weights: Weights, event: Event, why: str | None = None) -> Weights:
    """Return the state of the weights after an event.

    why: the reason why the weights must not be used from then on; None: that from before, or the event's usual one

    Raises SyncError for an event that cannot happen in this state; LostEngineError once the engine was shut down, for
    all events of a sync.
    """
    match weights.state, event:
        case State.CLOSED, _:
            if event in _OF_A_SYNC or event is Event.START:
                raise LostEngineError(SHUT_DOWN)
            return weights
        case _, Event.CLOSE:
            return Weights(State.CLOSED, SHUT_DOWN, whole=False)
        case State.DEAD, Event.START:
            return Weights(State.REFUSED, RESTARTED, whole=False)
        case State.DEAD, _:
            if event in _OF_A_SYNC:
                raise SyncError(weights.why)
            return weights
        case _, Event.DIE:
            return Weights(State.DEAD, why or DIED, whole=False)
        case _, Event.REFUSE:
            return Weights(State.REFUSED, why or UNUSABLE, whole=False)
        case _, Event.BEGIN:
            before = _ended(weights, None)
            return Weights(State.OPEN, why or UNDER_WAY, before=replace(before, whole=True))
        case _, Event.END:
            return _ended(weights, why)
        case _, Event.RESTORE:
            return weights if weights.before is None else weights.before
    if (state := _STEPS.get((weights.state, event))) is None:
        raise SyncError(f"{event} cannot follow {weights.state}; allowed: begin, write, check and serve, in this order")
    if state is State.SERVING:
        return Weights(whole=weights.whole)
    return replace(weights, state=state, why=why or weights.why, whole=weights.whole and event is not Event.WRITE)


def _ended(weights: Weights, why: str | None) -> Weights:
    """Return the state once an open sync has ended without new weights; without one the same."""
    if weights.before is None:
        return weights
    if weights.whole:
        return weights.before
    return Weights(State.REFUSED, why or weights.why, whole=False)


class Checked(NamedTuple):
    """A manifest that the workers take.

    number:  number of the manifest in the workers
    groups:  number of each tensor's group: fused tensors must come together
    sizes:   group -> how many tensors it has
    numbers: name -> number of the tensor in the manifest
    reloaded: name of each tensor that vLLM must reload -> number of its group
    twins:   groups of names that share one storage in the engine, sent or not (weight_sync.shared)
    """

    number: int
    groups: Sequence[int]
    sizes: Mapping[int, int]
    numbers: Mapping[str, int]
    reloaded: Mapping[str, int] = MappingProxyType({})
    twins: Sequence[Sequence[str]] = ()


@dataclass(slots=True)
class SyncState:
    """An engine's weights, and what a sync must know of the engine.

    staged_on:  device of the memory that tensors go through to another process; None: the engine is in this one
    workers:    number of vLLM's workers, which open that memory
    weights:    whether they serve, and how far a sync has come
    running:    True while a sync, a calibration or a step down is under way
    generating: calls of generate under way
    asleep:     vLLM's tags that sleep: "weights", "kv_cache"
    sleep_level: level of that sleep; 0 if falling asleep has not ended
    soiled:     True if unproven weights have run, which may have left NaN in the KV cache for the next request
    version:    number of the weights that serve
    stamp:      name of those weights, which their workers keep, too; None for the checkpoint's
    expected:   tensors of the checkpoint it was started with, where known
    prepared:   manifests that the workers have checked
    base:       the trainer's copy of the weights that serve, where syncs send only what has changed
    kv_scales:  scales of the live engine; None with a BF16 KV cache
    kv_fixed:   True if its attention keeps the scales that it started with (fixed_scales.FIXED_SCALES)
    kv_clipped: layers that fixed scales clip -> largest |k| or |v| over what their scales can store
    longest_prompt, vocabulary: limits of the engine, in tokens, where known
    quantised:  names of the checkpoint's tensors that the engine holds in FP8; None until asked
    wide:       names of those that it keeps in FP32, asked with `quantised`
    said_rounded: True once it was said that FP32 is rounded
    """

    settings: SyncSettings
    staged_on: str | None
    fp8_kv: bool
    workers: int = 1
    weights: Weights = field(default_factory=Weights)
    running: bool = False
    generating: int = 0
    asleep: frozenset[str] = frozenset()
    sleep_level: int = 0
    soiled: bool = False
    version: int = 0
    stamp: str | None = None
    expected: Manifest | None = None
    prepared: dict[tuple[Manifest, bool], Checked] = field(default_factory=dict)
    base: Base | None = None
    kv_scales: Scales | None = None
    kv_fixed: bool = False
    kv_clipped: Mapping[str, float] = field(default_factory=dict)
    longest_prompt: int | None = None
    vocabulary: int | None = None
    quantised: tuple[str, ...] | None = None
    wide: frozenset[str] = frozenset()
    said_rounded: bool = False
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, config: Any) -> SyncState:
        """The state of an engine that somebody else has started. config: its VllmConfig"""
        state = cls(SyncSettings(), None, str(config.cache_config.cache_dtype).startswith("fp8"))
        state.longest_prompt = config.model_config.max_model_len - 1
        state.vocabulary = config.model_config.get_vocab_size()
        return state

    def note(self, event: Event, why: str | None = None) -> None:
        """Note what has happened to the weights. Raises as `after` does."""
        self.weights = after(self.weights, event, why)

    @property
    def refusal(self) -> str | None:
        """The reason why the engine must not generate; None while it serves."""
        return self.weights.why

    @property
    def which_serve(self) -> str:
        """The words for an error before anything was sent: which weights serve."""
        return "the old weights serve" if self.refusal is None else "the engine still refuses to generate"

    @property
    def dead(self) -> bool:
        """True if the engine has died. The next sync starts it again."""
        return self.weights.state is State.DEAD

    @property
    def shut_down(self) -> bool:
        """True if its owner has shut it down, for good."""
        return self.weights.state is State.CLOSED


def refuse_shut_down(state: SyncState) -> None:
    """Raises LostEngineError after shutdown()."""
    if state.shut_down:
        raise LostEngineError(SHUT_DOWN)


def refuse_dead(state: SyncState) -> None:
    """Raises NotServingError if the engine has died."""
    if state.dead:
        raise NotServingError(state.refusal)


@contextmanager
def generating(state: SyncState, only: bool = False) -> Iterator[None]:
    """Count a generate as running. Raises NotServingError while the weights must not be used.

    only: refuse a second generate
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
    """Keep everybody else away from the engine. busy: number of unfinished requests that vLLM counts

    Raises SyncError while any request or another procedure runs, LostEngineError after shutdown().
    """
    refuse_shut_down(state)
    with state.lock:
        if state.running:
            raise SyncError("another sync is running; wait for it. The weights that it leaves will serve")
        if requests := max(busy, state.generating):
            raise SyncError(
                f"{requests} requests are running; finish or abort them before. Nothing was sent; {state.which_serve}"
            )
        state.running = True
    try:
        yield
    finally:
        state.running = False


def refuse_asleep(state: SyncState, kv_amax: Any, scored: Any) -> None:
    """Raises SyncError if a part of the engine sleeps that a sync writes to or runs on."""
    if not state.asleep or state.dead:
        return
    runs = scored is not None or (state.fp8_kv and kv_amax is None)
    if "weights" in state.asleep or runs:
        instead = "" if "weights" in state.asleep else ", or give kv_amax and nothing scored"
        raise SyncError(
            f"the engine sleeps ({', '.join(sorted(state.asleep))}); call wake_up{instead}. Nothing was sent"
        )
