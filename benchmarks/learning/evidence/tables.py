"""The tables of docs/ that are made of the committed runs."""

from __future__ import annotations

from benchmarks.learning.evidence import engine_modes, news
from benchmarks.learning.evidence.corrections import corrected, laws
from benchmarks.learning.evidence.learnt import doubt, drill, in_training, learnt
from benchmarks.learning.evidence.places import (
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
    lasting = (H200_BROKEN_OFF / "qk-norm", H100 / "qk-norm")
    return {
        "learnt": learnt(H200 / "qk-norm"),
        "learnt qk-norm on H100s": learnt(H100 / "qk-norm"),
        "lasting": in_training(*lasting, against="lasting-tis"),
        "learnt smollm2": learnt(H200 / "smollm2", H100 / "smollm2"),
        "learnt gemma": learnt(H200 / "gemma"),
        "learnt under a broken sync": learnt(EXPLORED / "qk-norm"),
        "learnt moe on H100s": learnt(H100 / "moe"),
        "in training plain": in_training(H100_BROKEN_OFF / "plain", against="bf16"),
        "timed": timed(*alone),
        "gained": gained(*alone),
        "again": again(*alone),
        "engine modes": engine_modes.ways(),
        "doubt": doubt(H200 / "qk-norm", H100 / "moe", H100_BROKEN_OFF / "plain", H100 / "smollm2"),
        "drill": drill(H200 / "qk-norm"),
        "corrected": corrected(LARGE_BATCHES),
        "corrected in small batches": corrected(SMALL_BATCHES),
        "laws": laws(),
    } | news.tables()
