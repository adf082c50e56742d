"""Planning works on Windows. No test runs there: these take away here what Windows lacks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_run import simulated

import fp8plan
from fp8plan.jsonl import line

ROOT = Path(fp8plan.__file__).parent
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
PLANNING = [ROOT / name for name in ("model", "cli", "views", "importers", "runtime/watch/monitor")]

# Without the modules and functions, and with an error for text whose encoding is the system's: it is not UTF-8 there.
WINDOWS = f"""
import multiprocessing, os, sys, warnings
for name in {sorted(POSIX_ONLY - {"posix"})}:
    sys.modules[name] = None
for name in ("fork", "forkpty", "pread", "pwrite", "O_NONBLOCK", "O_CLOEXEC", "geteuid", "getuid", "killpg", "sync"):
    delattr(os, name)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
warnings.filterwarnings("error", category=EncodingWarning, module="fp8plan")
"""


def on_windows(code: str, *words: object) -> str:
    command = [sys.executable, "-X", "warn_default_encoding", "-c", WINDOWS + code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMAND = "from fp8plan import cli; cli.main()"


def test_a_plan_and_its_settings() -> None:
    asked = ("plan", "Qwen/Qwen3-8B", "--gpu", "h200", "--gpus", 8, "--prompts", 64, "--json")
    assert json.loads(on_windows(COMMAND, *asked))["choices"]
    work = "Workload(8, 4, Fixed(64), Fixed(256))"
    code = "from fp8plan import *; from fp8plan import Fixed, Workload\n"
    code += f"print(plan('Qwen/Qwen3-8B', 'h200', {work}).vllm_kwargs('fp8_block'))"
    assert "'quantization'" in on_windows(code)


def test_what_looks_at_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    rows = simulated(3)
    path.write_bytes(b"".join(map(line, rows)))
    assert "step 3," in on_windows(COMMAND, "monitor", path, "--once")
    assert "MAPE" in on_windows(COMMAND, "validate", path)
    append = "import sys; from pathlib import Path; from fp8plan import jsonl; p = Path(sys.argv[1])\n"
    append += "p.write_bytes(p.read_bytes()[:-9]); print(jsonl.append(p, b'{}\\n').cut); jsonl.write(p, {'a': 1})"
    assert int(on_windows(append, path)) > 9
    assert path.read_bytes().endswith(b'{}\n{"a":1}\n')


def test_nothing_that_is_posix_only_is_imported_with_a_module() -> None:
    paths = [path for folder in PLANNING for path in folder.rglob("*.py")] + sorted(ROOT.glob("*.py"))
    assert len(paths) > 100
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        for name in _names(node)
        if name in POSIX_ONLY
    ]
    assert not wrong


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []


def test_this_test_would_see_it() -> None:
    for code in (
        "import fcntl",
        "import os; os.pread",
        "import fp8plan; __import__('fp8plan.jsonl').jsonl.os.O_CLOEXEC",
    ):
        with pytest.raises(AssertionError, match=r"fcntl|pread|O_CLOEXEC"):
            on_windows(code)
