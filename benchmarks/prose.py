"""Figures that stand in sentences, where a generated block would break a paragraph or a list.

python -m benchmarks.prose        prints them; tests/test_readme.py fails if a page does not say so
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import expert_parallel
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import default_limits
from fp8plan.model.workload import Workload

MODEL, GPU, SEEDS = "Qwen/Qwen3-8B", "h200_sxm", range(10)


def quick_start(limits: EngineLimits | None = None, seed: int = 0) -> tuple[Choice, Choice]:
    """The quick start's BF16 rollout, and the chosen one."""
    work = Workload(32, 16, Fixed(1024), LogNormal(6000, 0.9, 20480), seed=seed)
    made = plan(MODEL, GPU, work, limits=limits)
    return next(x for x in made.choices if x.precision == "bf16"), made.choices[made.chosen or 0]


def colocated() -> str:
    limits = default_limits(find_gpu(GPU), MODEL, gpu_memory_utilization=0.6)
    gain = quick_start(limits)[1].best_gain.cell
    return f"With `--gpu-memory-utilization 0.6` the chosen precision gains {gain}."


def seeds() -> str:
    pairs = [quick_start(seed=seed) for seed in SEEDS]
    seconds, gains = [bf16.makespan_s or 0.0 for bf16, _ in pairs], [chosen.best_gain.ratio for _, chosen in pairs]
    return (
        f"With seeds {SEEDS[0]} to {SEEDS[-1]} the quick start's BF16 rollout takes {min(seconds):.0f} to "
        f"{max(seconds):.0f} s, and the chosen precision gains {min(gains):.2f}x to {max(gains):.2f}x."
    )


def sentences() -> dict[str, Sequence[str]]:
    """Page -> what it says."""
    return {"README.md": [colocated()], "docs/limits.md": [seeds(), expert_parallel.line()]}


if __name__ == "__main__":
    for page, said in sentences().items():
        print(page, *said, sep="\n  ")
