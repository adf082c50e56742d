"""The rollouts that TRL's GRPOTrainer logs with `log_completions=True`: completions/completions_STEP.parquet in its
output_dir.

Read in TRL 1.16.0, `GRPOTrainer.log`. A row is one response: step, prompt, completion, the rewards, advantage. A prompt
or a completion is text or a list of messages; completions are decoded without special tokens. A file is written at each
logging step and holds the last generation batch: one that is trained on for several steps is in several files. An
evaluation writes its own completions over those of its step. TRL's figures have no seconds of generation: its profile
goes to W&B, MLflow and Trackio only.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Source, Text, Texts

PREFIX = "completions_"


def rollouts(folder: Path) -> list[Texts]:
    """Read the rollouts of a trainer's output folder, or of its folder `completions`, by step.

    Raises ConfigError for a folder without any, and for a file that is not one of TRL's.
    """
    inside = folder / "completions"
    files = sorted((inside if inside.is_dir() else folder).glob(f"{PREFIX}*.parquet"))
    if not files:
        raise ConfigError(
            f"{folder} has no {PREFIX}STEP.parquet; give the trainer's output_dir, and train with "
            "GRPOConfig(log_completions=True)"
        )
    found = sorted((_rollout(file) for file in files), key=lambda texts: texts.step)
    again = (one for one in pairwise(found) if (one[0].prompts, one[0].responses) == (one[1].prompts, one[1].responses))
    repeated = {after.step for _, after in again}
    return [texts for texts in found if texts.step not in repeated]


def _rollout(file: Path) -> Texts:
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(file, columns=["step", "prompt", "completion"]).to_pylist()
    except Exception as error:  # pyarrow raises a type of its own per kind of damage
        raise ConfigError(f"cannot read {file} as TRL's completions: {error}") from None
    if not rows:
        raise ConfigError(f"{file} has no rows; delete it")
    prompts, responses = ([_text(row[name], name, file) for row in rows] for name in ("prompt", "completion"))
    return Texts(int(rows[0]["step"]), prompts, responses, special_tokens=True)


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
    rollouts, seconds=None, mean_response="completions/mean_length", overwritten="eval_completions/mean_length"
)
