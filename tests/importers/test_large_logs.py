"""Logs that are larger than the memory: read request by request, and only as far as they are asked for."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fp8plan import cli
from fp8plan.errors import ConfigError
from fp8plan.importers import counter as tokens
from fp8plan.importers import records
from fp8plan.importers import trl as trl_log
from fp8plan.importers.records import import_rollouts

SIZE = 6_000_000  # bytes of a dump
TEXT = " ".join(f"w{number}" for number in range(2000))


class Words:
    """A tokenizer for which a word is a token."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [range(text.count(" ") + 1) for text in texts]}


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "load_tokenizer", lambda name: Words())


def verl(folder: Path, files: int) -> None:
    line = {"input": TEXT[:3000], "output": TEXT, "gts": "x" * 1000, "score": 1.0}
    rows = SIZE // files // len(json.dumps(line))
    for step in range(1, files + 1):
        lines = (json.dumps(line | {"input": f"w{n // 4} {TEXT[:3000]}", "step": step}) for n in range(rows))
        (folder / f"{step}.jsonl").write_text("\n".join(lines))


def trl(folder: Path, files: int) -> None:
    rows = SIZE // files // (len(TEXT) + 3000)
    for step in range(1, files + 1):
        table = {"step": step, "prompt": [f"w{n} {TEXT[:3000]}" for n in range(rows)], "completion": TEXT}
        table["completion"] = [f"w{step} {TEXT}"] * rows
        pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def skyrl(folder: Path, files: int) -> None:
    rows, length = 64, SIZE // files // 64 // 8 // 3
    for step in range(1, files + 1):
        ones = np.ones((rows, length), dtype=np.int64)
        tensors = {
            name: {"format": "numpy", "data": ones.tobytes(), "shape": ones.shape, "dtype": "int64"}
            for name in ("sequences", "attention_mask")
        }
        half = ones[:, : length // 2]
        tensors["response_mask"] = tensors["sequences"] | {"data": half.tobytes(), "shape": half.shape}
        content = {"batch_dict": tensors, "metadata": None}
        (folder / f"global_step_{step}_training_input.pkl").write_bytes(pickle.dumps(content))


LOGS: dict[str, Callable[[Path, int], None]] = {"verl": verl, "trl": trl, "skyrl": skyrl}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_an_import_needs_a_small_part_of_the_log_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, files: int
) -> None:
    monkeypatch.setattr(tokens, "BATCH", 100_000)
    monkeypatch.setattr(trl_log, "ROWS", 8)
    LOGS[trainer](tmp_path, files)
    import_rollouts(trainer, tmp_path, tokenizer="words", last=1)  # whose imports are no part of it
    tracemalloc.start()
    try:
        found = import_rollouts(trainer, tmp_path, tokenizer="words").records
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == files
    assert sum(len(record["response_lengths"]) for record in found) > 60
    assert peak < SIZE / 4


@pytest.mark.parametrize("trainer", LOGS)
def test_the_last_rollouts_are_read_and_no_other(tmp_path: Path, trainer: str) -> None:
    LOGS[trainer](tmp_path, 4)
    first, second, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(b"junk\njunk")
    for last, begins in ((1, 4), (2, 3)):
        found = import_rollouts(trainer, tmp_path, tokenizer="words", last=last).records
        assert [record["step"] for record in found] == list(range(begins, 5))
        assert not any("first_rollout" in record for record in found)
    with pytest.raises(ConfigError, match=first.name):
        import_rollouts(trainer, tmp_path, tokenizer="words")
    first.write_bytes(second.read_bytes())
    found = import_rollouts(trainer, tmp_path, tokenizer="words").records
    assert [record.get("first_rollout") for record in found][:2] == [True, None]


def test_a_batch_that_is_trained_on_again_is_taken_once_from_the_end_too(tmp_path: Path) -> None:
    for step, text in ((2, "w1 w2"), (4, "w1 w2 w3"), (6, "w1 w2 w3"), (8, "w1 w2 w3")):
        row = {"step": [step], "prompt": ["w0"], "completion": [text]}
        pd.DataFrame(row).to_parquet(tmp_path / f"completions_{step:05d}.parquet")
    for last, steps in ((1, [4]), (2, [2, 4]), (None, [2, 4])):
        found = import_rollouts("trl", tmp_path, tokenizer="words", last=last).records
        assert [record["step"] for record in found] == steps


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_how_many_texts_are_tokenised_at_once_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(tokens, "BATCH", size)
    lines = [{"input": f"w1 w{n // 3}" + " w2" * (n // 3), "output": " ".join(["w"] * (n + 1))} for n in range(9)]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, [*lines, lines[0]])))
    (record,) = import_rollouts("verl", tmp_path, tokenizer="words").records
    assert record["prompt_ids"] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert record["prompt_lengths"] == [2, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert record["response_lengths"] == [1, 2, 3, 1, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("trainer", LOGS)
def test_progress_is_told_in_bytes_up_to_all_of_them(tmp_path: Path, trainer: str) -> None:
    LOGS[trainer](tmp_path, 3)
    told: list[tuple[int, int]] = []
    import_rollouts(trainer, tmp_path, tokenizer="words", last=2, progress=lambda *now: told.append(now))
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())][1:]
    assert told == sorted(told)
    assert {total for _, total in told} == {sum(sizes)}
    assert told[-1][0] == sum(sizes)
    assert len(told) > 10 or trainer == "skyrl"


@pytest.mark.parametrize("output", ["run.jsonl", "-"])
def test_an_import_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").mkdir()
    verl(tmp_path / "dump", 3)
    (tmp_path / "dump" / "3.jsonl").write_text('{"input": "w1", "output": "w2"}\n{"input": "w1"}\n')
    monkeypatch.setattr("sys.argv", ["fp8plan", "import", "verl", "dump", "--tokenizer", "words", "-o", output])
    with pytest.raises(SystemExit):
        cli.main()
    out, err = capsys.readouterr()
    assert out == ""
    assert "line 2 of dump/3.jsonl: field 'output' is missing" in err
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]
