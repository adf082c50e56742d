"""The steps of the rollouts of H100s that are predicted worst: what they wait for, and how far off they are.

    python -m benchmarks.worst_cells     prints a row for each

A step waits for the GPU if the host is predicted to need less than HOST_SHARE of the GPU's seconds. All others may wait
for the host. Steps that fill prompts are left out, and all before them. Figures are medians of windows of WINDOW steps,
with the ends of the middle 80%.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.calibrate.fit import measured_kv, read_traces
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.rollout import schedule_with, step_batch
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

H100, RESULTS = profiles_path() / "h100_sxm", Path(__file__).parent / "results"
FILES = (
    H100 / "vllm-0.26.0" / "validation" / "rollouts.jsonl",
    H100 / "vllm-0.26.0" / "validation" / "anchored.jsonl",
    H100 / "vllm-0.26.0" / "reports" / "rollouts.jsonl",
    H100 / "vllm-0.33.0" / "validation" / "rollouts.jsonl",
    RESULTS / "limits_h100" / "rollouts.jsonl",
    RESULTS / "above_graphs" / "rollouts.jsonl",
)
LEAST = 0.1  # least error of a makespan that is explained
WINDOW, HOST_SHARE = 20, 0.75
Seconds = NDArray[np.float64]


class Steps(NamedTuple):
    """Seconds of windows of decode steps, each of shape (windows,). gpu, predicted: as predicted"""

    measured: Seconds
    predicted: Seconds
    gpu: Seconds
    of_gpu: NDArray[np.bool_]  # True for windows that wait for the GPU


def steps_of(record: Record, trace: dict[str, list[float]]) -> Steps:
    """The decode steps of a rollout."""
    profile = load_profile(record.fields["gpu"], record.fields["engine_version"])[0]
    model = record.setup.step_model(profile.on_host(record.fields["host_loop_s"]))
    planned = schedule_with(record.batch, measured_kv(record), record.limits, longest_run=1)
    timed = model.timed(step_batch(planned))
    giving = planned.sampled_requests > 0
    columns = [np.diff(trace["core_s"], prepend=0.0)]
    columns += [each[giving] for each in (timed.seconds(), timed.on_gpu, planned.prefill_tokens)]
    host = np.broadcast_to(timed.scheduling.seconds + timed.launching.seconds, timed.on_gpu.shape)[giving]
    steps = min(map(len, columns))
    first = int(np.flatnonzero(columns[3][:steps] > 0).max(initial=-1)) + 2  # after the last prompt
    windows = [slice(start, start + WINDOW) for start in range(first, steps - WINDOW + 1, WINDOW)]
    measured, predicted, gpu, host = (
        np.array([each[window].sum() for window in windows]) for each in (*columns[:3], host)
    )
    return Steps(measured, predicted, gpu, host < HOST_SHARE * gpu)


def spread(ratios: Seconds) -> str:
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def row(record: Record, error: float, steps: Steps) -> tuple[str, ...]:
    cells = [record.fields["model"], record.fields["precision"], record.fields["workload"], f"{error:+.1%}"]
    for chosen in (steps.of_gpu, ~steps.of_gpu):
        measured, predicted = steps.measured[chosen], steps.predicted[chosen]
        cells += [f"{measured.sum():.1f}", spread(measured / predicted)] if chosen.any() else ["", ""]
    return *cells, spread(steps.measured / steps.gpu)


def worst() -> list[tuple[Record, float, Steps]]:
    """The records with an error above LEAST, the worst first: each with its error and its steps."""
    found: list[tuple[Record, float, Steps]] = []
    for path in FILES:
        traces = read_traces([path.with_suffix(".trace.jsonl.gz")])
        for record in read_records(path):
            profile = load_profile(record.fields["gpu"], record.fields["engine_version"])[0]
            error = simulated(record, profile).rollout.makespan_s / record.seconds - 1
            if abs(error) > LEAST:
                found.append((record, error, steps_of(record, traces[record.fields["key"]])))
    return sorted(found, key=lambda each: -abs(each[1]))


def table() -> str:
    """The worst cells in Markdown."""
    over = "measured over predicted"
    columns = ("wait for the GPU (s)", over, "may wait for the host (s)", over, "measured over the GPU's")
    return markdown(("model", "precision", "workload", "error", *columns), [row(*each) for each in worst()])


if __name__ == "__main__":
    print(table())
