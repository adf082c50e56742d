"""The fault drill: its table is complete, its judge fails on what is mixed, and the committed run has no wrong row."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.fault_drill import drill, judge, report, table
from benchmarks.fault_drill.fault import DIRECT, ENGINE, MIXED, NEW, OLD, PLACES, REFUSES, Fault
from benchmarks.fault_drill.judge import Seen, Version
from fp8plan import jsonl
from fp8plan.errors import SyncError

KINDS = {"files", "tensors", "link", "writers", "disk", "memory", "update", "death"}
VERSIONS = [Version({"w": number}, f"answer {number}") for number in range(3)]


def test_forty_faults_strike_in_each_place_or_say_why_not() -> None:
    assert len(table.FAULTS) >= 40
    assert len({fault.name for fault in table.FAULTS}) == len(table.FAULTS)
    assert {fault.kind for fault in table.FAULTS} == KINDS
    for fault in table.FAULTS:
        assert fault.ways
        assert set(fault.ways) | set(fault.left_out) == set(PLACES), fault.name
        assert not set(fault.ways) & set(fault.left_out), fault.name
        assert all(fault.left_out.values()), fault.name
        assert fault.how
        assert set(fault.expected) <= {OLD, NEW, REFUSES}
        assert fault.says or REFUSES not in fault.expected, fault.name  # a refusal says why
    assert all(len(table.at(place)) >= 15 for place in PLACES)
    deaths = [fault.ends for fault in table.at(ENGINE)]
    assert any(deaths)
    assert deaths == sorted(deaths)  # last


def test_every_row_of_the_committed_run_is_right() -> None:
    rows = jsonl.rows(report.RESULTS)
    expected = {(place, fault.name) for place in PLACES for fault in table.at(place)}
    assert {(row["place"], row["fault"]) for row in rows} == expected
    assert [row for row in rows if row["wrong"]] == []
    assert all((row["rss_most"] or 0) <= judge.MOST_MEMORY * row["rss_before"] for row in rows)
    assert report.minutes(rows) < 30


SEEN: dict[str, tuple[Seen, str]] = {
    "old": (Seen([{"w": 0}], ["answer 0"]), OLD),
    "new": (Seen([{"w": 1}], ["answer 1"]), NEW),
    "two replicas": (Seen([{"w": 1}] * 2, ["answer 1"] * 2), NEW),
    "a refusal": (Seen(refusal="NaN in w"), REFUSES),
    "replicas apart": (Seen([{"w": 0}, {"w": 1}], ["answer 0", "answer 1"]), MIXED),
    "neither": (Seen([{"w": 7}], ["answer 7"]), MIXED),
    "new bits and old answers": (Seen([{"w": 1}], ["answer 0"]), MIXED),
    "a parameter more": (Seen([{"w": 1, "v": 1}], ["answer 1"]), MIXED),
    "an answer less": (Seen([{"w": 1}] * 2, ["answer 1"]), MIXED),
    "nothing": (Seen(), MIXED),
}


@pytest.mark.parametrize("name", SEEN)
def test_an_outcome_is_old_or_new_whole_or_a_refusal_or_mixed(name: str) -> None:
    seen, outcome = SEEN[name]
    assert judge.outcome(seen, VERSIONS[0], VERSIONS[1]) == outcome


class Fake:
    """A place whose engine serves what `deliver` brings, and what a fault's act puts there."""

    name, processes, mend = ENGINE, staticmethod(list), staticmethod(lambda: None)

    def __init__(self) -> None:
        self.now, self.versions, self.ignores = 0, VERSIONS, 0
        self.seen = self.of(0)

    @staticmethod
    def of(version: int) -> Seen:
        return Seen([VERSIONS[version].digests], [VERSIONS[version].answers])

    def settle(self, way: str) -> None:
        self.seen = self.of(self.now)

    def deliver(self, version: int, way: str) -> None:
        if self.ignores:
            self.ignores -= 1
            raise SyncError("the store is damaged")
        self.seen = self.of(version)

    def look(self) -> Seen:
        return self.seen


def fault(act: Callable[[Any], None], expected: tuple[str, ...] = (OLD,), says: str = "") -> Fault:
    return Fault("a fault", "files", "something", act, {ENGINE: DIRECT}, expected, says, deadline_s=0.5)


def raising(error: BaseException) -> Any:
    raise error


def refused(scene: Any) -> None:
    scene.attempt(lambda: raising(SyncError("w is NaN")))


def showing(seen: Seen, more: Callable[[Any], None] = lambda scene: None) -> Callable[[Any], None]:
    def act(scene: Any) -> None:
        more(scene)
        scene.place.seen = seen

    return act


RIGHT: dict[str, Fault] = {
    "old weights, and an error that names it": fault(refused, says="w is NaN"),
    "new weights": fault(showing(Fake.of(1)), (NEW,)),
    "a refusal": fault(showing(Seen(refusal="w is NaN; call sync_weights")), (REFUSES,), "w is NaN"),
}
WRONG: dict[str, tuple[Fault, str]] = {
    "mixed": (fault(showing(SEEN["replicas apart"][0])), "mixed weights; expected: old weights"),
    "mixed where all else is allowed": (
        fault(showing(SEEN["neither"][0], refused), (OLD, NEW, REFUSES), "NaN"), "mixed weights"
    ),
    "new, where old is expected": (fault(showing(Fake.of(1))), "new weights; expected: old weights"),
    "an error of another kind": (fault(lambda scene: scene.attempt(lambda: raising(KeyError("w")))), "KeyError: 'w'"),
    "an error that does not name it": (fault(refused, says="v is NaN"), "nothing says /v is NaN/"),
    "an error that nobody expects": (fault(refused), "an error for a fault that passes"),
    "no error": (fault(lambda scene: None, says="w is NaN"), "nothing says"),
    "a call that hangs": (fault(lambda scene: time.sleep(30)), "hangs: not over after 0.5 s"),
    "a fault that stays": (
        fault(lambda scene: vars(scene.place).update(ignores=drill.EVERY)), "not healed by good versions"
    ),
    "memory": (
        fault(lambda scene: vars(scene.place).update(processes=lambda: [1])), "times the memory before"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_row_is_right_if_the_engine_serves_whole_weights_or_says_why_not(name: str) -> None:
    place = Fake()
    place.processes = staticmethod(lambda: [os.getpid()])
    row = drill.row(place, RIGHT[name])
    assert row["wrong"] == []
    assert (row["healed_by"], place.now) == (1, 2)
    assert "ok" in report.line(row)


@pytest.mark.parametrize("name", WRONG)
def test_a_row_is_wrong_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill.memory, "resident", lambda pids: 100)
    monkeypatch.setattr(drill.memory, "reset", lambda pids: None)
    monkeypatch.setattr(drill.memory, "most", lambda pids: 151 if list(pids) else 150)
    wrong_fault, says = WRONG[name]
    row = drill.row(Fake(), wrong_fault)
    assert any(says in problem for problem in row["wrong"]), row
    assert len(row["wrong"]) <= 3
    assert "WRONG" in report.line(row)


def test_a_fault_may_heal_by_the_next_whole_version() -> None:
    place = Fake()
    row = drill.row(place, fault(lambda scene: vars(place).update(ignores=drill.EVERY - 1)))
    assert (row["wrong"], row["healed_by"]) == ([], drill.EVERY)


def test_a_late_answer_is_wrong() -> None:
    late = replace(fault(lambda scene: None), deadline_s=2.0)
    assert judge.problems(late, OLD, [], "", 2.5, (100, 100)) == ["2 s; the deadline is 2 s"]
