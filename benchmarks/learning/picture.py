"""The picture of a run whose C moves: its KL, C and reward in each step.

    python -m benchmarks.learning.picture     writes docs/evidence/threshold_moves.svg

The run is the arm growing-level-4-2 of the tiny policy, seed 0: C from 4 to 2 while noise of the engine's weights
grows. Its log lacks the lengths of the rollouts. This command repeats it in a minute:

    python -m benchmarks.learning.run FOLDER --device cpu --arms growing-level-4-2 --seeds 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fp8plan import jsonl, schemas
from fp8plan.views.page import as_svg

RUN: Final = Path(__file__).parent / "cpu/tiny-qk-norm/growing_level_4_2.jsonl.gz"
PICTURE: Final = Path(__file__).parents[2] / "docs/evidence/threshold_moves.svg"
PANELS: Final = {"KL k3 per token": schemas.K3_ROBUST, "C": schemas.TIS, "mean reward": schemas.REWARD}
SIZE: Final = (8.0, 6.0)  # inches


def picture() -> Any:
    """A figure of matplotlib with a panel for each figure of the run."""
    from matplotlib.figure import Figure

    rows = jsonl.rows(RUN)
    steps = [row["step"] for row in rows]
    made: Any = Figure(figsize=SIZE, layout="constrained")
    axes = made.subplots(len(PANELS), 1, sharex=True)
    for axis, (label, name) in zip(axes, PANELS.items(), strict=True):
        values = [row["metrics"][name] for row in rows]
        axis.plot(steps, values, color="#0072B2", drawstyle="steps-post" if name == schemas.TIS else "default")
        axis.set_ylabel(label)
        axis.grid(color="0.9")
    axes[0].set_yscale("log")
    axes[-1].set_ylim(bottom=0)
    axes[-1].set_xlabel("training step")
    return made


if __name__ == "__main__":
    PICTURE.write_text(as_svg(picture()) + "\n", encoding="utf-8")
    print(f"written: {PICTURE}")
