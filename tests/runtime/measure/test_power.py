"""Kernels that run for seconds: which they are, how they are timed, and that the fit takes them for no timings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from fp8plan import jsonl
from fp8plan.model.calibrate.kernel_rows import QUANTITIES
from fp8plan.model.calibrate.profile_of import kernel_rows, power_rows
from fp8plan.runtime.measure.kernels import attention, elementwise, gemm, moe, power, timing
from fp8plan.runtime.measure.kernels import power as script
from fp8plan.runtime.measure.kernels.sweep import Point, Work


def test_each_kind_of_work_is_there_with_few_rows_and_with_many() -> None:
    quick, full = (power.points(grid) for grid in ("quick", "full"))
    for points in (quick, full):
        assert len({point.key for point in points}) == len(points)
        assert {point.kernel for point in points} == {point.kernel for point in full}
    assert len(quick) < len(full) < 50  # three seconds each
    others = {x.kernel for grid in (attention, elementwise, gemm, moe) for x in grid.points("full")}
    assert {point.kernel for point in full} < others
    assert {point.kernel.partition(".")[0] for point in full} <= set(QUANTITIES)
    rows = [point.shape["m"] for point in full if point.kernel.startswith("gemm")]
    assert (min(rows), max(rows)) == (64, 16384)


def test_the_calls_are_those_of_the_script_that_times_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(name: str) -> Callable[[], Callable[[Point], Work]]:
        return lambda: lambda point: Work([lambda: name], {"backend": point.kernel})

    for name in script.BENCHES:
        monkeypatch.setitem(script.BENCHES, name, bench(name))
    for point in power.points("full"):
        work = script.work(point)
        assert work.timer is timing.sustained_seconds
        assert work.columns == {"backend": point.kernel}
        assert work.calls[0]() == script.FILES[point.kernel.partition(".")[0]]


class Gpu:
    """A GPU on which a replay of 8 calls takes 10 ms of its own clock, and whose power settles after three readings."""

    def __init__(self) -> None:
        self.now_s, self.readings = 0.0, 0

    def replay(self) -> None:
        self.now_s += 0.01

    def power_w(self) -> float:
        self.readings += 1
        return 700.0 if self.readings > 3 else 100.0

    def event(self, enable_timing: bool) -> Gpu.Event:
        return Gpu.Event(self)

    class Event:
        def __init__(self, gpu: Gpu) -> None:
            self.gpu, self.at_s = gpu, 0.0

        def record(self) -> None:
            self.at_s = self.gpu.now_s

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: Gpu.Event) -> float:
            return (later.at_s - self.at_s) * 1e3


def test_power_is_read_once_it_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, gpu, ticks = pytest.importorskip("torch"), Gpu(), iter(range(1000))
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda on: nullcontext())
    monkeypatch.setattr(timing, "stream", lambda: None)
    monkeypatch.setattr(timing, "captured", lambda calls, budget: (gpu, 8))
    monkeypatch.setattr(timing, "elapsed", lambda replay, number: [0.01, 0.012])
    monkeypatch.setattr(timing, "gpu_power_w", gpu.power_w)
    monkeypatch.setattr(timing, "sm_clock_mhz", lambda: 1500)
    monkeypatch.setattr(timing, "gpu_energy_j", lambda: 50.0 * gpu.now_s)
    monkeypatch.setattr(timing.time, "monotonic", lambda: 0.1 * next(ticks))
    found = timing.sustained_seconds([lambda: None], settle_s=0.4, run_s=0.5)
    assert found.seconds == pytest.approx(0.01 / 8)
    assert (found.sm_mhz, found.power_w) == (1500, 700.0)
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    assert found.energy_w is not None
    monkeypatch.setattr(timing, "gpu_energy_j", lambda: None)
    assert timing.sustained_seconds([lambda: None], settle_s=0.4, run_s=0.5).energy_w is None


def test_what_ran_for_seconds_is_no_timing_of_a_kernel(tmp_path: Path) -> None:
    row = {"kernel": "gemm.bf16", "m": 8, "n": 64, "k": 64, "seconds": 1e-4}
    jsonl.write(tmp_path / "gemm.jsonl", row)
    jsonl.write(tmp_path / "power.jsonl", row | {"seconds": 2e-4, "power_w": 600.0})
    jsonl.write(tmp_path / "power.jsonl", row | {"seconds": 3e-4, "power_w": None})
    jsonl.write(tmp_path / "clock_course.jsonl", {"kernel": "gemm.bf16", "course": []})
    assert kernel_rows(tmp_path).seconds.tolist() == [1e-4]
    assert power_rows(tmp_path).seconds.tolist() == [2e-4]
    assert power_rows(tmp_path / "none").empty
