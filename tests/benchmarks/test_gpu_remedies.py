"""The probes of small policies that share a lent GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import remedies
from fp8plan.model.risk.remedies import Remedies
from fp8plan.runtime.measure.probe.results import Interval, Probe, Probed
from fp8plan.runtime.measure.probe.sampling import SampleSettings

SHAPES = Path(remedies.__file__).parents[1] / "learning" / "gpus" / "shapes"


def test_replay_is_measured_for_models_with_experts_alone() -> None:
    dense, moe = remedies.remedies_of(False), remedies.remedies_of(True)
    assert len(set(moe)) == len(moe) == 12
    assert dense == [each for each in moe if not each.router_replay]
    assert dense[0] == Remedies()


def test_policies_that_were_taught_get_their_own_problems(tmp_path: Path) -> None:
    prompts = remedies.prompts_of("tiny-moe", tmp_path, 32)
    assert prompts is not None
    assert len({tuple(prompt) for prompt in prompts}) >= 8
    assert remedies.prompts_of("gemma", tmp_path, 32) is None


def test_engines_that_share_a_gpu_have_pools_of_their_own() -> None:
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remedies, "probe", lambda *words, **options: asked.append((words, options)))
        remedies.measured(SHAPES / "smollm2", "smollm2", "fp8_block", "h200", 128, 4, 512)
    [(words, options)] = asked
    assert words == (str(SHAPES / "smollm2"), ["fp8_block"], None)
    assert options["kv_cache_memory_bytes"] == remedies.POOL_BYTES
    assert options["limits"].gpu_memory_utilization == remedies.SHARE
    assert options["settings"] == SampleSettings(512, 4)
    assert options["remedies"] == remedies.remedies_of(False)


@pytest.mark.parametrize("error", [None, "RuntimeError: no memory"])
def test_the_file_has_all_findings_and_an_error_is_told(
    error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kl, ess = Interval(2e-3, 1e-3, 3e-3), Interval(1.0, 1.0, 1.0)
    figures = {"kl_k3": kl, "k1": kl, "ess_raw": ess, "ratio_above_2": kl, "ratio_below_half": kl}
    findings = [Probed("bf16", figures=figures), Probed("bf16", error=error, figures=None if error else figures)]
    found = Probe("a model", "h200", "today", "0.33.0", "a test", SampleSettings(), 16, findings)
    monkeypatch.setattr(remedies, "measured", lambda **_: found)
    output = tmp_path / "moe" / "bf16.json"
    words = ["model", "--policy", "moe", "--precision", "bf16", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["remedies", *words])
    assert remedies.main() == (error is not None)
    assert [row["error"] for row in json.loads(output.read_text())["precisions"]] == [None, error]
    assert "2.0e-3" in capsys.readouterr().out
