"""Print all tables of docs/evidence/learning.md that are made of runs."""

from __future__ import annotations

from benchmarks.learning.evidence import engine_modes
from benchmarks.learning.evidence.learnt import (
    DOUBTED,
    H100,
    H100_BROKEN_OFF,
    H200,
    H200_BROKEN_OFF,
    LARGE_BATCHES,
    SMALL_BATCHES,
    corrected,
    doubt,
    drill,
    in_training,
    learnt,
)
from benchmarks.learning.evidence.speed import OF_SPEED, again, gained, timed

print(
    learnt(H200 / "qk-norm"),
    learnt(H100 / "qk-norm"),
    in_training(H200_BROKEN_OFF / "qk-norm", H100 / "qk-norm", against="lasting-tis"),
    learnt(H200 / "smollm2", H100 / "smollm2"),
    learnt(H100 / "moe"),
    in_training(H100_BROKEN_OFF / "plain", against="bf16"),
    timed(*OF_SPEED),
    gained(*OF_SPEED),
    again(*OF_SPEED),
    engine_modes.ways(),
    doubt(*DOUBTED),
    drill(H200 / "qk-norm"),
    corrected(LARGE_BATCHES),
    corrected(SMALL_BATCHES),
    sep="\n\n",
)
