"""Rollouts of more requests than vLLM's largest CUDA graph has, measured on an H100, beside their predictions.

    python -m benchmarks.above_graphs        prints the table of docs/evidence/accuracy.md

"Anchored" predictions rest on the model's other rollouts with vLLM's default graphs. Those of larger graphs were
predicted before their run (benchmarks/gpu/lease/predict_above_graphs.sh), by these rollouts and those of Qwen3-8B.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.architecture import ModelShape
from fp8plan.model.plan.anchor import anchored
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

FILE = Path(__file__).parent / "results" / "above_graphs" / "rollouts.jsonl"
VERSION, DEFAULT = "0.26.0", 512


def lines() -> Iterator[tuple[str, ...]]:
    profile, records = load_profile("h100", VERSION)[0], read_records(FILE)
    for record in records:
        model, largest = record.fields["model"], record.fields["cudagraph_largest_batch"]
        others = [x for x in records if x is not record and x.fields["model"] == model]
        others = [x for x in others if x.fields["cudagraph_largest_batch"] == DEFAULT]
        anchor = anchored(profile, ModelShape.from_hf(model), VERSION, others)
        requests, seconds = len(record.fields["response_lengths"]), record.seconds
        words = (_words(record, each) for each in (profile, anchor.applied(profile)))
        yield model, record.fields["precision"], f"{requests:,}", f"{largest:,}", f"{seconds:.1f}", *words


def _words(record: Record, profile: Profile) -> str:
    rollout = simulated(record, profile).rollout
    times = f"{rollout.makespan_s:.1f} ({rollout.makespan_low_s:.1f}-{rollout.makespan_high_s:.1f})"
    return f"{times}, {rollout.makespan_s / record.seconds - 1:+.0%}"


def table() -> str:
    """The measured rollouts in Markdown."""
    head = ("model", "precision", "requests", "largest graph", "measured (s)", "predicted (s)", "anchored (s)")
    return markdown(head, lines())


if __name__ == "__main__":
    print(table())
