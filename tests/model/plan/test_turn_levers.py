"""Levers on rollouts of turns, against plans of the same thing, and their sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fp8plan.model.distributions import LogNormal
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import Prediction, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.scene import Lever, Scene
from fp8plan.model.plan.turn_levers import turn_levers
from fp8plan.model.plan.turn_sentences import _saves
from fp8plan.model.rollout import simulate
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns

DENSE = "Qwen/Qwen3-8B"
WORK = Workload(16, 8, 800, turns=Turns(6, LogNormal(300, 0.8, 2000), 200, LogNormal(2, 1, 60)))
STARVED = EngineLimits(gpu_memory_utilization=0.2)
FP8 = "fp8_block+fp8_kv"


@cache
def planned(precision: str = FP8, concurrent: int | None = None, gpus: int | None = None, **limits: Any) -> Prediction:
    work = replace(WORK, turns=replace(WORK.turns, concurrent=concurrent))
    asked = replace(STARVED, **limits)
    return predict(PlanRequest(DENSE, "h200", work, limits=asked, precisions=[precision], gpus=gpus))


def makespan(prediction: Prediction) -> float:
    return prediction.chosen.timed.makespan_s


def scene(prediction: Prediction) -> Scene:
    return Scene.of(prediction.chosen, prediction.request, prediction.profile)


@cache
def levers(prediction_of: str = FP8, concurrent: int | None = None) -> dict[str, Lever]:
    return {lever.name: lever for lever in turn_levers(scene(planned(prediction_of, concurrent)))}


def numbers(found: dict[str, Lever]) -> list[int]:
    matches = (re.match(r"(\d+) trajectories at once", name) for name in found)
    return [int(match[1]) for match in matches if match]


@pytest.mark.parametrize("precision", ["bf16", FP8])
def test_fewer_trajectories_at_once_are_tried_as_long_as_that_saves_time(precision: str) -> None:
    found = levers(precision)
    (number,) = numbers(found)
    lever = found[f"{number} trajectories at once"]
    assert lever.before_s == pytest.approx(makespan(planned(precision)))
    assert lever.after_s == pytest.approx(makespan(planned(precision, number)))
    assert makespan(planned(precision, number // 2)) > lever.after_s
    assert lever.words["fp8plan"] == f"--concurrent {number}"
    reason = next(x for x in planned(precision).plan.reasons if lever.name in x)
    assert ("saves" in reason) == (lever.after_s < lever.before_s)


def test_a_cap_on_the_trajectories_at_once_is_doubled_up_to_all() -> None:
    found = levers(FP8, 8)
    more = max(numbers(found))
    assert more > 16
    assert found[f"{more} trajectories at once"].after_s < makespan(planned(FP8, 16)) < makespan(planned(FP8, 8))
    assert min(numbers(found)) == 4  # slower, but priced
    assert found["4 trajectories at once"].gain.ratio < 1


def test_prefix_caching_is_worth_what_the_plan_without_it_takes_longer() -> None:
    without = makespan(planned(enable_prefix_caching=False))
    assert without > 1.1 * makespan(planned())
    assert levers()["prefix caching off"].after_s == pytest.approx(without)
    on = {x.name: x for x in turn_levers(scene(planned(enable_prefix_caching=False)))}["prefix caching on"]
    assert (on.before_s, on.after_s) == pytest.approx((without, makespan(planned())))


def test_replicas_that_do_not_keep_trajectories_cost_their_share_of_a_lost_cache() -> None:
    name = "trajectories return to any replica"
    assert name not in levers()
    four = predict(PlanRequest(DENSE, "h200", WORK, limits=replace(STARVED, data_parallel_size=4), precisions=[FP8]))
    found = {lever.name: lever for lever in turn_levers(scene(four))}
    lost_s = found["prefix caching off"].after_s - makespan(four)
    assert found[name].after_s == pytest.approx(makespan(four) + 0.75 * lost_s)
    assert found[name].price.startswith("75% of the returns find no prefix")
    assert any(name in reason and "loses" in reason for reason in four.plan.reasons)


def test_a_cap_stops_the_longest_trajectories_with_what_their_tools_add() -> None:
    (name,) = (name for name in levers() if name.startswith("cap at"))
    most = int(name.split()[2].replace(",", ""))
    batch = WORK.batch()
    lengths = batch.lengths - batch.prompts
    shorter = batch.stopped_at(most)
    np.testing.assert_array_equal(shorter.lengths - shorter.prompts <= most, True)
    assert ((shorter.lengths == batch.lengths) == (lengths <= most)).all()
    chosen = planned().chosen
    again = simulate(chosen.setup, shorter, planned().profile, memory=chosen.memory)
    assert levers()[name].after_s == pytest.approx(again.rollout.makespan_s)
    assert levers()[name].price.startswith(f"{(lengths > most).mean():.0%} of the trajectories have no end")


def test_the_gain_of_a_larger_cache_is_named_apart_from_that_of_faster_steps() -> None:
    bf16, own = planned("bf16"), planned()
    assert bf16.chosen.memory is not None
    blocks = bf16.chosen.memory.usable_blocks + 1
    small = makespan(planned(num_gpu_blocks=blocks))
    kept = scene(own).kept_gain(bf16.chosen.memory.kv_cache_tokens)
    assert kept == pytest.approx(small / makespan(own), rel=1e-3)
    assert kept > 1.2
    both = predict(PlanRequest(DENSE, "h200", WORK, limits=STARVED, precisions=["bf16", FP8]))
    gain = makespan(bf16) / makespan(own)
    words = f"Of the {gain:.2f}x over bf16, {kept:.2f}x is by the prefixes and requests that a larger KV cache keeps"
    assert any(f"{words}, and {gain / kept:.2f}x by faster steps" in reason for reason in both.plan.reasons)


@pytest.mark.parametrize(
    ("after_s", "words"),
    [(99.7, "changes nothing"), (100.3, "changes nothing"), (98.0, "saves 2 s"), (130, "loses 30 s")],
)
def test_a_lever_that_changes_less_than_half_a_percent_changes_nothing(after_s: float, words: str) -> None:
    assert _saves(100.0, after_s) == words


def test_an_ample_cache_gains_nothing_by_kept_prefixes() -> None:
    ample = predict(PlanRequest(DENSE, "h200", WORK, precisions=["bf16", FP8]))
    assert not any("a larger KV cache keeps" in reason for reason in ample.plan.reasons)


def test_an_fp8_kv_cache_has_the_price_of_the_choice_that_differs_in_it_alone() -> None:
    both = predict(PlanRequest(DENSE, "h200", WORK, limits=STARVED, precisions=["bf16", "fp8_kv"]))
    saved = makespan(planned("bf16")) - makespan(planned("fp8_kv"))
    assert any(
        f"Lever: FP8 KV cache (the plan has it, bf16 has not): saves {saved:.3g} s" in x for x in both.plan.reasons
    )
