"""A Plan is plain data: it survives JSON unchanged, and a damaged one is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.plan import Plan
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.expected import LEVELS, RiskBudget
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import KV_SCALES


@given(
    makespan=st.floats(allow_nan=False, allow_infinity=False),
    step=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    tokens=st.integers(0, 10**12),
    thresholds=st.sampled_from([{}, {"token_tis": 2.0}, {"token_tis": 1.5}]),
    limits=st.builds(EngineLimits, max_model_len=st.none() | st.integers(1, 10**6), enforce_eager=st.booleans()),
    reason=st.text(),
    budget=st.builds(RiskBudget, accept=st.sampled_from(LEVELS), low_kl=st.floats(0, 1)),
    kv_scales=st.sampled_from(KV_SCALES),
    chosen=st.integers(0, 1),
)
def test_json_gives_back_an_equal_plan(
    makespan: float,
    step: float | None,
    tokens: int,
    thresholds: dict[str, Any],
    limits: EngineLimits,
    reason: str,
    budget: RiskBudget,
    kv_scales: str,
    chosen: int,
) -> None:
    at_one = {"kl_k3": 1e-3, "kl_k3_low": 1e-4, "kl_k3_high": makespan, "risk": "low"}
    choices = (
        plans.predicted("bf16", makespan_s=makespan, rl_step_s=step),
        plans.predicted("fp8_kv", kv_cache_tokens=tokens, unit_kv_scales=at_one),
        plans.choice("fp8_block", available=False, reason=reason),
    )
    told: dict[str, Any] = {"reasons": (reason,), "warnings": (reason, ""), "budget": budget, "kv_scales": kv_scales}
    plan = plans.plan(choices=choices, chosen=chosen, thresholds=thresholds, limits=limits, **told)
    assert Plan.from_json(plan.to_json()) == plan


def test_numpy_numbers_become_plain_ones() -> None:
    odd = plans.predicted("bf16", makespan_s=np.float32(1.5), preemptions=np.int64(3), extrapolated=np.bool_(True))
    plan = plans.plan(choices=(odd,), workload={**plans.WORKLOAD, "mean": np.float64(2.5)})
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert type(plan.choices[0].preemptions) is int
    assert type(plan.choices[0].extrapolated) is bool


def test_to_dict_holds_the_documented_keys_in_order() -> None:
    data = plans.saved().to_dict()
    assert list(data) == [
        "schema_version", "fp8plan_version", "model", "gpu", "profile", "limits", "workload", "seed", "choices",
        "chosen", "baseline", "thresholds", "reasons", "warnings", "budget", "remedies", "kv_scales", "anchor",
        "inside", "engine_version",
    ]  # fmt: skip
    assert (
        list(data["choices"][0])
        == (
            "precision tensor_parallel data_parallel available reason makespan_s makespan_low_s makespan_high_s "
            "output_tokens_per_s speedup_over_best speedup_over_best_low speedup_over_best_high step_speedup_over_best "
            "step_speedup_over_best_low step_speedup_over_best_high "
            "speedup speedup_low speedup_high rl_step_s step_speedup kv_cache_tokens preemptions "
            "tail_fraction kl_k3 kl_k3_low kl_k3_high ess_raw clip_fraction seq_reject_fraction risk unit_kv_scales "
            "extrapolated refused_by expert_parallel step_speedup_low step_speedup_high rests_on max_num_seqs "
            "remedy routed_experts turns"
        ).split()
    )
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize("where", ["", "limits", "choices.0", "budget"])
def test_a_missing_field_is_named_and_an_unknown_one_is_passed_over(where: str) -> None:
    """A later version of the same schema may say more, anywhere."""
    plan = plans.saved(warnings=("a note",), budget=RiskBudget(accept="low"), kv_scales="unit", fp8plan_version="7.8.9")

    def damaged(damage: Any) -> str:
        data: Any = plan.to_dict() | {"schema_version": "1.42"}
        node = data
        for step in filter(None, where.split(".")):
            node = node[int(step) if step.isdigit() else step]
        damage(node)
        return json.dumps(data)

    kinds = {"": Plan, "limits": EngineLimits, "choices.0": Choice, "budget": RiskBudget}
    field = fields(kinds[where])[1].name
    with pytest.raises(ConfigError, match=rf"field '([\w\[\].]*\.)?{field}' is missing"):
        Plan.from_json(damaged(lambda node: node.pop(field)))
    assert Plan.from_json(damaged(lambda node: node.update(colour={"r": [1]}))) == plan


def test_a_plan_of_a_schema_without_remedies_has_none() -> None:
    older = plans.saved().to_dict() | {"schema_version": "1.7"}
    del older["remedies"]
    assert Plan.from_json(json.dumps(older)) == plans.saved()
    with pytest.raises(ConfigError, match="the plan: field 'remedies' is missing"):
        Plan.from_json(json.dumps(older | {"schema_version": "1.8"}))


def test_remedies_are_saved_and_reach_the_engine_of_every_choice() -> None:
    remedies = Remedies(True, "fp8_block", (2, 1, "o_proj"))
    plan = Plan.from_json(plans.saved(remedies=remedies).to_json())
    assert plan.remedies == remedies
    assert plan.setup("fp8_block").shape.left_in_bf16()
    assert plan.setup("bf16").shape.left_in_bf16() == ()
    data = plan.to_dict()
    data["remedies"]["keep_bf16"] = [1]
    with pytest.raises(ConfigError, match=r"the plan: remedies: keep_bf16 is \(1,\); allowed: two counts of layers"):
        Plan.from_json(json.dumps(data))
    data["remedies"]["keep_bf16"] = [2, 1]
    assert Plan.from_json(json.dumps(data)).remedies == Remedies(True, "fp8_block", (2, 1))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            "2.0",
            r"schema 2\.0, written by fp8plan 9\.1; this is fp8plan .*, which reads schema 1\.x: type: pip inst",
        ),
        ("0.9", r"schema 0\.9, written by fp8plan 9\.1; .*: install the version that wrote it"),
        ("1", r"plan: schema_version is '1'; allowed: text such as '1\.\d'"),
        (["1.0"], r"plan: schema_version is \['1\.0'\]"),
        (
            None,
            r"not a plan: it has no schema_version; to make one, type: fp8plan plan MODEL --gpu GPU --json",
        ),
    ],
)
def test_a_plan_of_another_schema_is_refused_by_version(version: Any, message: str) -> None:
    changed = plans.saved().to_dict() | {"schema_version": version, "fp8plan_version": "9.1", "choices": "unlike ours"}
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(json.dumps(changed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the plan is not JSON: .*; to make one, type: fp8plan plan MODEL"),
        ("[]", "plan is a list"),
        ("[" * 100_000, "the plan is not JSON: maximum recursion depth"),
        (json.dumps({**plans.saved().to_dict(), "seed": "7"}), r"the plan: seed is '7'"),
        (json.dumps({**plans.saved().to_dict(), "seed": True}), r"the plan: seed is True"),
        (json.dumps({**plans.saved().to_dict(), "choices": {}}), "choices is {}; allowed: a list"),
        (json.dumps({**plans.saved().to_dict(), "choices": [3]}), r"choices\[0\] is 3; allowed: an object"),
        (json.dumps({**plans.saved().to_dict(), "reasons": "because"}), "reasons is 'because'"),
        (json.dumps({**plans.saved().to_dict(), "warnings": [1]}), r"warnings\[0\] is 1; allowed: text"),
        (
            json.dumps({**plans.saved().to_dict(), "kv_scales": "none"}),
            "kv_scales is 'none'; allowed: calibrated, unit",
        ),
        (json.dumps({**plans.saved().to_dict(), "budget": "low"}), "budget is 'low'; allowed: an object"),
        (
            json.dumps({**plans.saved().to_dict(), "budget": asdict(RiskBudget()) | {"accept": "all"}}),
            "the plan: budget.accept is 'all'; allowed: low, moderate, high; to make one, type",
        ),
        (
            json.dumps({**plans.saved().to_dict(), "limits": asdict(EngineLimits()) | {"block_size": 17}}),
            "the plan: limits: block_size is 17; allowed: a multiple of 16",
        ),
        (json.dumps({**plans.saved().to_dict(), "chosen": 9}), "chosen is 9; allowed: 0 to 3"),
        (json.dumps({**plans.saved().to_dict(), "thresholds": {"tis": 2}}), "unknown thresholds: tis"),
    ],
)
def test_a_damaged_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(text)


AT_ONE = {"kl_k3": 3e-3, "kl_k3_low": 1e-3, "kl_k3_high": 4.5e-2, "risk": "low"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tensor_parallel", -3, r"choices\[2\]\.tensor_parallel is -3; allowed: a whole number of at least 1"),
        ("data_parallel", 0, r"choices\[2\]\.data_parallel is 0; allowed: a whole number of at least 1"),
        ("risk", None, r"choices\[2\]\.risk is None, but the choice is available"),
        ("risk", "none", r"choices\[2\]\.risk is 'none'; allowed: low, moderate, high"),
        ("kl_k3_high", None, r"choices\[2\]\.kl_k3_high is None, but the choice is available"),
        ("makespan_s", float("nan"), "the plan is not JSON: it holds NaN"),
        ("rl_step_s", float("-inf"), "the plan is not JSON: it holds -Infinity"),
        ("kl_k3_high", 10**400, r"choices\[2\]\.kl_k3_high is 1000"),
        ("unit_kv_scales", {}, r"choices\[2\]\.unit_kv_scales: field 'kl_k3' is missing"),
        ("unit_kv_scales", AT_ONE | {"kl_k3_high": "x"}, r"unit_kv_scales: kl_k3_high is 'x'; allowed: a number"),
        ("unit_kv_scales", AT_ONE | {"risk": "none"}, r"unit_kv_scales: risk is 'none'; allowed: low, moderate, h"),
        ("unit_kv_scales", AT_ONE | {"risk": None}, r"unit_kv_scales: risk is None; allowed: low, moderate, high;"),
    ],
)
def test_a_damaged_choice_is_refused_by_field(field: str, value: Any, message: str) -> None:
    data = plans.saved().to_dict()
    data["choices"][2][field] = value
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(json.dumps(data))


def test_a_number_that_overflows_is_refused() -> None:
    text = plans.saved().to_json().replace('"makespan_s": 1.0', '"makespan_s": 1e999', 1)
    with pytest.raises(ConfigError, match=r"choices\[0\]\.makespan_s is inf"):
        Plan.from_json(text)


@pytest.mark.parametrize("value", [-1, 0, "x", None, True, [0.5, 2]])
def test_a_bound_is_a_number_above_0(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"thresholds\['token_tis'\] is .*; allowed: a number above 0"):
        Plan.from_json(plans.saved(thresholds={"token_tis": value}).to_json())


@pytest.mark.parametrize("thing", [None, {}, 5])
def test_what_is_no_text_is_no_plan(thing: Any) -> None:
    with pytest.raises(ConfigError, match=f"the plan is a {type(thing).__name__}; allowed: text"):
        Plan.from_json(thing)


def test_a_number_that_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="workload"):
        plans.plan(workload={**plans.WORKLOAD, "mean": float("nan")})


def test_select_takes_the_chosen_or_the_one_asked_for() -> None:
    plan = plans.plan(chosen=2)
    assert plan.select().precision == list(PRESETS)[2]
    assert plan.select(0).precision == "bf16"
    assert plan.select("fp8_kv").precision == "fp8_kv"
    for wrong in (4, -1):
        with pytest.raises(ConfigError, match=f"no choice {wrong}; allowed: 0 to 3, or a precision"):
            plan.select(wrong)
    for thing in (1.5, True, plan.choices[0], [0]):
        told = re.escape(f"choice is {thing!r:.60}; allowed: 0 to 3, or a precision")
        with pytest.raises(ConfigError, match=told):
            plan.select(thing)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"the plan has no 'fp8'; allowed: bf16, fp8_block, fp8_kv, fp8_block\+fp8_kv"
    ):
        plan.select("fp8")


def test_a_precision_names_that_of_the_chosen_layout_or_else_its_fastest() -> None:
    def kv(tensor_parallel: int, **known: Any) -> Choice:
        return plans.choice("fp8_kv", tensor_parallel=tensor_parallel, **known)

    gone = kv(8, available=False, reason="too large")
    rollouts = (plans.choice("bf16", makespan_s=1.0), gone, kv(4, makespan_s=9.0), kv(2, makespan_s=7.0))
    plan = plans.plan(choices=rollouts)
    assert plan.index("fp8_kv") == 3
    assert plan.vllm_kwargs("fp8_kv")["tensor_parallel_size"] == 2
    assert "+actor_rollout_ref.rollout.custom.fp8plan.choice=fp8_kv" in plan.verl_overrides("fp8_kv")
    chosen = plans.choice("bf16", makespan_s=9.0, rl_step_s=60.0)
    steps = (chosen, kv(2, makespan_s=7.0, rl_step_s=50.0), kv(4, makespan_s=9.0, rl_step_s=40.0))
    assert plans.plan(choices=steps).select("fp8_kv").tensor_parallel == 4
    same = (replace(chosen, tensor_parallel=2), *steps[1:])
    assert plans.plan(choices=same).select("fp8_kv").tensor_parallel == 2
    assert plans.plan(choices=steps[1:], chosen=0).select("fp8_kv").tensor_parallel == 2  # the chosen one itself
    with pytest.raises(ConfigError, match="too large"):
        plans.plan(choices=(gone,)).select("fp8_kv")


def test_a_choice_the_gpu_cannot_run_is_not_emitted() -> None:
    gone = plans.choice("fp8_block", available=False, reason="the GPU has no FP8 tensor cores")
    plan = plans.plan(choices=(plans.choice("bf16"), gone))
    with pytest.raises(ConfigError, match="no FP8 tensor cores"):
        plan.vllm_kwargs(1)
