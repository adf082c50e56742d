"""Levers on the weight sync against plans that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.scene import Lever
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.tune.answer import Answer
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import Tuned, search
from fp8plan.model.tune.weight_sync import USUAL_RATE, sync_levers
from fp8plan.model.weight_changes import TopK
from fp8plan.model.workload import Workload
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings

MODEL = "Qwen/Qwen3-8B"
WORK = Workload(16, 8, Fixed(200), LogNormal(600, 0.9, 3000))
TIMES = StepTimes(train_s=52, logprob_s=14)


def tuned(precision: str = "fp8_block", link: str = "1Gb/s", **options: object) -> Tuned:
    return search(TuneRequest(MODEL, "h200", WORK, trainer=TIMES, link=link, precisions=[precision], **options))  # type: ignore[arg-type]


def levers_of(made: Tuned) -> dict[str, Lever]:
    return {lever.name: lever for lever in sync_levers(made.scene())}


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_a_delta_is_worth_what_a_plan_with_a_learning_rate_saves(precision: str) -> None:
    made = tuned(precision)
    every = levers_of(made)
    assert set(every) == {"delta sync"} | ({"dense FP8 sync"} if precision == "fp8_block" else set())
    limits = made.best.chosen.setup.limits
    options = {"limits": limits, "trainer": TIMES, "link": "1Gb/s", "precisions": [precision]}
    planned = predict(PlanRequest(MODEL, "h200", WORK, learning_rate=USUAL_RATE, **options))  # type: ignore[arg-type]
    delta = every["delta sync"]
    assert delta.before_s == pytest.approx(made.best.chosen.step_s)
    assert delta.after_s == pytest.approx(planned.chosen.step_s)
    assert "assumed learning rate of 1e-06 with adamw: type your --learning-rate" in delta.setting
    assert delta.gain.ratio == pytest.approx(delta.before_s / delta.after_s)
    assert delta.gain.low < delta.gain.ratio < delta.gain.high
    copy = made.best.chosen.setup.shape.weight_bytes(made.best.chosen.setup.precision)
    assert delta.price == f"{copy / 1e9:.3g} GB of the trainer's memory for a copy"
    if precision == "fp8_block":
        fp8 = next(cost for cost in planned.chosen.syncs if cost.mode == "dense FP8")
        saved = made.best.chosen.syncs[0].seconds - fp8.seconds
        assert every["dense FP8 sync"].saved_s[0] == pytest.approx(saved)


def test_the_sync_of_the_plan_is_marked_as_its_own() -> None:
    for top_k, name, mismatch in ((None, "delta sync", "nothing"), (TopK(share=1e-5), "top-k sync", "unknown")):
        made = tuned(learning_rate=1e-6, top_k=top_k)
        (lever,) = levers_of(made).values()
        assert (lever.name, lever.in_plan, lever.mismatch) == (name, True, mismatch)
        assert lever.after_s == pytest.approx(made.best.chosen.step_s)
        dense = tuned().best.chosen
        assert lever.before_s == pytest.approx(dense.step_s, rel=1e-3)
        assert "assumed" not in lever.setting


@pytest.mark.parametrize("options", [{}, {"learning_rate": 1e-6, "top_k": TopK(nbytes=2e7)}])
def test_the_words_of_a_sync_are_settings_of_an_engine(options: dict[str, object]) -> None:
    for lever in levers_of(tuned(**options)).values():
        settings = eval(lever.words["fp8plan"], {"SyncSettings": SyncSettings, "TopK": TopK})
        assert isinstance(settings, SyncSettings)
        assert (settings.delta is None) == (lever.name == "dense FP8 sync")
        assert settings.top_k == options.get("top_k")


@pytest.mark.parametrize("target", ["verl", "trl"])
def test_a_trainer_with_one_mode_has_no_lever_and_is_told_what_its_sync_takes(target: str) -> None:
    made = tuned(target=target)
    assert levers_of(made) == {}
    (told,) = (sentence for sentence in Answer.of(made).sentences if "weight sync takes" in sentence)
    assert "own sync sends all weights in BF16" in told


def test_a_sync_that_does_not_count_is_no_lever_and_without_a_step_there_is_none() -> None:
    answer = Answer.of(tuned(link="400Gb/s"))
    assert not any(lever.name.endswith(" sync") for lever in answer.levers)
    assert not any("weight sync takes" in sentence for sentence in answer.sentences)
    alone = search(TuneRequest(MODEL, "h200", WORK, link="1Gb/s", learning_rate=1e-6))
    assert levers_of(alone) == {}
    assert levers_of(replace(alone, request=replace(alone.request, link=None, learning_rate=None))) == {}
