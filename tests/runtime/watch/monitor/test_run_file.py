"""The run file: whole lines whatever happens to its writer, and a reader that sees nothing else."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_run import simulated

from fp8plan import jsonl as record
from fp8plan.errors import ConfigError
from fp8plan.jsonl import append, line, torn_path
from fp8plan.runtime.watch.monitor.steps import DECODER, RunReader, Steps
from fp8plan.schemas import K3

# Appends records without end and says after each that it is written. Sizes differ, so that kills fall into long writes.
WRITER = """
import sys
from pathlib import Path
from fp8plan.jsonl import append, line
path, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    size = (10, 1000, 200_000)[step % 3]
    append(path, line({"step": step, "metrics": {"rollout_corr/k3_kl": step * 7}, "filling": "x" * size}))
    print(step, flush=True)
    step += 1
"""


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "metrics": {}} | more


def steps(path: Path) -> list[int]:
    reader = RunReader(path)
    reader.read()
    assert reader.skipped == 0
    return reader.steps.numbers.tolist()


def checks(reader: RunReader) -> list[tuple[int, float]]:
    """The number and the k3 of each step."""
    return list(zip(reader.steps.numbers, reader.steps.column(K3), strict=True))


@pytest.mark.slow
def test_fifty_writers_killed_at_any_time_lose_no_record_but_the_one_in_flight(tmp_path: Path) -> None:
    path, chance = tmp_path / "run.jsonl", random.Random(5)
    reader, torn = RunReader(path), 0
    for _ in range(50):
        first = len(reader.steps)
        command = [sys.executable, "-c", WRITER, str(path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline())]  # it is at work
            time.sleep(chance.uniform(0, 0.02))
            reader.read()  # readable while it writes
            writer.send_signal(signal.SIGKILL)
            said += [int(x) for x in writer.stdout.read().split()]
        reader.read()  # readable as the kill has left it
        assert said == list(range(first, len(reader.steps)))[: len(said)]  # all that was said to be written is there
        assert len(reader.steps) - (said[-1] + 1) <= 1  # and the one in flight, perhaps
        torn += append(path, b"").cut > 0
    assert (reader.skipped, reader.replaced) == (0, 0)
    assert checks(reader) == [(n, 7 * n) for n in range(len(reader.steps))]
    assert steps(path) == list(range(len(reader.steps)))
    assert len(torn_path(path).read_text().splitlines() if torn else []) == torn


@given(cut=st.integers(0, 400), before=st.integers(0, 3))
def test_a_line_cut_anywhere_is_repaired_to_the_last_whole_one_and_kept_beside(
    tmp_path_factory: pytest.TempPathFactory, cut: int, before: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    whole = b"".join(line(row(n)) for n in range(before))
    torn = line(row(before, text="é\n" * 60))[:-1][:cut]
    path.write_bytes(whole + torn)
    assert steps(path) == list(range(before))  # a reader does not see it, repaired or not
    assert append(path, line(row(before))).cut == len(torn)
    assert path.read_bytes() == whole + line(row(before))
    if torn:
        (note,) = map(json.loads, torn_path(path).read_text().splitlines())
        assert note["text"].encode() == torn
        assert (note["offset"], note["bytes"]) == (len(whole), len(torn))
    else:
        assert not torn_path(path).exists()


def test_a_long_torn_line_is_cut_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(line(row(0)) + b"x" * 200_000)
    assert append(path, b"") == (200_000, 200_000 + len(line(row(0))), len(line(row(0))))
    assert path.read_bytes() == line(row(0))
    assert append(path, b"").cut == 0


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond it: the kernel then writes a part of a line, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_line_that_fits_in_part_leaves_nothing_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, line(row(0)))
    before = path.read_bytes()
    with file_limit(len(before) + 10), pytest.raises(OSError, match="only 10 of"):
        append(path, line(row(1)))
    assert path.read_bytes() == before
    append(path, line(row(1)))
    assert steps(path) == [0, 1]
    assert not torn_path(path).exists()


def test_a_full_disk_is_an_error_of_the_operating_system() -> None:
    with pytest.raises(OSError) as caught:
        append(Path("/dev/full"), line(row(0)))
    assert caught.value.errno == errno.ENOSPC


def test_a_writer_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LOCK_S", 0.05)
    path = tmp_path / "run.jsonl"
    append(path, line(row(0)))
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process"):
            append(path, line(row(1)))
    append(path, line(row(1)))
    assert steps(path) == [0, 1]


def test_a_reader_follows_a_file_that_grows_is_rewound_and_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ConfigError, match=r"run\.jsonl.*Monitor"):
        RunReader(path).read()
    append(path, b"")  # makes it
    reader = RunReader(path)
    assert (reader.read(), len(reader.steps)) == (0, 0)
    for step in range(5):
        append(path, line(row(step, metrics={K3: 1.0})))
        assert reader.read() == 1
    with open(path, "ab") as file:  # a line that is being written
        file.write(line(row(5))[:9])
    assert reader.read() == 0
    append(path, line(row(3, metrics={K3: 2.0})))  # back to a checkpoint
    assert reader.read() == 1
    assert checks(reader) == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert (reader.replaced, reader.returns) == (2, 1)
    append(path, b"no record\n[1]\n\n")
    assert (reader.read(), reader.skipped) == (0, 2)
    os.unlink(path)
    append(path, line(row(9)))
    assert reader.read() == 1
    assert (reader.steps.numbers.tolist(), reader.replaced, reader.skipped) == ([9], 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 1.0},
        {"step": 10**400},
        {"metrics": {"rollout_corr/k3_kl": "abc"}},
        {"metrics": {"rollout_corr/k3_kl": 10**400}},
        {"metrics": None},
        {"guard": [1]},
        {"guard": {"verdict": {"causes": ["x"]}}},
        {"guard": {"verdict": {"action": 1}}},
        {"guard": {"state": 1}},
        {"alarms": "kl"},
        {"alarms": [1]},
        {"date": 5},
        {"model": 3},
        {"precision": 4},
        {"decision": {}},
        {"profile": [{"first": 0, "k3": 1.0}]},
        {"profile": [{"first": 0, "tokens": 3, "k3": "x"}]},
    ],
    ids=str,
)
def test_a_line_whose_fields_are_not_what_they_should_be_is_skipped_and_counted(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    path, fine = tmp_path / "run.jsonl", row(1, guard=None, model=None, decision="hold", more=[{}])
    path.write_bytes(json.dumps(row(0) | wrong).encode() + b"\n" + line(fine))
    reader = RunReader(path)
    assert reader.read() == 1
    assert (reader.steps.numbers.tolist(), reader.steps.said[0].decision, reader.skipped) == ([1], "hold", 1)


def test_a_record_of_a_newer_schema_is_an_error_each_time_and_what_came_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, line(row(1)) + line(row(2, schema_version="1.9", more=1)) + line(row(3, schema_version="2.0")))
    reader = RunReader(path)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"run\.jsonl has schema 2\.0; this is .* reads schema 1\.x: type: pip install"
        ):
            reader.read()
        assert reader.steps.numbers.tolist() == [1, 2]


def test_junk_of_any_kind_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n\xff\xfe\n" + line(row(1)))
    reader = RunReader(path)
    assert (reader.read(), reader.skipped) == (1, 2)


@given(st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999"]), st.sampled_from(["reward", "versions", "guard"]))
def test_a_number_that_is_none_in_a_field_that_is_not_shown_hides_no_step(
    tmp_path_factory: pytest.TempPathFactory, number: str, field: str
) -> None:
    path = tmp_path_factory.mktemp("odd") / "run.jsonl"
    path.write_text(f'{{"step": 4, "metrics": {{"{K3}": 0.5, "own": {number}}}, "{field}": {{"x": {number}}}}}\n')
    reader = RunReader(path)
    assert (reader.read(), reader.skipped) == (1, 0)
    assert checks(reader) == [(4, 0.5)]


def test_a_reader_needs_memory_for_what_is_shown_not_for_every_request(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lengths = {name: list(range(1000, 2500)) for name in ("prompt_lengths", "response_lengths", "prompt_ids")}
    path.write_bytes(b"".join(line(row(step, **lengths)) for step in range(300)))
    reader = RunReader(path)
    tracemalloc.start()
    try:
        assert reader.read() == 300
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 5
    assert reader.steps.numbers[7] == 7


def test_a_long_run_needs_a_part_of_its_file_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(map(line, simulated(400))))
    RunReader(path).read()  # what is imported with the first use is no part of it
    reader = RunReader(path)
    tracemalloc.start()
    try:
        assert reader.read() == 400
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < path.stat().st_size / 2
    assert peak < held + 300_000  # not the whole file at once


def test_a_compressed_run_is_read_and_read_anew_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    reader = RunReader(path)
    for rows in ([1, 2, 3], [1, 2, 3, 4], [7]):
        path.write_bytes(gzip.compress(b"".join(line(row(step)) for step in rows) + b'{"step": 9'))
        assert (reader.read(), reader.steps.numbers.tolist()) == (len(rows), rows)
        assert (reader.read(), reader.skipped, reader.replaced) == (0, 0, 0)
    for broken in (path.read_bytes()[:-9], b"no gzip at all"):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"cannot read .*run\.jsonl\.gz: .*; give the file of a Monitor"):
            reader.read()


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from(["hold", "tighten"])), max_size=40))
def test_columns_hold_what_a_list_of_records_would(taken: list[tuple[int, bool, str]]) -> None:
    """Records come in any order of steps, as from runs that go back again and again."""
    steps, expected, replaced = Steps(), list[dict[str, Any]](), 0
    for number, (step, known, decision) in enumerate(taken):
        spans = [{"first": 64 * at, "tokens": 5, "k3": number} for at in range(number % 3)]
        metrics = {K3: float(number) if known else None}
        record = row(step, metrics=metrics, decision=decision, reason=f"{number}", profile=spans)
        replaced += steps.add(DECODER.decode(line(record)))
        expected = [*(x for x in expected if x["step"] < step), record]
    assert replaced == len(taken) - len(expected)
    assert steps.numbers.tolist() == [x["step"] for x in expected]
    values = [x["metrics"][K3] for x in expected]
    assert [steps.value(K3, at) for at in range(len(steps))] == values
    assert steps.infinite.tolist() == [x is None for x in values]
    assert [(x.decision, x.reason) for x in steps.said] == [(x["decision"], x["reason"]) for x in expected]
    assert steps.spans.tolist() == [
        x for y in expected for s in y["profile"] for x in (s["first"], s["tokens"], s["k3"])
    ]
    assert steps.ends.tolist() == np.cumsum([len(x["profile"]) for x in expected]).tolist()
    for count in (1, 3, 50):
        assert steps.last(count).numbers.tolist() == steps.numbers.tolist()[-count:]


def test_what_was_read_stays_while_the_file_is_gone_and_what_comes_then_is_read_from_its_beginning(
    tmp_path: Path,
) -> None:
    path, away = tmp_path / "run.jsonl", tmp_path / "away.jsonl"
    append(path, line(row(1)) + line(row(2)))
    reader = RunReader(path)
    reader.read()
    path.rename(away)
    with pytest.raises(ConfigError, match="cannot read"):
        reader.read()
    assert reader.steps.numbers.tolist() == [1, 2]
    away.write_bytes(line(row(7)) + line(row(8)) + line(row(9)))  # the same file, longer, with other lines
    away.rename(path)
    assert (reader.read(), reader.steps.numbers.tolist()) == (3, [7, 8, 9])


def test_what_json_has_no_number_for_is_null_and_what_is_no_data_is_refused() -> None:
    given = {
        "a": float("nan"),
        "b": [np.float32(0.5), np.inf],
        "c": (np.int64(3), True, None),
        "d": np.arange(2),
        4: "\n",
    }
    assert json.loads(line(given)) == {"a": None, "b": [0.5, None], "c": [3, True, None], "d": [0, 1], "4": "\n"}
    assert line(given).count(b"\n") == 1
    with pytest.raises(TypeError, match="object"):
        line({"a": object()})
