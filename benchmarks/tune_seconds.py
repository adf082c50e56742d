"""Seconds of `fp8plan.tune` beside one plan of the same set-up, and as the grid grows.

    python -m benchmarks.tune_seconds

The search alone; then the levers of `fp8plan tune`. CPU seconds of one process, the least of REPEATS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.tables import markdown
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import predict
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.tune.answer import Answer
from fp8plan.model.tune.search import SEARCHED, search
from fp8plan.model.workload import Fixed, LogNormal, Workload

REPEATS = 3
LONG = LogNormal(6000, 0.9, 20480)
CASES: dict[str, dict[str, Any]] = {
    "Qwen3-8B, H200, 512 responses": {
        "model": "Qwen/Qwen3-8B", "gpu": "h200", "workload": Workload(32, 16, Fixed(1024), LONG)
    },
    "Qwen3-1.7B, H100, 768 short responses": {
        "model": "Qwen/Qwen3-1.7B", "gpu": "h100", "workload": Workload(48, 16, Fixed(16), Fixed(256))
    },
    "Qwen3-30B-A3B, 4 H200s, 2,048 responses": {
        "model": "Qwen/Qwen3-30B-A3B", "gpu": "h200", "workload": Workload(128, 16, Fixed(1024), LONG), "gpus": 4
    },
    "Qwen3-8B, 8 H100s, 8,192 responses, starved": {
        "model": "Qwen/Qwen3-8B", "gpu": "h100", "workload": Workload(512, 16, Fixed(1024), LONG), "gpus": 8
    },
    "Gemma 3 12B (Python's scheduler), H200, 512 responses": {
        "model": "google/gemma-3-12b-it", "gpu": "h200",
        "workload": Workload(32, 16, Fixed(1024), LogNormal(3000, 0.9, 8192)),
    },
}  # fmt: skip


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least CPU seconds, and the result."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        result = work()
        times.append(time.process_time() - begin)
    return min(times), result


def main() -> None:
    rows = []
    for name, case in CASES.items():
        case = case | {"trainer": StepTimes(train_s=120, logprob_s=30)}
        plan_s, _ = seconds(lambda: predict(**case))  # noqa: B023
        search_s, tuned = seconds(lambda: search(**case))  # noqa: B023
        levers_s, _ = seconds(lambda: Answer.of(tuned))  # noqa: B023
        cells = (f"{plan_s:.2f}", f"{search_s:.2f}", f"{search_s / plan_s:.1f}x", str(tuned.settings))
        rows.append((name, *cells, f"{levers_s:.2f}", f"{(search_s + levers_s) / plan_s:.1f}x"))
    heads = ("set-up", "plan (s)", "search (s)", "search / plan", "settings", "levers (s)", "with levers / plan")
    print(markdown.table(heads, rows))
    case, rows = CASES["Qwen3-30B-A3B, 4 H200s, 2,048 responses"], []
    for free in range(len(SEARCHED) + 1):
        fixed = EngineLimits(max_num_seqs=1024) if free < 1 else None
        search_s, tuned = seconds(lambda: search(**case, limits=fixed, keep=SEARCHED[free:]))  # noqa: B023
        rows.append((", ".join(SEARCHED[:free]) or "none", str(tuned.settings), f"{search_s:.2f}"))
    print(f"\n{markdown.table(('limits searched', 'settings', 'search (s)'), rows)}")


if __name__ == "__main__":
    main()
