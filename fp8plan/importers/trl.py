"""The rollouts that TRL's GRPOTrainer logs with `log_completions=True`: completions/completions_STEP.parquet in its
output_dir.

Read in TRL 1.16.0, `GRPOTrainer.log` and `_generate`. A row is one response: step, prompt, completion, the rewards,
advantage. A prompt or a completion is text or a list of messages. Plain completions are decoded without special tokens.
Messages are those that `parse_response` made of the tokens: content, reasoning_content or thinking, and tool_calls. The
output of tools stands between the assistant's messages. The definitions of the tools, which the chat template puts
into every prompt, are not logged. A file is written at each logging step and holds the last generation batch. A batch
that is trained on for several steps is in several files. An evaluation writes its own completions over those of its
step. TRL's figures have no seconds of generation: its profile goes to W&B, MLflow and Trackio only. Its mean length
counts the tokens that the model generated, without tool output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Note, Request, Source, Text
from fp8plan.packages import PARQUET, package

ROWS: Final = 64  # read at once


def requests(file: Path, note: Note) -> Iterator[Request]:
    """Read the requests of a file. Raises ConfigError for a file that is not one of TRL's."""
    for row in _rows(file):
        yield Request(_text(row["prompt"], "prompt", file), _text(row["completion"], "completion", file))


def repeats(file: Path, before: Path) -> bool:
    """True if a file has the requests of the one before it."""
    pairs = zip_longest(requests(file, str), requests(before, str))
    return all(request == other for request, other in pairs)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    parquet = package("pyarrow.parquet", f"reading {file}", PARQUET)
    try:
        with parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
            for batch in table.iter_batches(ROWS, columns=["prompt", "completion"]):
                yield from batch.to_pylist()
    except Exception as error:  # pyarrow raises a type of its own per kind of damage
        raise ConfigError(f"cannot read {file} as TRL's completions: {error}") from None


def _text(value: Any, name: str, file: Path) -> Text:
    """A column's value: text, or messages whose contents are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"a {name} in {file} is {str(value)[:60]!r}; allowed: text, or a list of messages")
    messages: list[dict[str, Any]] = _without_null(value)
    for message in messages:
        parts = message.setdefault("content", "")
        if isinstance(parts, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                raise ConfigError(
                    f"a {name} in {file} has parts that are not text, whose tokens the log does not hold; rollouts "
                    "with images cannot be imported"
                )
            message["content"] = "".join(part.get("text", "") for part in parts)
    return messages


def _without_null(value: Any) -> Any:
    """The value without keys that are null: Parquet gives every object all keys of its column."""
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


SOURCE = Source(
    re.compile(r"completions_(\d+)\.parquet"),
    "GRPOConfig(log_completions=True), in its output_dir",
    requests,
    folder="completions",
    special_tokens=True,
    repeats=repeats,
    mean_response="completions/mean_length",
    overwritten="eval_completions/mean_length",
)
