"""Tuned rollouts of turns: the trajectories at once are searched with the limits, and all levers are plans of turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import LogNormal
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan import planner
from fp8plan.model.plan.choice import choose
from fp8plan.model.plan.planner import Prediction, predict, unpriced
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.scene import Lever, Scene
from fp8plan.model.targets import TARGETS
from fp8plan.model.tune.answer import Answer
from fp8plan.model.tune.request import SEARCHED, TuneRequest
from fp8plan.model.tune.search import WORTH_A_CHANGE, Field, Grid, Tuned, search
from fp8plan.model.tune.speculation import Speculation
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns

DENSE = "Qwen/Qwen3-8B"
TURNS = Turns(6, LogNormal(100, 0.4, 800), 1500, LogNormal(4, 0.5, 20))
WORK = Workload(24, 8, 600, turns=TURNS)
STARVED = EngineLimits(gpu_memory_utilization=0.32)
PRECISIONS = ["bf16", "fp8_block", "fp8_block+fp8_kv"]


def asked(concurrent: int | None = None, limits: EngineLimits = STARVED, gpus: int | None = None) -> TuneRequest:
    work = replace(WORK, turns=replace(TURNS, concurrent=concurrent))
    return TuneRequest(DENSE, "h200", work, limits=limits, precisions=PRECISIONS, gpus=gpus)


def predicted(limits: EngineLimits, concurrent: int | None) -> Prediction:
    request = asked(concurrent, limits)
    return predict(PlanRequest(DENSE, "h200", request.workload, limits=limits, precisions=PRECISIONS))


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return search(asked())


@pytest.fixture(scope="module")
def found(tuned: Tuned) -> dict[str, Lever]:
    return {lever.name: lever for lever in Answer.of(tuned).levers}


def test_the_trajectories_at_once_are_searched_with_the_limits(tuned: Tuned) -> None:
    assert tuned.grid.concurrent == (16, 32, 64, 128, None)
    before, number = tuned.changes["concurrent"]
    assert before is None
    assert tuned.best.request.batch.at_once == number
    assert tuned.best.chosen.seconds < 0.9 * tuned.base.chosen.seconds
    assert tuned.best.plan == predicted(tuned.best.plan.limits, number).plan
    sentences = " ".join(tuned.prediction.plan.reasons)
    assert f"concurrent {number} instead of all" in sentences
    assert "with 16, 32, 64, 128, all trajectories at once" in sentences


def test_no_plan_of_the_grid_is_better(tuned: Tuned) -> None:
    grid, every = tuned.grid, []
    for seqs, concurrent in product(grid.max_num_seqs, grid.concurrent):
        limits = replace(tuned.base.plan.limits, max_num_seqs=seqs)
        every.append(predicted(limits, concurrent).chosen)
    best = every[choose(every, tuned.best.plan.budget)]
    assert tuned.best.chosen.seconds <= best.seconds * (1 + WORTH_A_CHANGE)


def test_the_choice_at_a_point_is_that_of_a_plan() -> None:
    base = unpriced(asked(gpus=2))
    grid = Grid.around(base, STARVED, ())
    some = [point for group in grid.settings(base) for point in group][::4]
    assert len({point.concurrent for point in some}) > 2
    for (limits, concurrent), choice in Field.of(base).choices(some):
        whole = predict(asked(concurrent, limits, gpus=2)).chosen
        assert (choice.setup.precision, choice.setup.limits) == (whole.setup.precision, whole.setup.limits)
        assert choice.seconds == pytest.approx(whole.seconds, rel=1e-9)


def test_a_number_that_is_given_or_kept_stays() -> None:
    kept = replace(asked(), keep=["concurrent", *SEARCHED])
    assert search(kept).settings == 1
    given = search(asked(48))
    assert given.grid.concurrent == (48,)
    assert given.best.request.batch.at_once == 48


@pytest.mark.parametrize("target", ["verl", "trl", "nemo-rl", "skyrl", "openrlhf"])
def test_a_trainer_that_cannot_bound_the_trajectories_at_once_gets_all(target: str) -> None:
    base = unpriced(replace(asked(), target=target))
    assert Grid.around(base, STARVED, ()).concurrent == (None,)


@pytest.mark.parametrize("target", ["vllm", "prime-rl", "slime"])
def test_a_target_that_bounds_the_trajectories_at_once_has_them_searched(target: str) -> None:
    base = unpriced(replace(asked(), target=target))
    assert Grid.around(base, STARVED, ()).concurrent == (16, 32, 64, 128, None)


def test_prime_rl_gets_all_samples_of_a_prompt_at_once() -> None:
    asks = replace(asked(), workload=Workload(4, 48, 600, turns=TURNS))
    for target, numbers in {"vllm": (16, 32, 64, 128, None), "prime-rl": (64, 128, None)}.items():
        assert Grid.around(unpriced(replace(asks, target=target)), STARVED, ()).concurrent == numbers


def test_the_levers_of_turns_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes: list[Scene] = []

    def counted(scene: Scene) -> list[Lever]:
        scenes.append(scene)
        return []

    monkeypatch.setattr(planner, "turn_levers", counted)
    tuned = search(replace(asked(), keep=SEARCHED))
    Answer.of(tuned)
    assert [scene.choice for scene in scenes] == [tuned.best.chosen]


def test_every_word_of_a_lever_is_a_target_s(found: dict[str, Lever]) -> None:
    assert {program for lever in found.values() for program in lever.words} <= {*TARGETS, "fp8plan"}


def test_a_change_of_the_trajectories_at_once_is_a_lever_of_the_plan(tuned: Tuned, found: dict[str, Lever]) -> None:
    _, number = tuned.changes["concurrent"]
    lever = found[f"concurrent {number}"]
    assert lever.in_plan
    assert lever.before_s == pytest.approx(predicted(tuned.best.plan.limits, None).chosen.timed.makespan_s)
    assert lever.words["fp8plan"] == f"--concurrent {number}"
    assert lever.words["prime-rl"] == (
        f"orchestrator.concurrency.max_inflight={number} and orchestrator.concurrency.min_inflight={number}"
    )
    assert "vllm" not in lever.words


def test_levers_of_turns_are_plans_of_turns(found: dict[str, Lever], tuned: Tuned) -> None:
    number = tuned.best.request.batch.at_once
    without = predicted(replace(tuned.best.plan.limits, enable_prefix_caching=False), number)
    assert found["prefix caching off"].after_s == pytest.approx(
        next(c for c in without.tried if c.setup.precision == tuned.best.chosen.setup.precision).timed.makespan_s
    )
    assert found["FP8 KV cache"].in_plan
    assert any("by the prefixes and requests that a larger KV cache keeps" in x for x in tuned.best.plan.reasons)
    two = predict(replace(asked(number), limits=replace(tuned.best.plan.limits, data_parallel_size=2)))
    same = next(c for c in two.tried if c.setup.precision == tuned.best.chosen.setup.precision)
    assert found["2 GPUs"].after_s == pytest.approx(same.timed.makespan_s)
    assert not any(lever.measured for lever in found.values())
    assert not any("partial" in name or "asynchronous" in name for name in found)


def test_aborting_the_last_trajectories_ends_with_as_many_as_are_needed(found: dict[str, Lever]) -> None:
    stopped = found["stop the tail, 10% more"]
    assert stopped.after_s < stopped.before_s
    assert "of the longest tenth lost" in stopped.price


def test_the_answer_says_what_limits_a_rollout_of_turns(tuned: Tuned) -> None:
    answer = Answer.of(tuned)
    turns = tuned.best.chosen.timed.turns
    assert turns is not None
    assert f"an endless KV cache {turns['saves']['cache']:.0%}" in answer.limited_by
    assert "shortens the longest trajectory" in answer.floor
    assert not any("--acceptance" in sentence for sentence in answer.sentences)
    levels = [answer.waterfall.before, *answer.waterfall.changes, answer.waterfall.tuned]
    assert levels[-2].seconds == pytest.approx(levels[-1].seconds, rel=1e-6)
    assert [level.seconds for level in answer.waterfall.beyond] == sorted(
        (level.seconds for level in answer.waterfall.beyond), reverse=True
    )


def test_drafts_of_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match="for which drafts are not modelled; leave --acceptance out"):
        search(replace(asked(), speculation=Speculation(0.6)))
