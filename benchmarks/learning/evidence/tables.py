"""The tables of docs/ that are made of the committed runs."""

from __future__ import annotations

from benchmarks.learning.evidence import engine_modes, news
from benchmarks.learning.evidence.corrections import corrected, laws
from benchmarks.learning.evidence.learnt import doubt, drill, in_training, learnt
from benchmarks.learning.evidence.places import (
    DRILL,
    EXPLORED,
    H100,
    H100_BROKEN_OFF,
    H200,
    H200_BROKEN_OFF,
    LARGE_BATCHES,
    SMALL_BATCHES,
)
from benchmarks.learning.evidence.speed import again, gained, timed


def tables() -> dict[str, str]:
    """The block of a page that a table fills -> the table, in Markdown."""
    alone = ("qk-norm", "wide")
    doubts = (("qk-norm", H200), ("moe", H100), ("plain", H100_BROKEN_OFF), ("smollm2", H100))
    return {
        "learnt": learnt("qk-norm", H200),
        "learnt qk-norm on H100s": learnt("qk-norm", H100),
        "lasting": in_training("qk-norm", H200_BROKEN_OFF, H100, against="lasting-tis"),
        "learnt smollm2": learnt("smollm2", H200, H100),
        "learnt gemma": learnt("gemma", H200),
        "learnt under a broken sync": learnt("qk-norm", EXPLORED),
        "learnt moe on H100s": learnt("moe", H100),
        "in training plain": in_training("plain", H100_BROKEN_OFF, against="bf16"),
        "timed": timed(*alone),
        "gained": gained(*alone),
        "again": again(*alone),
        "engine modes": engine_modes.ways(),
        "doubt": doubt(doubts),
        "drill": drill(DRILL),
        "corrected": corrected(LARGE_BATCHES),
        "corrected in small batches": corrected(SMALL_BATCHES),
        "laws": laws(),
    } | news.tables()
