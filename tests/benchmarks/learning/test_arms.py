"""The table of arms, and which runs come first."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.learning import run
from benchmarks.learning.arms import (
    ARMS,
    CANDIDATES,
    CORRECTIONS,
    DEFAULTS,
    EVERY,
    FP8,
    GROUPS,
    JUDGED,
    Arm,
    arm_named,
    broken,
    chosen,
    strength,
    uncorrected,
)
from benchmarks.learning.run import arguments, begun_runs, jobs, side_by_side
from benchmarks.learning.state import RunFolder
from benchmarks.learning.tables import RULED
from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.model.precision import find_precision
from fp8plan.runtime.watch.controller.laws import LevelThresholds
from fp8plan.runtime.watch.controller.state import Escalation


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_can_run_on_both_devices(name: str) -> None:
    arm = arm_named(name)
    for device in FP8:
        assert find_precision(arm.preset(device)).name == arm.preset(device)
    assert arm.correction in CORRECTIONS
    assert strength(arm.mismatch, 0, 100) == 0


def test_a_cpu_runs_what_is_fast_there() -> None:
    assert {arm.preset("cpu") for arm in ARMS.values()} == {"bf16", "fp8_kv"}
    assert {arm.preset("cuda") for arm in ARMS.values()} == {"bf16", "fp8_block+fp8_kv"}


def test_mismatch_grows_or_comes_in_spikes() -> None:
    growing = [strength("growing", step, 100) for step in range(100)]
    assert growing == sorted(growing)
    assert growing[-1] > 0.1
    lasting = [strength("lasting", step, 100) for step in range(100)]
    assert lasting == sorted(lasting)
    assert set(lasting[30:]) == {strength("growing", 100, 100)}
    assert lasting[29] < lasting[30]
    assert [strength("moderate", step, 100) * 2 for step in range(100)] == pytest.approx(lasting)
    for steps in (20, 100, 300):
        spiking = [strength("spiking", step, steps) for step in range(steps)]
        assert 3 <= sum(x > 0 for x in spiking) <= 0.15 * steps
    assert not any(strength("benign", step, 100) for step in range(100))
    with pytest.raises(
        ConfigError, match="mismatch is 'none'; allowed: benign, growing, lasting, moderate, spiking, staler, broken"
    ):
        strength("none", 0, 100)


def test_rollouts_get_staler_by_quarters() -> None:
    assert not any(Arm().stale(step, 64) for step in range(64))
    synced = [step + 1 for step in range(64) if not Arm(mismatch="staler").stale(step, 64)]
    assert synced == [*range(1, 17), *range(18, 33, 2), *range(36, 49, 4), 56, 64]


def test_a_sync_is_broken_for_five_steps() -> None:
    assert [step for step in range(60) if broken("broken", step, 60)] == [30, 31, 32, 33, 34]
    assert not any(broken("lasting", step, 60) for step in range(60))
    assert not any(strength(name, step, 60) for name in ("staler", "broken") for step in range(60))


def test_the_arms_of_defaults_have_names_of_committed_runs() -> None:
    committed = {row["arm"] for row in jsonl.rows(RULED)}
    judged = [f"{mismatch}-{name}" for mismatch in JUDGED for name in ("none", "tis", "tis-1.4", "adaptive")]
    assert set(judged) < set(DEFAULTS) & committed


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_candidate_runs_beside_c_2_under_all_mismatches_and_never_steps_down(name: str) -> None:
    arms = [arm_named(arm) for arm in GROUPS[name.replace("_", "-")]]
    assert {(arm.mismatch, arm.correction) for arm in arms} == set(product(EVERY, ("tis", name)))
    correction = CORRECTIONS[name]
    assert correction.follows == (Escalation.RECALIBRATE_KV,)
    assert isinstance(correction.controller, LevelThresholds)
    assert correction.settings.thresholds.tis == correction.controller.tis


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        ("fp8-adaptive", "fp8"),
        ("bf16-tis", "bf16"),
        ("lasting-tis-1.1", "lasting-none"),
        ("fp8", "fp8"),
        ("fp8-unit-kv", None),  # no arm has scales of 1.0 and no correction
    ],
)
def test_a_correction_is_held_against_the_arm_without_one(arm: str, other: str | None) -> None:
    assert uncorrected(arm) == other


def test_groups_and_names_choose_arms_once() -> None:
    assert chosen(["bf16", "main"])[0] == "bf16"
    assert chosen(["bf16", "main"]).count("bf16") == 1
    assert set(chosen(list(GROUPS))) == set(ARMS)
    with pytest.raises(ConfigError, match="arm is 'fp9'; allowed: bf16"):
        chosen(["fp9"])


def test_every_arm_has_its_first_seed_before_any_has_its_second() -> None:
    assert jobs(["bf16", "fp8"], range(2)) == [("bf16", 0), ("fp8", 0), ("bf16", 1), ("fp8", 1)]
    assert jobs(["bf16"], range(7, 8)) == [("bf16", 7)]


def test_one_run_gets_the_words_of_the_whole(tmp_path: Path) -> None:
    words = [str(tmp_path), "--arms", "fp8", "--device", "cpu", "--steps", "3"]
    given = arguments(words)
    assert (given.arms, given.words, given.one) == ([["fp8"]], words, None)
    assert arguments([*words, "--device", "cpu", "--one", "fp8/0"]).one == "fp8/0"


def test_later_arms_come_after_all_seeds_of_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(run, "side_by_side", lambda given, runs: seen.extend(runs) or [])
    monkeypatch.setattr(run.subprocess, "run", lambda words, check: None)
    words = ["--device", "cpu", "--seeds", "2", "--arms", "fp8", "bf16", "--arms", "bf16", "fp8-tis"]
    assert run.main([str(tmp_path), *words]) == 0
    first = [("fp8", 0), ("bf16", 0), ("fp8", 1), ("bf16", 1)]
    assert seen == [*first, ("fp8-tis", 0), ("fp8-tis", 1)]
    seen.clear()
    (tmp_path / "kept.jsonl").write_text(
        '{"policy": "tiny-qk-norm", "arm": "bf16", "seed": 0}\n{"policy": "qk-norm", "arm": "fp8", "seed": 0}\n'
    )
    assert run.main([str(tmp_path), *words, "--kept", str(tmp_path / "kept.jsonl")]) == 0
    assert seen == [first[0], *first[2:], ("fp8-tis", 0), ("fp8-tis", 1)]
    with pytest.raises(ConfigError, match="does not exist"):
        run.main([str(tmp_path), *words, "--kept", str(tmp_path / "other.jsonl")])


def test_as_many_runs_share_a_gpu_as_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments([str(tmp_path), "--device", "cuda", "--at-once", "3"])
    together, seen = Barrier(3), []

    def did(words: list[str], **more: Any) -> SimpleNamespace:
        together.wait(timeout=20)  # breaks unless three are here
        seen.append((words[-1], more["env"]["CUDA_VISIBLE_DEVICES"]))
        return SimpleNamespace(returncode=int(words[-1] == "fp8/1"))

    monkeypatch.setattr(run, "gpus", lambda: ["5"])
    monkeypatch.setattr(run.subprocess, "run", did)
    runs = [("bf16", 0), ("fp8", 0), ("bf16", 1), ("fp8", 1), ("fp8-tis", 0), ("fp8-tis", 1)]
    assert side_by_side(given, runs) == ["fp8/1"]
    assert sorted(seen) == sorted((f"{arm}/{seed}", "5") for arm, seed in runs)
    with pytest.raises(ConfigError, match="--at-once is 0; allowed: 1 and more"):
        arguments([str(tmp_path), "--at-once", "0"])


def test_only_runs_that_have_begun_are_in_the_table(tmp_path: Path) -> None:
    for name in ("fp8/10", "fp8/2", "bf16/0"):
        RunFolder(tmp_path / name).write("predicted.json", {})
        (tmp_path / name / "steps.jsonl").touch()
    RunFolder(tmp_path / "fp8" / "0")
    assert list(begun_runs(tmp_path)) == [("bf16", 0), ("fp8", 2), ("fp8", 10)]
