"""The guard's ladder: it only leads down, one rung at a time, and never without enough bad rollouts in a row."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import (
    DEPTH,
    Action,
    GuardSettings,
    GuardState,
    Symptoms,
    answered,
    decide,
    ladder,
    stepped_down,
)

SPEED = 1000.0  # tokens per second, achieved
SETTINGS = GuardSettings(patience=3, margin=0.05, kl_limit=0.03, kl_release=0.8)
CLEAN_KL, HELD_KL, HIGH_KL = 0.01, 0.027, 0.05
RUNGS = {
    "bf16": (),
    "fp8_block": (Action.ALL_BF16,),
    "fp8_kv": (Action.RECALIBRATE_KV, Action.KV_TO_BF16),
    "fp8_block+fp8_kv": (Action.RECALIBRATE_KV, Action.KV_TO_BF16, Action.ALL_BF16),
}


def seen(name: str, kl: float | None = None, compiled: bool = False, **gains: float) -> Symptoms:
    """gains: rung -> speed after it / speed now."""
    expected = {Action(rung): SPEED * gain for rung, gain in gains.items()}
    return Symptoms(name, SPEED, as_fast=True, compiled=compiled, expected=expected, kl_k3=kl)


def follow(rows: list[Symptoms], settings: GuardSettings = SETTINGS) -> list[Action]:
    state, actions = GuardState(), []
    for row in rows:
        state, action, _ = decide(state, row, settings)
        actions.append(action)
    return actions


@pytest.mark.parametrize("name", PRESETS)
def test_a_lasting_mismatch_goes_down_every_rung_that_the_precision_has(name: str) -> None:
    assert ladder(find_precision(name)) == RUNGS[name]
    taken = [action for action in follow([seen(name, HIGH_KL)] * 15) if action != Action.NONE]
    assert tuple(taken) == RUNGS[name]


@pytest.mark.parametrize("name", ["fp8_kv", "fp8_block+fp8_kv"])
def test_a_slow_engine_is_never_recalibrated(name: str) -> None:
    actions = follow([seen(name, kv_to_bf16=1.5)] * 9)
    assert actions[:3] == [Action.NONE, Action.NONE, Action.KV_TO_BF16]
    assert Action.RECALIBRATE_KV not in actions


def test_speed_takes_the_first_rung_that_gains_enough() -> None:
    rows = [seen("fp8_block+fp8_kv", kv_to_bf16=1.02, all_bf16=1.2)] * 3
    assert follow(rows)[-1] == Action.ALL_BF16
    rows = [seen("fp8_block+fp8_kv", kv_to_bf16=1.1, all_bf16=1.2)] * 3
    assert follow(rows)[-1] == Action.KV_TO_BF16
    rows = [seen("fp8_block+fp8_kv", kv_to_bf16=1.05, all_bf16=1.2)] * 3  # the margin itself is not enough
    assert follow(rows)[-1] == Action.ALL_BF16
    assert set(follow([seen("fp8_block", all_bf16=1.05)] * 9)) == {Action.NONE}


def test_a_gain_within_the_margin_keeps_the_count_and_none_clears_it() -> None:
    slow, held, fast = (seen("fp8_block", all_bf16=gain) for gain in (1.2, 1.05, 1.0))
    slower = seen("fp8_block", all_bf16=0.7)
    assert follow([slow, slow, held, slow])[-1] == Action.ALL_BF16
    assert follow([slow, slow, fast, slow])[-1] == Action.NONE
    assert follow([slow, slow, slower, slow])[-1] == Action.NONE


def test_of_two_symptoms_the_deeper_rung_is_taken() -> None:
    both = seen("fp8_block+fp8_kv", HIGH_KL, all_bf16=1.2)
    state, action, why = decide(GuardState(slow=2, mismatched=2), both, SETTINGS)
    assert action == Action.ALL_BF16
    assert "1,200 tokens/s" in why
    assert "KL 0.05 is over its limit 0.03" in why
    assert state == GuardState(rung=Action.ALL_BF16)


def test_a_compile_excuses_the_speed_but_not_the_mismatch() -> None:
    slow = seen("fp8_block", all_bf16=2.0)
    stalled = seen("fp8_block", compiled=True, all_bf16=2.0)
    assert set(follow([stalled] * 20)) == {Action.NONE}
    assert follow([slow, stalled, slow, stalled, slow])[-1] == Action.ALL_BF16  # it neither counts nor clears
    assert follow([seen("fp8_block", HIGH_KL, compiled=True)] * 3)[-1] == Action.ALL_BF16


def test_between_limit_and_release_a_count_stands_still() -> None:
    high, held, clean = (seen("fp8_block", kl) for kl in (HIGH_KL, HELD_KL, CLEAN_KL))
    assert follow([high, high, held, high])[-1] == Action.ALL_BF16
    assert follow([high, high, clean, high])[-1] == Action.NONE
    assert set(follow([held] * 20)) == {Action.NONE}
    limit, release = seen("fp8_block", 0.03), seen("fp8_block", 0.03 * 0.8)
    assert follow([high, limit, high])[-1] == Action.NONE  # the limit itself is not over it
    assert follow([high, limit, high, high])[-1] == Action.ALL_BF16
    assert follow([high, high, release, high])[-1] == Action.NONE  # the release itself ends it
    assert decide(GuardState(mismatched=2), limit, SETTINGS)[1:] == (Action.NONE, "nothing to do")
    assert set(follow([seen("fp8_block")] * 5)) == {Action.NONE}  # KL not known


def test_no_limit_means_no_mismatch() -> None:
    assert set(follow([seen("fp8_block", 9.0)] * 9, GuardSettings(kl_limit=None))) == {Action.NONE}


def test_reasons_say_how_far_it_is() -> None:
    _, _, why = decide(GuardState(mismatched=1), seen("fp8_kv", HIGH_KL), SETTINGS)
    assert why == "KL 0.05 is over its limit 0.03: such rollout 2 of 3 before recalibrate_kv"
    _, _, why = decide(GuardState(), seen("bf16", HIGH_KL), SETTINGS)
    assert "nothing left to step down to from bf16" in why
    _, _, why = decide(GuardState(), seen("fp8_kv", kv_to_bf16=1.5), SETTINGS)
    assert why == "1,500 tokens/s are expected after kv_to_bf16: such rollout 1 of 3 before it is taken"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compiled": True, "as_fast": False}, "a kernel was compiled, so this rollout is not counted"),
        ({"cold": True, "as_fast": False}, "the engine's first rollout is a cold start, so it is not counted"),
        ({}, "nothing to do"),
        ({"as_fast": False, "expected": {}}, "there is nothing faster to step down to from fp8_block"),
        (
            {"as_fast": False},
            "no step down, because none is expected to be much faster (1,020 tokens/s after all_bf16)",
        ),
    ],
)
def test_it_says_why_there_is_nothing_to_do(changes: dict[str, Any], why: str) -> None:
    symptoms = replace(seen("fp8_block", all_bf16=1.02), **changes)
    assert decide(GuardState(), symptoms, SETTINGS) == (GuardState(), Action.NONE, why)


def test_without_patience_it_only_judges() -> None:
    judges = GuardSettings(patience=None)
    assert set(follow([seen("fp8_kv", HIGH_KL, kv_to_bf16=1.5)] * 9, judges)) == {Action.NONE}
    _, _, why = decide(GuardState(mismatched=8), seen("fp8_kv", HIGH_KL), judges)
    assert why == "KL 0.05 is over its limit 0.03: this guard only judges (patience is None)"


def test_a_reason_counts_the_bad_rollouts_alone() -> None:
    """Between two bad ones may lie others, between the limit and its release, so they are not "in a row"."""
    state, whys = GuardState(), []
    for kl in (HIGH_KL, HELD_KL, HELD_KL, HIGH_KL, HELD_KL, HIGH_KL):
        state, _, why = decide(state, seen("fp8_kv", kl), SETTINGS)
        whys.append(why)
    assert whys[3] == "KL 0.05 is over its limit 0.03: such rollout 2 of 3 before recalibrate_kv"
    assert whys[5] == "recalibrate_kv, because KL 0.05 is over its limit 0.03, in 3 rollouts"


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_left_of_a_precision(name: str) -> None:
    before = find_precision(name)
    for action in Action:
        after = find_precision(stepped_down(name, action))
        assert after.weights == ("bf16" if action == Action.ALL_BF16 else before.weights)
        assert after.kv == ("bf16" if action in (Action.KV_TO_BF16, Action.ALL_BF16) else before.kv)


gains = st.dictionaries(st.sampled_from(["kv_to_bf16", "all_bf16"]), st.floats(0.3, 3.0))
rollouts = st.lists(st.tuples(st.none() | st.floats(0, 0.1), st.booleans(), gains), min_size=1, max_size=40)


def run(name: str, rows: list[Any], patience: int, save: bool = False) -> list[tuple[GuardState, Action, bool]]:
    """State and action after each rollout, and whether the rollout showed a symptom."""
    settings, state, log = GuardSettings(patience=patience), GuardState(), []
    assert settings.kl_limit is not None
    for kl, compiled, expected in rows:
        open_rungs = [x for x in RUNGS[name] if DEPTH[x] > DEPTH[state.rung]]
        helps = any(expected.get(x.value, 0) > 1 + settings.margin for x in open_rungs)
        bad = (helps and not compiled) or (kl is not None and kl > settings.kl_limit)
        state, action, _ = decide(state, seen(name, kl, compiled, **expected), settings)
        if save:
            state = GuardState.from_dict(json.loads(json.dumps(state.to_dict())))
        log.append((state, action, bad))
    return log


@given(name=st.sampled_from(list(PRESETS)), rows=rollouts, patience=st.integers(1, 5))
def test_it_only_goes_down_within_the_ladder_and_never_in_a_hurry(name: str, rows: list[Any], patience: int) -> None:
    log = run(name, rows, patience)
    depths = [DEPTH[state.rung] for state, _, _ in log]
    assert depths == sorted(depths)
    taken = [i for i, (_, action, _) in enumerate(log) if action != Action.NONE]
    assert len(taken) <= len(RUNGS[name])
    assert {log[i][1] for i in taken} <= set(RUNGS[name])
    since = 0
    for i in taken:
        assert sum(bad for _, _, bad in log[since : i + 1]) >= patience
        assert log[i][2]  # the last straw is a bad rollout itself
        assert log[i][0] == GuardState(rung=log[i][1])  # the counts start again
        since = i + 1


@given(name=st.sampled_from(list(PRESETS)), rows=rollouts, patience=st.integers(1, 5))
def test_a_saved_state_goes_on_as_if_nothing_had_happened(name: str, rows: list[Any], patience: int) -> None:
    assert run(name, rows, patience) == run(name, rows, patience, save=True)


@pytest.mark.parametrize(
    "data",
    [{"rung": "up"}, {"slow": -1}, {"slow": 1.5}, {"mismatched": True}, {"mismatched": None}, {"more": 1}],
)
def test_a_state_that_nobody_saved_is_refused(data: dict[str, Any]) -> None:
    saved = GuardState().to_dict()
    for wrong in (saved | data, {}):
        with pytest.raises(ConfigError, match=r"the guard's state.*allowed"):
            GuardState.from_dict(wrong)
    assert GuardState.from_dict(saved) == GuardState()


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience": 0},
        {"patience": 1.5},
        {"slack": -0.1},
        {"margin": float("nan")},
        {"kl_limit": 0.0},
        {"kl_release": 0},
        {"kl_release": 1.1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is .*allowed"):
        GuardSettings(**wrong)


def test_the_settings_at_their_bounds_and_by_default() -> None:
    assert GuardSettings(slack=0, margin=0, patience=1, kl_release=1).kl_release == 1
    assert GuardSettings() == GuardSettings(0.05, 3, 0.05, 0.03, 0.8)


@pytest.mark.parametrize("name", RUNGS)
def test_what_a_controller_escalates_takes_the_rungs_in_order_each_once(name: str) -> None:
    state, said = GuardState(), []
    for escalation in (Escalation.RECALIBRATE_KV, *[Escalation.STEP_DOWN] * 3):
        action = answered(state, name, escalation)
        said.append(action)
        state = GuardState(rung=action, taken=state.taken) if action != Action.NONE else state
        assert answered(state, name, Escalation.RECALIBRATE_KV) == Action.NONE  # not twice
    assert tuple(x for x in said if x != Action.NONE) == RUNGS[name]
    assert (said[0] == Action.RECALIBRATE_KV) == (Action.RECALIBRATE_KV in RUNGS[name])
    assert decide(state, seen(name, HIGH_KL), SETTINGS)[1] == Action.NONE  # the guard knows that they are taken


def test_fixed_scales_that_clip_lead_to_a_bf16_cache_and_never_to_a_recalibration() -> None:
    clips = replace(seen("fp8_block+fp8_kv"), kv_fixed=True, kv_clipped=("layer 3",))
    healthy = replace(seen("fp8_block+fp8_kv"), kv_fixed=True)
    assert follow([clips] * 3) == [Action.NONE, Action.NONE, Action.KV_TO_BF16]
    assert follow([clips, clips, healthy, clips])[-1] == Action.NONE
    assert "fixed KV scales clip 1 layer(s) (layer 3)" in decide(GuardState(mismatched=2), clips, SETTINGS)[2]
    assert ladder(find_precision("fp8_kv"), kv_fixed=True) == (Action.KV_TO_BF16,)
    none = answered(GuardState(), "fp8_kv", Escalation.RECALIBRATE_KV, kv_fixed=True)
    down = answered(GuardState(), "fp8_kv", Escalation.STEP_DOWN, kv_fixed=True)
    assert (none, down) == (Action.NONE, Action.KV_TO_BF16)
