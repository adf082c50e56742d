"""The streams of the command line: full, closed, a reader that left, ASCII only. No traceback, the right exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = ["plan", "Qwen/Qwen3-0.6B", "--gpu", "h200", "--prompts", "2", "--samples", "2"]
PLAN += ["--prompt-lengths", "fixed:16", "--response-lengths", "fixed:32"]
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`fp8plan` in a shell, with what the command does to its streams."""
    program = f'fp8plan() {{ "{sys.executable}" -m fp8plan "$@"; }}; set -o pipefail; '
    return subprocess.run(
        ["bash", "-c", program + command], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


LISTS = [pytest.param([name], marks=pytest.mark.slow) for name in ("models", "profiles")]


@pytest.mark.parametrize("words", [PLAN, [*PLAN, "--json"], *LISTS, ["--help"]])
@pytest.mark.parametrize(
    ("to", "why"),
    [("/dev/full", "No space left on device"), pytest.param("&-", "it is closed", marks=pytest.mark.slow)],
)
def test_a_result_that_cannot_be_written_is_one_error(words: list[str], to: str, why: str) -> None:
    done = shell(f"fp8plan {' '.join(words)} >{to}")
    assert done.returncode == 2
    notes = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert notes == [
        f"fp8plan: stdout cannot be written: {why}; the result is lost or incomplete: send it somewhere else"
    ]


@pytest.mark.parametrize("to", ["/dev/full", pytest.param("&-", marks=pytest.mark.slow)])
def test_without_stderr_the_result_is_the_same_and_errors_keep_their_exit_code(to: str) -> None:
    words = " ".join([*PLAN, "--json"]).replace("h200", "b200")  # a profile that there is much to note of
    good, whole = shell(f"fp8plan {words} 2>{to}"), shell(f"fp8plan {words}")
    assert "note: " in whole.stderr
    assert (good.returncode, good.stdout) == (0, whole.stdout)
    assert json.loads(good.stdout)["gpu"] == "b200"
    bad = shell(f"fp8plan {words} --precision int4 2>{to}")
    assert (bad.returncode, bad.stdout) == (2, "")


def test_a_reader_that_left_ends_it_quietly() -> None:
    done = shell("fp8plan models --json | true")  # it is gone before Python has started
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def test_no_stream_at_all_is_no_traceback() -> None:
    assert shell("fp8plan models <&- >&- 2>&-").returncode == 2


def test_a_plan_from_a_closed_stdin_is_one_error() -> None:
    done = shell("fp8plan emit - verl <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fp8plan: cannot read -: stdin is closed; give a file that can be read\n"


def test_a_result_goes_into_a_pipe_that_is_named() -> None:
    done = shell(f"fp8plan {' '.join(PLAN)} --json=/dev/stderr 2>&1 >/dev/null | cat")
    assert '"schema_version"' in done.stdout, done


def test_a_file_whose_name_is_no_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("")
    done = shell(f"cd {tmp_path} && fp8plan monitor $'\\xff.jsonl' --once")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\udcff.jsonl: no step yet\n", "")


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], PLAN, *LISTS])
@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_a_terminal_of_few_characters_is_no_traceback(words: list[str], encoding: str) -> None:
    code, text = on_a_terminal(words, ASCII | {"PYTHONIOENCODING": encoding})
    assert code == 0
    assert text.isascii()
    assert "Traceback" not in text


def test_ctrl_c_is_told_and_has_its_own_exit_code() -> None:
    program = (
        "import os, signal, sys, time\nfrom fp8plan import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli.app.command('long')(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(9)))\n"
        "sys.argv = ['fp8plan', 'long']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "fp8plan: interrupted")


def test_characters_that_there_are_not_are_replaced_or_escaped() -> None:
    program = (
        "from fp8plan.cli.console import standard_streams\nwith standard_streams(): print('a × b ≤ c – d ▁█ \\u00e9')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env={**os.environ, **ASCII}, check=True)
    assert done.stdout.decode("ascii") == "a x b <= c - d .# \\xe9\n"


def on_a_terminal(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit code, and all that a terminal shows."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8plan", *words],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **env},
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            seen += os.read(leader, 65536)
        except OSError:  # the terminal is left
            break
    os.close(leader)
    return process.wait(timeout=60), seen.decode(errors="replace")
