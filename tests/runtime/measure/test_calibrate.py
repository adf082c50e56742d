"""The processes that `fp8plan calibrate` runs one after the other on a machine, and the shipped cells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from runpy import run_module
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.measure import calibrate
from fp8plan.runtime.measure.rollouts import jobs as cells

H200 = find_gpu("h200")
FOLDER = Path(calibrate.__file__).parent / "cells"
SHIPPED = sorted(FOLDER.glob("*.json"))
EVERY = ["bf16", "fp8_block", "fp8_kv", "fp8_block+fp8_kv"]


def setting(model: str = "fp8plan/dense-50m", *precisions: str, **changes: Any) -> dict[str, Any]:
    limits = {"gpu_memory_utilization": 0.6, "max_model_len": 4096}
    return (
        {"model": model, "gpu": "h200_sxm", "precisions": list(precisions) or EVERY, "workloads": []} | limits | changes
    )


# Which cells


def test_cells_are_for_the_card_and_otherwise_as_they_were() -> None:
    asked = [setting(), setting("Qwen/Qwen3-1.7B", "bf16")]
    assert calibrate.cells_for(find_gpu("h100"), asked) == [x | {"gpu": "h100_sxm"} for x in asked]
    assert asked[0]["gpu"] == "h200_sxm"  # the shipped list is not written to


def test_fp8_is_dropped_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [setting(), setting("Qwen/Qwen3-1.7B", "fp8_block", "fp8_kv")]
    (kept,) = calibrate.cells_for(find_gpu("a100"), asked)
    assert (kept["model"], kept["precisions"]) == ("fp8plan/dense-50m", ["bf16"])
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("fp8plan/dense-50m: fp8_block, fp8_block+fp8_kv, fp8_kv left out on a100_sxm")
    assert second.endswith("Qwen/Qwen3-1.7B: fp8_block, fp8_kv left out on a100_sxm")


def test_models_that_do_not_fit_are_dropped_by_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-32B has 61 GiB of BF16 weights and 33 in FP8; an L40S has 45 GiB."""
    asked = [setting("Qwen/Qwen3-32B", gpu_memory_utilization=0.9), setting()]
    large, small = calibrate.cells_for(find_gpu("l40s"), asked)
    assert large["precisions"] == ["fp8_block", "fp8_block+fp8_kv"]
    assert small["precisions"] == EVERY
    assert "Qwen/Qwen3-32B: bf16, fp8_kv left out on l40s" in capsys.readouterr().err
    (kept,) = calibrate.cells_for(find_gpu("l40s"), [setting("Qwen/Qwen3-32B", gpu_memory_utilization=0.6), setting()])
    assert kept["model"] == "fp8plan/dense-50m"


def test_nothing_that_fits_is_an_error_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"none of the calibration's models fits l40s; .* fp8plan\.runtime\.measure\."
    ):
        calibrate.cells_for(find_gpu("l40s"), [setting("Qwen/Qwen3-235B-A22B")])
    with pytest.raises(ConfigError, match="fits a100_sxm"):
        calibrate.cells_for(find_gpu("a100"), [setting("fp8plan/dense-50m", "fp8_kv")])


# In which order, and what of a failure


class Machine:
    """Stands in for subprocess.run: remembers what was started, and ends it with the status asked for."""

    def __init__(self, **status: int) -> None:
        self.status, self.started = status, []

    def __call__(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, "-m"]
        name = re.fullmatch(r"fp8plan\.runtime\.measure\.(?:kernels\.)?(\w+?)(?:\.run)?", command[2])[1]
        self.started.append((name, command[3:]))
        return subprocess.CompletedProcess(command, self.status.get(name, 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(**status: int) -> Machine:
        made = Machine(**status)
        monkeypatch.setattr(calibrate.subprocess, "run", made)
        return made

    return make


@pytest.mark.parametrize(("card", "cores", "expected"), [("h200", 16, 14), ("l4", 16, 3), ("h200", 1, 1)])
def test_compilers_leave_cores_and_memory(
    card: str, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert calibrate.compilers(find_gpu(card)) == expected


ORDER = ["gemm", "attention", "moe", "elementwise", "power", "rollouts"]


@pytest.mark.parametrize("grid", ["quick", "full"])
def test_kernels_come_before_rollouts_and_all_write_into_the_folder(
    machine: Callable[..., Machine], tmp_path: Path, grid: str
) -> None:
    started = machine()
    calibrate.measure(tmp_path / "new", H200, grid)
    assert [name for name, _ in started.started] == ORDER
    for _, words in started.started[:-1]:
        assert words == ["--output", str(tmp_path / "new/kernels"), "--grid", grid, "--gpu", "h200_sxm", "--compile"]
    words = started.started[-1][1]
    asked = json.loads(Path(words[words.index("--cells") + 1]).read_text())
    shipped = json.loads((FOLDER / calibrate.CELLS[grid]).read_text())
    assert [x["workloads"] for x in asked] == [x["workloads"] for x in shipped]  # an H200 leaves nothing out
    assert words[words.index("--output") + 1] == str(tmp_path / "new/steps/rollouts.jsonl")
    assert "--trace" in words
    assert words[-1] == "--compile"


def test_a_cpu_has_rollouts_alone(machine: Callable[..., Machine], tmp_path: Path) -> None:
    started = machine()
    calibrate.measure(tmp_path, find_gpu("cpu"), "quick")
    ((name, words),) = started.started
    assert name == "rollouts"
    assert {x["gpu"] for x in json.loads(Path(words[words.index("--cells") + 1]).read_text())} == {"cpu"}


def test_a_card_without_fp8_is_asked_for_bf16_alone(machine: Callable[..., Machine], tmp_path: Path) -> None:
    started = machine()
    calibrate.measure(tmp_path, find_gpu("a100"), "full")
    asked = {name: words[words.index("--only") + 1 :] for name, words in started.started[:-1]}
    assert asked["gemm"] == ["gemm.bf16"]
    names = "attention_decode", "attention_mixed", "attention_prefill", "kv_write"
    assert asked["attention"] == [f"{name}.bf16" for name in names]
    assert asked["moe"] == ["moe.bf16"]
    assert asked["elementwise"] == ["activation", "norm", "rotary", "sampling.v2"]


@pytest.mark.parametrize("name", ORDER)
def test_points_that_fail_are_noted_and_the_rest_goes_on(
    machine: Callable[..., Machine], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    started = machine(**{name: 1})
    calibrate.measure(tmp_path, H200, "quick")
    assert [done for done, _ in started.started] == ORDER
    assert f"{name}: something failed and is left out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ORDER)
@pytest.mark.parametrize("status", [2, -9, 137])
def test_a_measurement_that_cannot_be_made_stops_it_all(
    machine: Callable[..., Machine], tmp_path: Path, name: str, status: int
) -> None:
    started = machine(**{name: status})
    with pytest.raises(ConfigError, match=rf"{name} could not be measured \(exit status {status}\)"):
        calibrate.measure(tmp_path, H200, "quick")
    assert [done for done, _ in started.started] == ORDER[: ORDER.index(name) + 1]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_commands_that_are_started_know_their_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweeps' own parsers: each lists the points that are left, which are of the kernels asked for."""
    for name in calibrate.KERNELS:
        words = ["--output", str(tmp_path), "--grid", "quick", "--gpu", "h200_sxm", "--compile"]
        only = calibrate._only(name, find_gpu("a100"), "quick")  # --only and names
        monkeypatch.setattr(sys, "argv", [name, *words, *only, "--list"])
        with pytest.raises(SystemExit) as end:
            run_module(f"{calibrate.PACKAGE}.kernels.{name}", run_name="__main__")
        out, err = capsys.readouterr()
        assert not end.value.code, err
        points = [json.loads(line) for line in out.splitlines()]
        assert {point["kernel"] for point in points} <= set(only[1:])
        assert f"{len(points)} points are left" in err
        assert len(points) >= 10
        assert not list(tmp_path.iterdir())


# The cells that are shipped


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], list[dict[str, Any]]]]:
    options = cells.Options(tmp_path_factory.mktemp("jobs") / "out.jsonl", "full", True, {}, ())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cells, "engine_version", lambda: "0.26.0")
        yield cache(lambda file: cells.jobs(file, options))


def keys(found: list[dict[str, Any]]) -> list[str]:
    return [run["key"] for job in found for cell in job["work"] for run in cell["runs"]]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_cells_can_be_run_and_are_unique(file: Path, jobs: Callable[[Path], list[dict[str, Any]]]) -> None:
    found, settings = jobs(file), json.loads(file.read_text())
    assert len(found) == sum(len(x["precisions"]) for x in settings)
    assert len(set(keys(found))) == len(keys(found)) > 0
    assert len({job["label"] for job in found}) == len(found)  # each engine has a log of its own
    for job in found:
        names = [cell["workload"] for cell in job["work"]]
        assert len(set(names)) == len(names)


def test_what_validates_is_not_what_is_fitted(jobs: Callable[[Path], list[dict[str, Any]]]) -> None:
    fitted = [FOLDER / name for name in (*calibrate.CELLS.values(), calibrate.CPU_CELLS)]
    judges = [file for file in SHIPPED if "validation" in file.stem]
    assert len(judges) >= 2

    def workloads(files: list[Path]) -> set[str]:
        """The work asked of each engine, without what names the run."""
        same = ("model", "gpu", "precision", "kv_cache_tokens")
        lengths = ("prompt_lengths", "response_lengths", "prompt_ids")
        return {
            json.dumps([[job["fields"][x] for x in same], [cell[x] for x in lengths]])
            for file in files
            for job in jobs(file)
            for cell in job["work"]
        }

    assert not workloads(fitted) & workloads(judges)


@pytest.mark.parametrize("name", sorted({*calibrate.CELLS.values(), calibrate.CPU_CELLS}))
def test_the_calibrations_cells_all_fit_the_card_they_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((FOLDER / name).read_text())
    (card,) = {x["gpu"] for x in settings}
    assert calibrate.cells_for(find_gpu(card), settings) == settings
    assert capsys.readouterr().err == ""
