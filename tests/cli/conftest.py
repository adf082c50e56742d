"""The command line, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Done
from typed import replacing

from fp8plan import cli
from fp8plan.model.profile import library


@pytest.fixture
def fp8plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """Run the command line in this process, in an empty folder, with the shipped datasheet profile only.

    Words after those of PLAN may give its options anew.
    """
    sheet = library.profiles_path() / "datasheet.json"
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "datasheet.json").write_text(sheet.read_text())
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(library, "profiles_path", lambda: tmp_path / "profiles")

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["fp8plan", *replacing([*map(str, words)])])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Done(code, *capsys.readouterr())

    return run
