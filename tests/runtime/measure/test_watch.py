"""Facts about the machine that are written down during a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fp8plan.runtime.measure.rollouts import host as watch
from fp8plan.runtime.measure.rollouts.host import Watch, cpu_ticks


def test_clock_and_power_are_sampled_and_theft_is_a_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(watch, "STAT", stat)
    monkeypatch.setattr(watch, "EVERY_S", 0.001)
    clocks, powers = iter([1980, 1700, 1700] * 1000), iter([500.0, 700.0] * 1000)
    monkeypatch.setattr(watch, "sm_clock_mhz", lambda: next(clocks))
    monkeypatch.setattr(watch, "gpu_power_w", lambda: next(powers))
    stat.write_text("cpu 100 0 100 800 0 0 0 10 0 0\ncpu0 1 2\n")
    with Watch(None) as seen:
        time.sleep(0.1)
        stat.write_text("cpu 150 0 120 800 0 0 0 40 0 0\ncpu0 1 2\n")
    assert seen.facts["cpu_steal_share"] == pytest.approx(30 / 100)
    assert seen.facts["sm_mhz"] == 1700
    assert seen.facts["power_w"] == pytest.approx(600, abs=40)
    assert seen.facts["host_slowdown"] is None


def test_a_machine_that_says_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watch, "STAT", tmp_path / "absent")
    assert cpu_ticks() is None
    with Watch(None) as seen:
        pass
    assert seen.facts["cpu_steal_share"] is None
    assert seen.facts["sm_mhz"] is None
