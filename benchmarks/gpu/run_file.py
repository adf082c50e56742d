"""A Monitor's run file of a measurement, brought home."""

from __future__ import annotations

import json
from pathlib import Path


def name_model(file: Path, folder: str | Path, model: str) -> None:
    """Put the model's name in place of its folder, so that records are known where the folder is not."""
    if file.is_file():
        old, new = (f'"model":{json.dumps(str(name))}' for name in (folder, model))
        file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
