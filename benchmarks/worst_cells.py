"""The steps of the rollouts of H100s that are predicted worst: what they wait for, and how far off they are.

    python -m benchmarks.worst_cells     prints the table of docs/evidence/accuracy.md

A step waits for the GPU or for the host, whichever is predicted to take longer. Prompts are left out. Figures are of
windows of WINDOW steps, because the front end's pauses shift single steps.
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
WINDOW = 20
Seconds = NDArray[np.float64]


class Steps(NamedTuple):
    """Seconds of windows of decode steps, each of shape (windows,). gpu, predicted: as predicted"""

    measured: Seconds
    predicted: Seconds
    gpu: Seconds
    waits_for_host: NDArray[np.bool_]


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
    measured, predicted, gpu, waits = (
        np.array([each[window].sum() for window in windows]) for each in (*columns[:3], host)
    )
    return Steps(measured, predicted, gpu, waits > gpu)


def row(record: Record, error: float, steps: Steps) -> tuple[str, ...]:
    host, ratios = steps.waits_for_host, steps.measured / steps.predicted
    cells = [record.fields["model"], record.fields["precision"], record.fields["workload"], f"{error:+.0%}"]
    for chosen in (~host, host):
        if not chosen.any():
            cells += ["", ""]
            continue
        low, middle, high = np.quantile(ratios[chosen], (0.1, 0.5, 0.9))
        cells += [f"{steps.measured[chosen].sum():.1f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
    low, middle, high = np.quantile((steps.measured / steps.gpu), (0.1, 0.5, 0.9))
    return *cells, f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table() -> str:
    """The worst cells in Markdown, the worst first."""
    found: list[tuple[float, Record, Path]] = []
    for path in FILES:
        for record in read_records(path):
            profile = load_profile(record.fields["gpu"], record.fields["engine_version"])[0]
            error = simulated(record, profile).rollout.makespan_s / record.seconds - 1
            if abs(error) > LEAST:
                found.append((error, record, path))
    traces = read_traces([path.with_suffix(".trace.jsonl.gz") for path in dict.fromkeys(path for *_, path in found)])
    rows = [
        row(record, error, steps_of(record, traces[record.fields["key"]]))
        for error, record, _ in sorted(found, key=lambda each: -abs(each[0]))
    ]
    head = ("model", "precision", "workload", "error", "wait for the GPU (s)", "measured over predicted")
    return markdown((*head, "wait for the host (s)", "measured over predicted", "measured over the GPU's"), rows)


if __name__ == "__main__":
    print(table())
