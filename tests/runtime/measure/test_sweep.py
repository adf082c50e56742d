"""A sweep resumes, keeps its order and its budget, and loses nothing. Which GEMMs and small kernels are measured."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from fp8plan import jsonl
from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.calibrate.profile_of import LINEARS, is_held_out
from fp8plan.runtime.measure import machine
from fp8plan.runtime.measure.kernels import elementwise as elementwise_grid
from fp8plan.runtime.measure.kernels import gemm as gemm_grid
from fp8plan.runtime.measure.kernels import sweep, timing
from fp8plan.runtime.measure.kernels.sweep import Point, Work, arguments, check_gpu, compile_first, select, shares

POINTS = [Point("gemm.bf16", {"m": m, "n": 64, "k": 128}) for m in (4, 1, 3, 2)]


class Bench:
    """Prepares points, whose calls take as many seconds as they have rows; those with `broken` rows raise."""

    def __init__(self, *broken: int) -> None:
        self.broken, self.prepared = broken, []

    def work(self, point: Point) -> Work:
        self.prepared.append(point.shape["m"])
        if point.shape["m"] in self.broken:
            raise RuntimeError(f"{point.shape['m']} rows are too many\nand more lines")
        return Work([lambda: point.shape["m"]], {"backend": "test"}, timer)


def timer(calls: Sequence[Callable[[], object]]) -> timing.Timing:
    return timing.Timing(float(sum(call() for call in calls)), 0.01, 5)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "gemm.jsonl"


def test_a_row_says_what_was_measured_and_on_which_machine(output: Path) -> None:
    assert sweep.sweep(POINTS, Bench().work, output) == []
    rows, machines = read(output), read(output.with_name("machines.jsonl"))
    assert [row["m"] for row in rows] == [4, 1, 3, 2]
    first = rows[0]
    assert {name: first[name] for name in ("kernel", "n", "k", "seconds", "spread", "replays", "backend")} == {
        "kernel": "gemm.bf16",
        "n": 64,
        "k": 128,
        "seconds": 4.0,
        "spread": 0.01,
        "replays": 5,
        "backend": "test",
    }
    assert {row["run"] for row in rows} == {machines[0]["run"]}
    assert machines[0].keys() >= {
        "gpu_uuid",
        "gpu_product",
        "driver",
        "boot",
        "torch_version",
        "engine_version",
        "date",
    }


def test_what_is_measured_is_not_measured_again(output: Path) -> None:
    sweep.sweep(POINTS[:2], Bench().work, output)
    bench = Bench()
    same = [Point(p.kernel, dict(reversed(p.shape.items()))) for p in POINTS]  # the order of the sizes says nothing
    sweep.sweep(same, bench.work, output)
    assert bench.prepared == [3, 2]
    assert Counter(row["m"] for row in read(output)) == Counter([1, 2, 3, 4])
    assert len({row["run"] for row in read(output)}) == 2
    sweep.sweep(POINTS, bench.work, output)
    assert len(read(output.with_name("machines.jsonl"))) == 2  # the third had nothing to do


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_costs_its_own_point_alone(output: Path, cut: int) -> None:
    sweep.sweep(POINTS, Bench().work, output)
    whole = output.read_bytes()
    output.write_bytes(whole[:-cut])
    bench = Bench()
    sweep.sweep(POINTS, bench.work, output)
    assert bench.prepared == [2]
    assert [row["m"] for row in read(output)] == [4, 1, 3, 2]
    assert output.read_bytes().startswith(whole[: whole[:-1].rfind(b"\n")])


def test_a_broken_line_elsewhere_is_an_error_that_shows_it(output: Path) -> None:
    sweep.sweep(POINTS[:1], Bench().work, output)
    output.write_text("{broken\n" + output.read_text())
    with pytest.raises(ConfigError, match=r"^line 1 of .*gemm.jsonl is not JSON: .*; mend or delete that line$"):
        sweep.sweep(POINTS, Bench().work, output)


def test_a_failure_is_recorded_and_tried_again_last(output: Path) -> None:
    failures = sweep.sweep(POINTS, Bench(1, 4).work, output)
    assert len(failures) == 2
    assert [row["m"] for row in read(output)] == [3, 2]
    failed = read(output.with_name("gemm.failed.jsonl"))
    assert [row["m"] for row in failed] == [4, 1]
    assert failed[0]["error"] == "RuntimeError: 4 rows are too many"
    assert not failed[0]["refused"]
    bench = Bench(4)
    more = [*POINTS, Point("gemm.bf16", {"m": 5, "n": 64, "k": 128})]
    assert len(sweep.sweep(more, bench.work, output)) == 1
    assert bench.prepared == [5, 4, 1]
    assert [row["m"] for row in read(output)] == [3, 2, 5, 1]


def test_a_point_that_the_gpu_cannot_have_is_no_failure(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Refusal(ConfigError):
        pass

    def prepare(point: Point) -> Work:
        if point.shape["m"] > 2:
            raise Refusal(f"{point.shape['m']} rows do not fit in the pool")
        return Work([lambda: 1], timer=timer)

    assert sweep.sweep(POINTS, prepare, output) == []
    assert [row["m"] for row in read(output)] == [1, 2]
    assert [(row["m"], row["refused"]) for row in read(output.with_name("gemm.failed.jsonl"))] == [(4, True), (3, True)]
    assert "4 rows do not fit in the pool" in capsys.readouterr().err


def test_a_call_that_fails_is_a_failure_of_its_point(output: Path) -> None:
    def prepare(point: Point) -> Work:
        return Work([lambda: 1 // (point.shape["m"] - 3)], timer=timer)

    failures = sweep.sweep(POINTS, prepare, output)
    assert [text.rpartition(": ")[2] for text in failures] == ["integer division or modulo by zero"]
    assert len(read(output)) == 3


def test_a_failed_capture_is_recorded_with_what_made_it_fail(output: Path) -> None:
    """The end of a capture fails too, and its error comes last."""

    def capture(calls: Sequence[Callable[[], object]]) -> timing.Timing:
        try:
            raise ValueError("cannot be captured")
        finally:
            raise RuntimeError("capture invalidated")

    sweep.sweep(POINTS[:1], lambda point: Work([], timer=capture), output)
    assert read(output.with_name("gemm.failed.jsonl"))[0]["error"] == "ValueError: cannot be captured"


def test_a_failed_point_leaves_nothing_behind(output: Path) -> None:
    """Its tensors would fill the GPU until Python's garbage collector runs."""
    left = []

    class Tensor:
        def __call__(self) -> None:
            raise RuntimeError("out of memory")

    def prepare(point: Point) -> Work:
        call = Tensor()
        left.append(weakref.ref(call))
        return Work([call], timer=timer)

    gc.disable()
    try:
        sweep.sweep(POINTS, prepare, output)
        assert [ref() for ref in left] == [None] * len(POINTS)
    finally:
        gc.enable()


def test_no_garbage_is_collected_during_a_capture() -> None:
    with suppress(RuntimeError), timing._uncollected():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_failures_of_a_kind_are_noted_once_and_recorded_each(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(sweep.sweep(POINTS, Bench(1, 3, 4).work, output)) == 3
    assert capsys.readouterr().err.count("rows are too many") == 1
    assert len(read(output.with_name("gemm.failed.jsonl"))) == 3


@pytest.mark.parametrize("broken", ["rand", "synchronize"])
def test_a_broken_gpu_ends_the_run_and_keeps_its_rows(
    output: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """As after an illegal access, or a capture that failed and left the generator of random numbers capturing."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("unspecified launch failure")

    state = dict.fromkeys(("rand", "synchronize"), lambda *_, **__: None) | {broken: fails}
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=state["synchronize"], empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(rand=state["rand"], cuda=cuda, __version__="2"))
    with pytest.raises(Fp8PlanError, match=r"broken; type the same command to go on \(unspecified launch failure\)"):
        sweep.sweep(POINTS, Bench(3).work, output)
    assert [row["m"] for row in read(output)] == [4, 1]
    assert [row["m"] for row in read(output.with_name("gemm.failed.jsonl"))] == [3]


def test_time_that_has_passed_stops_the_sweep(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sweep.time, "monotonic", lambda: clock[0])

    def prepare(point: Point) -> Work:
        clock[0] += 10
        return Bench().work(point)

    sweep.sweep(POINTS, prepare, output, seconds=15)
    assert [row["m"] for row in read(output)] == [4, 1]
    assert "2 points are left" in capsys.readouterr().err
    sweep.sweep(POINTS, prepare, output, seconds=15)
    assert len(read(output)) == 4


def test_parts_are_disjoint_complete_and_equally_large() -> None:
    points = gemm_grid.points("full")
    parts = [select(points, [], f"{i}/4") for i in (1, 2, 3, 4)]
    assert Counter(p.key for part in parts for p in part) == Counter(p.key for p in points)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert select(points, [], "1/1") == points
    few = select(points, ["quantise"], "2/2")
    assert {p.kernel for p in few} == {"quantise"}


@pytest.mark.parametrize("part", ["1/1", "2/3"])
def test_shares_of_a_part_are_the_part(part: str) -> None:
    points = gemm_grid.points("full")
    found = [p.key for share in shares(part, 5) for p in select(points, [], share)]
    assert Counter(found) == Counter(p.key for p in select(points, [], part))


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "a/b", "1/0"])
def test_a_part_that_is_none_is_an_error(part: str) -> None:
    with pytest.raises(ConfigError, match=r"--part is .*; allowed: I/N"):
        select(POINTS, [], part)


def test_an_unknown_kernel_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"--only is 'gemm'; allowed: gemm\.bf16"):
        select(POINTS, ["gemm"], "1/1")


def run(output: Path, *words: str, broken: Sequence[int] = ()) -> int:
    bench = Bench(*broken)
    words = ("--output", str(output.parent), *words)
    return sweep.command("gemm", "Doc.", lambda grid: POINTS, lambda: bench.work, words=words)


def test_the_command_measures_and_its_status_tells(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "check_gpu", lambda name: None)
    assert run(output, "--part", "1/2") == 0
    assert [row["m"] for row in read(output)] == [4, 3]
    assert run(output, broken=[2]) == 1
    assert run(output) == 0
    assert run(output, "--part", "3/2") == 2


def test_the_command_lists_what_is_left(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "check_gpu", lambda name: None)
    run(output, "--part", "1/2")
    assert run(output, "--list") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [p.row for p in POINTS[1::2]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that does nothing."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(sweep, "check_gpu", lambda name: None)


@pytest.mark.usefixtures("gpu")
def test_compiling_calls_every_point_once_and_writes_nothing(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called = []

    def prepare(point: Point) -> Work:
        if point.shape["m"] == 1:
            raise RuntimeError("no such kernel")
        return Work([lambda: called.append(point.shape["m"])] * 3)

    words = ["--output", str(output.parent), "--compile-only"]
    assert sweep.command("gemm", "Doc.", lambda grid: POINTS, lambda: prepare, words=words) == 1
    assert called == [4, 3, 2]
    assert "'m': 1, 'n': 64, 'k': 128} did not run: RuntimeError: no such kernel" in capsys.readouterr().err
    assert not list(output.parent.iterdir())


@pytest.mark.usefixtures("gpu")
def test_only_kernels_that_are_compiled_are_called_before(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, called = [], []
    monkeypatch.setattr(sweep, "compile_first", lambda name, given: first.append(name))
    points = [*POINTS, Point("gemm.fp8_block", {"m": 5, "n": 64, "k": 128})]

    def prepare(point: Point) -> Work:
        return Work([lambda: called.append(point.kernel) or 1], timer=timer)

    def run(compiled: Sequence[str], *words: str) -> int:
        words = ("--output", str(output.parent), *words)
        return sweep.command("gemm", "Doc.", lambda grid: points, lambda: prepare, compiled=compiled, words=words)

    assert run(["gemm.fp8_block"], "--compile-only") == 0
    assert called == ["gemm.fp8_block"]
    assert run(["gemm.fp8_block"], "--compile", "2", "--only", "gemm.bf16") == 0
    assert not first
    assert run(["gemm.fp8_block"], "--compile", "2") == 0
    assert first == ["gemm"]
    assert run(["gemm.fp8_block"], "--compile", "2") == 0  # nothing is left
    assert first == ["gemm"]


@pytest.mark.parametrize(("number", "processes"), [((), 3), (("2",), 2)])
def test_compilers_end_after_half_of_the_time(
    output: Path, monkeypatch: pytest.MonkeyPatch, number: tuple[str, ...], processes: int
) -> None:
    output.parent.mkdir()
    begun, started, start = time.monotonic(), [], subprocess.Popen

    def popen(command: list[str], **to: Any) -> subprocess.Popen[bytes]:
        started.append(command[-1])
        return start([sys.executable, "-c", "import time; time.sleep(60)"], **to)

    monkeypatch.setattr("fp8plan.runtime.measure.kernels.sweep.subprocess.Popen", popen)
    words = ["--output", str(output.parent), "--seconds", "1", "--gpu", "l4", "--compile", *number]
    monkeypatch.setattr("fp8plan.runtime.measure.calibrate.os.sched_getaffinity", lambda _: set(range(16)))
    compile_first("gemm", arguments("gemm", None, words))
    assert started == shares("1/1", processes)  # the default is as many as an L4's memory allows
    assert 0.5 <= time.monotonic() - begun < 30


def test_a_machine_without_the_gpu_is_refused(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8plan.runtime.measure.kernels.sweep.gpu_facts", lambda: {"gpu_product": None})
    assert run(output) == 2
    assert not output.exists()
    monkeypatch.setattr("fp8plan.runtime.measure.kernels.sweep.gpu_facts", lambda: {"gpu_product": "NVIDIA L40S"})
    with pytest.raises(ConfigError, match="this machine has NVIDIA L40S"):
        check_gpu("h200_sxm")
    check_gpu("auto")
    check_gpu("l40s")


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, 0), ("3", 3), ("2,0", 2), ("GPU-1a2b", "GPU-1a2b"), ("GPU-1a2b,GPU-0", "GPU-1a2b")]
)
def test_the_first_visible_gpu_is_the_one_reported(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: int | str
) -> None:
    class Nvml:
        nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = staticmethod(lambda name: name)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine._first_visible(Nvml) == asked


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_where_no_gpu_is_visible_none_is_reported(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert machine.gpu_facts() == machine.NOTHING


@pytest.mark.parametrize("size", [1, 1 << 16, 5 << 20, 100 << 20, 10 << 30])
def test_copies_fill_the_cache_four_times_within_limits(size: int) -> None:
    l2 = 60 << 20
    number = timing.copies(size, l2)
    assert timing.LEAST_COPIES <= number <= timing.MOST_COPIES
    assert number == timing.MOST_COPIES or number * size >= 4 * l2
    assert number == timing.LEAST_COPIES or (number - 1) * size < 4 * l2


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    code = "import sys; from fp8plan.jsonl import write\n"
    code += "for i in range(50): write(sys.argv[1], {'who': sys.argv[2], 'i': i, 'long': 'x' * 5000})"
    file = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), who]) for who in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert Counter(row["who"] for row in jsonl.rows(file)) == {"a": 50, "b": 50}


@pytest.mark.parametrize("grid", [gemm_grid, elementwise_grid])
def test_full_holds_quick_and_no_point_twice(grid: Any) -> None:
    quick, full = (grid.points(name) for name in ("quick", "full"))
    for points in (quick, full):
        assert len({point.key for point in points}) == len(points)
    assert {point.key for point in quick} < {point.key for point in full}
    assert {point.kernel for point in quick} == {point.kernel for point in full}


def test_the_grids_are_as_large_as_their_time_allows() -> None:
    sizes = {name: len(gemm_grid.points(name)) + len(elementwise_grid.points(name)) for name in ("quick", "full")}
    assert 150 <= sizes["quick"] <= 220
    assert 1200 <= sizes["full"] <= 1720  # Gemma-4-31B brought 23, and Qwen2.5-0.5B to 14B and gpt-oss-120b 31


def test_fp8_points_are_what_deep_gemm_and_flashinfer_take() -> None:
    n_multiple, k_multiple = 64, 128  # vLLM falls back to other kernels elsewhere
    shapes = [point.shape for point in gemm_grid.points("full") if point.kernel != "gemm.bf16"]
    assert {(shape.get("n", n_multiple) % n_multiple, shape["k"] % k_multiple) for shape in shapes} == {(0, 0)}
    rows = {point.shape["m"] for point in gemm_grid.points("full") if point.kernel == "gemm.fp8_block"}
    assert min(rows) >= gemm_grid.SWAP_AB_BELOW


def test_every_core_shape_is_measured_at_every_row_count_in_both_precisions() -> None:
    rows: dict[tuple[str, int, int], set[int]] = {}
    for point in gemm_grid.points("full"):
        if "n" in point.shape:
            rows.setdefault((point.kernel, point.shape["n"], point.shape["k"]), set()).add(point.shape["m"])
    for n, k in gemm_grid.weights_of(gemm_grid.CORE):
        assert rows["gemm.bf16", n, k] >= set(gemm_grid.ROWS)
        assert rows["linear.fp8_block", n, k] == set(gemm_grid.ROWS)
    for n, k in gemm_grid.linears():
        assert len(rows["gemm.bf16", n, k]) >= 3
    for n, k in gemm_grid.lm_heads():
        assert max(rows["gemm.bf16", n, k]) <= 1024


def test_shapes_that_do_not_name_a_layer_are_of_all_models() -> None:
    """Qwen3-8B, from its config: 32 + 2 * 8 heads of 128, hidden 4096, inner 12288, vocabulary 151936."""
    assert {(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)} <= set(gemm_grid.linears())
    assert (151936, 4096) in gemm_grid.lm_heads()


def test_held_out_shapes_are_measured_and_differ_from_those_to_fit() -> None:
    fit, apart = (pd.DataFrame(gemm_grid.weights_of(x), columns=["n", "k"]) for x in (gemm_grid.CORE, LINEARS))
    assert not is_held_out(fit).any()
    assert is_held_out(apart).all()
    points = pd.DataFrame([{"kernel": p.kernel} | p.shape for p in gemm_grid.points("full") if "n" in p.shape])
    for kernel in ("gemm.bf16", "linear.fp8_block"):
        rows = points[points.kernel == kernel]
        found = set(rows[is_held_out(rows)][["n", "k"]].itertuples(index=False, name=None))
        assert found == set(apart.itertuples(index=False, name=None))


def test_a_cut_leaves_even_coverage() -> None:
    points = gemm_grid.points("full")
    cut, whole = (Counter(p.kernel for p in some) for some in (points[: len(points) // 2], points))
    for kernel, count in whole.items():
        assert abs(cut[kernel] - count / 2) <= 2 * count**0.5  # 4 sd of drawing half without replacement


def test_importing_needs_neither_torch_nor_vllm() -> None:
    modules = ("attention", "elementwise", "gemm", "moe", "power", "sweep", "timing")
    names = ", ".join(f"fp8plan.runtime.measure.kernels.{module}" for module in modules)
    code = f"import sys, {names}; sys.exit(', '.join({{'torch', 'vllm'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
