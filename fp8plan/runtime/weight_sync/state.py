"""The states of an engine's weights, and the events that lead from one to the next.

    SERVING, REFUSED --BEGIN--> OPEN --WRITE--> WRITING --CHECK--> CHECKED --SERVE--> SERVING

A sync that ends without new weights returns to the state before it, unless it has overwritten that state's weights.
Between two syncs weights serve or are refused. The trainer's process, a server's front end and each worker keep such a
state. `after` is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from threading import Lock
from types import MappingProxyType
from typing import Final, NamedTuple

from fp8plan.errors import LostEngineError, SyncError
from fp8plan.runtime.weight_sync.delta.base import Base
from fp8plan.runtime.weight_sync.kv_scales import Scales
from fp8plan.runtime.weight_sync.manifest import Manifest
from fp8plan.runtime.weight_sync.settings import SyncSettings


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
    RESTORE = "restore"  # the same, and the weights from before it are live again
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
    whole:  False once the sync that was begun last has written, unless the weights from before it are live again
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

    why: the reason why the weights must not be used from then on; None: as before, or in the event's own words

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
        raise SyncError(f"{event} cannot follow {weights.state}; allowed: begin, write, check, serve")
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
    kv_fixed:   True if its attention keeps the scales that it started with (kv_scales.FIXED_SCALES)
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

    def note(self, event: Event, why: str | None = None) -> None:
        """Note what has happened to the weights. Raises as `after` does."""
        self.weights = after(self.weights, event, why)

    @property
    def refusal(self) -> str | None:
        """The reason why the engine must not generate; None while it serves."""
        return self.weights.why

    @property
    def dead(self) -> bool:
        """Whether the engine has died, so that the next sync starts it again."""
        return self.weights.state is State.DEAD

    @property
    def shut_down(self) -> bool:
        """Whether its owner has shut it down, for good."""
        return self.weights.state is State.CLOSED
