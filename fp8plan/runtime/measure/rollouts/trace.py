"""Every engine step of a rollout, as vLLM reports it to the process that holds the `LLM`."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from fp8plan.errors import ConfigError

Row: TypeAlias = tuple[float, ...]
COLUMNS = ("t_s", "core_s", "running", "waiting", "kv_usage", "generation_tokens", "prompt_tokens", "preempted")


class Trace:
    """Reports of vLLM after each engine step: when the engine had it (core_s), and when the front end got it (t_s)."""

    def __init__(self, llm: Any) -> None:
        manager = llm.llm_engine.logger_manager
        if manager is None:
            raise ConfigError("step times need disable_log_stats=False")
        self.rows: list[Row] = []
        self.begun = 0.0
        report, core = manager.record, llm.llm_engine.engine_core
        get_output, last = core.get_output, [0.0]

        def remembered() -> Any:
            outputs = get_output()
            last[0] = outputs.timestamp  # the engine's time.monotonic(), which perf_counter() equals on Linux
            return outputs

        def record(scheduler_stats: Any = None, iteration_stats: Any = None, **rest: Any) -> None:
            if scheduler_stats is not None and iteration_stats is not None:
                self.rows.append(
                    (
                        round(time.perf_counter() - self.begun, 6),
                        round(last[0] - self.begun, 6),
                        scheduler_stats.num_running_reqs,
                        scheduler_stats.num_waiting_reqs,
                        round(scheduler_stats.kv_cache_usage, 4),
                        iteration_stats.num_generation_tokens,
                        iteration_stats.num_prompt_tokens,
                        iteration_stats.num_preempted_reqs,
                    )
                )
            report(scheduler_stats=scheduler_stats, iteration_stats=iteration_stats, **rest)

        core.get_output, manager.record = remembered, record

    def start(self) -> None:
        self.rows.clear()
        self.begun = time.perf_counter()

    def slowest(self) -> dict[str, float]:
        """Seconds of the first step, the requests' arrival included, and of the longest."""
        times = [row[0] for row in self.rows]
        steps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        return {"first_step_s": round(steps[0], 6), "longest_step_s": round(max(steps), 6)}


def write_trace(path: str, key: str, rows: Sequence[Row]) -> None:
    """One JSON line: the record's key, and a column per COLUMNS."""
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=False))
    with gzip.open(path, "at", encoding="utf-8") as file:
        file.write(json.dumps({"key": key} | columns) + "\n")
