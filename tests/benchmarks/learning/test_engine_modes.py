"""The table of the ways to run a rollout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learning.evidence.engine_modes import ways
from fp8plan.errors import ConfigError


def test_ways_to_run_a_rollout_stand_beside_its_prediction(tmp_path: Path) -> None:
    same = {"what": "rollout", "model": "modes/qk-norm", "gpu_product": "NVIDIA H200", "engine": "vLLM 0.26.0"}
    same |= {"memory": 0.1, "precision": "bf16", "mode": "inprocess", "tokens": 57_832, "steps": 577}
    rows = [{"what": "note"}, {"what": "profile"}]
    rows += [same | {"logprobs": "none", "seconds": x} for x in (9.0, 2.0)]  # something disturbed the first
    rows += [same | {"logprobs": "objects", "seconds": 2.0 + 57_832e-5}]
    path = tmp_path / "modes.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ways(path).splitlines()[2:]]
    assert [line[:4] + line[6:] for line in lines] == [
        ["bf16", "the caller's", "none", "9.00, 2.00", "-"],
        ["bf16", "the caller's", "objects", "2.58", "10.0 µs"],
        ["bf16", "its own *", "objects", "1.95", "-"],
    ]
    predicted_s = float(lines[0][4].split()[0])
    assert float(lines[0][5].rstrip("%")) == pytest.approx(100 * (predicted_s / 2.0 - 1), abs=0.3)
    path.write_text(json.dumps(same | {"logprobs": "none", "seconds": 1.0, "tokens": 1}))
    with pytest.raises(ConfigError, match="has 1 tokens and 577 steps"):
        ways(path)
