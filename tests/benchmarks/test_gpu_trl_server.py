"""The script that times syncs of TRL's server mode, without a server and a trainer."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import trl_server

pytestmark = pytest.mark.trl  # the rows hold its version

MODEL = "fp8plan/dense-9m"


def test_rows_name_the_model_and_its_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def fails(part: str, args: argparse.Namespace) -> None:
        folders.append(Path(args.folder))
        assert list(folders[0].iterdir())
        assert args.folder in trl_server.command_of(part, args)
        raise RuntimeError("no server today")

    monkeypatch.setattr(trl_server, "run", fails)
    monkeypatch.setattr(trl_server, "randomise", lambda name, folder: write_config(Path(folder)))
    output = tmp_path / "rows.jsonl"
    trl_server.main(["--model", MODEL, "--output", str(output), "--gpu", "cpu", "--precision", "fp8_kv"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["what"], row["model"], row["error"]) for row in rows] == [
        ("failed", MODEL, "RuntimeError: no server today")
    ] * 2
    assert not folders[0].exists()


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(trl_server.find_config(MODEL)[0]))


def test_a_folder_stays_where_it_is(tmp_path: Path) -> None:
    with trl_server.checkpoint(str(tmp_path)) as folder:
        assert folder == str(tmp_path)
    assert tmp_path.exists()


def test_the_trainer_gets_what_the_servers_start_has_left_of_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [1000.0], list[list[str]]()

    @contextmanager
    def serving(words: list[str], log: Path, patience_s: float) -> Iterator[str]:
        assert patience_s == 560
        now[0] += 200
        yield "http://server"

    def started(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(trl_server.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trl_server, "serving", serving)
    monkeypatch.setattr(trl_server, "command_of", lambda part, args: ["vllm", "serve"])
    monkeypatch.setattr(trl_server.subprocess, "run", started)
    monkeypatch.setattr(trl_server, "note", lambda *args, **found: None)
    told = {"model": MODEL, "folder": "/a", "precision": "fp8_kv", "steps": 3, "gpu": "cpu", "deadline": 560.0}
    trl_server.run("stock", argparse.Namespace(output=tmp_path / "rows.jsonl", **told))
    (words,) = asked
    assert words[words.index("--deadline") + 1] == "360.0"
    assert words[words.index("--folder") + 1] == "/a"
