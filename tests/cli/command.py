"""Helpers for tests of the command line: the outcome of a call, and the form of a refusal."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from typed import MODEL

from fp8plan.version import DEFAULT_VERSION

RECORD: dict[str, Any] = {
    "model": MODEL,
    "gpu": "h200",
    "engine": "vllm",
    "engine_version": DEFAULT_VERSION,
    "precision": "bf16",
    "prompt_lengths": [16, 16, 20],
    "response_lengths": [32, 40, 50],
    "seconds": 1.0,
}


class Done(NamedTuple):
    code: int
    out: str
    err: str


def refused(done: Done, *parts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that starts with the program's name and holds the parts."""
    assert done.code == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("fp8plan: ")
    for part in parts:
        assert part in line


def first_choice(done: Done) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(done.out)["choices"][0]
    return choice
