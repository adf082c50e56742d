"""Run the tests of one checkout with an adapter in the place of the peer's modules; write a line for each test.

    python -m benchmarks.peers.tests PEER CHECKOUT OUTPUT

The test files are copied to a temporary folder, where the peer's conftest.py does not reach them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import adapted
from benchmarks.peers.table import FAIL, PASS, UNSAID


class Recorder:
    """A plugin of pytest that notes a verdict for each test.

    file:    that the tests are from, as in the checkout
    known:   name of a test -> the reason why it fails
    """

    def __init__(self, file: str, known: dict[str, str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._file, self._known = file, known

    def pytest_runtest_setup(self) -> None:
        adapted.CALLS.clear()
        torch.manual_seed(0)  # some tests draw without a seed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if report.when == "call" or report.failed:
            error = None if call.excinfo is None else call.excinfo.value
            self._note(item.name, error)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._row(self._file, UNSAID, f"it cannot be imported: {_last_line(report.longreprtext)}")

    def _note(self, name: str, error: BaseException | None) -> None:
        known = self._known.get(name.partition("[")[0], "")
        if isinstance(error, adapted.CannotBeSaid):
            self._row(name, UNSAID, str(error))
        elif not adapted.CALLS:
            self._row(name, UNSAID, "it asks nothing of the correction")
        elif error is None:
            self._row(name, PASS, "")
        else:
            self._row(name, FAIL, known or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", bool(known))

    def _row(self, name: str, verdict: str, reason: str, known: bool = False) -> None:
        self.rows.append({"file": self._file, "test": name, "verdict": verdict, "reason": reason, "known": known})


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].removeprefix("E").strip()


def main(peer: str, checkout: Path, output: Path) -> None:
    adapter = import_module(f"benchmarks.peers.{peer.replace('-', '_')}")
    adapter.install(checkout)
    rows: list[dict[str, Any]] = []
    for file in adapter.FILES:
        if not (checkout / file).exists():
            continue
        recorder = Recorder(file, adapter.KNOWN)
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / Path(file).name
            copy.write_text(adapter.adapted_text((checkout / file).read_text(encoding="utf-8")), encoding="utf-8")
            alone = ["--noconftest", "-c", os.devnull, "--rootdir", place, "-p", "no:cacheprovider", "-q"]
            pytest.main([str(copy), *alone], plugins=[recorder])
        rows += recorder.rows
    if not rows:
        sys.exit(f"{checkout} has none of {', '.join(adapter.FILES)}")
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
