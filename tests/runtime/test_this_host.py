"""The host of this machine is timed once a day, and is not known where that fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.runtime import this_host as here


class Timer:
    """Stands for the process that times the host. printed: its output; code: its exit code"""

    def __init__(self) -> None:
        self.printed, self.code, self.calls = "0.000415\n", 0, 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        if self.code:
            raise subprocess.CalledProcessError(self.code, command)
        return subprocess.CompletedProcess(command, 0, self.printed, "")


@pytest.fixture
def timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(here, "find_spec", lambda _: object())
    monkeypatch.setattr(here.os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr(here.subprocess, "run", timer)
    return timer


def test_the_host_is_timed_once_a_day(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = here.time.time()
    assert here.host_loop_s() == here.host_loop_s() == 4.15e-4
    assert timer.calls == 1
    timer.printed = "0.0005"
    monkeypatch.setattr(here.time, "time", lambda: now + here.KEPT_S - 60)
    assert here.host_loop_s() == 4.15e-4
    monkeypatch.setattr(here.time, "time", lambda: now + here.KEPT_S + 60)
    assert here.host_loop_s() == 5e-4
    assert timer.calls == 2


@pytest.mark.parametrize("what", ["boot_id", "installed", "python_version"])
def test_another_machine_vllm_or_python_is_timed_anew(timer: Timer, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    here.host_loop_s()
    monkeypatch.setattr(here, what, lambda *_: "another")
    timer.printed = "0.0003"
    assert here.host_loop_s() == 3e-4
    monkeypatch.undo()


def test_timing_anew_replaces_what_was_kept(timer: Timer) -> None:
    here.host_loop_s()
    timer.printed = "0.0003"
    assert here.time_host() == here.host_loop_s() == 3e-4


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', '{"KEY": {"host_loop_s": "fast", "time": 1e18}}'])
def test_a_spoilt_cache_is_replaced(timer: Timer, tmp_path: Path, content: str) -> None:
    file = tmp_path / "fp8plan" / "host_loops.json"
    file.parent.mkdir()
    file.write_text(content.replace("KEY", here._key()))
    assert here.host_loop_s() == here.host_loop_s() == 4.15e-4
    assert timer.calls == 1
    assert list(json.loads(file.read_text())) == [here._key()]


def test_a_home_that_cannot_be_written_to_costs_another_timing(
    timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert here.host_loop_s() == here.host_loop_s() == 4.15e-4
    assert timer.calls == 2


def test_a_host_that_cannot_be_timed_is_not_known(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    timer.code = 1
    assert here.host_loop_s() is None
    with pytest.raises(ConfigError, match=f"could not be timed .*; type: .* -m {here.TIMER}"):
        here.time_host()
    timer.code, timer.printed = 0, "no number"
    assert here.host_loop_s() is None
    monkeypatch.setattr(here, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="type: pip install psutil"):
        here.time_host()


def test_the_process_that_times_prints_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert 1e-5 < here.time_host() < 1e-2
