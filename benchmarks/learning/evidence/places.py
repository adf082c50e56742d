"""Paths of the committed runs: folders of policies, and files with a line for each run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parents[1]
# The tiny policy's runs, of 512 sequences a step and of 32, and those of evidence/news.md.
LARGE_BATCHES, SMALL_BATCHES, NEWS = (
    _HERE / "cpu" / "tiny-qk-norm" / name for name in ("control.jsonl", "small_batches.jsonl", "news.jsonl")
)
# Runs that shared a GPU: those that are whole, and those that the end of a lease broke off.
H200, H100 = (_HERE / gpu / "shared" for gpu in ("h200", "h100"))
H200_BROKEN_OFF, H100_BROKEN_OFF = (shared.with_name("broken_off") for shared in (H200, H100))
EXPLORED: Final = H200.with_name("explored")  # runs of a plan that did not need them, in one seed
ALONE: Final = H200.with_name("alone")  # runs that had the GPU for themselves
