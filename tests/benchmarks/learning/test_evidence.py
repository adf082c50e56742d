"""The files that are kept of runs, and the tables that are made from them."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from statistics import fmean, median

import pytest

from benchmarks.learning import predicted
from benchmarks.learning.evidence import corrections, learnt, speed
from benchmarks.learning.keep import DOUBT
from benchmarks.learning.keep import main as keep
from benchmarks.learning.state import RunFolder
from fp8plan import jsonl, schemas

ROW = {"step": 21, "response_tokens": 1, "reward": 0.5, "precision": "fp8_kv"}


def a_run(folder: Path, at_once: int, after: float, slower: float = 1.0) -> RunFolder:
    run = RunFolder(folder)
    said = dict.fromkeys((*predicted.FORESEEN, "pilot_reward"), 1.0)
    run.write("predicted.json", said | {"at_once": at_once, "precision": "bf16", "warnings": []})
    for step in range(1, 21):
        tokens = 100 * step  # the arms draw the same problems in a step, other ones in the next
        row = {"step": step, "reward": 0.5, "response_tokens": tokens, "rollout_s": 3.0 * slower, "train_s": 1.0}
        row["precision"] = "fp8_kv"
        run.log("steps.jsonl", row | {"sync_s": 0.5, "step_s": 3.0 * slower + 1.5})
        metrics = {schemas.K3: 0.1 / step, schemas.ESS_RAW: 0.9, schemas.CLIP_FRACTION: 0.01, schemas.TIS: 1.5}
        metrics[DOUBT] = 2.0 / step
        run.log("run.jsonl", {"step": step, "prompt_lengths": [1] * 4, "guard": {}, "metrics": metrics})
    run.write("done.json", {"reward_after": after, "date": "2026-11-24"})
    (folder / "checkpoint.pt").write_bytes(b"large")
    return run


def kept_in(table: Path, runs: Path, *options: str) -> Path:
    """The table, with the runs of a policy's folder."""
    keep([str(runs), str(table), *options])
    return table


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of a policy: two runs that shared a GPU, and one that had it for itself."""
    folder = tmp_path / "qk-norm"
    for seed, after in enumerate((0.6, 0.8)):
        a_run(folder / "fp8-tis" / str(seed), 8, after)
    a_run(folder / "bf16" / "0", 1, 0.7)
    return folder


def test_a_run_is_a_line_and_lines_of_other_runs_stay(tmp_path: Path, runs: Path) -> None:
    table = kept_in(tmp_path / "kept.jsonl", runs)
    before = jsonl.rows(table)
    assert [(row["policy"], row["arm"], row["seed"]) for row in before] == [
        ("qk-norm", "bf16", 0),
        ("qk-norm", "fp8-tis", 0),
        ("qk-norm", "fp8-tis", 1),
    ]
    a_run(tmp_path / "moe" / "bf16" / "0", 8, 0.9)
    kept_in(table, tmp_path / "moe")
    assert jsonl.rows(table)[:3] == before
    again = table.read_bytes()
    kept_in(table, runs)  # a second time changes nothing
    assert table.read_bytes() == again


def test_a_line_has_the_figures_of_the_steps(tmp_path: Path, runs: Path) -> None:
    row = jsonl.rows(kept_in(tmp_path / "kept.jsonl", runs))[1]
    k3 = [0.1 / step for step in range(1, 21)]
    assert row["steps"] == 20
    assert (row["reward_before"], row["reward_after"]) == (1.0, 0.6)
    assert row["kl_first"] == pytest.approx(k3[0])
    assert row["kl_k3"] == pytest.approx(median(k3[1:]), rel=1e-5)
    assert row["kl_begin"] == pytest.approx(fmean(k3[:10]), rel=1e-5)
    assert row["kl_late"] == pytest.approx(fmean(k3[-10:]), rel=1e-5)
    assert row["kl_end"] == pytest.approx(fmean(k3[-2:]), rel=1e-5)
    assert row["reward_middle"] is None  # no step 21
    assert row["clipped_mass"] is None  # no step has it
    assert row["gradient_error"] == []


def test_the_steps_of_speed_are_kept_with_their_lengths(tmp_path: Path, runs: Path) -> None:
    table = kept_in(tmp_path / "alone.jsonl.gz", runs, "--speed")
    row = jsonl.rows(table)[0]
    assert [step["rollout_s"] for step in row["seconds"]] == [3.0] * 20
    assert row["rollouts"][4]["prompt_lengths"] == [1] * 4
    assert row["rollouts"][4]["metrics"] == {schemas.K3: 0.1 / 5}
    assert "guard" not in row["rollouts"][4]
    assert row["predicted"]["at_once"] == 1


def test_an_arm_is_a_line_with_its_spread_over_seeds(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = learnt.learnt("qk-norm", kept_in(tmp_path / "kept.jsonl", runs)).splitlines()
    assert lines[2].startswith("| bf16 | 1 | 1.00 | 0.70 | -0.30 | - | - |")
    # Less BF16's: of the one seed that both have. No run is uncorrected.
    cells = ["1.00 (1.00 to 1.00)", "0.70 (0.60 to 0.80)", "-0.30 (-0.40 to -0.20)", "-0.10", "-"]
    assert lines[3].startswith(f"| fp8-tis | 2 | {' | '.join(cells)} |")
    assert lines[3].endswith("| 1.50 |")
    monkeypatch.setattr(speed, "ALONE", kept_in(tmp_path / "alone.jsonl.gz", runs, "--speed"))
    cells = ["1.00 s (1.00 to 1.00)", "3.00 s", "2727 µs (1500 to 15000)", "1.00 s", "0.50 s", "4.50 s"]
    assert speed.timed("qk-norm").splitlines()[2] == f"| qk-norm | bf16 | 19 | {' | '.join(cells)} |"


def test_the_same_seed_on_another_machine_is_another_run(tmp_path: Path, runs: Path) -> None:
    a_run(tmp_path / "elsewhere" / "qk-norm" / "fp8-tis" / "0", 8, 1.0)
    a_run(tmp_path / "elsewhere" / "qk-norm" / "bf16" / "0", 8, 0.9)
    tables = (kept_in(tmp_path / "a.jsonl", runs), kept_in(tmp_path / "b.jsonl", tmp_path / "elsewhere" / "qk-norm"))
    line = learnt.learnt("qk-norm", *tables).splitlines()[3]
    assert line.startswith("| fp8-tis | 3 | 1.00 (1.00 to 1.00) | 0.80 (0.60 to 1.00) |")
    assert "| +0.00 ± 0.10 |" in line  # -0.1 here, +0.1 there


def test_the_kl_stands_beside_the_policys_doubt(tmp_path: Path, runs: Path) -> None:
    table = kept_in(tmp_path / "kept.jsonl", runs)
    cells = learnt.doubt([("qk-norm", table)]).splitlines()[2].split(" | ")
    assert cells[:2] == ["| qk-norm", "bf16"]
    assert float(cells[2]) == pytest.approx(2 * 0.29290, rel=0.02)  # mean of 1 / step over steps 1 to 10
    assert cells[6:] == ["5.0e-02", "5.0e-02 |"]


def test_a_run_that_goes_on_is_no_result_yet(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "bf16" / "0", 8, 0.7)
    (run / "done.json").unlink()
    assert jsonl.rows(kept_in(tmp_path / "kept.jsonl", tmp_path / "runs")) == []
    table = kept_in(tmp_path / "kept.jsonl", tmp_path / "runs", "--unfinished")
    assert jsonl.rows(table)[0]["reward_after"] is None
    assert len(learnt.learnt("runs", table).splitlines()) == 2


def test_runs_that_were_broken_off_show_their_rewards_in_training(tmp_path: Path) -> None:
    for arm, better in (("lasting-tis", 0.0), ("lasting-none", 0.25), ("bf16", 0.0)):
        for seed, reward in enumerate((0.25, 0.75)):
            run = a_run(tmp_path / "runs" / arm / str(seed), 8, 0.7)
            (run / "done.json").unlink()
            run.log("steps.jsonl", ROW | {"reward": reward + better})
    kl = sum(0.1 / step for step in range(11, 21)) / 10
    tis, none = (
        [
            "2",
            "21",
            "0.50 (0.50 to 0.50)",
            f"{0.5 + x:.2f} ({0.25 + x:.2f} to {0.75 + x:.2f})",
            *late,
            f"{kl:.1e} ({kl:.1e} to {kl:.1e})",
        ]
        for x, late in ((0.0, ("0.50 (0.47 to 0.53)", "-")), (0.25, ("0.53 (0.50 to 0.55)", "+0.03 ± 0.00")))
    )
    table = kept_in(tmp_path / "kept.jsonl", tmp_path / "runs", "--unfinished")
    # Without bf16, which has another mismatch.
    assert learnt.in_training("runs", table, against="lasting-tis").splitlines()[2:] == [
        f"| {' | '.join(['lasting-none', *none, '-'])} |",
        f"| {' | '.join(['lasting-tis', *tis, '1.50 (1.50 to 1.50)'])} |",
    ]


def test_speed_ups_are_of_the_same_step_of_both_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = a_run(tmp_path / "wide" / "bf16" / "0", 1, 0.7, slower=1.5)
    fast = a_run(tmp_path / "wide" / "fp8" / "0", 1, 0.7)
    for run, seconds in ((base, 99.0), (fast, 1.0)):  # a step that was disturbed
        run.log("steps.jsonl", dict.fromkeys(("rollout_s", "train_s", "sync_s", "step_s"), seconds) | ROW)
    base.log("steps.jsonl", ROW | {"step": 22, "rollout_s": 99.0, "step_s": 99.0})  # in the BF16 arm alone
    steps = base.rows("steps.jsonl"), fast.rows("steps.jsonl")
    assert predicted.speedups(*steps, "rollout", [21, 22]) == pytest.approx([1.5] * 19)
    assert predicted.speedups(*steps, "step", [21, 22]) == pytest.approx([6.0 / 4.5] * 19)
    assert max(predicted.speedups(*steps, "rollout")) == pytest.approx(99.0)
    assert predicted.speedups(*steps, "step", range(30)) == []
    table = kept_in(tmp_path / "alone.jsonl.gz", tmp_path / "wide", "--speed")
    rows = [row | {"disturbed": [21, 22]} if row["arm"] == "bf16" else row for row in jsonl.rows(table)]
    table.write_bytes(gzip.compress(b"".join(map(jsonl.line, rows))))
    monkeypatch.setattr(speed, "ALONE", table)
    (line,) = speed.gained("wide").splitlines()[2:]
    assert line.startswith(
        "| wide * | fp8 | 19 | 1.00 (1.00 to 1.00) | 1.50 (1.50 to 1.50) | 1.00 | 1.33 (1.33 to 1.33) |"
    )
    assert speed.timed("wide").splitlines()[2].startswith("| wide | bf16 | 19 | 1.00 s (1.00 to 1.00) | 4.50 s |")


def test_rollouts_are_predicted_again_from_their_own_lengths() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in speed.again("wide").splitlines()[2:]]
    assert [row[:3] for row in rows] == [["wide", "bf16", "2"], ["wide", "fp8", "4"]]  # without the first
    assert all(abs(float(row[3].rstrip("%"))) < 11 for row in rows)


def test_the_report_of_a_drill_is_shown(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write("drill.json", {"scars": [{"fault": "engine killed", "step": 16, "change": -0.0304, "error": 0.02}]})
    assert learnt.drill(run / "drill.json").splitlines()[2:] == ["| engine killed | 16 | -0.030 | 0.020 |"]


def test_corrections_stand_beside_a_constant_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    for arm, rewards in (("lasting-tis", (0.5, 0.7, 0.9)), ("lasting-adaptive", (0.6, 0.9))):
        for seed, after in enumerate(rewards):
            a_run(tmp_path / "runs" / arm / str(seed), 2, after)
    going = a_run(tmp_path / "runs" / "lasting-none" / "0", 2, 0.1)
    (going / "done.json").unlink()
    target = kept_in(tmp_path / "control.jsonl", tmp_path / "runs")
    lines = corrections.corrected(target).splitlines()[2:]
    # The error of 0.1 and 0.2 is half of their difference.
    assert lines == [
        "| lasting | token TIS, C = 2 | 3 | 1.00 ± 0.00 | 0.70 ± 0.12 | - | 0.0051 | 1.50 |",
        "| lasting | `LevelThresholds` | 2 | 1.00 ± 0.00 | 0.75 ± 0.15 | +0.15 ± 0.05 | 0.0051 | 1.50 |",
    ]


def test_the_committed_runs_have_every_setting_of_the_laws() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in corrections.laws().splitlines()[2:]]
    assert [row[3] for row in rows if row[2] == "growing" and "GPU" not in row[0]] == ["1", "7"]
    assert all(int(row[3]) > 1 for row in rows if "H200" not in row[0] or row[2] != "growing")
    unseen = {(row[1], row[2], column) for row in rows for column in range(5, 8) if row[column] == "-"}
    assert unseen == {
        ("256", "growing", 7),
        *(("32", name, column) for name in ("lasting", "moderate") for column in (5, 7)),
    }


def test_laws_stand_beside_c_of_2_after_runs_and_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {"lasting-tis": (0.5, 0.7), "lasting-adaptive": (0.6, 0.9), "lasting-none": (0.1, 0.4)}
    for arm, after in rewards.items():
        for seed, reward in enumerate(after):
            a_run(tmp_path / "runs" / arm / str(seed), 2, reward)
    broken_off = a_run(tmp_path / "more" / "lasting-adaptive" / "0", 2, 0.0)
    broken_off.log("steps.jsonl", ROW | {"reward": 1.5})  # the mean of the last ten steps is 0.1 above the others'
    (broken_off / "done.json").unlink()
    a_run(tmp_path / "more" / "lasting-tis" / "0", 2, 0.0)
    whole = kept_in(tmp_path / "whole.jsonl", tmp_path / "runs")
    more = kept_in(tmp_path / "more.jsonl", tmp_path / "more", "--unfinished")
    settings = {
        "whole": partial(corrections.whole_runs, whole, policy="runs"),
        "late": partial(corrections.runs_in_training, whole, more),
    }
    rows = tuple(corrections.Setting(name, 8, "lasting", measure) for name, measure in settings.items())
    monkeypatch.setattr(corrections, "SETTINGS", rows)
    kl = f"{sum(0.1 / step for step in range(11, 21)) / 10:.1g}"
    assert corrections.laws().splitlines()[2:] == [
        f"| whole | 8 | lasting | 2 | {kl} | -0.35 ± 0.05 | +0.15 ± 0.05 | - |",
        f"| late | 8 | lasting | 3 | {kl} | +0.00 ± 0.00 | +0.03 ± 0.03 | - |",
    ]
