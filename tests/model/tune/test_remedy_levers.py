"""Levers that lower the mismatch, against plans with and without the remedy."""

from __future__ import annotations

from functools import cache

import pytest

from fp8plan.model.distributions import Fixed
from fp8plan.model.plan.choice import power
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.scene import Lever
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.targets import TARGETS
from fp8plan.model.tune.answer import Answer
from fp8plan.model.tune.levers import levers
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload

EXPERTS, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"
WORK = Workload(16, 8, Fixed(256), Fixed(512))
REPLAY, KEPT, TRAINED = "router replay", "the first and last layer in BF16", "a trainer in fp8_block"
OUTPUTS = "attention outputs in BF16"


def request(model: str, remedies: Remedies, precision: str = "fp8_block") -> TuneRequest:
    budget = RiskBudget(accept="high")
    return TuneRequest(model, "h200", WORK, precisions=[precision], budget=budget, remedies=remedies)


@cache
def found(model: str, remedies: Remedies, precision: str = "fp8_block") -> dict[str, Lever]:
    tuned = search(request(model, remedies, precision))
    return {lever.name: lever for lever in levers(tuned, tuned.scene()) if lever.remedy}


def planned(remedies: Remedies) -> tuple[float, float]:
    """Seconds and KL of a plan with these remedies."""
    chosen = predict(request(EXPERTS, remedies)).chosen
    return chosen.timed.makespan_s, chosen.expected.kl_k3


@pytest.mark.parametrize(
    ("name", "remedies"),
    [
        (REPLAY, Remedies(router_replay=True)),
        (KEPT, Remedies(keep_bf16=(1, 1))),
        (OUTPUTS, Remedies(keep_bf16=(0, 0, "o_proj"))),
        (TRAINED, Remedies(trainer_precision="fp8_block")),
    ],
)
def test_a_remedy_costs_and_lowers_what_plans_with_and_without_it_say(name: str, remedies: Remedies) -> None:
    (before_s, before), (after_s, after) = planned(Remedies()), planned(remedies)
    for lever, in_plan in ((found(EXPERTS, Remedies())[name], False), (found(EXPERTS, remedies)[name], True)):
        assert lever.in_plan is in_plan
        assert (lever.before_s, lever.after_s) == pytest.approx((before_s, after_s))
        assert lever.mismatch == f"KL k3 {power(after)} instead of {power(before)}"
        assert lever.setting == f"plan with {remedies.options}"


def test_a_trainer_in_fp8_takes_no_time_of_the_rollout() -> None:
    lever = found(EXPERTS, Remedies())[TRAINED]
    assert lever.gain.certain
    assert lever.saved_s == (0, 0, 0)
    assert "blockwise" in lever.words["verl"]


def test_what_a_model_or_a_precision_lacks_has_no_row() -> None:
    assert REPLAY not in found(DENSE, Remedies())
    assert {KEPT, "the first 4 and last 4 layers in BF16", OUTPUTS, TRAINED} == found(DENSE, Remedies()).keys()
    assert found(DENSE, Remedies(), "bf16") == {}
    assert list(found(EXPERTS, Remedies(), "bf16")) == [REPLAY]


def test_words_are_the_engine_s_and_the_trainers_own() -> None:
    rows = found(EXPERTS, Remedies())
    assert {program for row in rows.values() for program in row.words} <= {*TARGETS, "fp8plan"}
    assert rows[REPLAY].words["vllm"] == "--enable-return-routed-experts"
    assert rows[REPLAY].words["slime"] == "--use-rollout-routing-replay"
    assert rows[REPLAY].words["trl"] == "fp8plan.integrations.trl.GRPOTrainer(..., router_replay=True)"
    assert rows[KEPT].words["vllm"].endswith(r"re:.*\.layers\.(0|47)\..*")
    assert rows[KEPT].words["fp8plan"] == "keep_bf16=(1, 1)"
    kept = found(EXPERTS, Remedies(keep_bf16=(1, 1, "o_proj")))
    both = kept["the first and last layer and attention outputs in BF16"]
    assert both.words["vllm"].startswith(r"quantization_config ignore: re:.*\.layers\.(0|47)\..*, re:.*\.(o_proj|")
    assert both.words["fp8plan"] == "keep_bf16=(1, 1, 'o_proj')"
    assert "vllm" not in rows[TRAINED].words
    followed = found(EXPERTS, Remedies(trainer_precision="fp8_block_pow2"))["a trainer in fp8_block_pow2"]
    assert followed.words["vllm"] == "VLLM_USE_DEEP_GEMM_E8M0=1"


def test_remedies_are_in_the_table_even_where_they_change_no_time() -> None:
    answer = Answer.of(search(request(EXPERTS, Remedies())))
    names = [lever.name for lever in answer.levers]
    assert {REPLAY, KEPT, TRAINED} <= set(names)
    assert not {REPLAY, KEPT, TRAINED} & set(answer.idle)


def test_a_search_with_returned_experts_keeps_the_prefix_cache() -> None:
    tuned = search(request(EXPERTS, Remedies(router_replay=True)))
    assert tuned.grid.prefix_caching == (True,)
    assert tuned.best.plan.limits.enable_return_routed_experts
