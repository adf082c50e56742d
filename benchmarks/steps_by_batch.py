"""Median seconds of a decode step by the number of requests and of steps that fill prompts, measured and predicted,
spells of slow decode steps, and pauses of the front end.

The engine reports a step that fills prompts now with the step before it, now with itself: as many steps as the schedule
has of them, the longest, are taken for them.

`python benchmarks/steps_by_batch.py FOLDER MODEL PRECISION WORKLOAD`, of FOLDER/rollouts.jsonl and its traces: e.g.
profiles/h200_sxm/vllm-0.26.0/steps Qwen/Qwen3-1.7B bf16 drain
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fp8plan.model.calibrate.fit import measured_kv, read_traces
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import schedule_with, step_batch
from fp8plan.model.validate.records import read_records

PAUSE_S, FEWEST = 0.15, 3
SLOW, SPELL = 1.5, 3  # times the median of steps with as many requests; such steps in a row


def spells(slow: np.ndarray) -> list[slice]:
    """Runs of at least SPELL true values in a boolean array."""
    ends = np.flatnonzero(np.diff(slow.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [slice(start, stop) for start, stop in ends.tolist() if stop - start >= SPELL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("model", "precision", "workload"):
        parser.add_argument(name)
    given = parser.parse_args()
    traces = read_traces([given.folder / "rollouts.trace.jsonl.gz"])
    for record in read_records(given.folder / "rollouts.jsonl"):
        fields = record.fields
        if (fields["model"], fields["precision"], fields["workload"]) != (given.model, given.precision, given.workload):
            continue
        trace, profile = traces[fields["key"]], load_profile(find_gpu(fields["gpu"]), fields["engine_version"])[0]
        planned = schedule_with(record.batch, measured_kv(record), record.limits, longest_run=1)
        giving = planned.sampled_requests > 0
        predicted = record.setup.step_model(profile).seconds(step_batch(planned))[giving]
        measured = np.diff(trace["core_s"], prepend=0.0)
        steps = min(predicted.size, measured.size)
        requests = np.where(planned.prefill_tokens > 0, 0, planned.decode_requests)[giving][:steps]
        usual = np.full(steps, np.inf)
        for number in np.unique(requests[requests > 0]):
            chosen = requests == number
            if chosen.sum() >= FEWEST:
                took, expected = (np.median(x[:steps][chosen]) for x in (measured, predicted))
                usual[chosen] = took
                said = f"{took * 1e3:.2f} ms, predicted {expected * 1e3:.2f}"
                print(f"{number:4d} requests, {chosen.sum():4d} steps: {said}")
        filling = planned.prefill_tokens[giving][:steps] > 0
        longest = np.median(np.sort(measured[:steps])[-filling.sum() :]) * 1e3
        expected = np.median(predicted[:steps][filling]) * 1e3
        print(f"steps that fill prompts, {filling.sum():4d}: {longest:.1f} ms, predicted {expected:.1f}")
        lost = (measured[:steps] - usual).clip(min=0.0)
        slow = [f"{lost[x].sum():.2f} s in {x.stop - x.start} steps" for x in spells(measured[:steps] > SLOW * usual)]
        print(f"slow spells lost: {', '.join(slow) or 'none'}")
        waits, tokens = np.diff(trace["t_s"], prepend=0.0), np.cumsum(trace["generation_tokens"])
        pauses = [f"{waits[i]:.2f} s at {tokens[i]:,} tokens" for i in np.flatnonzero(waits > PAUSE_S)]
        print(f"pauses of the front end: {', '.join(pauses) or 'none'}")


if __name__ == "__main__":
    main()
