"""The last lines of `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import seen
from benchmarks.learning.state import RunFolder

PLANNED = {
    "precision": "fp8_kv",
    "pilot_reward": 0.5,
    "kl_k3_low": 1e-5,
    "kl_k3_high": 4e-3,
    "makespan_low_s": 0.3,
    "makespan_high_s": 0.6,
    "speedup": 0.9,
}


def test_the_lines_have_what_was_planned_and_what_was_seen(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("predicted.json", PLANNED)
    for step, (seconds, kl) in enumerate([(0.4, 1e-3), (0.9, 3e-3), (0.5, 2e-3)], start=1):
        folder.log("steps.jsonl", {"step": step, "rollout_s": seconds, "response_tokens": 1000})
        metrics = {"rollout_corr/k3_kl": kl, "fp8plan/clip_fraction": kl}
        folder.log("run.jsonl", {"step": step, "metrics": metrics})
    with pytest.raises(OSError, match=r"done\.json"):  # the run is not over
        seen.lines(folder)
    folder.write("done.json", {"steps": 3, "reward_after": 0.75})
    learned, engine, mismatch, speed = seen.lines(folder)
    assert "0.50 before and 0.75 after 3 steps" in learned
    assert "3,000 tokens in fp8_kv, and took new weights 3 times" in engine
    assert "2.0e-03 per token in the median, planned 1.0e-05 to 4.0e-03; TIS clipped 0.20%" in mismatch
    assert "0.50 s for the median rollout, planned 0.30 to 0.60 s, 0.90x as fast as BF16" in speed
