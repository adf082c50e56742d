"""Facts about the machine that are written down during a run."""

from __future__ import annotations

import time

import pytest

from fp8plan.runtime.measure.rollouts import host as watch
from fp8plan.runtime.measure.rollouts.host import Watch


def test_clock_and_power_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.001)
    clocks, powers = iter([1980, 1700, 1700] * 1000), iter([500.0, 700.0] * 1000)
    monkeypatch.setattr(watch, "sm_clock_mhz", lambda: next(clocks))
    monkeypatch.setattr(watch, "gpu_power_w", lambda: next(powers))
    with Watch(None) as seen:
        time.sleep(0.1)
    assert seen.facts["sm_mhz"] == 1700
    assert seen.facts["power_w"] == pytest.approx(600, abs=40)
    assert seen.facts["host_slowdown"] is None


def test_a_machine_that_says_nothing_is_no_error() -> None:
    with Watch(None) as seen:
        pass
    assert seen.facts["sm_mhz"] is None
