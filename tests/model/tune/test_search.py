"""The search of an engine's limits against plans at every setting."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from measured_families import shape_of

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits, capture_size_for
from fp8plan.model.plan.choice import choose
from fp8plan.model.plan.explain import limits_matter
from fp8plan.model.plan.planner import Prediction, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.rollout import makespans, rollout, schedules
from fp8plan.model.setup import EngineSetup, default_limits
from fp8plan.model.tune.request import SEARCHED, TuneRequest
from fp8plan.model.tune.search import WORTH_A_CHANGE, Field, Grid, Tuned, search
from fp8plan.model.workload import Workload

SMALL, DENSE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"
SHORT = Workload(75, 8, Fixed(64), Fixed(48))
STARVED = Workload(12, 16, Fixed(300), LogNormal(900, 0.7, 3000))
CASES: dict[str, dict[str, Any]] = {
    "more requests than a graph": {"model": SMALL, "workload": SHORT},
    "a starved pool": {"model": DENSE, "workload": STARVED, "limits": EngineLimits(gpu_memory_utilization=0.16)},
    "two GPUs": {"model": SMALL, "workload": SHORT, "gpus": 2, "precisions": ["bf16", "fp8_block"]},
    "an RL step": {
        "model": SMALL,
        "workload": replace(SHORT, prompts=20),
        "trainer": StepTimes(train_s=3.0, logprob_s=1.0),
    },
    "experts": {"model": "fp8plan/moe-7b", "workload": replace(SHORT, prompts=20)},
    "windows": {
        "model": "google/gemma-3-12b-it",
        "workload": replace(SHORT, prompts=9, samples_per_prompt=8),
        "precisions": ["bf16", "fp8_kv"],
    },
}


def at_every_setting(case: dict[str, Any]) -> dict[EngineLimits, Prediction]:
    """A whole plan under every combination of the grid that vLLM allows."""
    base = predict(PlanRequest(gpu="h200", **case))
    grid = Grid.around(base, case.get("limits"), ())
    plans = {}
    for seqs, whole, budget, caching in product(
        grid.max_num_seqs, grid.whole_graphs, grid.max_num_batched_tokens, grid.prefix_caching
    ):
        if budget >= seqs:
            limits = replace(
                base.plan.limits,
                max_num_seqs=seqs,
                max_num_batched_tokens=budget,
                max_cudagraph_capture_size=capture_size_for(seqs) if whole else None,
                enable_prefix_caching=caching,
            )
            plans[limits] = predict(PlanRequest(gpu="h200", **case | {"limits": limits}))
    return plans


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name == "windows" else pytest.mark.slow) for name, case in CASES.items()],
)
def test_no_plan_under_any_setting_is_better(case: dict[str, Any]) -> None:
    plans, tuned = at_every_setting(case), search(TuneRequest(gpu="h200", **case))
    choices = [plan.chosen for plan in plans.values()]
    best = choices[choose(choices, tuned.best.plan.budget)]
    assert tuned.best.chosen.setup.precision == best.setup.precision
    assert tuned.best.chosen.seconds <= best.seconds * (1 + WORTH_A_CHANGE)
    assert tuned.best.plan == plans[tuned.best.plan.limits].plan  # the very plan that `plan` makes there


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_choice_at_a_setting_is_that_of_a_plan(case: dict[str, Any]) -> None:
    base = predict(PlanRequest(gpu="h200", **case))
    grid = Grid.around(base, case.get("limits"), ())
    field = Field.of(base)
    for (limits, _), choice in (pair for group in grid.settings(base) for pair in field.choices(group)):
        whole = predict(PlanRequest(gpu="h200", **case | {"limits": limits})).chosen
        assert (choice.setup.precision, choice.setup.limits) == (whole.setup.precision, whole.setup.limits)
        assert choice.seconds == pytest.approx(whole.seconds, rel=1e-9)
        assert choice.layout_doubt == whole.layout_doubt


def test_makespans_are_those_of_whole_rollouts() -> None:
    base = predict(PlanRequest(SMALL, "h200", SHORT, gpus=4, inside="server"))
    for candidate in (c for c in base.tried if c.rollout):
        setup, memory = candidate.setup, candidate.memory
        assert memory is not None
        model = setup.step_model(base.profile)
        batches = base.request.batch.split(setup.limits.data_parallel_size)
        several = [schedules(batches, memory.kv, replace(setup.limits, max_num_seqs=n)) for n in (1024, 50)]
        assert makespans(several, model) == pytest.approx([rollout(plans, model).makespan_s for plans in several])


def test_what_is_given_stays() -> None:
    limits = EngineLimits(max_num_seqs=300, max_num_batched_tokens=5000, gpu_memory_utilization=0.7)
    kept = ["enable_prefix_caching", "max_cudagraph_capture_size"]
    tuned = search(TuneRequest(SMALL, "h200", SHORT, limits=limits, keep=kept))
    assert (tuned.settings, tuned.changes) == (1, {})
    assert tuned.prediction.plan.limits == replace(limits, max_model_len=112)
    free = search(TuneRequest(SMALL, "h200", SHORT, limits=EngineLimits(gpu_memory_utilization=0.7)))
    assert free.changes == {"max_cudagraph_capture_size": (None, 1024)}
    assert free.prediction.plan.limits.gpu_memory_utilization == 0.7
    assert free.settings > 1
    for wrong in ("max_num_seqs", ["block_size"]):
        with pytest.raises(ConfigError, match=r"keep is .*; allowed: a list with some of max_num_seqs"):
            search(TuneRequest(SMALL, "h200", SHORT, keep=wrong))


def test_graphs_for_all_requests_hold_them_whatever_their_number() -> None:
    fixed = EngineLimits(max_num_seqs=600)
    tuned = search(TuneRequest(SMALL, "h200", SHORT, limits=fixed, precisions=["bf16"]))
    assert tuned.changes == {"max_cudagraph_capture_size": (None, 608)}  # vLLM captures multiples of 16
    assert max(tuned.best.chosen.setup.cudagraph_sizes) == 608
    for requests in (1, 256, 257, 600, 1100, 2048):
        limits = replace(fixed, max_num_seqs=requests, max_cudagraph_capture_size=capture_size_for(requests))
        assert requests <= max(EngineSetup(SMALL, "h200", "bf16", limits).cudagraph_sizes) < requests + 16


def test_the_least_share_is_as_fast_and_less_is_not() -> None:
    tuned = search(TuneRequest(DENSE, "h200", replace(STARVED, prompts=40), precisions=["bf16"]))
    assert tuned.least_share is not None

    def seconds(share: float) -> float:
        limits = replace(tuned.best.plan.limits, gpu_memory_utilization=share)
        return predict(
            PlanRequest(DENSE, "h200", replace(STARVED, prompts=40), precisions=["bf16"], limits=limits)
        ).chosen.seconds

    at_most = tuned.best.chosen.seconds * (1 + WORTH_A_CHANGE)
    assert seconds(tuned.least_share) <= at_most < seconds(tuned.least_share - 0.05)
    (sentence,) = [x for x in tuned.prediction.plan.reasons if "would be enough" in x]
    assert sentence.startswith(f"gpu_memory_utilization {tuned.least_share:g} ")


@pytest.mark.parametrize("name", ["nvidia/Nemotron-H-8B-Base-8K", "google/gemma-4-31B"])
def test_prefix_caching_that_is_not_modelled_is_not_tried(name: str) -> None:
    model = shape_of(name) if name.startswith("nvidia") else name
    limits = default_limits(find_gpu("h200"), model, enable_prefix_caching=False)
    tuned = search(TuneRequest(model, "h200", replace(SHORT, prompts=3), limits=limits, precisions=["bf16"]))
    assert tuned.best.plan.limits.enable_prefix_caching is False
    assert tuned.settings > 1


def test_a_cpu_has_no_graphs_and_no_share() -> None:
    tuned: Tuned = search(TuneRequest("fp8plan/dense-50m", "cpu", replace(SHORT, prompts=9)))
    assert tuned.grid.whole_graphs == (False,)
    assert tuned.least_share is None


def test_a_tuned_plan_is_a_plan() -> None:
    plan = fp8plan.tune(SMALL, "h200", SHORT)
    assert isinstance(plan, fp8plan.Plan)
    assert fp8plan.Plan.from_json(plan.to_json(tune={"more": 1})) == plan
    assert plan.vllm_kwargs()["max_cudagraph_capture_size"] == plan.limits.max_cudagraph_capture_size == 1024
    for target in ("vllm", "verl", "trl"):
        assert plan.emit(target)
    headline, grid, _ = plan.reasons[-3:]
    assert headline.startswith("Limits: max_cudagraph_capture_size 1024 instead of vLLM's own. The choice is ")
    assert "max_num_seqs 64, 128, 256, 512, 600, 1024" in grid


@pytest.mark.parametrize("case", ["more requests than a graph", "a starved pool"])
def test_a_tuned_plan_does_not_advise_to_tune(case: str) -> None:
    keep = SEARCHED if "pool" in case else ()
    tuned = search(TuneRequest(gpu="h200", keep=keep, **CASES[case] | {"precisions": ["bf16"]}))
    (advice,) = limits_matter(tuned.base.chosen.setup, tuned.base.chosen.timed)
    assert advice in tuned.base.plan.reasons
    assert "fp8plan tune" in advice
    assert "fp8plan tune" not in tuned.prediction.plan.to_json()
    kept = [reason for reason in tuned.best.plan.reasons if reason != advice]
    assert list(tuned.prediction.plan.reasons[: len(kept)]) == kept


def test_progress_sees_every_group_of_settings() -> None:
    seen: list[Any] = []

    def bar(items: Any) -> Any:
        for item in items:
            seen.append(item)
            yield item

    tuned = search(TuneRequest(SMALL, "h200", SHORT, progress=bar))
    assert sum(map(len, seen)) <= tuned.settings
    assert len(seen) > 1
    assert search(TuneRequest(SMALL, "h200", SHORT, workers=2)).prediction.plan == tuned.prediction.plan


def test_a_datasheet_profile_is_searched_too() -> None:
    tuned = search(TuneRequest(SMALL, "h200", SHORT, profile=datasheet_profile(fp8plan.find_gpu("h200"))))
    assert tuned.best.chosen.seconds <= tuned.base.chosen.seconds
