"""The lines that are kept of runs, and the tables that are made from them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median, stdev

import pytest

from benchmarks.learning import predicted, tables
from benchmarks.learning.arms import JUDGED
from benchmarks.learning.keep import main as keep
from benchmarks.learning.state import RunFolder
from benchmarks.learning.tables import (
    LAWS,
    MASKED,
    MASKS,
    RULED,
    SEEDS,
    kept_runs,
    margin,
    margins,
    pooled,
    rewards_of,
)
from fp8plan import jsonl, schemas


def a_run(folder: Path, after: float | None) -> RunFolder:
    """A run of 20 steps; after: its reward, None: it was broken off"""
    run = RunFolder(folder)
    run.write("predicted.json", dict.fromkeys((*predicted.FORESEEN, "pilot_reward"), 1.0))
    for step in range(1, 21):
        run.log("steps.jsonl", {"step": step, "reward": 0.5, "precision": "fp8_kv"})
        metrics = {schemas.K3: 0.1 / step, schemas.ESS_RAW: 0.9, schemas.CLIP_FRACTION: 0.01, schemas.TIS: 1.5}
        run.log("run.jsonl", {"step": step, "metrics": metrics})
    if after is not None:
        run.write("done.json", {"reward_after": after, "date": "2026-11-24"})
    return run


def kept_in(table: Path, runs: Path, *options: str) -> Path:
    """The table, with the runs of a policy's folder."""
    keep([str(runs), str(table), *options])
    return table


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of a policy."""
    folder = tmp_path / "qk-norm"
    for seed, after in enumerate((0.6, 0.8)):
        a_run(folder / "fp8-tis" / str(seed), after)
    a_run(folder / "bf16" / "0", 0.7)
    return folder


def test_a_run_is_a_line_and_lines_of_other_runs_stay(tmp_path: Path, runs: Path) -> None:
    table = kept_in(tmp_path / "kept.jsonl", runs)
    before = jsonl.rows(table)
    assert [(row["policy"], row["arm"], row["seed"]) for row in before] == [
        ("qk-norm", "bf16", 0),
        ("qk-norm", "fp8-tis", 0),
        ("qk-norm", "fp8-tis", 1),
    ]
    a_run(tmp_path / "moe" / "bf16" / "0", 0.9)
    kept_in(table, tmp_path / "moe")
    assert jsonl.rows(table)[:3] == before
    again = table.read_bytes()
    kept_in(table, runs)  # a second time changes nothing
    assert table.read_bytes() == again


def test_a_line_has_the_figures_of_the_steps(tmp_path: Path, runs: Path) -> None:
    row = jsonl.rows(kept_in(tmp_path / "kept.jsonl", runs))[1]
    k3 = [0.1 / step for step in range(1, 21)]
    assert (row["steps"], row["bf16_steps"], row["date"]) == (20, 0, "2026-11-24")
    assert (row["reward_before"], row["reward_after"], row["reward_late"]) == (1.0, 0.6, 0.5)
    assert row["kl_k3"] == pytest.approx(median(k3[1:]), rel=1e-5)
    assert row["kl_late"] == pytest.approx(fmean(k3[-10:]), rel=1e-5)
    assert (row["ess_raw"], row["clip_fraction"]) == (0.9, 0.01)
    assert (row["tis_least"], row["tis_late"]) == (1.5, 1.5)


def test_a_run_that_goes_on_is_no_result_yet(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "bf16" / "0", None)
    assert jsonl.rows(kept_in(tmp_path / "kept.jsonl", tmp_path / "runs")) == []
    table = kept_in(tmp_path / "kept.jsonl", tmp_path / "runs", "--unfinished")
    assert jsonl.rows(table)[0]["reward_after"] is None
    assert len(tables.learnt("runs", table).splitlines()) == 2


def test_an_arm_is_a_line_with_its_spread_over_seeds(tmp_path: Path, runs: Path) -> None:
    lines = tables.learnt("qk-norm", kept_in(tmp_path / "kept.jsonl", runs)).splitlines()
    assert lines[2].startswith("| bf16 | 1 | 1.00 | 0.70 | -0.30 | - | - |")
    # Less BF16's: of the one seed that both have. No run is uncorrected.
    cells = ["1.00 (1.00 to 1.00)", "0.70 (0.60 to 0.80)", "-0.30 (-0.40 to -0.20)", "-0.10", "-"]
    assert lines[3].startswith(f"| fp8-tis | 2 | {' | '.join(cells)} |")
    assert lines[3].endswith("| 1.50 |")


def test_the_same_seed_on_another_machine_is_another_run(tmp_path: Path, runs: Path) -> None:
    a_run(tmp_path / "elsewhere" / "qk-norm" / "fp8-tis" / "0", 1.0)
    a_run(tmp_path / "elsewhere" / "qk-norm" / "bf16" / "0", 0.9)
    both = (kept_in(tmp_path / "a.jsonl", runs), kept_in(tmp_path / "b.jsonl", tmp_path / "elsewhere" / "qk-norm"))
    line = tables.learnt("qk-norm", *both).splitlines()[3]
    assert line.startswith("| fp8-tis | 3 | 1.00 (1.00 to 1.00) | 0.80 (0.60 to 1.00) |")
    assert "| +0.00 ± 0.10 |" in line  # -0.1 here, +0.1 there


def test_in_the_committed_runs_no_law_is_ahead_of_c_of_2_under_all_mismatches_that_were_new() -> None:
    rewards = rewards_of(kept_runs(RULED))
    for law in LAWS:
        over = {name: margin(rewards[f"{name}-{law}"], rewards[f"{name}-tis"]) for name in JUDGED}
        level = [name for name, apart in over.items() if apart and apart.difference <= apart.error]
        assert {"growing", "spiking", "staler"} <= set(level), law
        assert None not in over.values()


def test_masks_are_below_token_tis_in_the_committed_runs_and_tightening_one_does_not_help() -> None:
    rewards = rewards_of(kept_runs(RULED))
    for mask in MASKS:
        below, tightened = (pooled(rewards, *pair, MASKED) for pair in ((mask, "tis"), (f"{mask}-news", mask)))
        assert below is not None
        assert tightened is not None
        assert below.difference < -below.error
        assert tightened.difference < tightened.error


def test_a_pooled_margin_is_of_means_of_seeds() -> None:
    """The differences of mismatches cancel within a seed, so that the seeds alone make its error."""
    of: dict[str, dict[int, float]] = {}
    for at, mismatch in enumerate(JUDGED):
        of[f"{mismatch}-tis"] = dict.fromkeys(range(SEEDS), 0.5)
        of[f"{mismatch}-news"] = {seed: 0.6 + 0.1 * (at - 2) + 0.02 * (seed % 2) for seed in range(SEEDS)}
    whole = pooled(of, "news", "tis")
    assert whole is not None
    assert whole.difference == pytest.approx(0.11)
    assert whole.error == pytest.approx(stdev([0.0, 0.02] * 3) / 6**0.5)
    assert "| news less C = 2 | -0.090 ± 0.004 |" in margins(of, [("news", "tis")])
    del of["staler-news"][3]
    assert pooled(of, "news", "tis") is None


def test_margins_are_over_the_seeds_that_both_have() -> None:
    mine, other = {s: float(s) for s in range(8)}, {s: s / 2 for s in range(1, 7)}
    apart = margin(mine, other)
    assert apart is not None
    assert apart.difference == 1.75
    assert abs(apart.error - 0.3818813) < 1e-6
    assert margin(mine, {0: 1.0}) is None


def test_speed_ups_are_of_the_same_step_of_both_runs() -> None:
    def seconds(rollout_s: float, *steps: int) -> list[dict[str, float]]:
        rows = [{"step": step, "response_tokens": 100 * step, "rollout_s": rollout_s * step} for step in steps]
        return [row | {"step_s": row["rollout_s"] + row["step"]} for row in rows]

    base, fast = {"seconds": seconds(3.0, 1, 2, 3, 4), "disturbed": [4]}, {"seconds": seconds(2.0, 1, 2, 3, 4, 5)}
    assert tables.speedups(base, fast, "rollout") == pytest.approx([1.5] * 2)  # of steps 2 and 3
    assert tables.speedups(base, fast, "step") == pytest.approx([4 / 3] * 2)
    assert tables.speedups(base, {"seconds": seconds(2.0, 1)}, "step") == []
