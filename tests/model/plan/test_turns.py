"""Plans of trajectories with several turns: waits for tools, and prefixes that the cache keeps or loses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fp8plan.model.distributions import LogNormal
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import makespans, rollout, schedule_with, simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns

DENSE, GPU = "Qwen/Qwen3-8B", "h200_sxm"
TURNS = Turns(6, LogNormal(300, 0.8, 2000), 200, LogNormal(2, 1, 60))
WORK = Workload(16, 8, 800, turns=TURNS)
STARVED = EngineLimits(gpu_memory_utilization=0.32)  # in BF16 DENSE has no room for the contexts of all trajectories
VERY_STARVED = EngineLimits(gpu_memory_utilization=0.24)


def by_precision(answer: Plan) -> dict[str, Choice]:
    return {choice.precision: choice for choice in answer.choices}


def turns_of(choice: Choice) -> dict[str, Any]:
    assert choice.turns is not None
    return choice.turns


def test_an_ample_cache_keeps_every_prefix() -> None:
    answer = plan(DENSE, GPU, WORK)
    for choice in answer.choices:
        assert turns_of(choice)["again_tokens"] == 0
        assert turns_of(choice)["hit_share"] > 0.7
    assert Plan.from_json(answer.to_json()) == answer


def test_a_cache_in_fp8_keeps_more_prefixes_and_gains_more_than_in_single_turns() -> None:
    bf16, fp8 = (by_precision(plan(DENSE, GPU, WORK, limits=STARVED))[name] for name in ("bf16", "fp8_kv"))
    assert turns_of(fp8)["again_tokens"] < 0.5 * turns_of(bf16)["again_tokens"]
    assert turns_of(fp8)["hit_share"] > turns_of(bf16)["hit_share"]
    ample = by_precision(plan(DENSE, GPU, WORK))["fp8_kv"]
    assert fp8.speedup is not None
    assert ample.speedup is not None
    assert fp8.speedup > ample.speedup + 0.1


def test_the_sentences_compare_with_bf16() -> None:
    answer = plan(DENSE, GPU, WORK, limits=STARVED)
    again = f"{turns_of(by_precision(answer)['bf16'])['again_tokens']:,}"
    assert any("of earlier turns are computed again" in x and f"with bf16 {again}." in x for x in answer.reasons)


LIMITED: dict[str, tuple[Workload, str]] = {
    "cache": (WORK, "bf16"),
    "tools": (Workload(16, 8, 800, turns=Turns(6, 300, 200, 20.0)), "fp8_kv"),
    "tail": (Workload(16, 8, 800, turns=Turns(LogNormal(4, 1, 40), 300, 200, 1.0)), "fp8_kv"),
    "compute": (Workload(64, 8, 800, turns=Turns(6, 300, 200, 1.0)), "fp8_kv"),
}


@pytest.mark.parametrize("limit", LIMITED)
def test_the_limit_is_what_saves_most_when_it_is_simulated_away(limit: str) -> None:
    work, precision = LIMITED[limit]
    limits = VERY_STARVED if limit == "cache" else None
    answer = plan(DENSE, GPU, work, limits=limits, precisions=[precision])
    choice = answer.select()
    saves = turns_of(choice)["saves"]
    assert turns_of(choice)["limit"] == limit
    assert saves["tail"] == choice.tail_fraction
    assert any(f"{limit} limit" in reason.lower() for reason in answer.reasons)


def test_the_savings_are_those_of_plans_without_waits_and_with_a_large_cache() -> None:
    bf16 = by_precision(plan(DENSE, GPU, WORK, limits=VERY_STARVED))["bf16"]
    at_once = replace(WORK, turns=replace(TURNS, tool_s=0.0))
    others = {
        "tools": plan(DENSE, GPU, at_once, limits=VERY_STARVED),
        "cache": plan(DENSE, GPU, WORK, limits=EngineLimits()),
    }
    for name, other in others.items():
        saved = 1 - (by_precision(other)["bf16"].makespan_s or 0.0) / (bf16.makespan_s or 0.0)
        assert saved > 0.05
        assert turns_of(bf16)["saves"][name] == pytest.approx(saved, abs=0.005)


def test_longer_waits_lengthen_a_rollout_by_idle_time() -> None:
    waits = [with_waits(seconds) for seconds in (0.0, 5.0, 20.0)]
    choices = [by_precision(plan(DENSE, GPU, work))["bf16"] for work in waits]
    shares = [turns_of(choice)["tool_share"] for choice in choices]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.5
    makespans_s = [choice.makespan_s or 0.0 for choice in choices]
    for (shorter, makespan), (longer, other) in pairwise(zip((0.0, 5.0, 20.0), makespans_s, strict=True)):
        assert 0 < other - makespan <= 5 * (longer - shorter) + 1  # five waits of each trajectory


def with_waits(seconds: float) -> Workload:
    return Workload(4, 2, 800, turns=Turns(6, 300, 200, seconds))


def test_fewer_trajectories_at_once_keep_more_prefixes() -> None:
    few = Workload(16, 8, 800, turns=Turns(6, TURNS.turn_tokens, 200, TURNS.tool_s, concurrent=16))
    all_at_once, capped = (by_precision(plan(DENSE, GPU, x, limits=STARVED))["bf16"] for x in (WORK, few))
    assert turns_of(capped)["again_tokens"] < turns_of(all_at_once)["again_tokens"]


def test_replicas_share_the_trajectories_that_run_at_once() -> None:
    batch = Workload(16, 8, 800, turns=Turns(2, 30, 20, 1.0, concurrent=9)).batch()
    parts = batch.split(4)
    assert [part.turns.concurrent for part in parts if part.turns] == [3, 2, 2, 2]
    assert sum(len(part.prompts) for part in parts) == 128


@pytest.mark.parametrize("precision", ["bf16", "fp8_block+fp8_kv"])
def test_the_makespan_is_that_of_the_model_asked_at_every_step(precision: str) -> None:
    setup = EngineSetup(DENSE, GPU, precision, STARVED)
    batch, profile = WORK.batch(), load_profile(setup.gpu, setup.engine_version)[0]
    runs = simulate(setup.holding(batch.longest), batch, profile)
    single = schedule_with(batch, runs.memory.kv, runs.model.limits, runs.clock, longest_run=1)
    assert single.num_steps == runs.rollout.num_steps
    one_by_one = rollout([single], runs.model)
    assert runs.rollout.makespan_s == pytest.approx(one_by_one.makespan_s, rel=2e-3)
    assert makespans([[single]], runs.model) == pytest.approx([one_by_one.makespan_s])
    assert one_by_one.parts["tools"] == pytest.approx(single.idle_s.sum() / one_by_one.makespan_s)


def test_more_replicas_than_trajectories_at_once_are_no_layout() -> None:
    few = Workload(16, 8, 800, turns=Turns(6, 300, 200, 1.0, concurrent=4))
    reasons = {c.data_parallel: c.reason for c in plan(DENSE, GPU, few, gpus=8).choices}
    assert "8 replicas for 4 requests" in str(reasons[8])
    assert reasons[4] is None


def test_without_a_prefix_cache_the_plan_says_why_all_is_computed_again() -> None:
    answer = plan(DENSE, GPU, WORK, limits=EngineLimits(enable_prefix_caching=False))
    assert any("Prefix caching is off" in reason for reason in answer.reasons)
    assert turns_of(answer.select())["hit_share"] == 0


def test_the_tail_is_the_time_with_few_trajectories_left() -> None:
    level = Workload(16, 8, 800, turns=Turns(6, 300, 200, 1.0, concurrent=32))
    assert by_precision(plan(DENSE, GPU, level))["bf16"].tail_fraction < 0.2  # type: ignore[operator]


def test_a_turn_finds_the_prefix_up_to_dropped_reasoning() -> None:
    work = Workload(4, 2, 800, turns=Turns(6, 300, 200, 1.0, reasoning_share=0.5))
    turns = turns_of(plan(DENSE, GPU, work).select())
    prompts = 800 + (300 - 150 + 200) * np.arange(6)
    hits = 8 * (prompts[:-1] // 16 * 16).sum() + 4 * (799 // 16 * 16)  # the second sample finds the prompt of the first
    assert turns["hit_share"] == hits / (8 * prompts.sum())
    assert turns["again_tokens"] == 0


def test_a_batch_of_turns_counts_tool_tokens_in_its_lengths() -> None:
    batch = WORK.batch()
    assert batch.turns is not None
    np.testing.assert_array_equal(batch.lengths, batch.prompts + batch.responses + 5 * 200)
