"""Sinks: what is wrong from the start is one error, what fails later is reported once and never stops a run."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_run import simulated

from fp8plan import jsonl as record
from fp8plan.errors import ConfigError
from fp8plan.jsonl import line
from fp8plan.runtime.watch.monitor import sinks
from fp8plan.runtime.watch.monitor.sinks import Callback, JsonLines, Prometheus, Sinks, TensorBoard
from fp8plan.runtime.watch.monitor.steps import RunReader

RECORDS = simulated(12)


def read(path: Path) -> list[int]:
    reader = RunReader(path)
    reader.read()
    return list(reader.steps.numbers)


def fed(some: Sinks, state: dict[str, bool], full: Callable[[int], bool]) -> None:
    """Give all records to the sinks, on a disk that is full for those whose number `full` says so of."""
    for number, one in enumerate(RECORDS):
        state["full"] = full(number)
        some.write(one)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """While `full` is set, every write of a record meets a full disk: the kernel's own, of /dev/full."""
    state, write = {"full": False}, os.write

    def maybe(file: int, text: bytes) -> int:
        if state["full"]:
            with open("/dev/full", "wb", buffering=0) as device:
                return write(device.fileno(), text)
        return write(file, text)

    monkeypatch.setattr(record.os, "write", maybe)
    return state


def test_a_full_disk_is_reported_once_counted_and_made_good_when_there_is_room(
    tmp_path: Path, full_disk: dict[str, bool]
) -> None:
    path = tmp_path / "run.jsonl"
    taken: list[int] = []
    some = Sinks([JsonLines(path), Callback(lambda one: taken.append(one["step"]))])
    some.open()
    with pytest.warns(RuntimeWarning) as told:
        fed(some, full_disk, lambda number: 3 <= number < 7 or number == 9)
    (warning,) = told
    assert all(part in str(warning.message) for part in ("run.jsonl", "step 4", "No space left", "Training goes on"))
    assert some.failures == [5, 0]
    assert taken == read(path) == [one["step"] for one in RECORDS]  # nothing is lost, the order is kept


def test_a_disk_that_stays_full_keeps_no_more_than_the_last_records(
    tmp_path: Path, full_disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "KEPT", 4)
    path = tmp_path / "run.jsonl"
    some = Sinks([JsonLines(path)])
    with pytest.warns(RuntimeWarning) as told:
        fed(some, full_disk, lambda number: number < 11)
    assert read(path) == [8, 9, 10, 11, 12]
    assert some.failures == [11]
    full, all_of_them = (str(x.message) for x in told)
    assert "No space" in full
    assert "dropped records: 7, of steps 1 to 7" in all_of_them
    some.close()  # which is told already


def test_each_outage_says_what_it_drops(
    tmp_path: Path, full_disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "KEPT", 2)
    path = tmp_path / "run.jsonl"
    some = Sinks([JsonLines(path)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fed(some, full_disk, lambda number: number in (2, 3, 4, 7, 8, 9, 10, 11))
        some.close()
    assert read(path) == [1, 2, 4, 5, 6, 7]  # the last five never had room
    assert [str(x.message).partition("dropped")[2] for x in told][1:] == [
        " records: 1, of steps 3 to 3",
        " records: 5, of steps 8 to 12",
    ]


def test_a_file_that_has_records_is_told_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for number in range(3):
        some = Sinks([JsonLines(path)])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            some.open()
            some.write(RECORDS[number])
            some.close()
        assert [f"{path} has records already" in str(x.message) for x in told] == [True] * bool(number)
    assert read(path) == [1, 2, 3]


@pytest.mark.parametrize("opened_first", [True, False])
def test_two_writers_of_a_file_are_told_of_each_other_once(tmp_path: Path, opened_first: bool) -> None:
    path = tmp_path / "run.jsonl"
    first, second = Sinks([JsonLines(path)]), Sinks([JsonLines(path)])
    first.open()
    if opened_first:
        second.open()  # an empty file tells it nothing
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first.write(RECORDS[0])
        if not opened_first:
            second.open()
        for one in RECORDS[:5]:
            second.write(one)
            first.write(one)
    said = [str(x.message) for x in told]
    assert sum("another process writes to" in text for text in said) == 2
    assert sum("has records already" in text for text in said) == (not opened_first)
    reader = RunReader(path)
    reader.read()
    assert (len(reader.steps), reader.replaced, reader.returns) == (5, 6, 6)


def test_a_disk_that_is_full_at_the_start_or_the_end_is_no_error(tmp_path: Path, full_disk: dict[str, bool]) -> None:
    some = Sinks([JsonLines("/dev/full", sync_s=None)])
    some.open()
    with pytest.warns(RuntimeWarning, match="/dev/full"):
        some.write(RECORDS[0])
    with pytest.warns(RuntimeWarning, match="dropped records: 1, of steps 1 to 1"):
        some.close()
    assert some.failures == [2]


def test_a_torn_line_is_repaired_when_the_file_is_opened_and_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(line(RECORDS[0]) + line(RECORDS[1])[:100])
    some = Sinks([JsonLines(path)])
    with pytest.warns(RuntimeWarning) as told:
        some.open()
    torn, old = (str(x.message) for x in told)
    assert re.search(r"torn line of 100 bytes.*run\.jsonl\.torn", torn)
    assert "has records already" in old
    some.write(RECORDS[1])  # a warning would be an error here
    assert read(path) == [1, 2]
    assert some.failures == [0]


def test_a_file_that_is_taken_away_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    some = Sinks([JsonLines(path)])
    some.open()
    some.write(RECORDS[0])
    path.rename(tmp_path / "old.jsonl")
    some.write(RECORDS[1])
    assert (read(tmp_path / "old.jsonl"), read(path)) == ([1], [2])


@pytest.mark.parametrize("where", ["absent/run.jsonl", ".", "file/run.jsonl"])
def test_a_file_that_can_never_be_written_is_one_error_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*give a file"):
        Sinks([JsonLines(tmp_path / where)]).open()
    with pytest.raises(ConfigError, match="sync_s is -1"):
        JsonLines(tmp_path / "run.jsonl", sync_s=-1)


@pytest.mark.parametrize(("sync_s", "least", "most"), [(None, 0, 0), (0.0, 3, 3), (3600.0, 1, 1)])
def test_the_disk_itself_is_waited_for_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync_s: float | None, least: int, most: int
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(record.os, "fsync", waits.append)
    sink = JsonLines(tmp_path / "run.jsonl", sync_s)
    for one in RECORDS[:3]:
        sink.write(one)
    assert least <= len(waits) <= most


def test_a_disk_that_fails_after_the_write_is_not_said_to_have_lost_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(record.os, "fsync", broken)
    some = Sinks([JsonLines(path)])
    with pytest.warns(RuntimeWarning, match=r"run\.jsonl: step 1 is in the file, but perhaps not on the disk.*error"):
        some.write(RECORDS[0])
    some.write(RECORDS[1])
    assert read(path) == [1, 2]
    some.close()
    assert some.failures == [3]
    other = Sinks([JsonLines(path)])
    with pytest.warns(RuntimeWarning, match=r"closed, but the last steps are perhaps not on the disk"):
        other.close()


def test_a_sink_that_spoils_its_record_spoils_nobody_elses(tmp_path: Path) -> None:
    def spoil(one: Any) -> None:
        json.dumps(one)  # it is plain data, too
        one["metrics"].clear()
        one["response_lengths"].append("x")
        one["guard"]["verdict"]["action"] = "x"
        del one["step"]

    given, taken = json.loads(line(RECORDS[0])), list[Any]()
    some = Sinks([Callback(spoil), Callback(taken.append), JsonLines(tmp_path / "run.jsonl"), Callback(spoil)])
    some.write(given)
    assert some.failures == [0, 0, 0, 0]
    assert given == taken[0] == json.loads((tmp_path / "run.jsonl").read_text()) == RECORDS[0]


def test_a_bug_of_a_callback_stops_nothing_also_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(one: Any) -> None:
        raise KeyError("absent")

    taken: list[Any] = []
    some = Sinks([Callback(broken), Callback(taken.append)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in RECORDS:
            some.write(one)
    assert (some.failures, taken) == ([len(RECORDS), 0], RECORDS)
    (told,) = capsys.readouterr().err.splitlines()
    assert all(part in told for part in ("broken", "KeyError", "absent", "Training goes on"))


def scraped(sink: Prometheus) -> str:
    with urllib.request.urlopen(f"http://{sink.address}:{sink.port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_prometheus_serves_the_last_record_on_this_machine_only() -> None:
    pytest.importorskip("prometheus_client")
    sink = Prometheus(port=0)
    sink.open()
    try:
        assert sink._served[0].server_address[0] == "127.0.0.1"
        assert "rollout_corr" not in scraped(sink)  # there is no record yet
        for one in RECORDS:
            sink.write(one)
        text, final = scraped(sink), RECORDS[-1]
        values = dict(x.rsplit(" ", 1) for x in text.splitlines() if x and not x.startswith("#"))
        assert float(values["rollout_corr_k3_kl"]) == final["metrics"]["rollout_corr/k3_kl"]
        assert float(values["fp8plan_step"]) == final["step"]
        assert values[f'fp8plan_decision{{decision="{final["decision"]}"}}'] == "1.0"
        assert values['fp8plan_guard_action{action="none"}'] == "1.0"
        assert "fp8plan_threshold_low" not in text  # it has no value
        assert "# HELP rollout_corr_k3_kl rollout_corr/k3_kl" in text
        assert "vllm:" not in text
        assert "python_info" not in text
    finally:
        sink.close()
    with socket.socket() as free:  # the port is given back
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", sink.port))


def test_a_busy_port_is_one_clear_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        first = Prometheus(port=0)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use; give another port"):
            Sinks([first, Prometheus(port=port)]).open()
        assert first._served is None
    with pytest.raises(ConfigError, match="port is 70000"):
        Prometheus(port=70000)


@pytest.mark.parametrize(
    ("sink", "package"),
    [(lambda: Prometheus(port=0), "prometheus_client"), (lambda: TensorBoard("runs"), "tensorboard")],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, sink: Any, package: str) -> None:
    for name in [x for x in sys.modules if x.partition(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=f"needs {package}; type: pip install {package}"):
        sink().open()


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of all event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: {x.step: x.value for x in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_tensorboard_has_every_metric_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    some = Sinks([TensorBoard(tmp_path / "board")])
    some.open()
    for one in RECORDS:
        some.write(one)
    found = scalars(tmp_path / "board")  # before it is closed
    some.close()
    assert some.failures == [0]
    assert found["rollout_corr/k3_kl"] == pytest.approx(
        {one["step"]: one["metrics"]["rollout_corr/k3_kl"] for one in RECORDS}
    )
    assert set(found) == {name for name, value in RECORDS[0]["metrics"].items() if value is not None}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_tensorboard_that_fails_is_reported_once_and_goes_on_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, state = RecordWriter.write, {"full": False}

    def maybe(self: Any, data: bytes) -> None:
        if state["full"]:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", maybe)
    some = Sinks([TensorBoard(tmp_path / "board")])
    some.open()
    with pytest.warns(RuntimeWarning) as told:
        fed(some, state, lambda number: 3 <= number < 6)
    some.close()
    (warning,) = [x for x in told if x.category is RuntimeWarning]
    assert "No space left" in str(warning.message)
    assert some.failures[0] >= 3
    last = max(scalars(tmp_path / "board")["rollout_corr/k3_kl"])
    assert last == RECORDS[-1]["step"]


def test_a_record_survives_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JsonLines(path)
    for one in RECORDS:
        sink.write(one)
    assert [json.loads(x) for x in path.read_text().splitlines()] == RECORDS
