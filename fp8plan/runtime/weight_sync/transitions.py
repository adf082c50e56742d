"""The states of an engine's weights, and the events that lead from one to the next.

    SERVING, REFUSED --BEGIN--> OPEN --WRITE--> WRITING --CHECK--> CHECKED --SERVE--> SERVING

A sync that ends without new weights returns to the state before it, unless it has overwritten that state's weights.
Between two syncs weights serve or are refused. The trainer's process, a server's front end and each worker keep such a
state. `after` is a pure function of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from fp8plan.errors import LostEngineError, SyncError


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
