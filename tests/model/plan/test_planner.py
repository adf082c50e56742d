"""The planner: what it enumerates, what it compares with, and what it chooses within a risk budget."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uniform_models import resized

import fp8plan
from fp8plan.errors import CapacityError, ConfigError, ProfileError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import ShortConv
from fp8plan.model.distributions import Fixed, LogNormal, Trace
from fp8plan.model.hardware import Gpu, find_gpu, gpus
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan import candidates as evaluate
from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import Choice, choose
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import load_profile
from fp8plan.model.risk.expected import LEAST_GAIN, LEVELS, MismatchRisk, RiskBudget
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.rollout import Rollout, Simulated, Timeline, simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Workload
from fp8plan.version import DEFAULT_VERSION

SMALL = "Qwen/Qwen3-0.6B"
DENSE = "Qwen/Qwen3-8B"
WORK = Workload(16, 8, Fixed(200), LogNormal(600, 0.9, 3000))
STARVED = EngineLimits(gpu_memory_utilization=0.14)  # leaves DENSE a pool of a few requests on an H200


def by_precision(answer: Plan) -> dict[str, Choice]:
    rows = {c.precision: c for c in answer.choices}
    assert len(rows) == len(answer.choices)
    return rows


# Choosing

EMPTY = np.zeros(1, dtype=np.int64)
RISK = MismatchRisk(**dict.fromkeys(f.name for f in fields(MismatchRisk)) | {"kl_k3": 0.0, "level": "low"})  # type: ignore[arg-type]
ROLLOUT = Rollout(1.0, 0.9, 1.1, 1, 1, 0, 0, 0, 0.0, {}, {}, (), Timeline(np.ones(1), EMPTY, EMPTY, EMPTY, EMPTY))


def candidate(seconds: float | None, kl: float = 0.0, level: Any = "low", step_s: float | None = None) -> Candidate:
    """A candidate with these figures; None: not available."""
    base = Candidate(EngineSetup("Qwen/Qwen3-8B", "h200", "bf16", EngineLimits()), step_s=step_s)
    if seconds is None:
        return replace(base, reason="a test")
    return replace(base, rollout=replace(ROLLOUT, makespan_s=seconds), risk=replace(RISK, kl_k3=kl, level=level))


def test_the_fastest_is_chosen() -> None:
    assert choose([candidate(9, 0.1), candidate(5, 0.3), candidate(None), candidate(7, 0.2)], RiskBudget()) == 1


def test_a_gain_below_the_least_does_not_pay_for_more_kl() -> None:
    small, enough = 1 + LEAST_GAIN * 0.9, 1 + LEAST_GAIN * 1.1
    assert choose([candidate(small, 0.1), candidate(1, 0.2)], RiskBudget()) == 0
    assert choose([candidate(enough, 0.1), candidate(1, 0.2)], RiskBudget()) == 1
    assert choose([candidate(small, 0.2), candidate(1, 0.1)], RiskBudget()) == 1
    assert choose([candidate(small, 0.1), candidate(1, 0.1)], RiskBudget()) == 1  # equal KL: the faster


@pytest.mark.parametrize(("accept", "expected"), [("low", 0), ("moderate", 1), ("high", 2)])
def test_the_budget_excludes_what_is_riskier(accept: Any, expected: int) -> None:
    found = [candidate(9, 0.1, "low"), candidate(6, 0.2, "moderate"), candidate(3, 0.3, "high")]
    assert choose(found, RiskBudget(accept=accept)) == expected


def test_if_nothing_is_within_the_budget_the_lowest_kl_is_chosen() -> None:
    found = [candidate(None), candidate(3, 0.3, "high"), candidate(9, 0.1, "moderate")]
    assert choose(found, RiskBudget(accept="low")) == 2


def test_with_trainer_figures_the_whole_step_decides() -> None:
    assert choose([candidate(9, step_s=20), candidate(5, step_s=30)], RiskBudget()) == 0


def doubtful(seconds: float, doubt: float = 0.1) -> Candidate:
    """A candidate on a layout that was not measured."""
    return replace(candidate(seconds), layout_doubt=doubt)


def test_a_layout_that_was_not_measured_has_to_be_faster_by_more_than_its_doubt() -> None:
    known = [candidate(100), candidate(97, 0.1)]
    assert choose([*known, doubtful(89)], RiskBudget()) == 1  # 98.4 if it is slower by its doubt
    assert choose([*known, doubtful(87)], RiskBudget()) == 2  # 96.1
    assert choose([*known, doubtful(87, 0.2)], RiskBudget()) == 1
    assert choose([doubtful(100), doubtful(85, 0.2)], RiskBudget()) == 1  # neither was measured
    assert choose([*known, doubtful(96)], RiskBudget()) == 1  # close, but not measured
    step = [replace(x, step_s=x.seconds + 1000) for x in (known[1], doubtful(87))]
    assert choose(step, RiskBudget()) == 1  # what is added to both is not in doubt


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"])
def test_a_plan_for_several_gpus_is_not_far_behind_its_own_fastest_choice(model: str) -> None:
    answer = plan(model, "h200", Workload(32, 16, 1024, LogNormal(6000, 0.9, 20480)), gpus=8)
    accepted = [c for c in answer.choices if c.makespan_s is not None and answer.budget.accepts(c.risk)]
    fastest = min(accepted, key=lambda c: c.makespan_s or 0.0)
    doubt = load_profile(find_gpu("h200"))[0].layout_error(*fastest.cut)
    assert answer.select().makespan_s <= (fastest.makespan_s or 0.0) * math.exp(doubt) * (1 + LEAST_GAIN)


@pytest.mark.parametrize("card", ["h200", "h100", "a100-80gb", "rtx4090"])  # calibrated, of a sibling, datasheet
def test_no_layout_is_chosen_that_does_not_beat_its_doubt_under_any_kind_of_profile(card: str) -> None:
    made = predict(PlanRequest("Qwen/Qwen3-0.6B", card, Workload(4, 4, 128, LogNormal(300, 0.9, 1200)), gpus=4))
    there = [c for c in made.tried if c.rollout]
    assert [c.layout_doubt for c in there] == [made.profile.layout_error(*c.setup.limits.cut) for c in there]
    assert any(c.layout_doubt for c in there)
    chosen, accepted = made.chosen, [c for c in made.tried if c.rollout and made.plan.budget.accepts(c.expected.level)]
    measured = [c.seconds for c in accepted if not c.layout_doubt]
    assert not chosen.layout_doubt or chosen.cautious_s < min(measured)


def test_a_faster_layout_that_nobody_measured_stands_back_and_is_named() -> None:
    work = Workload(32, 16, 512, LogNormal(2000, 0.9, 8192))
    answer = plan(DENSE, "h200", work, gpus=2, host_loop_s=2.6e-4)  # a known host, so that the layout is in doubt
    picked = answer.choices[answer.chosen]
    fastest = min(answer.choices, key=lambda c: c.makespan_s or 0.0)
    assert picked.tensor_parallel == 1
    assert fastest.tensor_parallel == 2
    assert any("on 1 replica of tensor_parallel_size 2 is predicted" in s for s in answer.reasons)
    assert any("No measurement of tensor_parallel_size 2 was fitted on h200_sxm" in s for s in answer.reasons)
    for choice in answer.choices:
        half = (choice.makespan_high_s / choice.makespan_low_s) ** 0.5 - 1  # type: ignore[operator]
        assert (half < 0.09) == (choice.tensor_parallel == 1)
        assert 0.12 < half < 0.17 or choice.tensor_parallel == 1
        assert bool(choice.rests_on["kernels"].get("collective")) == (choice.tensor_parallel == 2)
        beyond = sum(share for grounds, share in choice.rests_on["shares"].items() if grounds != "measured")
        assert choice.extrapolated == (beyond > 0.1)
        assert choice.speedup_low <= choice.speedup <= choice.speedup_high  # type: ignore[operator]
        assert (choice.speedup_low == choice.speedup_high) == (choice.precision == "bf16")


def test_a_given_layout_beyond_a_node_is_timed_over_the_network_and_says_so() -> None:
    def answer(node: int) -> Plan:
        limits = EngineLimits(tensor_parallel_size=16)
        return plan(DENSE, "h100", WORK, limits=limits, gpus_per_node=node, precisions=["bf16"])

    across, inside = answer(8), answer(16)
    assert across.choices[0].makespan_s > 1.2 * inside.choices[0].makespan_s  # type: ignore[operator]
    assert any("crosses nodes of 8 GPUs, so all-reduces are modelled for 400 Gb/s" in s for s in across.reasons)
    assert not any("crosses nodes" in s for s in inside.reasons)


figures = st.tuples(st.none() | st.floats(0.1, 100), st.floats(0, 1), st.sampled_from(LEVELS))


@given(st.lists(figures, min_size=1, max_size=8), st.sampled_from(LEVELS))
def test_a_choice_keeps_the_budget_and_loses_no_more_than_the_least_gain(rows: list[Any], accept: Any) -> None:
    found, budget = [candidate(*row) for row in rows], RiskBudget(accept=accept)
    runnable = [row for row in rows if row[0] is not None]
    if not runnable:
        return
    seconds, kl, level = rows[choose(found, budget)]
    accepted = [row for row in runnable if LEVELS.index(row[2]) <= LEVELS.index(accept)]
    if not accepted:
        assert kl == min(row[1] for row in runnable)
        return
    assert LEVELS.index(level) <= LEVELS.index(accept)
    for other_seconds, other_kl, _ in accepted:
        assert seconds <= other_seconds * (1 + LEAST_GAIN)
        assert seconds <= other_seconds or kl <= other_kl


# Whole plans


def test_every_precision_is_there_and_bf16_is_the_baseline() -> None:
    answer = plan(DENSE, "h200", WORK)
    rows = by_precision(answer)
    assert list(rows) == list(PRESETS)
    assert rows["bf16"].speedup == 1.0
    bf16 = rows["bf16"].makespan_s
    assert bf16 is not None
    for row in rows.values():
        assert row.available
        assert row.makespan_s is not None
        assert row.speedup == pytest.approx(bf16 / row.makespan_s)
        assert row.output_tokens_per_s == pytest.approx(WORK.batch().responses.sum() / row.makespan_s)
        assert row.kv_cache_tokens is not None
    assert rows["fp8_block"].kv_cache_tokens > rows["bf16"].kv_cache_tokens  # type: ignore[operator]
    # Without preemption the bytes that are read decide, and FP8 weights halve most of them.
    assert rows["fp8_block"].preemptions == rows["bf16"].preemptions == 0
    assert 1.1 < rows["fp8_block"].speedup < 2  # type: ignore[operator]


@pytest.mark.parametrize("card", [card for card in gpus() if not card.is_cpu], ids=lambda card: card.name)
def test_the_first_reason_says_that_a_profile_is_uncalibrated(card: Gpu) -> None:
    calibrated = load_profile(card)[0].kind == "calibrated"
    assert calibrated == (card.name == "h200_sxm")
    work = Workload(2, 4, Fixed(64), Fixed(200))
    for accept in ("low", "moderate"):
        for model in (SMALL, "Qwen/Qwen2.5-1.5B"):
            first = plan(model, card, work, budget=RiskBudget(accept=accept)).reasons[0]  # type: ignore[arg-type]
            assert ("for the rollout, uncalibrated" in first) is not calibrated, first


def test_a_plan_describes_what_it_is_for() -> None:
    work = Workload(3, 4, Trace((50, 10, 20), "prompts"), Trace((5, 9), "responses"), seed=11)
    answer = plan(SMALL, "h200", work)
    assert (answer.model, answer.gpu, answer.seed) == (SMALL, "h200_sxm", 11)
    assert answer.engine_version == answer.profile["engine_version"] == DEFAULT_VERSION
    assert (answer.workload["prompts"], answer.workload["samples"]) == (3, 4)
    assert (answer.workload["max_prompt_tokens"], answer.workload["max_response_tokens"]) == (50, 9)
    assert answer.workload["response_tokens"] == work.batch().responses.sum()
    assert answer.workload["mean_response_tokens"] == pytest.approx(work.batch().responses.mean())
    assert answer.limits == EngineLimits.for_gpu(find_gpu("h200")).holding(59)
    assert Plan.from_json(answer.to_json()) == answer


def test_a_shape_a_gpu_and_their_names_give_the_same_plan() -> None:
    assert plan(ModelShape.from_hf(DENSE), find_gpu("h200"), WORK) == plan("qwen3-8b", "NVIDIA H200", WORK)
    assert fp8plan.plan is plan


def test_the_cheap_risk_budget_stays_with_bf16_where_the_default_does_not() -> None:
    answers = {accept: plan(DENSE, "h200", WORK, budget=RiskBudget(accept=accept)) for accept in LEVELS}
    levels = {accept: answer.choices[answer.chosen].risk for accept, answer in answers.items()}
    assert answers["low"].choices[answers["low"].chosen].precision == "bf16"
    assert answers["moderate"].choices[answers["moderate"].chosen].precision != "bf16"
    assert all(LEVELS.index(level) <= LEVELS.index(accept) for accept, level in levels.items())  # type: ignore[arg-type]


def test_a_starved_pool_preempts_in_bf16_and_less_with_an_fp8_cache() -> None:
    rows = by_precision(plan(DENSE, "h200", WORK, limits=STARVED))
    pools = {name: row.kv_cache_tokens for name, row in rows.items()}
    assert pools["fp8_kv"] == pytest.approx(2 * pools["bf16"], rel=0.03)  # type: ignore[operator]  # less DeepGEMM's 32 MiB
    assert rows["bf16"].preemptions > 50  # type: ignore[operator]
    assert rows["fp8_kv"].preemptions < 0.6 * rows["bf16"].preemptions  # type: ignore[operator]
    roomy = by_precision(plan(DENSE, "h200", WORK))
    assert roomy["bf16"].preemptions == 0
    # What vanishing preemption adds to the speed-up is more than fewer bytes alone.
    assert rows["fp8_kv"].speedup > roomy["fp8_kv"].speedup + 0.1  # type: ignore[operator]


def test_an_imposed_pool_is_the_same_for_every_precision() -> None:
    answer = plan(DENSE, "h200", WORK, limits=EngineLimits(num_gpu_blocks=800))
    assert {c.kv_cache_tokens for c in answer.choices} == {801 * 16}
    assert len({c.preemptions for c in answer.choices}) == 1
    assert answer.choices[0].preemptions > 0  # type: ignore[operator]


@pytest.mark.parametrize(("card", "model"), [("h200", DENSE), ("h100", "Qwen/Qwen3-30B-A3B"), ("rtx4090", SMALL)])
def test_speed_ups_are_over_the_best_bf16_first_and_the_way_back_gives_it(card: str, model: str) -> None:
    answer = plan(model, card, Workload(4, 4, 128, LogNormal(300, 0.9, 1200)), gpus=4)
    there = [c for c in answer.choices if c.available]
    best = min((c for c in there if c.precision == "bf16"), key=lambda c: c.seconds)
    assert answer.choices[answer.baseline or 0] == best
    for c in there:
        assert c.speedup_over_best == pytest.approx((best.makespan_s or 0.0) / (c.makespan_s or 1.0))
        names = list(json.loads(answer.to_json())["choices"][0])
        assert names.index("speedup_over_best") < names.index("speedup")
    if answer.select().precision != "bf16":
        assert answer.select("bf16") == best
        assert answer.reasons[0].index("the best bf16") < answer.reasons[0].find("bf16 on the same layout") % 10**6


def test_gpus_enumerates_every_layout_that_divides_and_compares_within_it() -> None:
    answer = plan(DENSE, "h200", WORK, gpus=8)
    layouts = {(c.tensor_parallel, c.data_parallel) for c in answer.choices}
    assert layouts == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert len(answer.choices) == 4 * len(PRESETS)
    for layout in layouts:
        rows = [c for c in answer.choices if (c.tensor_parallel, c.data_parallel) == layout]
        bf16 = next(c for c in rows if c.precision == "bf16")
        assert bf16.speedup == 1.0
        assert bf16.makespan_s is not None
        for row in rows:
            assert row.makespan_s is not None
            assert row.speedup == pytest.approx(bf16.makespan_s / row.makespan_s)
    assert len({c.makespan_s for c in answer.choices if c.precision == "bf16"}) == 4
    # One layout of the eight is what a plan for that layout alone says.
    alone = plan(DENSE, "h200", WORK, limits=EngineLimits(tensor_parallel_size=4, data_parallel_size=2))
    same = dict.fromkeys((f.name for f in fields(Choice) if "speedup_over_best" in f.name), None)  # another baseline
    here = [replace(c, **same) for c in answer.choices if c.tensor_parallel == 4]
    assert [replace(c, **same) for c in alone.choices] == here


@pytest.mark.parametrize(("gpus", "sizes"), [(1, {1}), (3, {1}), (6, {1, 2}), (12, {1, 2, 4})])
def test_tensor_parallel_sizes_divide_both_the_gpus_and_the_heads(gpus: int, sizes: set[int]) -> None:
    answer = plan(SMALL, "h200", Workload(3, 4, Fixed(8), Fixed(8)), gpus=gpus)
    assert {c.tensor_parallel for c in answer.choices} == sizes
    assert {c.tensor_parallel * c.data_parallel for c in answer.choices} == {gpus}


@pytest.mark.parametrize(
    ("model", "target", "started"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", "vllm", {1, 2, 4, 8}),
        ("Qwen/Qwen3-4B", "vllm", {1, 2, 4, 8}),
        ("Qwen/Qwen3-4B", "verl", {1, 2, 4}),
        ("Qwen/Qwen3-30B-A3B", "vllm", {1, 2, 4, 8}),
        ("Qwen/Qwen3-30B-A3B", "verl", {1, 2}),
        ("Qwen/Qwen3-235B-A22B", "vllm", {2, 4, 8}),
        ("Qwen/Qwen3-235B-A22B", "verl", {2, 4}),
    ],
)
def test_fp8_weights_are_planned_only_where_the_engine_starts(model: str, target: str, started: set[int]) -> None:
    answer = plan(model, "h200", Workload(4, 4, Fixed(16), Fixed(16)), gpus=8, target=target)
    fp8 = [c for c in answer.choices if c.precision == "fp8_block" and not c.expert_parallel]
    assert {c.tensor_parallel for c in fp8 if c.available} == started
    for choice in fp8:
        if choice.tensor_parallel not in started and choice.tensor_parallel > 1:
            assert f"on each GPU at tensor_parallel_size {choice.tensor_parallel}" in choice.reason  # type: ignore[operator]
            assert "multiples of 128" in choice.reason  # type: ignore[operator]
    picked = answer.choices[answer.chosen]
    assert picked.available


def test_fp8_alone_on_a_layout_that_cannot_start_is_an_error() -> None:
    limits = EngineLimits(tensor_parallel_size=8)
    with pytest.raises(ConfigError, match=r"down_proj has 1216 inputs .* multiples of 128; allowed: 1, 2, 4$"):
        plan("Qwen/Qwen3-4B", "h200", WORK, limits=limits, precisions=["fp8_block"], target="verl")
    with pytest.raises(ConfigError, match=r"experts_w13 has 2880 inputs: .* multiple of 128, which its routers"):
        plan("fp8plan/gpt-oss-20b-bf16", "h200", WORK, precisions=["fp8_block"])
    with pytest.raises(ConfigError, match="target is 'sglang'"):
        plan("Qwen/Qwen3-4B", "h200", WORK, target="sglang")


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V2-Lite", "zai-org/GLM-4.5-Air"])
def test_what_has_no_whole_blocks_stays_in_bf16_and_the_plan_says_so(model: str) -> None:
    answer = plan(model, "h200", WORK)
    row = by_precision(answer)["fp8_block"]
    assert row.available
    assert row.refused_by["verl"].startswith("down_proj has 10944 inputs on each GPU at tensor_parallel_size 1")
    said = (
        "down_proj of 1 layer (10,944 inputs on each GPU) stays in BF16, as vLLM quantises only multiples of 128 inputs"
    )
    assert f"FP8 weights: {said}." in Plan.from_json(answer.to_json()).reasons
    kept = plan(model, "h200", WORK, remedies=Remedies(keep_bf16=(1, 0)))  # the layer that has it
    assert not any("down_proj" in reason for reason in kept.reasons)
    emitted = json.loads(answer.emit("vllm", "fp8_block"))
    assert said in emitted["notes"]
    patterns = [pattern.removeprefix("re:") for pattern in emitted["engine_args"]["quantization_config"]["ignore"]]
    inside = ("mlp.gate_up_proj", "mlp.down_proj", "mlp.shared_experts.down_proj", "mlp.gate", "self_attn.o_proj")
    left = [name for name in inside if any(re.match(pattern, f"model.layers.0.{name}") for pattern in patterns)]
    assert left == ["mlp.down_proj", "mlp.gate"]
    # All but one of 10,944 inputs' halves are gone: the weights of the one in BF16 are not.
    setup, shape = answer.setup("fp8_block"), ModelShape.from_hf(model)
    kept = sum(2 * x.elements * x.layers for x in shape.left_in_bf16())
    assert shape.weight_bytes(setup.precision) - kept < shape.weight_bytes(PRESETS["bf16"]) * 0.6


def test_another_layout_leaves_other_linears_in_bf16() -> None:
    answer = plan("zai-org/GLM-4.5-Air", "h200", WORK, gpus=2)
    said = [reason for reason in answer.reasons if "stay" in reason and "in BF16" in reason]
    assert len(said) == 2
    assert said[0].startswith("FP8 weights at tensor_parallel_size 1: down_proj of 1 layer (10,944 inputs")
    assert said[1].startswith("FP8 weights at tensor_parallel_size 2: down_proj of 1 layer (5,472 inputs")
    assert "shared_down_proj of 45 layers (704 inputs on each GPU)" in said[1]
    risks = {c.tensor_parallel: c.kl_k3 for c in answer.choices if c.precision == "fp8_block"}
    assert risks[2] < risks[1]  # type: ignore[operator]
    assert not any("in BF16" in reason for reason in plan("Qwen/Qwen3-8B", "h200", WORK, gpus=2).reasons)


def test_an_fp8_cache_that_vllm_has_no_kernel_for_is_refused_with_its_reason() -> None:
    narrow, wide = (resized(ModelShape.from_hf(DENSE), head_dim=numbers) for numbers in (256, 512))
    both = replace(wide, layers=(*wide.layers[:6], *narrow.layers[6:]))
    older = "0.31.0"  # 0.32 has a kernel for them
    rows = by_precision(plan(both, "h200", WORK, engine_version=older))
    for name, row in rows.items():
        assert row.available is (PRESETS[name].kv == "bf16")
        assert row.available or "FlashAttention 4" in row.reason  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"256 and 512 numbers.*allowed: bf16, fp8_block$"):
        plan(both, "h200", WORK, precisions=["fp8_kv"], engine_version=older)
    assert all(row.available for row in by_precision(plan(both, "h200", WORK)).values())
    states = replace(wide, layers=tuple(replace(layer, mixer=ShortConv(4096, 3)) for layer in wide.layers))
    with pytest.raises(ConfigError, match=r"no layer keeps keys and values.*MambaDType"):
        plan(states, "h200", WORK, precisions=["fp8_kv"])


def test_tensor_parallelism_stays_inside_a_node() -> None:
    small = Workload(64, 16, Fixed(8), Fixed(8))

    def sizes(gpu_name: str = "h100", **options: Any) -> set[int]:
        return {c.tensor_parallel for c in plan("Qwen/Qwen3-8B", gpu_name, small, **options).choices}

    assert sizes(gpus=16) == {1, 2, 4, 8}
    assert sizes(gpus=16, gpus_per_node=4) == {1, 2, 4}
    assert sizes(gpus=16, gpus_per_node=16) == {1, 2, 4, 8, 16}
    assert sizes("gb200", gpus=32) == {1, 2, 4, 8, 16, 32}
    assert sizes(gpus=12, gpus_per_node=6) == {1, 2}  # a replica of four would lie on two nodes
    with pytest.raises(ConfigError, match="gpus_per_node is 0"):
        sizes(gpus=16, gpus_per_node=0)


def test_more_replicas_than_requests_are_refused() -> None:
    two = Workload(1, 2, Fixed(8), Fixed(8))
    with pytest.raises(ConfigError, match="100000 replicas for 2 requests leave 99998 without any; allowed: at most 2"):
        plan(SMALL, "h200", two, limits=EngineLimits(data_parallel_size=100_000))
    with pytest.raises(ConfigError, match="100000 replicas for 2 requests"):
        plan(SMALL, "h200", two, gpus=100_000)
    rows = plan(SMALL, "h200", two, gpus=4).choices
    assert {c.data_parallel for c in rows if c.available} == {2, 1}
    assert all("4 replicas for 2 requests" in c.reason for c in rows if c.reason is not None)


def test_where_bf16_does_not_fit_there_is_no_speedup_and_a_reason() -> None:
    work = Workload(2, 2, Fixed(16), Fixed(64))
    rows = by_precision(plan("Qwen/Qwen2.5-32B", "l40s", work, precisions=["bf16", "fp8_block"]))
    assert not rows["bf16"].available
    assert "does not fit NVIDIA L40S" in rows["bf16"].reason  # type: ignore[operator]
    assert rows["bf16"].makespan_s is rows["bf16"].speedup is None
    assert rows["fp8_block"].available
    assert rows["fp8_block"].speedup is None
    answer = plan("Qwen/Qwen2.5-32B", "l40s", work, trainer=StepTimes(train_s=5, logprob_s=0))
    assert answer.choices[answer.chosen].precision == "fp8_block"
    assert answer.choices[answer.chosen].step_speedup is None
    assert "bf16 does not fit" in answer.reasons[0]


def test_with_more_gpus_bf16_fits_a_wider_layout() -> None:
    answer = plan("Qwen/Qwen2.5-32B", "l40s", Workload(2, 2, Fixed(16), Fixed(64)), gpus=2)
    bf16 = {c.tensor_parallel: c for c in answer.choices if c.precision == "bf16"}
    assert [bf16[1].available, bf16[2].available] == [False, True]
    assert bf16[2].speedup == 1.0
    assert all(c.speedup is None for c in answer.choices if c.tensor_parallel == 1)


def test_trainer_figures_pull_the_step_speedup_towards_one() -> None:
    plain = plan(DENSE, "h200", WORK)
    answer = plan(DENSE, "h200", WORK, trainer=StepTimes(train_s=10, logprob_s=2))
    for row, rollout_only in zip(answer.choices, plain.choices, strict=True):
        assert row.makespan_s == rollout_only.makespan_s
        assert rollout_only.rl_step_s is rollout_only.step_speedup is None
        assert row.rl_step_s > row.makespan_s + 12  # type: ignore[operator]
        assert row.speedup is not None
        assert row.step_speedup is not None
        synced = 0.02  # FP8 also pays for its quantisation and KV scales at each weight sync
        assert min(row.speedup, 1) - synced <= row.step_speedup <= max(row.speedup, 1)
    rows = by_precision(answer)
    assert rows["bf16"].step_gain == (1.0, 1.0, 1.0)
    for row in (row for row in answer.choices if row.precision != "bf16"):
        (ratio, low, high), (_, rollout_low, rollout_high) = row.step_gain, row.gain  # type: ignore[misc]
        assert low < ratio < high
        assert high / low < rollout_high / rollout_low  # only the rollout is in doubt
    assert 1 < rows["fp8_block"].step_speedup < rows["fp8_block"].speedup  # type: ignore[operator]


def test_a_long_training_step_makes_fp8_not_worth_it() -> None:
    quick, slow = (plan(DENSE, "h200", WORK, trainer=StepTimes(train_s=s, logprob_s=0)) for s in (1, 10_000))
    assert quick.choices[quick.chosen].precision != "bf16"
    assert slow.choices[slow.chosen].precision == "bf16"
    assert "FP8 is not worth it here: it gains nothing for the whole RL step." in slow.reasons[0]


def test_an_a100_keeps_the_rows_of_fp8_weights_with_the_reason() -> None:
    answer = plan(SMALL, "a100", WORK)
    rows = by_precision(answer)
    assert list(rows) == list(PRESETS)
    assert [row.available for row in rows.values()] == [True, False, True, False]
    assert all("fp8plan does not model FP8 weights" in row.reason for row in rows.values() if row.reason is not None)
    with pytest.raises(ConfigError, match="fp8_block was asked for: fp8plan does not model FP8 weights"):
        plan(SMALL, "a100", WORK, precisions=["bf16", "fp8_block"])


def test_what_cannot_be_is_refused_by_its_own_error() -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        plan("meta-llama/Llama-3.1-70B", "l40s", WORK)
    with pytest.raises(CapacityError, match="num_gpu_blocks 10 "):
        plan(SMALL, "h200", WORK, limits=EngineLimits(num_gpu_blocks=10))
    with pytest.raises(ConfigError, match="max_model_len is 3000"):
        plan(SMALL, "h200", WORK, limits=EngineLimits(max_model_len=3000))
    with pytest.raises(ConfigError, match="tensor_parallel_size 3"):
        plan(SMALL, "h200", WORK, limits=EngineLimits(tensor_parallel_size=3))
    with pytest.raises(ProfileError, match=r"0\.99\.0"):
        plan(SMALL, "h200", WORK, engine_version="0.99.0", strict=True)
    with pytest.raises(ConfigError, match="unknown precision 'fp4'"):
        plan(SMALL, "h200", WORK, precisions=["fp4"])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("gpu", 5, "Gpu or str"),
        ("workload", (2, 2, 16, 32), "Workload"),
        ("limits", {"max_num_seqs": 4}, "EngineLimits or None"),
        ("gpus", "8", "a whole number of at least 1, or leave it out"),
        ("gpus", True, "a whole number of at least 1, or leave it out"),
        ("trainer", {"train_s": 4}, "StepTimes or None"),
        ("budget", "low", "RiskBudget or None"),
        ("kv_scales_calibrated", "unit", "bool"),
        ("engine_version", 0.26, "str"),
        ("strict", None, "bool"),
        ("profile", "profile.json", "Profile or None"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    arguments = {"model": SMALL, "gpu": "h200", "workload": WORK} | {name: value}
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}; allowed: {allowed}")):
        plan(**arguments)


def test_an_unmeasured_layout_is_chosen_where_it_beats_its_doubt() -> None:
    """A model of 32B on one GPU is far slower than the doubt of a cut one."""
    found = plan("Qwen/Qwen3-32B", "h100", Workload(32, 16, 1024, LogNormal(6000, 0.9, 20480)), gpus=8)
    accepted = [c for c in found.choices if c.makespan_s is not None and found.budget.accepts(c.risk)]
    assert found.select().makespan_s <= 1.02 * min(c.makespan_s for c in accepted)
    assert found.select().tensor_parallel > 1
    assert not any("what was measured goes first" in reason for reason in found.reasons)


def test_measured_layouts_go_first_also_where_the_budget_accepts_none() -> None:
    work = Workload(32, 16, 512, LogNormal(2000, 0.9, 8192))
    for accept in ("low", "moderate"):
        budget = RiskBudget(accept=accept)
        found = plan(DENSE, "h200", work, gpus=2, precisions=["fp8_block"], budget=budget, host_loop_s=2.6e-4)
        assert found.select().tensor_parallel == 1
        assert any("what was measured goes first" in reason for reason in found.reasons)


def test_a_plan_for_trl_has_fp8_weights_on_any_number_of_gpus() -> None:
    """On one in fp8plan's trainer, on several in a server with its backend."""
    found = plan(SMALL, "h200", WORK, target="trl", gpus=2)
    able = {tp: [c.precision for c in found.choices if c.available and c.tensor_parallel == tp] for tp in (1, 2)}
    assert able == {1: list(PRESETS), 2: list(PRESETS)}
    assert not [c for c in plan(SMALL, "h200", WORK, gpus=2).choices if c.refused_by]


def test_what_is_advised_can_start() -> None:
    """29568 inputs of down_proj are 231 blocks: on two ranks it stays in BF16. No rank has gpt-oss in FP8."""
    with pytest.raises(CapacityError, match=r"does not fit.*; try tensor_parallel_size 2"):
        plan("Qwen/Qwen2.5-72B-Instruct", "h100", WORK, precisions=["fp8_block"])
    for model, share, advised in (("fp8plan/gpt-oss-20b-bf16", 0.4, False), ("Qwen/Qwen3-30B-A3B", 0.6, True)):
        limits = EngineLimits(gpu_memory_utilization=share)
        with pytest.raises(CapacityError, match="does not fit") as error:
            plan(model, "h100", WORK, limits=limits, precisions=["bf16"])
        assert ("FP8 weights" in str(error.value)) is advised


def test_numbers_of_numpy_s_types_are_written_as_plain_ones() -> None:
    limits = EngineLimits(max_num_seqs=np.int64(64), gpu_memory_utilization=np.float32(0.9))  # type: ignore[arg-type]
    work = Workload(2, 2, Trace(np.array([8, 9]), "here"), LogNormal(20.0, 1.0, np.int64(100)))  # type: ignore[arg-type]
    found = plan(SMALL, "h200", work, limits=limits, gpus=np.int64(1))  # type: ignore[arg-type]
    assert Plan.from_json(found.to_json()).limits.max_num_seqs == 64
    with pytest.raises(ConfigError, match="enable_prefix_caching is 'no'; allowed: True or False"):
        EngineLimits(enable_prefix_caching="no")  # type: ignore[arg-type]


def test_a_ratio_of_rl_steps_is_called_one() -> None:
    found = plan("Qwen/Qwen3-8B", "h200", Workload(16, 4, 512, 500), trainer=StepTimes(train_s=300, logprob_s=60))
    even = "fp8_block is no faster: it is 1.00x as fast as the chosen bf16 for the whole RL step (90%: "
    assert any(even in reason for reason in found.reasons)


def test_precisions_are_one_name_or_some() -> None:
    assert [c.precision for c in plan(SMALL, "h200", WORK, precisions="fp8_kv").choices] == ["fp8_kv"]
    with pytest.raises(ConfigError, match=r"precisions is \[\]; allowed: some of bf16, .*, or None for all"):
        plan(SMALL, "h200", WORK, precisions=[])


@pytest.mark.parametrize("observed", ["run.jsonl", [{"seconds": 1.0}]])
def test_observed_rollouts_are_records(observed: object) -> None:
    with pytest.raises(ConfigError, match=r"observed is .*; allowed: records; type: read_records\("):
        plan(SMALL, "h200", WORK, observed=observed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("low_kl", float("nan")), ("moderate_ess", -1), ("low_clip", "0.1"), ("moderate_kl", float("inf"))],
)
def test_a_budget_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"RiskBudget\.{name} is {re.escape(repr(value))}; allowed: a finite number"):
        RiskBudget(**{name: value})


def test_a_numpy_number_is_a_limit_that_json_can_hold() -> None:
    budget = RiskBudget(moderate_kl=np.float32(0.5))  # type: ignore[arg-type]
    assert budget.moderate_kl == 0.5
    assert type(budget.moderate_kl) is float


def test_kv_scales_left_at_one_are_riskier() -> None:
    good, unit = (by_precision(plan(DENSE, "h200", WORK, kv_scales_calibrated=c)) for c in (True, False))
    for name in PRESETS:
        wider = unit[name].kl_k3_high > good[name].kl_k3_high  # type: ignore[operator]
        assert wider == ("fp8_kv" in name)
        assert unit[name].makespan_s == good[name].makespan_s


def test_a_plan_knows_what_scales_of_one_would_cost() -> None:
    """Every choice with an FP8 KV cache has these figures, whatever scales the plan itself assumes."""
    good, unit = (by_precision(plan(DENSE, "h200", WORK, kv_scales_calibrated=c)) for c in (True, False))
    for name in PRESETS:
        told = unit[name]
        figures = {"kl_k3": told.kl_k3, "kl_k3_low": told.kl_k3_low, "kl_k3_high": told.kl_k3_high, "risk": told.risk}
        assert good[name].unit_kv_scales == told.unit_kv_scales == (figures if "fp8_kv" in name else None)


def test_a_plan_records_what_it_was_told_and_what_it_warned_of() -> None:
    budget = RiskBudget(accept="low", low_kl=0.02)
    found = predict(PlanRequest(SMALL, "b200", WORK, budget=budget, kv_scales_calibrated=False))
    assert (found.plan.budget, found.plan.kv_scales) == (budget, "unit")
    assert found.plan.warnings
    assert "b200" in found.plan.warnings[0]
    default = plan(SMALL, "b200", WORK)
    assert (default.budget, default.kv_scales) == (RiskBudget(), "unit")  # FlashInfer keeps them
    assert plan(SMALL, "h200", WORK).kv_scales == "calibrated"
    assert default.warnings == found.plan.warnings


def test_a_prediction_keeps_the_rollout_behind_every_choice() -> None:
    found = predict(PlanRequest(SMALL, "a100", WORK))
    assert [r is not None for r in found.rollouts] == [c.available for c in found.plan.choices]
    rollout, memory, choice = found.rollouts[0], found.tried[0].memory, found.plan.choices[0]
    assert rollout is not None
    assert memory is not None
    assert (memory.usable_blocks + 1) * 16 == choice.kv_cache_tokens
    assert rollout.makespan_s == choice.makespan_s == pytest.approx(rollout.timeline.seconds[-1])
    assert found.plan.warnings


def test_a_given_profile_is_used_without_a_warning() -> None:
    slow, _ = load_profile(find_gpu("h200"))
    slow = replace(
        slow,
        source="a test",
        coefficients={n: v / 2 if "efficiency" in n else 2 * v for n, v in slow.coefficients.items()},
    )
    found = predict(PlanRequest(SMALL, "h200", WORK, profile=slow))
    assert found.plan.profile["source"] == "a test"
    assert found.plan.warnings == ()
    assert found.plan.choices[0].makespan_s > plan(SMALL, "h200", WORK).choices[0].makespan_s  # type: ignore[operator]


def test_progress_sees_every_candidate_once() -> None:
    seen: list[Any] = []

    def watch(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            seen.append(item)
            yield item

    predict(PlanRequest(SMALL, "h200", WORK, gpus=2, progress=watch))
    assert len(seen) == 2 * len(PRESETS)


@pytest.mark.parametrize(
    ("model", "how"),
    [(SMALL, {"gpus": 4}), (DENSE, {"limits": STARVED, "precisions": ["bf16", "fp8_kv"]})],
    ids=["layouts", "one layout that starves"],
)
def test_several_processes_predict_what_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, how: dict[str, Any]
) -> None:
    alone = predict(PlanRequest(model, "h200", WORK, **how))

    def watched(*arguments: Any, **known: Any) -> Simulated:
        (tmp_path / str(os.getpid())).touch()
        return simulate(*arguments, **known)

    monkeypatch.setattr(evaluate, "simulate", watched)
    monkeypatch.setattr(evaluate, "WORTH_PROCESSES", 0)
    together = predict(PlanRequest(model, "h200", WORK, workers=2, **how))
    assert together.plan == alone.plan
    processes = {path.name for path in tmp_path.iterdir()}
    assert processes
    assert str(os.getpid()) not in processes


def test_the_model_half_imports_nothing_from_torch_vllm_or_the_runtime() -> None:
    folder = Path(fp8plan.__file__).parent / "model"
    files = sorted(folder.rglob("*.py"))
    assert folder / "plan" / "planner.py" in files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                assert name.split(".")[0] not in ("torch", "vllm", "triton"), path.name
                assert not name.startswith("fp8plan.runtime"), path.name


MANY = Workload(700, 1, Fixed(16), Fixed(24))


def test_a_plan_names_tune_where_the_limits_cost_time() -> None:
    def sentences(requests: int, **limits: Any) -> list[str]:
        work, given_limits = replace(MANY, prompts=requests), EngineLimits.for_gpu(find_gpu("h200"), **limits)
        reasons = plan(SMALL, "h200", work, limits=given_limits, precisions=["bf16"]).reasons
        return [reason for reason in reasons if "fp8plan tune" in reason]

    (sentence,) = sentences(700)
    assert "in steps of more than 512 requests, which have no CUDA graph" in sentence
    assert sentences(512) == sentences(700, max_num_seqs=512) == sentences(700, max_cudagraph_capture_size=1024) == []
    assert sentences(700, enforce_eager=True) == []
    starved = predict(PlanRequest(DENSE, "h200", WORK, limits=STARVED, precisions=["bf16"]))
    (rollout,), (sentence,) = starved.rollouts, [x for x in starved.plan.reasons if "fp8plan tune" in x]
    assert rollout is not None
    assert f"{rollout.preemptions:,} preemptions lose {rollout.recomputed_tokens:,} tokens" in sentence


def test_larger_graphs_are_never_slower() -> None:
    for name in (SMALL, "fp8plan/moe-7b", "Qwen/Qwen3.5-9B"):
        limits = [EngineLimits.for_gpu(find_gpu("h200"), max_cudagraph_capture_size=size) for size in (64, 512, 1024)]
        choices = [plan(name, "h200", MANY, limits=x, precisions=["bf16"]).choices[0] for x in limits]
        seconds = [choice.makespan_s or math.nan for choice in choices]
        assert seconds == sorted(seconds, reverse=True), name


def test_a_model_that_fits_no_node_is_planned_over_several() -> None:
    def sizes(**options: Any) -> set[int]:
        answer = plan("Qwen/Qwen3-235B-A22B", "h100", Workload(8, 1, Fixed(16), Fixed(16)), gpus_per_node=4, **options)
        return {choice.tensor_parallel for choice in answer.choices if choice.available}

    assert sizes(gpus=8, precisions=["bf16"]) == {8}
    assert sizes(gpus=8, precisions=["fp8_block"]) == {4}  # two replicas, each within its node
    with pytest.raises(CapacityError, match=r"with tensor_parallel_size 4: .*try tensor_parallel_size 8"):
        sizes(gpus=4, precisions=["bf16"])
    with pytest.raises(CapacityError, match=r"with tensor_parallel_size 4: "):
        sizes(gpus=8, precisions=["bf16"], target="verl")  # whose replicas stay in a node
    for precisions in (["bf16", "fp8_block"], ["fp8_block", "bf16"]):
        with pytest.raises(CapacityError, match=r"in fp8_block .*try tensor_parallel_size 4"):
            sizes(gpus=2, precisions=precisions)
    with pytest.raises(ConfigError, match="replicas for 1 requests"):  # no reason to cross nodes
        plan(SMALL, "h100", Workload(1, 1, Fixed(16), Fixed(16)), gpus=8, gpus_per_node=4)


def test_engines_without_cuda_graphs_are_said_to_be_unmeasured() -> None:
    def warned(gpu: str, **limits: Any) -> bool:
        card = find_gpu(gpu)
        answer = plan(SMALL, card, MANY, limits=EngineLimits.for_gpu(card, **limits), precisions=["bf16"])
        return any(warning.startswith("enforce_eager: ") for warning in answer.warnings)

    assert warned("h200", enforce_eager=True)
    assert not warned("h200")
    assert not warned("cpu")  # where vLLM has no others


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gpu": "h200"}, r"plan\(\) missing a required argument: 'model'"),
        (
            {"model": "Qwen/Qwen3-8B", "gpu": "h200", "workload": None, "speed": 1},
            r"plan\(\) got an unexpected keyword argument 'speed'",
        ),
    ],
)
def test_an_argument_that_is_missing_or_unknown_is_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        fp8plan.plan(**arguments)
