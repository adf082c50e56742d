"""A Plan is plain data: it survives JSON unchanged, and a damaged one is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan import Choice, Plan
from fp8plan.model.precision import PRESETS

finite = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(
    makespan=finite,
    tokens=st.none() | st.integers(0, 10**12),
    thresholds=st.sampled_from([{}, {"token_tis": 2.0}, {"sequence_mis": (0.5, 2.0), "token_tis": 1.5}]),
    limits=st.builds(EngineLimits, max_model_len=st.none() | st.integers(1, 10**6), enforce_eager=st.booleans()),
    reason=st.text(),
    chosen=st.integers(0, 1),
)
def test_json_gives_back_an_equal_plan(
    makespan: float | None,
    tokens: int | None,
    thresholds: dict[str, Any],
    limits: EngineLimits,
    reason: str,
    chosen: int,
) -> None:
    choices = (plans.choice("bf16", makespan_s=makespan), plans.choice("fp8_kv", kv_cache_tokens=tokens))
    plan = plans.plan(choices=choices, chosen=chosen, thresholds=thresholds, limits=limits, reasons=(reason,))
    assert Plan.from_json(plan.to_json()) == plan


def test_numpy_numbers_become_plain_ones() -> None:
    odd = plans.choice("bf16", makespan_s=np.float32(1.5), preemptions=np.int64(3), extrapolated=np.bool_(True))
    plan = plans.plan(choices=(odd,), workload={**plans.WORKLOAD, "mean": np.float64(2.5)})
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert type(plan.choices[0].preemptions) is int
    assert type(plan.choices[0].extrapolated) is bool


def test_to_dict_holds_the_documented_keys_in_order() -> None:
    data = plans.plan().to_dict()
    assert list(data) == [
        "model", "gpu", "profile", "limits", "workload", "seed", "choices", "chosen", "thresholds", "reasons",
    ]  # fmt: skip
    assert (
        list(data["choices"][0])
        == (
            "precision tensor_parallel data_parallel available reason makespan_s makespan_low_s makespan_high_s "
            "output_tokens_per_s speedup speedup_low speedup_high rl_step_s step_speedup kv_cache_tokens preemptions "
            "tail_fraction kl_k3 kl_k3_low kl_k3_high ess_raw clip_fraction seq_reject_fraction risk extrapolated"
        ).split()
    )
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize("where", ["", "limits", "choices.0"])
def test_a_missing_field_and_an_unknown_one_are_named(where: str) -> None:
    def damaged(damage: Any) -> str:
        data: Any = plans.plan().to_dict()
        node = data
        for step in filter(None, where.split(".")):
            node = node[int(step) if step.isdigit() else step]
        damage(node)
        return json.dumps(data)

    field = fields({"": Plan, "limits": EngineLimits, "choices.0": Choice}[where])[1].name
    with pytest.raises(ConfigError, match=rf"missing field '{field}'"):
        Plan.from_json(damaged(lambda node: node.pop(field)))
    with pytest.raises(ConfigError, match="unknown field 'colour'"):
        Plan.from_json(damaged(lambda node: node.update(colour="red")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a plan"),
        ("[]", "plan is a list"),
        (json.dumps({**plans.plan().to_dict(), "seed": "7"}), r"plan\.seed is '7'"),
        (json.dumps({**plans.plan().to_dict(), "seed": True}), r"plan\.seed is True"),
        (json.dumps({**plans.plan().to_dict(), "choices": {}}), "choices is a dict"),
        (json.dumps({**plans.plan().to_dict(), "choices": [3]}), r"choices\[0\] is a int"),
        (json.dumps({**plans.plan().to_dict(), "reasons": "because"}), "reasons is 'because'"),
        (json.dumps({**plans.plan().to_dict(), "chosen": 9}), "chosen is 9; allowed: 0 to 3"),
        (json.dumps({**plans.plan().to_dict(), "thresholds": {"tis": 2}}), "unknown thresholds: tis"),
    ],
)
def test_a_damaged_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(text)


def test_a_number_that_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="workload"):
        plans.plan(workload={**plans.WORKLOAD, "mean": float("nan")})


def test_select_takes_the_chosen_or_the_one_asked_for() -> None:
    plan = plans.plan(chosen=2)
    assert plan.select().precision == list(PRESETS)[2]
    assert plan.select(0).precision == "bf16"
    with pytest.raises(ConfigError, match="no choice 4"):
        plan.select(4)


def test_a_choice_the_gpu_cannot_run_is_not_emitted() -> None:
    gone = plans.choice("fp8_block", available=False, reason="the GPU has no FP8 tensor cores")
    plan = plans.plan(choices=(plans.choice("bf16"), gone))
    with pytest.raises(ConfigError, match="no FP8 tensor cores"):
        plan.vllm_kwargs(1)
