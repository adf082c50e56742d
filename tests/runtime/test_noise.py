"""What an engine writes while it starts is held back, and found when something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, subprocess, sys, time
from fp8plan.runtime.noise import held_back
print("before")
with held_back():
    print("python")
    os.write(2, b"descriptor\\n")
    subprocess.run(["sh", "-c", "echo child; echo child >&2"])
    {inside}
print("after")
{after}
"""


def ran(folder: Path, inside: str = "", after: str = "") -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """What was shown, and the files that are left."""
    program, env = PROGRAM.format(inside=inside, after=after), os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    return done, list(folder.iterdir())


def test_nothing_is_shown_and_nothing_is_left_when_all_is_well(tmp_path: Path) -> None:
    done, left = ran(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nafter\n", "")
    assert left == []


def test_an_exception_names_the_file_that_has_it_all(tmp_path: Path) -> None:
    done, (left,) = ran(tmp_path, inside="raise RuntimeError('no kernel')")
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert "RuntimeError: no kernel" in done.stderr
    assert done.stderr.splitlines()[-1] == f"its output is in {left}"
    assert "python" not in done.stderr
    assert sorted(left.read_text().split()) == ["child", "child", "descriptor", "python"]


def test_what_fails_later_names_it_too(tmp_path: Path) -> None:
    """A process that was started meanwhile writes there as long as it lives, and so its last words are there."""
    done, (left,) = ran(tmp_path, after="raise RuntimeError('the engine has died')")
    assert done.stdout == "before\nafter\n"
    assert done.stderr.splitlines()[-2:] == [
        "RuntimeError: the engine has died",
        f"the engine's output is in {left}",
    ]


def test_ctrl_c_is_shown(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done, (left,) = ran(tmp_path, inside="os.kill(os.getpid(), 2); time.sleep(9)")
    assert "KeyboardInterrupt" in done.stderr
    assert str(left) in done.stderr


def test_closed_streams_stop_nothing(tmp_path: Path) -> None:
    program = PROGRAM.replace("os.write(2, ", "str(").format(inside="", after="open('done', 'w').close()")
    shell = f"exec '{sys.executable}' -c \"$0\" <&- >&- 2>&-"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run(["bash", "-c", shell, program], check=True, cwd=tmp_path, env=env, timeout=60)
    assert (tmp_path / "done").exists()
