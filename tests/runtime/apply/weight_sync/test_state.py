"""Every event in every state of an engine's weights: the state that follows, or a refusal."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import LostEngineError, SyncError
from fp8plan.runtime.apply.weight_sync.state import DIED, RESTARTED, SHUT_DOWN, UNDER_WAY, Event, State, Weights, after

SERVING = Weights()
BAD = Weights(State.REFUSED, "bad", whole=False)
RESTORED = Weights(State.REFUSED, "bad", whole=True)
DEAD = Weights(State.DEAD, DIED, whole=False)
CLOSED = Weights(State.CLOSED, SHUT_DOWN, whole=False)
STARTED = Weights(State.REFUSED, RESTARTED, whole=False)
WHY = "it broke off"
BROKEN = Weights(State.REFUSED, WHY, whole=False)


def opened(before: Weights, state: State = State.OPEN, whole: bool = True, why: str = UNDER_WAY) -> Weights:
    return Weights(state, why, before, whole)


OPEN = opened(SERVING)
WRITING, CHECKED = (opened(SERVING, state, whole=False) for state in (State.WRITING, State.CHECKED))
BEGUN = opened(SERVING, why=WHY)
NOT_NOW, GONE, LOST = "cannot follow", "starts it again", "was shut down"

ALIVE: dict[Event, Weights | str] = {  # the same in every state of an engine that is neither dead nor closed
    Event.REFUSE: BROKEN,
    Event.DIE: Weights(State.DEAD, WHY, whole=False),
    Event.START: NOT_NOW,
    Event.CLOSE: CLOSED,
}

# The row of a state has, for each event with the reason WHY: what follows, or what the refusal says.
TABLE: dict[str, tuple[Weights, dict[Event, Weights | str]]] = {
    "serving": (
        SERVING,
        {
            Event.BEGIN: BEGUN,
            Event.WRITE: NOT_NOW,
            Event.CHECK: NOT_NOW,
            Event.SERVE: NOT_NOW,
            Event.END: SERVING,
            Event.RESTORE: SERVING,
        }
        | ALIVE,
    ),
    "refused": (
        BAD,
        {
            Event.BEGIN: opened(RESTORED, why=WHY),
            Event.WRITE: NOT_NOW,
            Event.CHECK: NOT_NOW,
            Event.SERVE: NOT_NOW,
            Event.END: BAD,
            Event.RESTORE: BAD,
        }
        | ALIVE,
    ),
    "open": (
        OPEN,
        {
            Event.BEGIN: BEGUN,
            Event.WRITE: opened(SERVING, State.WRITING, whole=False, why=WHY),
            Event.CHECK: opened(SERVING, State.CHECKED, why=WHY),
            Event.SERVE: NOT_NOW,
            Event.END: SERVING,
            Event.RESTORE: SERVING,
        }
        | ALIVE,
    ),
    "writing": (
        WRITING,
        {
            Event.BEGIN: opened(Weights(State.REFUSED, UNDER_WAY), why=WHY),
            Event.WRITE: opened(SERVING, State.WRITING, whole=False, why=WHY),
            Event.CHECK: opened(SERVING, State.CHECKED, whole=False, why=WHY),
            Event.SERVE: NOT_NOW,
            Event.END: BROKEN,
            Event.RESTORE: SERVING,
        }
        | ALIVE,
    ),
    "checked": (
        CHECKED,
        {
            Event.BEGIN: opened(Weights(State.REFUSED, UNDER_WAY), why=WHY),
            Event.WRITE: NOT_NOW,
            Event.CHECK: NOT_NOW,
            Event.SERVE: Weights(whole=False),
            Event.END: BROKEN,
            Event.RESTORE: SERVING,
        }
        | ALIVE,
    ),
    "dead": (
        DEAD,
        dict.fromkeys((Event.BEGIN, Event.WRITE, Event.CHECK, Event.SERVE), GONE)
        | dict.fromkeys((Event.END, Event.RESTORE, Event.REFUSE, Event.DIE), DEAD)
        | {Event.START: STARTED, Event.CLOSE: CLOSED},
    ),
    "closed": (
        CLOSED,
        dict.fromkeys((Event.BEGIN, Event.WRITE, Event.CHECK, Event.SERVE, Event.START), LOST)
        | dict.fromkeys((Event.END, Event.RESTORE, Event.REFUSE, Event.DIE, Event.CLOSE), CLOSED),
    ),
}


def test_the_table_has_every_event_in_every_state() -> None:
    assert set(TABLE) == set(State)
    assert all(weights.state == name for name, (weights, _) in TABLE.items())
    assert all(set(row) == set(Event) for _, row in TABLE.values())


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)), ids=lambda x: str(x))
def test_what_follows_an_event(state: State, event: Event) -> None:
    weights, row = TABLE[state]
    expected = row[event]
    if isinstance(expected, Weights):
        assert after(weights, event, WHY) == expected
        return
    kind = LostEngineError if state is State.CLOSED else SyncError
    with pytest.raises(kind, match=expected) as refused:
        after(weights, event, WHY)
    assert type(refused.value) is kind


def followed(*events: Event | tuple[Event, str]) -> Weights:
    """The state after events, from one that serves."""
    weights = Weights()
    for event in events:
        weights = after(weights, event) if isinstance(event, Event) else after(weights, *event)
    return weights


def test_an_event_has_words_of_its_own() -> None:
    assert followed(Event.BEGIN).why == UNDER_WAY
    assert followed(Event.BEGIN, Event.WRITE).why == UNDER_WAY
    assert followed((Event.BEGIN, "a"), Event.WRITE, Event.END).why == "a"
    assert followed((Event.BEGIN, "a"), Event.WRITE, Event.BEGIN, Event.END).why == "a"
    assert followed(Event.DIE).why == DIED


def test_what_wrote_nothing_leaves_the_weights_from_before() -> None:
    """Also after the end of a sync that changed nothing, and beside a refusal from before."""
    assert followed(Event.BEGIN, Event.END) == SERVING
    assert followed(Event.BEGIN, Event.CHECK, Event.END) == SERVING
    assert followed(Event.BEGIN, Event.CHECK, Event.SERVE) == SERVING
    refused = followed((Event.REFUSE, "bad"), Event.BEGIN, Event.WRITE, Event.RESTORE)
    assert (refused.state, refused.why, refused.whole) == (State.REFUSED, "bad", True)


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_only_a_sync_that_was_checked_makes_refused_weights_serve(events: list[Event]) -> None:
    """And there is a reason not to use the weights in each state but serving."""
    weights, spoilt = Weights(), False
    for event in events:
        before = weights
        try:
            weights = after(weights, event)
        except SyncError:
            assert weights is before
            continue
        assert (weights.before is not None) == weights.is_open
        assert (weights.why is None) == (weights.state is State.SERVING)
        if event is Event.SERVE:
            assert before.state is State.CHECKED
            spoilt = False
        elif event in (Event.REFUSE, Event.DIE, Event.CLOSE):
            spoilt = True
        assert not (spoilt and weights.state is State.SERVING)
