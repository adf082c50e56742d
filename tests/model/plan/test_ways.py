"""The remedies that a plan offers where the risk budget rules a faster precision out."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import ShortConv
from fp8plan.model.distributions import parse_distribution
from fp8plan.model.plan.candidates import Way, ruled_out
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import Prediction, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.ways import KEPT
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import BLOCK, POW2, Remedies
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.workload import Workload

EXPERTS, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"
WORK = Workload(16, 8, parse_distribution("fixed:256", "prompt"), parse_distribution("fixed:512", "response"))


@cache
def planned(model: str, most: float, gpu: str = "h200", remedies: Remedies | None = None) -> Prediction:
    """A plan whose budget accepts a KL up to `most`, whatever is clipped."""
    budget = RiskBudget(low_kl=most, low_clip=1.0, low_ess=0.0, accept="low")
    request = PlanRequest(model, gpu, WORK, budget=budget, remedies=remedies or Remedies(), engine_version="0.33.0")
    return predict(request)


def high(model: str, precision: str, remedies: Remedies | None = None, gpu: str = "h200") -> float:
    """The upper end of the KL's band of a precision with some remedies."""
    choices = planned(model, 1.0, gpu, remedies).plan.choices
    (kl,) = (c.kl_k3_high for c in choices if c.precision == precision)
    assert kl is not None
    return kl


def way(prediction: Prediction, precision: str) -> Way | None:
    (choice,) = (c for c in prediction.plan.choices if c.precision == precision)
    return choice.remedy


REPLAY = Remedies(router_replay=True)


def test_what_is_allowed_needs_no_way() -> None:
    assert all(choice.remedy is None for choice in planned(EXPERTS, 1.0).plan.choices)


def test_router_replay_is_offered_with_the_kl_and_the_time_of_a_plan_that_has_it() -> None:
    replayed, plain = planned(EXPERTS, 1.0, remedies=REPLAY).plan, planned(EXPERTS, 1.0).plan
    limit = high(EXPERTS, "fp8_block", REPLAY) * 1.01
    prediction = planned(EXPERTS, limit)
    offered = way(prediction, "fp8_block")
    assert offered is not None
    assert offered.remedies == REPLAY
    (with_it,) = (c for c in replayed.choices if c.precision == "fp8_block")
    (without,) = (c for c in plain.choices if c.precision == "fp8_block")
    assert (offered.kl_k3, offered.kl_k3_low, offered.kl_k3_high) == (
        with_it.kl_k3,
        with_it.kl_k3_low,
        with_it.kl_k3_high,
    )
    assert offered.added_s == pytest.approx(with_it.seconds - without.seconds)
    assert offered.added_s > 0
    assert offered.risk == "low"
    (reason,) = (x for x in prediction.plan.reasons if x.startswith("fp8_block would be"))
    assert "; it needs router replay: k3 " in reason
    assert f"+{offered.added_s:.3g} s a rollout, risk low." in reason


def test_beside_attention_outputs_the_fewest_layers_are_kept_that_are_enough() -> None:
    every = [Remedies(keep_bf16=(0, 0, "o_proj"))]
    every += [Remedies(keep_bf16=kept) for kept in KEPT if "o_proj" in kept]
    bounds = [high(DENSE, "fp8_block", remedies) for remedies in every]
    assert bounds == sorted(bounds, reverse=True)
    for remedies, before, after in zip(every[1:], bounds[:-1], bounds[1:], strict=True):
        offered = way(planned(DENSE, (before * after) ** 0.5, remedies=every[0]), "fp8_block")
        assert offered is not None
        assert offered.remedies == remedies
        assert offered.added_s > 0


def test_what_a_model_lacks_is_not_offered() -> None:
    """Without attention there are no outputs to keep, and of two layers none would be left."""
    dense, trained = ModelShape.from_hf(DENSE), Remedies(trainer_precision=POW2)
    layers = tuple(replace(layer, mixer=ShortConv(4096, 3)) for layer in dense.layers[:2])
    request = replace(planned(DENSE, 1.0, "b200").request, model=replace(dense, layers=layers))
    (enough,) = (x.kl_k3_high for x in predict(replace(request, remedies=trained)).plan.choices
                 if x.precision == "fp8_block")  # fmt: skip
    assert enough is not None
    offered = way(predict(replace(request, budget=RiskBudget(enough * 1.01, 1.0, 0.0, accept="low"))), "fp8_block")
    assert offered is not None
    assert offered.remedies == trained


def test_a_trainer_on_the_rollout_s_grid_is_named_behind_what_leaves_training_alone() -> None:
    """Blackwell's kernels round scales to powers of two."""
    plain, trained = (high(DENSE, "fp8_block", Remedies(trainer_precision=x), "b200") for x in ("bf16", POW2))
    assert trained < plain
    prediction = planned(DENSE, (plain * trained) ** 0.5, "b200")
    offered = way(prediction, "fp8_block")
    assert offered is not None
    assert any(offered.remedies.keep_bf16)
    assert offered.trainer == POW2
    (reason,) = (x for x in prediction.plan.reasons if x.startswith("fp8_block would be"))
    assert reason.endswith("A trainer in fp8_block_pow2 is enough, too, but changes the training itself.")


def test_a_trainer_in_fp8_is_offered_where_nothing_else_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8plan.model.plan.ways.KEPT", ())
    own = Remedies(keep_bf16=(0, 0, "o_proj"))
    both = replace(own, trainer_precision=POW2)
    plain, trained = (high(DENSE, "fp8_block", remedies, "b200") for remedies in (own, both))
    request = planned(DENSE, 1.0, "b200", own).request
    limit = (plain * trained) ** 0.5
    prediction = predict(replace(request, budget=RiskBudget(limit, 1.0, 0.0, accept="low")))
    offered = way(prediction, "fp8_block")
    assert offered is not None
    assert offered.remedies == both
    assert offered.added_s == 0
    (reason,) = (x for x in prediction.plan.reasons if x.startswith("fp8_block would be"))
    assert reason.endswith("no more time, risk low. That changes the training itself.")


def test_two_remedies_are_offered_where_one_is_not_enough() -> None:
    kept = KEPT[-1]
    one = min(high(EXPERTS, "fp8_block", x) for x in (REPLAY, Remedies(keep_bf16=kept), Remedies(False, BLOCK)))
    both = high(EXPERTS, "fp8_block", Remedies(True, keep_bf16=kept))
    assert both < one
    offered = way(planned(EXPERTS, (one * both) ** 0.5), "fp8_block")
    assert offered is not None
    assert offered.remedies.router_replay
    assert any(offered.remedies.keep_bf16)


def test_where_nothing_helps_the_reason_says_so() -> None:
    prediction = planned(EXPERTS, high(EXPERTS, "bf16") * 1.01)
    assert way(prediction, "fp8_block+fp8_kv") is None
    (reason,) = (x for x in prediction.plan.reasons if x.startswith("fp8_block+fp8_kv would be"))
    assert reason.endswith("Its mismatch risk is moderate, and no remedy lowers it to low.")


def test_where_no_precision_is_allowed_each_one_with_a_way_is_named() -> None:
    limit = (high(EXPERTS, "bf16") * high(EXPERTS, "bf16", REPLAY)) ** 0.5
    prediction = planned(EXPERTS, limit)
    assert prediction.plan.reasons[0].startswith("No precision stays within the risk budget")
    assert prediction.plan.reasons[1].startswith("The chosen bf16's mismatch risk is moderate; it needs router replay")


def test_remedies_of_the_plan_stay_in_what_is_offered_further() -> None:
    own = Remedies(keep_bf16=(2, 2))
    limit = (high(EXPERTS, "fp8_block", own) * high(EXPERTS, "fp8_block", Remedies(True, keep_bf16=(2, 2)))) ** 0.5
    offered = way(planned(EXPERTS, limit, remedies=own), "fp8_block")
    assert offered is not None
    assert offered.remedies.keep_bf16 >= (2, 2)
    assert offered.remedies != own


def test_a_trainer_of_the_plan_is_no_further_change_of_the_training() -> None:
    own, both = Remedies(trainer_precision=BLOCK), Remedies(True, BLOCK)
    prediction = planned(EXPERTS, high(EXPERTS, "fp8_block", both) * 1.01, remedies=own)
    offered = way(prediction, "fp8_block")
    assert offered is not None
    assert offered.remedies == both
    (reason,) = (x for x in prediction.plan.reasons if "it also needs router replay: k3 " in x)
    assert "training itself" not in reason


def test_further_layers_are_kept_beside_those_of_the_plan() -> None:
    limit = high(DENSE, "fp8_block", Remedies(keep_bf16=(4, 4, "o_proj"))) * 1.01
    offered = way(planned(DENSE, limit, remedies=Remedies(keep_bf16=(3, 0, "o_proj"))), "fp8_block")
    assert offered is not None
    assert offered.remedies.keep_bf16 == (4, 4, "o_proj")
    assert offered.kl_k3_high == pytest.approx(limit / 1.01)
    limit = high(DENSE, "fp8_block", Remedies(keep_bf16=(4, 6, "o_proj"))) * 1.01
    assert way(planned(DENSE, limit, remedies=Remedies(keep_bf16=(0, 6, "o_proj"))), "fp8_block") is None


def test_of_the_chosen_precision_only_the_chosen_layout_has_a_way() -> None:
    """Beside one that the budget rules out, the reason of a plan names its way."""
    prediction = planned(EXPERTS, 1e-9)
    chosen = prediction.chosen
    faster = replace(chosen, step_s=chosen.seconds / 2)
    assert ruled_out([chosen, faster], 0, prediction.request.risk_budget) == [0]


def test_a_choice_with_a_way_is_saved_and_read() -> None:
    limit = high(EXPERTS, "fp8_block", REPLAY) * 1.01
    plan = planned(EXPERTS, limit).plan
    assert Plan.from_json(plan.to_json()) == plan
    saved = json.loads(plan.to_json())["choices"]
    assert [choice["remedy"] and choice["remedy"]["remedies"]["router_replay"] for choice in saved].count(True) >= 1


def test_the_way_of_a_plan_with_the_trainer_s_times_is_that_of_the_whole_step() -> None:
    limit = high(EXPERTS, "fp8_block", REPLAY) * 1.01
    request = planned(EXPERTS, limit).request
    of_rollout = way(planned(EXPERTS, limit), "fp8_block")
    prediction = predict(replace(request, trainer=StepTimes(train_s=1, logprob_s=1), link="200Gb/s"))
    offered = way(prediction, "fp8_block")
    assert offered is not None
    assert of_rollout is not None
    to_trainer_s = 128 * (256 + 512) * 384 / 25e9
    assert offered.added_s == pytest.approx(of_rollout.added_s + to_trainer_s)
    assert " s a step, risk low." in " ".join(prediction.plan.reasons)


def test_ways_are_those_of_the_fastest_layout_alone() -> None:
    prediction = planned(EXPERTS, high(EXPERTS, "bf16") * 1.01)
    found = ruled_out(prediction.tried, prediction.plan.chosen, prediction.request.risk_budget)
    assert {prediction.plan.choices[i].precision for i in found} <= {"fp8_block", "fp8_kv", "fp8_block+fp8_kv"}
