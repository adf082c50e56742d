"""The rollouts that TRL's GRPOTrainer logs with `log_completions=True`: completions/completions_STEP.parquet in its
output_dir.

Read in TRL 1.16.0, `GRPOTrainer.log`. A row is one response: step, prompt, completion, the rewards, advantage. A prompt
or a completion is text or a list of messages; completions are decoded without special tokens. A file is written at each
logging step and holds the last generation batch: one that is trained on for several steps is in several files. An
evaluation writes its own completions over those of its step. TRL's figures have no seconds of generation: its profile
goes to W&B, MLflow and Trackio only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Logged, Request, Source, Text

PREFIX: Final = "completions_"
ROWS: Final = 64  # read at once


def files(folder: Path) -> list[Logged]:
    """Find the rollouts of a trainer's output folder, or of its folder `completions`, by step.

    Raises ConfigError for a folder without any.
    """
    inside = folder / "completions"
    paths = (inside if inside.is_dir() else folder).glob(f"{PREFIX}*.parquet")
    by_step = {int(step): path for path in paths if (step := path.stem.removeprefix(PREFIX)).isdecimal()}
    if not by_step:
        raise ConfigError(
            f"{folder} has no {PREFIX}STEP.parquet; give the trainer's output_dir, and train with "
            "GRPOConfig(log_completions=True)"
        )
    steps = sorted(by_step)
    return [Logged(step, by_step[step], by_step.get(before)) for before, step in zip([-1, *steps], steps, strict=False)]


def requests(file: Path) -> Iterator[Request]:
    """Read the requests of a file. Raises ConfigError for a file that is not one of TRL's, and for one without any."""
    empty = True
    for row in _rows(file):
        empty = False
        yield Request(_text(row["prompt"], "prompt", file), _text(row["completion"], "completion", file))
    if empty:
        raise ConfigError(f"{file} has no rows; delete it")


def repeats(file: Path, before: Path) -> bool:
    """Tell whether a file has the requests of the one before it."""
    return all(request == other for request, other in zip_longest(requests(file), requests(before)))


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
            for batch in table.iter_batches(ROWS, columns=["prompt", "completion"]):
                yield from batch.to_pylist()
    except Exception as error:  # pyarrow raises a type of its own per kind of damage
        raise ConfigError(f"cannot read {file} as TRL's completions: {error}") from None


def _text(value: Any, name: str, file: Path) -> Text:
    """A column's value. Parquet gives every message all keys that any message has; those are taken out again."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"a {name} in {file} is {str(value)[:60]!r}; allowed: text, or a list of messages")
    messages = [{key: x for key, x in message.items() if x is not None} for message in value]
    if any(isinstance(message.get("content"), list) for message in messages):
        raise ConfigError(
            f"a {name} in {file} has parts that are not text, whose tokens the log does not hold; rollouts with images "
            "cannot be imported"
        )
    return messages


SOURCE = Source(
    files,
    requests,
    special_tokens=True,
    repeats=repeats,
    mean_response="completions/mean_length",
    overwritten="eval_completions/mean_length",
)
