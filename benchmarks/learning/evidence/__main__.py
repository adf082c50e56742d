"""Print all tables of docs/evidence/learning.md that are made of runs."""

from __future__ import annotations

from benchmarks.learning.evidence import engine_modes
from benchmarks.learning.evidence.learnt import corrected, doubt, drill, in_training, learnt
from benchmarks.learning.evidence.speed import OF_SPEED, again, gained, timed

print(
    learnt("qk-norm"),
    in_training("qk-norm"),
    learnt("smollm2"),
    in_training("moe"),
    timed(*OF_SPEED),
    gained(*OF_SPEED),
    again(*OF_SPEED),
    engine_modes.ways(),
    doubt("qk-norm"),
    drill("qk-norm"),
    corrected(),
    sep="\n\n",
)
