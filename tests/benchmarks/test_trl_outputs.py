"""The script that times TRL's two ways of a rollout, with stand-ins for the server and its client."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import trl_outputs

pytestmark = pytest.mark.trl

ROWS = [{"what": what, "front_s": 1.0, "client_s": 2.0, "tokens": 1000} for what in trl_outputs.WAYS]


def test_a_server_without_the_route_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.generation.vllm_client import VLLMClient

    generate = functools.wraps(VLLMClient.generate)(lambda *args, **how: {"completion_ids": [[1]]})
    monkeypatch.setattr(VLLMClient, "generate", generate)
    client = SimpleNamespace(_rolled_out=lambda prompts, sampling: None)
    given = argparse.Namespace(prompts=1, tokens=1, runs=1)
    with pytest.raises(AssertionError, match="the server has not fp8plan's route"):
        list(trl_outputs.measured(client, os.getpid(), given))


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `main` writes. Nothing is started."""

    @contextmanager
    def nothing(*args: Any) -> Iterator[tuple[str, int]]:
        yield "http://server", 0

    monkeypatch.setattr("fp8plan.integrations.trl.client.PlannedClient", SimpleNamespace)
    monkeypatch.setattr(trl_outputs, "checkpoint", nothing)
    monkeypatch.setattr(trl_outputs, "serving", nothing)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr("sys.argv", ["trl_outputs", "--output", str(tmp_path / "rows.jsonl")])
    return tmp_path / "rows.jsonl"


def test_results_are_replaced_by_whole_ones_alone(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(*args: Any) -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise AssertionError("the two ways answer differently")

    output.write_text("the committed rows\n")
    monkeypatch.setattr(trl_outputs, "measured", broken_off)
    with pytest.raises(AssertionError, match="answer differently"):
        trl_outputs.main()
    assert output.read_text() == "the committed rows\n"
    monkeypatch.setattr(trl_outputs, "measured", lambda *args: iter(ROWS))
    trl_outputs.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS
