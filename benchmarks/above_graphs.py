"""Rollouts of more requests than vLLM's largest CUDA graph has, measured on H100s, beside their predictions.

    python -m benchmarks.above_graphs        prints them

Each was predicted by the H200's profile, which knows neither these GPUs nor these hosts: for a host that is not known,
with the host's loop (RolloutRecord.host_loop_s), and "anchored" on the model's other rollouts with the same limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.architecture import ModelShape
from fp8plan.model.plan.anchor import anchored
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

RESULTS = Path(__file__).parent / "results"
FILES = [RESULTS / name / "rollouts.jsonl" for name in ("above_graphs", "limits_h100")]
VERSION, DEFAULT = "0.26.0", 512


def lines() -> Iterator[tuple[str, ...]]:
    profile = load_profile("h100", VERSION)[0]
    for records in map(read_records, FILES):
        for record in records:
            model, precision, largest, workload = (
                record.fields[name] for name in ("model", "precision", "cudagraph_largest_batch", "workload")
            )
            others = [x for x in records if x is not record and x.fields["model"] == model]
            others = [x for x in others if x.fields["cudagraph_largest_batch"] == DEFAULT]
            anchor = anchored(profile, ModelShape.from_hf(model), VERSION, others)
            unknown = replace(record, fields=record.fields | {"host_loop_s": None})
            words = _words(unknown, profile), _words(record, profile), _words(record, anchor.applied(profile))
            limits = f"{record.limits.max_num_seqs:,}", f"{largest:,}"
            yield model, precision, workload.removesuffix(", graphs"), *limits, f"{record.seconds:.1f}", *words


def _words(record: Record, profile: Profile) -> str:
    rollout = simulated(record, profile).rollout
    times = f"{rollout.makespan_s:.1f} ({rollout.makespan_low_s:.1f}-{rollout.makespan_high_s:.1f})"
    return f"{times}, {rollout.makespan_s / record.seconds - 1:+.0%}"


def table() -> str:
    """The measured rollouts in Markdown."""
    limits = "max_num_seqs", "largest graph"
    predicted = "host unknown (s)", "with its loop (s)", "anchored (s)"
    return markdown(("model", "precision", "workload", *limits, "measured (s)", *predicted), lines())


if __name__ == "__main__":
    print(table())
