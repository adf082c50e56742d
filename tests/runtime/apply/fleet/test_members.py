"""A fleet's actors, without Ray's processes: who counts as dead, and what becomes of those that do not start."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.apply.fleet import members as module
from fp8plan.runtime.apply.fleet.members import LOOK_S, STOP_S, Members, Replica
from fp8plan.runtime.apply.weight_sync.calls import Rpc
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Event, SyncState

pytestmark = pytest.mark.ray

LATE = object()  # an answer that is not there yet
DEATHS: dict[str, tuple[Any, ...]] = {
    "ActorDiedError": (),
    "ActorUnavailableError": ("no route", None),
    "ActorUnschedulableError": ("no such host",),
    "ActorPlacementGroupRemoved": (),
    "NodeDiedError": ("it is off",),
    "ObjectReconstructionFailedError": ("00",),
    "OutOfMemoryError": ("its host has none left",),
    "RuntimeEnvSetupError": ("no such folder",),
    "WorkerCrashedError": (),
}
ERRORS: dict[str, tuple[Any, ...]] = {
    "ObjectLostError": ("00", None, ""),
    "ObjectStoreFullError": (),
    "OutOfDiskError": (),
    "RaySystemError": ("it cannot be unpickled",),
}


@dataclass
class FakeLaunch:
    kwargs: dict[str, Any] = field(default_factory=dict)


class FakeRay:
    """Ray, as far as Members asks it. answers: of each actor, to whatever it is asked; an error is raised."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.made = answers, 0
        self.told: list[tuple[str, int]] = []

    def remote(self, _: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.actor))

    def actor(self, *_: Any) -> Any:
        number, self.made = self.made, self.made + 1

        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *_: self.told.append((name, number)) or self.answers[number])

        return SimpleNamespace(number=number, start=method("start"), judgement=method("judgement"), stop=method("stop"))

    def get(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert len(references) == num_returns
        self.told.append(("wait", int(timeout)))
        return references, [one for one in references if one is LATE]

    def kill(self, actor: Any) -> None:
        self.told.append(("kill", actor.number))


def made(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> tuple[Members, FakeRay]:
    fake = FakeRay(answers)
    monkeypatch.setattr(module, "ray", lambda: fake)
    monkeypatch.setattr(module, "placed", lambda *_: None)
    monkeypatch.setattr(module, "place", lambda *_: {})
    monkeypatch.setattr(module, "await_places", lambda *_: None)
    terms = SimpleNamespace(settings=None, mode="inprocess", guard=None, gpus=0, cpus=1.0, env={}, wait_s=1.0)
    return Members(len(answers), terms), fake  # type: ignore[arg-type]


def asked(members: Members) -> dict[int, Any]:
    return members.collect(members.submit("judgement", dict.fromkeys(members.living, ())))


def raised(name: str, arguments: tuple[Any, ...]) -> Any:
    from ray import exceptions

    return getattr(exceptions, name)(*arguments)


@pytest.mark.parametrize("name", DEATHS)
def test_who_dies_leaves_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members, fake = made(monkeypatch, ["one", "other"])
    members.start(range(2), FakeLaunch())  # type: ignore[arg-type]
    fake.answers[1] = raised(name, DEATHS[name])
    with pytest.warns(RuntimeWarning, match="replica 1 of the fleet is lost"):
        assert asked(members) == {0: "one"}
    assert (list(members.living), list(members.lost)) == ([0], [1])


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_rays_own_kills_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members, fake = made(monkeypatch, ["one", "other"])
    members.start(range(2), FakeLaunch())  # type: ignore[arg-type]
    fake.answers[0] = error = raised(name, ERRORS[name])
    with pytest.raises(type(error)):
        asked(members)
    assert (list(members.living), members.lost) == ([0, 1], {})


def test_where_one_does_not_start_all_are_stopped_before_they_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    members, fake = made(monkeypatch, [(256, 1024), OSError("no checkpoint")])
    fake.answers[1] = raised("RayTaskError", ("start", "", fake.answers[1]))
    with pytest.raises(OSError, match="no checkpoint"):
        members.start(range(2), FakeLaunch())  # type: ignore[arg-type]
    assert fake.told[3:] == [("stop", 0), ("stop", 1), ("wait", STOP_S), ("kill", 0), ("kill", 1)]
    assert (members.living, set(members.lost.values())) == ({}, {"it did not start: no checkpoint"})


def test_an_actor_without_a_place_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("places did not get free")

    members, fake = made(monkeypatch, [LATE])
    monkeypatch.setattr(module, "await_places", refuse)
    with pytest.raises(ConfigError, match="did not get free"):
        members.start([0], FakeLaunch())  # type: ignore[arg-type]
    assert fake.told[1] == ("wait", LOOK_S)
    assert (members.living, members.lost) == ({}, {0: "it did not start: places did not get free"})


def test_an_actor_that_starts_slowly_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    members, fake = made(monkeypatch, [LATE])

    def look(*_: Any) -> None:
        monkeypatch.setattr(fake, "wait", lambda references, **_: (references, []))
        monkeypatch.setattr(fake, "get", lambda _: (256, 1024))

    monkeypatch.setattr(module, "await_places", look)
    members.start([0], FakeLaunch())  # type: ignore[arg-type]
    assert (list(members.living), members.sizes) == ([0], (256, 1024))


def test_a_commit_ends_what_a_broken_off_generate_has_left_in_a_replica() -> None:
    """And the next rollout is the first on new weights."""
    state = SyncState(SyncSettings(), None, fp8_kv=False)
    replica = Replica(SimpleNamespace(), SyncSettings())  # type: ignore[arg-type]
    replica._engine = SimpleNamespace(state=state, answer=lambda call: [{"ok": None}])  # type: ignore[assignment]
    state.note(Event.REFUSE, "a generate was broken off")
    replica.answer(Rpc("fp8plan_finish", (0,)))
    assert (state.refusal, state.version) == ("a generate was broken off", 0)
    assert replica.answer(Rpc("fp8plan_commit", ("stamp",))) == [{"ok": None}]
    assert (state.refusal, state.version) == (None, 1)


def test_a_replica_that_has_died_does_no_call() -> None:
    """Its fleet then counts it as lost, and the others go on with the sync."""
    state = SyncState(SyncSettings(), None, fp8_kv=False)
    replica = Replica(SimpleNamespace(), SyncSettings())  # type: ignore[arg-type]
    replica._engine = SimpleNamespace(state=state, answer=lambda call: [{"ok": None}])  # type: ignore[assignment]
    state.note(Event.DIE)
    with pytest.raises(NotServingError, match="the engine has died"):
        replica.answer(Rpc("fp8plan_commit", ("stamp",)))
