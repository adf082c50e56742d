"""The table of benchmarks.gpu.engine_modes: a rollout of the policy whose rollouts took longer than predicted.

What disturbs a rollout only adds seconds. So errors, and what a token costs more with log-probs than without, are of
the fastest rollout of each way.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.engine_modes import SAMPLES, requests, setup_of
from benchmarks.learning.evidence.places import SHAPES
from benchmarks.learning.predicted import UNSEEN
from benchmarks.own_host import own_loop_s
from benchmarks.tables.markdown import table
from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import Rollout, simulate
from fp8plan.model.workload import Batch

RESULTS: Final = Path(__file__).parents[2] / "results" / "engine_modes_h200.jsonl"
STEPS: Final = Path(__file__).parents[3] / "profiles" / "h200_sxm" / "vllm-0.26.0" / "steps"
SAME_LAYERS: Final = "fp8plan/dense-50m"  # as the policy; the profile was fitted to its steps
OWN: Final = "its own"
PROCESSES: Final = {"inprocess": "the caller's", "multiprocess": OWN}
HEADS = ("precision", "engine's process", "log-probs", "seconds", "predicted (90%)", "error", "log-probs, a token")


def ways(path: Path = RESULTS) -> str:
    """A line for each way to run the rollout, in Markdown: its seconds, beside the prediction.

    A star: not the rollout, but the sum of as many of the steps that the profile was fitted to.

    Raises ConfigError for a row of another rollout than the script's own.
    """
    seconds = defaultdict[tuple[str, str, str], list[float]](list)
    said = dict[str, Rollout]()
    for row in (row for row in jsonl.rows(path) if row["what"] == "rollout"):
        precision = row["precision"]
        told = said[precision] = said.get(precision) or _predicted(row)
        if (row["tokens"], row["steps"]) != (told.output_tokens, told.num_steps):
            raise ConfigError(
                f"a rollout of {path} has {row['tokens']} tokens and {row['steps']} steps; allowed: "
                f"{told.output_tokens} and {told.num_steps}, as benchmarks.gpu.engine_modes has by default"
            )
        seconds[precision, PROCESSES[row["mode"]], row["logprobs"]].append(row["seconds"])
    seconds |= {(precision, f"{OWN} *", "objects"): [_of_steps(precision)] for precision in said}
    lines = []
    for (precision, process, way), each in seconds.items():
        told, without = said[precision], seconds.get((precision, process, "none"))
        cost = UNSEEN
        if without and way != "none":
            cost = f"{1e6 * (min(each) - min(without)) / told.output_tokens:.1f} µs"
        cells = [precision, process, way, ", ".join(f"{one:.2f}" for one in each)]
        cells += [f"{told.makespan_s:.2f} s ({told.makespan_low_s:.2f} to {told.makespan_high_s:.2f})"]
        cells += [f"{told.makespan_s / min(each) - 1:+.1%}", cost]
        lines.append(cells)
    return table(HEADS, lines)


def _predicted(row: dict[str, Any]) -> Rollout:
    """The script's rollout as today's model predicts it, on the host that the profile was calibrated on."""
    gpu, policy = find_gpu(row["gpu_product"]), SHAPES / Path(row["model"]).name
    setup, _ = setup_of(policy, gpu, row["precision"], row["memory"])
    asked = requests()
    prompts, responses = np.array([(len(one.prompt), len(one.key)) for one in asked]).T
    version = row["engine"].removeprefix("vLLM ")
    profile = load_profile(gpu, version)[0].on_host(own_loop_s(gpu.name, version))
    return simulate(setup, Batch(prompts, responses, np.arange(len(prompts)) // SAMPLES), profile).rollout


def _of_steps(precision: str) -> float:
    """Seconds of the script's steps if each takes as long as the profile's steps of SAME_LAYERS with as many requests.

    Their engine had a process of its own, and log-probs were objects.
    """
    cell = (SAME_LAYERS, "drain", precision)
    records = jsonl.rows(STEPS / "rollouts.jsonl")
    key = next(row["key"] for row in records if (row["model"], row["workload"], row["precision"]) == cell)
    trace = next(row for row in jsonl.rows(STEPS / "rollouts.trace.jsonl.gz") if row["key"] == key)
    took, running = np.diff(trace["core_s"]), np.array(trace["running"][1:])
    seen = np.unique(running[running > 0])
    means = [took[running == number].mean() for number in seen]
    responses = np.array([len(one.key) for one in requests()])
    return float(sum(np.interp((responses > step).sum(), seen, means) for step in range(responses.max())))
