"""The guard's anchor: the first rollouts of a run correct the profile, and only then a rollout is called slow."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.profile.library import datasheet_profile, load_profile
from fp8plan.model.profile.profile import PACES
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings, GuardState
from fp8plan.runtime.watch.guard.guard import FIRST, Cause, Guard, Verdict
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation, predict

LIMITS = EngineLimits.for_gpu(find_gpu("h200_sxm"), max_model_len=2048).settled()
FACTS = EngineFacts("Qwen/Qwen3-8B", "h200_sxm", "0.26.0", "fp8_block", LIMITS)
PROFILE = load_profile(find_gpu(FACTS.gpu), FACTS.engine_version)[0].on_host(2.6e-4)
SHEET = datasheet_profile(find_gpu(FACTS.gpu), FACTS.engine_version)
WORK = Observation(1.0, [256] * 128, [300 + 5 * n for n in range(128)])
ALONE = predict(FACTS, WORK, PROFILE)
MARLIN = replace(FACTS, kernel_backends={"gemm.fp8_block": "MarlinFP8ScaledMMLinearKernel"})


def at(share: float, **changes: Any) -> Observation:
    """A rollout at a share of the speed that the profile alone predicts."""
    return replace(WORK, seconds=ALONE.makespan_s / share, **changes)


def run(*shares: float, facts: EngineFacts = FACTS, **guard: Any) -> tuple[Guard, list[Verdict]]:
    """A guard and its verdicts on rollouts at these shares, after a cold start."""
    watching = Guard(facts, **({"profile": PROFILE} | guard))
    watching.after_rollout(at(0.1))
    return watching, [watching.after_rollout(at(share)) for share in shares]


@pytest.fixture(autouse=True)
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr("fp8plan.runtime.watch.guard.guard.warn", said.append)
    return said


@pytest.mark.parametrize("share", [0.36, 0.5, 0.8, 1.3, 2.0])
def test_a_machine_of_its_own_pace_is_never_slow_and_a_later_slowdown_is(share: float, warned: list[str]) -> None:
    """The profile is calibrated, with an interval of +-7%."""
    _, verdicts = run(*[share] * (FIRST + 2), share / 1.25)
    *before, after = verdicts[FIRST:]
    assert [verdict.as_fast for verdict in verdicts[:FIRST]] == [True if share > 1 else None] * FIRST
    assert not any(verdict.anchored for verdict in verdicts[:FIRST])
    assert not any("too slow" in verdict.reason for verdict in verdicts[:-1])
    assert all(verdict.causes == () for verdict in (*verdicts[: FIRST - 1], *before))
    assert [(verdict.as_fast, verdict.anchored) for verdict in before] == [(True, True)] * 2
    assert [verdict.ratio for verdict in before] == pytest.approx([1.0] * 2, abs=0.02)
    assert (after.as_fast, after.anchored, [each.cause for each in after.causes]) == (False, True, [Cause.UNKNOWN])
    assert "too slow" in after.reason
    assert {verdict.action for verdict in verdicts} == {Action.NONE}
    assert len(warned) == 1


def test_a_slow_first_rollout_is_not_judged_and_says_why() -> None:
    _, (verdict,) = run(0.5)
    assert verdict.reason.endswith("it is not judged: no rollouts of this machine have corrected the prediction so far")
    assert verdict.to_dict()["as_fast"] is None
    assert verdict.to_dict()["anchored"] is False


def test_a_datasheet_is_corrected_too() -> None:
    predicted = predict(FACTS, WORK, SHEET).makespan_s
    guard = Guard(FACTS, profile=SHEET)
    rollouts = [replace(WORK, seconds=predicted / share) for share in (0.1, 0.6, 0.6, 0.6, 0.6, 0.48)]
    assert [guard.after_rollout(rollout).as_fast for rollout in rollouts] == [False, None, None, None, True, False]


def test_far_from_the_profile_is_said_once(warned: list[str]) -> None:
    _, verdicts = run(*[0.5] * (FIRST + 3))
    (finding,) = verdicts[FIRST - 1].causes
    assert (finding.cause, finding.gap, [finding.sentence]) == (Cause.MACHINE, False, warned)
    assert re.match(
        r"this machine makes 50% of the tokens/s that the profile predicts \(allowed: [89]\d% to 1[01]\d%\)",
        finding.sentence,
    )
    assert "The first 3 rollouts are the reference from now on" in finding.sentence
    assert "Only a measured bf16 rollout shows what fp8_block gains here" in finding.sentence
    assert verdicts[FIRST - 1].reason.endswith(finding.sentence)
    assert Cause.MACHINE not in {each.cause for verdict in verdicts[FIRST:] for each in verdict.causes}
    _, near = run(*[0.95] * (FIRST + 1))
    assert len(warned) == 1
    assert near[FIRST].anchored


def test_one_odd_rollout_among_the_first_does_not_set_the_pace() -> None:
    _, verdicts = run(0.8, 0.4, 0.8, 0.8, 0.64)
    assert [verdict.as_fast for verdict in verdicts[FIRST:]] == [True, False]


@pytest.mark.parametrize("disturbed", [{"compiled_files": 3}, {"preemptions": 90}])
def test_a_disturbed_rollout_corrects_nothing_and_its_cause_is_named(disturbed: dict[str, Any]) -> None:
    guard, _ = run()
    verdicts = [guard.after_rollout(at(0.5, **disturbed)) for _ in range(9)]
    assert guard.rollouts == []
    assert {verdict.as_fast for verdict in verdicts} == {None}
    assert {each.cause for verdict in verdicts for each in verdict.causes} <= {Cause.COMPILING, Cause.PREEMPTION}
    assert all(verdict.causes for verdict in verdicts)


def test_late_requests_are_part_of_the_machine() -> None:
    """A trainer's own work before the engine comes with every rollout."""
    guard, _ = run()
    late = at(0.7, arrival_s=0.3 * ALONE.makespan_s)
    first, *_, last = [guard.after_rollout(late) for _ in range(FIRST + 1)]
    assert [each.cause for each in first.causes] == [Cause.ARRIVALS]
    assert (last.as_fast, last.causes) == (True, ())


def test_fp8_on_another_kernel_is_judged_from_the_start_and_never_becomes_the_reference() -> None:
    guard, verdicts = run(*[0.5] * 3, facts=MARLIN)
    assert [verdict.as_fast for verdict in verdicts] == [False] * 3
    assert [verdict.action for verdict in verdicts] == [Action.NONE, Action.NONE, Action.ALL_BF16]
    assert guard.rollouts == []
    guard.engine_changed(replace(FACTS, precision="bf16"))
    bf16 = ALONE.instead["bf16"].makespan_s
    after = [guard.after_rollout(replace(WORK, seconds=bf16 / 0.8)) for _ in range(FIRST + 2)]
    assert [verdict.as_fast for verdict in after] == [False, *[None] * FIRST, True]  # the first is cold


def test_a_mismatch_is_answered_before_any_correction() -> None:
    guard, _ = run()
    actions = [guard.after_rollout(at(0.5, kl_k3=0.2)).action for _ in range(3)]
    assert actions == [Action.NONE, Action.NONE, Action.ALL_BF16]


def test_after_a_step_down_the_machine_is_still_known() -> None:
    guard, _ = run(*[0.8] * FIRST)
    guard.took(Action.ALL_BF16)
    guard.engine_changed(replace(FACTS, precision="bf16"))
    bf16 = ALONE.instead["bf16"].makespan_s / 0.8
    verdicts = [guard.after_rollout(replace(WORK, seconds=seconds)) for seconds in (bf16, bf16, 1.25 * bf16)]
    assert [(verdict.as_fast, verdict.anchored) for verdict in verdicts] == [(True, True), (True, True), (False, True)]


@pytest.mark.parametrize("saved_after", range(FIRST + 2))
def test_the_reference_survives_a_checkpoint(saved_after: int, warned: list[str]) -> None:
    """Also half of the first rollouts do. A restarted engine begins with a cold start, which is not among them."""
    shares = [*[0.6] * (FIRST + 1), 0.48]
    _, whole = run(*shares)
    guard, before = run(*shares[:saved_after])
    saved = json.dumps(guard.state_dict())
    resumed = Guard(replace(FACTS, model=FACTS.model), profile=PROFILE)
    resumed.load_state_dict(json.loads(saved))
    assert json.dumps(resumed.state_dict()) == saved
    assert resumed.after_rollout(at(0.1)).cold
    after = [resumed.after_rollout(at(share)) for share in shares[saved_after:]]
    assert [*before, *after] == whole
    assert warned[0] == warned[-1]
    assert len(warned) == 2  # once a run


def test_a_state_goes_into_a_guard_that_has_seen_another_run() -> None:
    fresh, _ = run()
    fast, _ = run(*[1.2] * FIRST)
    slow, _ = run(*[0.6] * FIRST)
    fast.load_state_dict(slow.state_dict())
    assert fast.profile == slow.profile
    fast.load_state_dict(fresh.state_dict())
    assert (fast.profile, fast.settings.anchor) == (PROFILE, None)


def test_the_rollouts_of_another_gpu_are_forgotten_and_of_another_folder_are_not() -> None:
    guard, _ = run(*[0.6] * FIRST)
    saved = guard.state_dict()
    moved = saved | {"rollouts": [row | {"model": "/no/such/folder"} for row in saved["rollouts"]]}
    resumed = Guard(FACTS, profile=PROFILE)
    resumed.load_state_dict(moved)
    assert resumed.profile == guard.profile
    other = Guard(replace(FACTS, gpu="h100_sxm"))
    other.load_state_dict(saved)
    assert (other.rollouts, other.settings.anchor) == ([], None)


def test_the_anchor_of_a_plan_stays() -> None:
    settings = GuardSettings(anchor=Anchor({"gpu.pace": 0.2}, (), ()))
    guard, verdicts = run(*[0.8] * FIRST, 0.5, settings=settings)
    assert [(verdict.as_fast, verdict.anchored) for verdict in verdicts] == [(True, True)] * FIRST + [(False, True)]
    other, _ = run(*[0.5] * FIRST)
    profile = guard.profile
    guard.load_state_dict(other.state_dict())
    assert (guard.profile, guard.rollouts, guard.settings) == (profile, [], settings)


@pytest.mark.parametrize("rollouts", [None, 3, [3], [{"gpu": "h200_sxm"}], {"gpu": "h200_sxm"}])
def test_a_state_with_impossible_rollouts_is_refused_and_changes_nothing(rollouts: Any) -> None:
    guard, _ = run(*[0.6] * FIRST)
    before = guard.state_dict(), guard.profile
    with pytest.raises(ConfigError, match="guard's"):
        guard.load_state_dict(GuardState(slow=2).to_dict() | {"rollouts": rollouts})
    assert (guard.state_dict(), guard.profile) == before


def test_the_measured_pool_and_the_engines_limits_count() -> None:
    """A KV-starved engine is slow for a known reason, which the correction must not take for the machine's pace."""
    pool = 16 * 1500
    starved = replace(WORK, kv_cache_tokens=pool)
    predicted = predict(FACTS, starved, PROFILE)
    assert predicted.makespan_s > 1.2 * ALONE.makespan_s
    starved = replace(starved, seconds=predicted.makespan_s, preemptions=predicted.rollout.preemptions)
    eager = replace(FACTS, cudagraph_mode="NONE")
    launched = replace(WORK, seconds=predict(eager, WORK, PROFILE).makespan_s)
    assert launched.seconds > 1.2 * ALONE.makespan_s
    for facts, rollout in ((FACTS, starved), (eager, launched)):
        guard, _ = run(facts=facts)
        for _ in range(FIRST):
            guard.after_rollout(rollout)
        assert guard.settings.anchor is not None
        assert [guard.profile.coefficients[name] for name in PACES] == pytest.approx([1.0, 1.0], abs=0.01)


@pytest.mark.parametrize("compiled", [0, 3])
def test_a_first_rollout_and_one_that_compiles_correct_nothing_however_fast(compiled: int) -> None:
    guard = Guard(FACTS, profile=PROFILE)
    assert guard.after_rollout(at(1.0)).as_fast
    assert guard.rollouts == []
    guard.after_rollout(at(0.97, compiled_files=compiled))
    assert len(guard.rollouts) == (compiled == 0)


@pytest.mark.parametrize("inside", ["verl", "trl", "server"])
def test_a_trainers_front_end_has_the_pace_of_the_machine(inside: str) -> None:
    facts = replace(FACTS, inside=inside)
    predicted = predict(facts, WORK, PROFILE).makespan_s
    assert predicted > ALONE.makespan_s
    guard = Guard(facts, profile=PROFILE)
    shares = (0.1, *[0.5] * (FIRST + 1), 0.4)
    *_, same, slower = [guard.after_rollout(replace(WORK, seconds=predicted / share)) for share in shares]
    assert (same.as_fast, slower.as_fast) == (True, False)
    assert same.ratio == pytest.approx(1.0, abs=0.02)
    assert {row["inside"] for row in guard.rollouts} == {inside}
