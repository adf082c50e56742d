"""Paths of the committed tables of runs, which benchmarks.learning.keep wrote, and of what belongs to them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parents[1]
_GPUS: Final = _HERE / "gpus"
# The tiny policy's runs, of 512 sequences a step and of 32, and those of evidence/news.md.
LARGE_BATCHES, SMALL_BATCHES, NEWS = (
    _HERE / "cpu" / "tiny-qk-norm" / name for name in ("control.jsonl", "small_batches.jsonl", "news.jsonl")
)
# Runs that shared a GPU: those that are whole, and those that the end of a lease broke off.
H200, H100 = (_GPUS / f"{gpu}.jsonl" for gpu in ("h200", "h100"))
H200_BROKEN_OFF, H100_BROKEN_OFF = (_GPUS / f"{gpu}_broken_off.jsonl" for gpu in ("h200", "h100"))
EXPLORED: Final = _GPUS / "h200_explored.jsonl"  # runs of a plan that did not need them, in one seed
ALONE: Final = _GPUS / "h200_alone.jsonl.gz"  # runs that had the GPU for themselves, with the seconds of each step
DRILL: Final = _GPUS / "drill.json"  # what the fault drill on an H200 said
SHAPES: Final = _GPUS / "shapes"  # policy -> its config.json
