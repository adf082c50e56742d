"""The output of a starting engine is held back, and found when something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from fp8plan.runtime.apply.engine.launch import held_back

PROGRAM = """
import os, subprocess, sys, time
from fp8plan.runtime.apply.engine.launch import held_back
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
    """Run PROGRAM with this code in it. Returns the process with its output, and the files that are left."""
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


def test_the_first_error_of_the_engines_output_is_named(tmp_path: Path) -> None:
    """vLLM's own error only says that its process has failed."""
    inside = (
        "print('WARNING 11-27 ValueError: no tokenizer'); print('(EngineCore) ERROR TypeError: no such kernel'); "
        "print('ValueError: and so on'); raise RuntimeError('engine core failed')"
    )
    done, (left,) = ran(tmp_path, inside=inside)
    assert done.stderr.splitlines()[-1] == f"its output is in {left}, first error there: TypeError: no such kernel"


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


@pytest.mark.parametrize("kind", [OSError, ValueError, KeyboardInterrupt])
def test_what_fails_while_it_is_flushed_costs_no_stream(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk, a closed stream; what only interrupts is not kept back."""

    def flush() -> None:
        if inside:
            raise kind

    inside = False
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys.stdout, "flush", flush)
    opened = len(os.listdir("/dev/fd"))
    expected = nullcontext() if issubclass(kind, Exception) else pytest.raises(kind)
    with expected, held_back(engine_stays=False):
        os.write(1, b"inside")
        inside = True
    inside = False
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"
    assert len(os.listdir("/dev/fd")) == opened
    assert len(list(tmp_path.iterdir())) == (not issubclass(kind, Exception))


def test_no_room_for_the_file_leaves_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    opened = len(os.listdir("/dev/fd"))
    with pytest.raises(FileNotFoundError), held_back():
        pass
    assert len(os.listdir("/dev/fd")) == opened


def test_an_error_of_before_the_engine_does_not_keep_its_file(tmp_path: Path) -> None:
    """An interactive session goes on after it."""
    early = PROGRAM.replace("with held_back", "sys.last_value = ValueError()\nwith held_back")
    env = os.environ | {"TMPDIR": str(tmp_path)}
    program = early.format(inside="", after="")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    assert (done.stderr, list(tmp_path.iterdir())) == ("", [])


def test_closed_streams_stop_nothing(tmp_path: Path) -> None:
    program = PROGRAM.replace("os.write(2, ", "str(").format(inside="", after="open('done', 'w').close()")
    shell = f"exec '{sys.executable}' -c \"$0\" <&- >&- 2>&-"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run(["bash", "-c", shell, program], check=True, cwd=tmp_path, env=env, timeout=60)
    assert (tmp_path / "done").exists()
