"""The files that are kept of runs, and the tables that are made from them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.learning import predicted
from benchmarks.learning.evidence import corrections, learnt, speed
from benchmarks.learning.keep import main as keep
from benchmarks.learning.run import found_runs
from benchmarks.learning.state import RunFolder
from fp8plan import schemas

ROW = {"step": 21, "response_tokens": 1, "reward": 0.5}


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
        metrics[learnt.DOUBT] = 2.0 / step
        run.log("run.jsonl", {"step": step, "prompt_lengths": [1] * 4, "guard": {}, "metrics": metrics})
    run.write("done.json", {"reward_after": after, "date": "2026-11-24"})
    (folder / "checkpoint.pt").write_bytes(b"large")
    return run


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, after in enumerate((0.6, 0.8)):
        a_run(tmp_path / "runs" / "fp8-tis" / str(seed), 8, after)
    a_run(tmp_path / "runs" / "bf16" / "0", 1, 0.7)
    target = tmp_path / "kept" / "shared" / "qk-norm"
    keep([str(tmp_path / "runs"), str(target)])
    (target.parents[1] / "machine.json").write_text("{}")
    monkeypatch.setattr(speed, "ALONE", target.parent)
    return target


def test_runs_are_kept_whole_but_for_what_is_large_or_says_nothing(kept: Path) -> None:
    runs = found_runs(kept)
    assert list(runs) == [("bf16", 0), ("fp8-tis", 0), ("fp8-tis", 1)]
    shared, alone = runs["fp8-tis", 0].rows("run.jsonl"), runs["bf16", 0].rows("run.jsonl")
    assert [row["step"] for row in shared] == list(range(1, 21))
    assert set(alone[0]) - set(shared[0]) == {"prompt_lengths", "guard"}
    assert not list(kept.rglob("checkpoint.pt"))
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    keep([str(kept.parents[2] / "runs"), str(kept)])  # a second time changes nothing
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


def test_an_arm_is_a_line_with_its_spread_over_seeds(kept: Path) -> None:
    lines = learnt.learnt(kept).splitlines()
    assert lines[2].startswith("| bf16 | 1 | 1.00 | 0.70 | -0.30 | - | - |")
    # Less BF16's: of the one seed that both have. No run is uncorrected.
    cells = ["1.00 (1.00 to 1.00)", "0.70 (0.60 to 0.80)", "-0.30 (-0.40 to -0.20)", "-0.10", "-"]
    assert lines[3].startswith(f"| fp8-tis | 2 | {' | '.join(cells)} |")
    assert lines[3].endswith("| 1.50 |")
    cells = ["1.00 s (1.00 to 1.00)", "3.00 s", "2727 µs (1500 to 15000)", "1.00 s", "0.50 s", "4.50 s"]
    assert speed.timed("qk-norm").splitlines()[2] == f"| qk-norm | bf16 | 19 | {' | '.join(cells)} |"


def test_the_same_seed_on_another_machine_is_another_run(kept: Path, tmp_path: Path) -> None:
    a_run(tmp_path / "elsewhere" / "fp8-tis" / "0", 8, 1.0)
    a_run(tmp_path / "elsewhere" / "bf16" / "0", 8, 0.9)
    line = learnt.learnt(kept, tmp_path / "elsewhere").splitlines()[3]
    assert line.startswith("| fp8-tis | 3 | 1.00 (1.00 to 1.00) | 0.80 (0.60 to 1.00) |")
    assert "| +0.00 ± 0.10 |" in line  # -0.1 here, +0.1 there


def test_the_kl_stands_beside_the_policys_doubt(kept: Path) -> None:
    cells = learnt.doubt(kept).splitlines()[2].split(" | ")
    assert cells[:2] == ["| qk-norm", "bf16"]
    assert float(cells[2]) == pytest.approx(2 * 0.29290, rel=0.02)  # mean of 1 / step over steps 1 to 10
    assert cells[6:] == ["5.0e-02", "5.0e-02 |"]


def test_a_run_that_goes_on_is_no_result_yet(tmp_path: Path) -> None:
    run = a_run(tmp_path / "bf16" / "0", 8, 0.7)
    (run / "done.json").unlink()
    assert len(learnt.learnt(tmp_path).splitlines()) == 2


def test_runs_that_were_broken_off_show_their_rewards_in_training(tmp_path: Path) -> None:
    for arm, better in (("lasting-tis", 0.0), ("lasting-none", 0.25), ("bf16", 0.0)):
        for seed, reward in enumerate((0.25, 0.75)):
            run = a_run(tmp_path / arm / str(seed), 8, 0.7)
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
    # Without bf16, which has another mismatch.
    assert learnt.in_training(tmp_path, against="lasting-tis").splitlines()[2:] == [
        f"| {' | '.join(['lasting-none', *none, '-'])} |",
        f"| {' | '.join(['lasting-tis', *tis, '1.50 (1.50 to 1.50)'])} |",
    ]


def test_speed_ups_are_of_the_same_step_of_both_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = a_run(tmp_path / "alone" / "wide" / "bf16" / "0", 1, 0.7, slower=1.5)
    fast = a_run(tmp_path / "alone" / "wide" / "fp8" / "0", 1, 0.7)
    for run, seconds in ((base, 99.0), (fast, 1.0)):  # a step that was disturbed
        run.log("steps.jsonl", dict.fromkeys(("rollout_s", "train_s", "sync_s", "step_s"), seconds) | ROW)
    base.log("steps.jsonl", ROW | {"step": 22, "rollout_s": 99.0, "step_s": 99.0})  # in the BF16 arm alone
    assert predicted.speedups(base, fast, "rollout", [21, 22]) == pytest.approx([1.5] * 19)
    assert predicted.speedups(base, fast, "step", [21, 22]) == pytest.approx([6.0 / 4.5] * 19)
    assert max(predicted.speedups(base, fast, "rollout")) == pytest.approx(99.0)
    assert predicted.speedups(base, fast, "step", range(30)) == []
    monkeypatch.setattr(speed, "ALONE", tmp_path / "alone")
    (tmp_path / "machine.json").write_text('{"disturbed_steps": {"wide/bf16/0": [21, 22]}}')
    (line,) = speed.gained("wide").splitlines()[2:]
    assert line.startswith(
        "| wide * | fp8 | 19 | 1.00 (1.00 to 1.00) | 1.50 (1.50 to 1.50) | 1.00 | 1.33 (1.33 to 1.33) |"
    )
    assert speed.timed("wide").splitlines()[2].startswith("| wide | bf16 | 19 | 1.00 s (1.00 to 1.00) | 4.50 s |")


def test_rollouts_are_predicted_again_from_their_own_lengths() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in speed.again("wide").splitlines()[2:]]
    assert [row[:3] for row in rows] == [["wide", "bf16", "2"], ["wide", "fp8", "4"]]  # without the first
    assert all(abs(float(row[3].rstrip("%"))) < 11 for row in rows)


def test_the_drill_is_kept_and_shown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "drill", 1, 0.7)
    run.write("drill.json", {"scars": [{"fault": "engine killed", "step": 16, "change": -0.0304, "error": 0.02}]})
    keep([str(tmp_path / "runs"), str(tmp_path / "shared" / "qk-norm")])
    assert learnt.drill(tmp_path / "shared" / "qk-norm").splitlines()[2:] == ["| engine killed | 16 | -0.030 | 0.020 |"]


def test_corrections_stand_beside_a_constant_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    for arm, rewards in (("lasting-tis", (0.5, 0.7, 0.9)), ("lasting-adaptive", (0.6, 0.9))):
        for seed, after in enumerate(rewards):
            a_run(tmp_path / "runs" / arm / str(seed), 2, after)
    going = a_run(tmp_path / "runs" / "lasting-none" / "0", 2, 0.1)
    (going / "done.json").unlink()
    target = tmp_path / "control.jsonl"
    keep([str(tmp_path / "runs"), str(target)])
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


def test_laws_stand_beside_c_of_2_in_runs_and_in_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {"lasting-tis": (0.5, 0.7), "lasting-adaptive": (0.6, 0.9), "lasting-none": (0.1, 0.4)}
    for arm, after in rewards.items():
        for seed, reward in enumerate(after):
            a_run(tmp_path / "runs" / arm / str(seed), 2, reward)
    broken_off = a_run(tmp_path / "more" / "lasting-adaptive" / "0", 2, 0.0)
    broken_off.log("steps.jsonl", ROW | {"reward": 1.5})  # the mean of the last ten steps is 0.1 above the others'
    (broken_off / "done.json").unlink()
    a_run(tmp_path / "more" / "lasting-tis" / "0", 2, 0.0)
    keep([str(tmp_path / "runs"), str(tmp_path / "lines.jsonl")])
    whole, both = (tmp_path / "runs",), (tmp_path / "runs", tmp_path / "more")
    settings = {
        "whole": partial(corrections.of_runs, learnt.rewards_after, *whole),
        "late": partial(corrections.of_runs, learnt.rewards_late, *both, unfinished=True),
        "lines": partial(corrections.of_lines, tmp_path / "lines.jsonl"),
    }
    rows = tuple(corrections.Setting(name, 8, "lasting", measure) for name, measure in settings.items())
    monkeypatch.setattr(corrections, "SETTINGS", rows)
    kl = f"{sum(0.1 / step for step in range(11, 21)) / 10:.1g}"
    assert corrections.laws().splitlines()[2:] == [
        f"| whole | 8 | lasting | 2 | {kl} | -0.35 ± 0.05 | +0.15 ± 0.05 | - |",
        f"| late | 8 | lasting | 3 | {kl} | +0.00 ± 0.00 | +0.03 ± 0.03 | - |",
        f"| lines | 8 | lasting | 2 | {kl} | -0.35 ± 0.05 | +0.15 ± 0.05 | - |",
    ]
