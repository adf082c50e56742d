"""The folder of a run: its logs, its checkpoint, and how a run that was broken off goes on.

plan.json, predicted.json    written before the first step
run.jsonl                    the Monitor's record of each step, which `fp8plan monitor`, `report` and `validate` read
steps.jsonl                  the loop's own: reward, lengths, seconds
events.jsonl                 what the controller asked for, and what was done about it
checkpoint.pt                the newest; done.json: the run is over

A run goes on from its checkpoint: lines of later steps are dropped first, so that each step is in the logs once.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fp8plan import jsonl
from fp8plan.errors import ConfigError

LOGS: Final = ("run.jsonl", "steps.jsonl")  # lines with a step


class RunFolder:
    """The folder of one run, which is made."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process. Raises ConfigError if another has it."""
        with (self / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process runs {self.path}; wait for it, or end it") from None
            yield

    @property
    def done(self) -> bool:
        return (self / "done.json").is_file()

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        self._replace(name, (json.dumps(jsonl.plain(data), indent=1, allow_nan=False) + "\n").encode())

    def log(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a line."""
        jsonl.append(self / name, jsonl.line(row))

    def rows(self, name: str) -> list[Any]:
        """The rows of a log; [] if there is none."""
        return jsonl.rows(self / name)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint, whole or not at all."""
        import torch

        torch.save(dict(state), self / "checkpoint.new")
        os.replace(self / "checkpoint.new", self / "checkpoint.pt")

    def load(self, device: str) -> dict[str, Any] | None:
        """The checkpoint, after lines of later steps were dropped from the logs; None if there is none."""
        import torch

        saved = None
        if (self / "checkpoint.pt").is_file():
            saved = torch.load(self / "checkpoint.pt", map_location=device, weights_only=True)
        self.forget_after(0 if saved is None else saved["step"])
        return saved

    def forget_after(self, step: int) -> None:
        """Drop the lines of the logs whose step (1, 2, ...) is after this one."""
        for name in LOGS:
            if (self / name).is_file():
                kept = b"".join(jsonl.line(row) for row in self.rows(name) if row["step"] <= step)
                self._replace(name, kept)

    def _replace(self, name: str, text: bytes) -> None:
        (self / f"{name}.new").write_bytes(text)
        os.replace(self / f"{name}.new", self / name)


def read_json(path: Path) -> Any:
    return jsonl.parse(path.read_text(encoding="utf-8"), str(path))
