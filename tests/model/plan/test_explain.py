"""The reasons of a plan: the sentences say what the numbers say, and nothing that they do not."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import plans
import pytest

from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.choice import Answer, Choice
from fp8plan.model.plan.explain import explain
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.expected import MismatchRisk, RiskBudget
from fp8plan.model.rollout import Rollout, Timeline
from fp8plan.model.workload import Workload

NOTHING = np.zeros(0, dtype=np.int64)
TIMED = Rollout(
    1.0, 0.9, 1.1, 1, 1, 0, 0, 0, 0.0, {"attention": 0.7, "gemm": 0.25, "host": 0.05}, {"host": 1.0}, (),
    Timeline(np.ones(1), NOTHING, NOTHING, NOTHING, NOTHING),
)  # fmt: skip
DATASHEET = datasheet_profile(find_gpu("h200"))
MEASURED = replace(DATASHEET, kind="calibrated", source="a test")
SENTENCES = {"reasons": ("KL up to something", "a second thing")}
RISK = MismatchRisk(**dict.fromkeys(f.name for f in fields(MismatchRisk)) | SENTENCES)  # type: ignore[arg-type]
CORRECTIONS = ("token TIS at 2", "sequence MIS")
REQUEST = PlanRequest("Qwen/Qwen3-8B", "h200", Workload(1, 1, 1, 1))


def row(precision: str, seconds: float, risk: str = "low", **known: Any) -> Choice:
    facts = {
        "makespan_s": seconds, "makespan_low_s": seconds / 2, "makespan_high_s": seconds * 2, "risk": risk,
        "speedup": 100 / seconds, "kv_cache_tokens": 1000, "preemptions": 0, "tail_fraction": 0.0,
        "extrapolated": False,
    }  # fmt: skip
    for name in ("speedup", "step_speedup"):
        if ratio := (facts | known).get(name):
            doubt = 1.0 if precision == "bf16" else 1.1
            for kind in (name, f"{name}_over_best"):  # over one layout the two are the same
                facts |= {kind: ratio, f"{kind}_low": ratio / doubt, f"{kind}_high": ratio * doubt}
    return plans.choice(precision, **(facts | known))


def runs(*choices: Choice) -> list[Rollout | None]:
    """The rollouts behind these rows."""
    return [None if c.makespan_s is None else replace(TIMED, makespan_s=c.makespan_s) for c in choices]


def missing(precision: str, reason: str = "a test") -> Choice:
    return plans.choice(precision, available=False, reason=reason)


def reasons(
    *choices: Choice,
    chosen: int = 0,
    accept: Any = "moderate",
    profile: Profile = MEASURED,
    tail: float = 0.0,
) -> list[str]:
    rollouts = [x and replace(x, tail_fraction=tail) for x in runs(*choices)]
    found = explain(Answer(choices, chosen, rollouts, profile, RiskBudget(accept=accept)), RISK, CORRECTIONS, REQUEST)
    return [sentence for sentence in found if not sentence.startswith(("Mismatch: ", "Correction: ", "The time goes"))]


def test_a_gain_is_named_with_its_interval() -> None:
    headline, *_ = reasons(row("bf16", 100), row("fp8_block", 80), chosen=1)
    assert headline == (
        "Choose fp8_block: 80 s (90%: 40 to 160) for the rollout. It is 1.25x as fast as bf16 (90%: 1.14 to 1.38)."
    )


@pytest.mark.parametrize(
    ("seconds", "low", "high", "doubted"),
    [(80, 0.96, 1.63, True), (80, 1.004, 1.56, True), (80, 1.006, 1.55, False), (99, 0.9, 1.13, True)],
)
def test_a_gain_that_may_be_none_says_so(seconds: float, low: float, high: float, doubted: bool) -> None:
    chosen = row("fp8_block", seconds, speedup_low=low, speedup_high=high)
    for known in ({}, {"step_speedup": 1.1, "step_speedup_low": low, "step_speedup_high": high, "rl_step_s": 90.0}):
        bf16 = row("bf16", 100, **({"rl_step_s": 99.0} if known else {}))
        headline = reasons(bf16, replace(chosen, **known), chosen=1)[0]  # type: ignore[arg-type]
        assert headline.count("may be no faster: its interval holds 1.00") == doubted * (2 if known else 1)


def test_the_gain_of_the_step_is_named_for_two_shares_of_the_rollout_where_it_is_not_known() -> None:
    found = reasons(row("bf16", 100), row("fp8_block", 50, speedup=2.0), chosen=1)
    assert found[1] == (
        "The whole RL step becomes 1.33x as fast as with bf16 (90%: 1.29 to 1.38) if 50% of it is rollout there. "
        "It becomes 1.67x as fast as with bf16 (90%: 1.56 to 1.77) if 80% is."
    )
    assert "--train-s and --logprob-s" in found[2]
    known = row("fp8_block", 50, speedup=2.0, step_speedup=1.5)
    assert not any("The whole RL step becomes" in s for s in reasons(row("bf16", 100), known, chosen=1))
    assert not any("The whole RL step" in s for s in reasons(row("bf16", 100), row("fp8_block", 99)))


def test_what_makes_a_precision_slower_than_bf16_is_named() -> None:
    def told(parts: dict[str, float], *rows: Choice) -> list[str]:
        spent = [x and replace(x, parts=parts if i else TIMED.parts) for i, x in enumerate(runs(*rows))]
        found = explain(Answer(rows, 0, spent, MEASURED), RISK, CORRECTIONS, REQUEST)
        return [sentence for sentence in found if sentence.startswith("fp8_")]

    slower = "fp8_kv is 20% slower than bf16 (90%: 27% slower to 12% slower): it spends"
    rows = row("bf16", 100), row("fp8_kv", 125), missing("fp8_block")
    assert told({"attention": 1.0}, *rows) == [f"{slower} 125 s on attention over the KV cache, and bf16 70 s."]
    quantising = told({"quantise": 1.0}, *rows)
    assert quantising == [f"{slower} 125 s on quantising activations."]  # bf16's 0 s are no news
    (even,) = told(TIMED.parts, row("bf16", 100), row("fp8_kv", 100.5))
    assert re.fullmatch(r"fp8_kv is no faster: it is 1\.00x as fast as the chosen bf16 \(90%: .* to .*\)\.", even)
    (a_bit,) = told(TIMED.parts, row("bf16", 100), row("fp8_kv", 100.9))
    assert a_bit.startswith("fp8_kv is no faster: it is 0.9% slower than the chosen bf16 (90%: ")


def test_the_gain_of_the_whole_step_is_named_where_it_is_known() -> None:
    rows = row("bf16", 100, rl_step_s=200.0), row("fp8_block", 80, rl_step_s=180.0, step_speedup=200 / 180)
    assert "The whole RL step is 1.11x as fast as with bf16 (90%: 1.01 to 1.22)." in reasons(*rows, chosen=1)[0]


def test_it_says_that_fp8_is_not_worth_it_and_why_for_each() -> None:
    found = reasons(row("bf16", 100), row("fp8_block", 99), row("fp8_kv", 125))
    assert "Stay with bf16" in found[0]
    assert "FP8 is not worth it" in found[0]
    assert "fp8_block is only 1.0% faster than the chosen bf16" in found[1]
    assert "mismatch" in found[1]
    assert "fp8_kv is 20% slower than bf16" in found[2]
    assert len(found) == 3


def test_it_says_that_the_budget_excludes_a_faster_one() -> None:
    found = reasons(row("bf16", 100), row("fp8_block", 50, "moderate"), accept="low")
    assert "Stay with bf16" in found[0]
    assert "risk budget (low)" in found[0]
    assert "not worth it" not in found[0]
    assert "fp8_block would be 2.00x as fast as the chosen bf16" in found[1]
    assert "risk is moderate" in found[1]


def test_a_gain_below_the_least_is_the_reason_though_riskier_ones_are_faster() -> None:
    found = reasons(row("bf16", 100), row("fp8_block", 98.5), row("fp8_kv", 60, "high"))
    assert "within the risk budget (moderate) it gains less than 2%, which does not pay for a mismatch" in found[0]
    assert "outside" not in found[0]
    assert any("fp8_block is only 1.5% faster" in s for s in found)
    assert any(s.startswith("fp8_kv would be 1.67x as fast as the chosen bf16 (90%") for s in found)
    assert any(s.endswith("risk is high, and no remedy lowers it to moderate.") for s in found)


def test_layouts_that_nobody_measured_are_named() -> None:
    rows = row("bf16", 100), row("fp8_block", 80), row("fp8_block", 60, tensor_parallel=2, extrapolated=True)
    found = reasons(*rows, chosen=1)
    assert any("fp8_block on 1 replica of tensor_parallel_size 2 is predicted 1.33x as fast" in s for s in found)
    assert "No measurement of tensor_parallel_size 2 was fitted on h200_sxm" in found[-1]
    assert not any("Part of this workload" in s for s in found)
    seen = replace(MEASURED, tensor_parallel=[1, 2])
    assert not any(
        "measure" in s for s in reasons(*rows[:2], replace(rows[2], extrapolated=False), chosen=2, profile=seen)
    )


def test_a_riskier_one_that_is_slower_is_not_the_reason() -> None:
    found = reasons(row("bf16", 100), row("fp8_block", 110, "high"))
    assert "FP8 is not worth it" in found[0]
    assert not any("risk" in sentence for sentence in found)
    assert found[0].endswith("FP8 is not worth it here: it gains nothing.")


def test_a_gain_too_small_to_tell_is_no_gain() -> None:
    assert "fp8_block is no faster: it is 1.00x" in reasons(row("bf16", 100), row("fp8_block", 99.8, "high"))[1]


def test_between_two_fp8_choices_the_one_not_taken_is_explained() -> None:
    found = reasons(row("bf16", 100), row("fp8_block", 80.0), row("fp8_block+fp8_kv", 79.2), chosen=1)
    assert any("fp8_block+fp8_kv is only 1.0% faster" in sentence for sentence in found)
    assert not any(sentence.startswith("bf16") for sentence in found)


def test_it_says_that_nothing_is_within_the_budget() -> None:
    found = reasons(row("bf16", 100, "moderate"), row("fp8_block", 50, "high"), accept="low")
    for part in ("No precision stays within the risk budget (low)", "bf16 has the lowest", "its risk is moderate"):
        assert part in found[0]


def test_fp8_that_cannot_run_is_not_called_not_worth_it() -> None:
    (headline,) = reasons(row("bf16", 100), missing("fp8_block"), missing("fp8_kv"))
    assert "no FP8 precision is planned here" in headline
    (headline,) = reasons(row("bf16", 100))
    assert "no other precision was asked for" in headline


def test_without_a_baseline_it_says_which_of_two_reasons_it_is() -> None:
    (unfit,) = reasons(missing("bf16", "does not fit"), row("fp8_block", 80, speedup=None), chosen=1)
    assert "bf16 does not fit" in unfit
    (alone,) = reasons(row("fp8_block", 80, speedup=None))
    assert "bf16 was not asked for" in alone
    elsewhere = row("bf16", 100, tensor_parallel=2)
    unfit_here = reasons(missing("bf16"), row("fp8_block", 80, speedup=None), elsewhere, chosen=1)
    assert "1.25x as fast as the best bf16, on 1 replica of tensor_parallel_size 2" in unfit_here[0]


def test_the_best_bf16_is_named_where_it_has_another_layout() -> None:
    rows = row("bf16", 100), row("fp8_block", 50, speedup=2.0), row("bf16", 80, tensor_parallel=2)
    headline = reasons(*rows, chosen=1)[0]
    first = headline.index("1.60x as fast as the best bf16, on 1 replica of tensor_parallel_size 2")
    assert first < headline.index("2.00x as fast as bf16 on the same layout")


def test_preemptions_are_named_when_they_fall_and_only_then() -> None:
    starved = row("bf16", 100, preemptions=1234)
    better = row("fp8_kv", 60, preemptions=12, kv_cache_tokens=2000)
    found = reasons(starved, better, chosen=1)
    assert any("2,000 tokens instead of 1,000" in s and "from 1,234 to 12" in s for s in found)
    for same in (starved, row("bf16", 100)):
        other = replace(better, preemptions=same.preemptions)
        assert not any("preemption" in s for s in reasons(same, other, chosen=1))
    # Compared on the same layout only.
    assert not any("preemption" in s for s in reasons(replace(starved, tensor_parallel=2), better, chosen=1))


def test_a_long_tail_is_named_with_what_binds_it() -> None:
    rows = row("bf16", 100), row("fp8_kv", 60)
    sentence = reasons(*rows, chosen=1, tail=0.4)[-1]
    assert "40% of the rollout is tail" in sentence
    assert "There the time goes to waiting for the host (100%)" in sentence
    assert not any("tail" in s for s in reasons(*rows, chosen=1, tail=0.2))


def test_it_says_where_the_time_goes() -> None:
    found = explain(Answer((row("bf16", 100),), 0, [TIMED], MEASURED), RISK, CORRECTIONS, REQUEST)
    assert "The time goes to attention over the KV cache (70%) and linear layers (25%)." in found


def test_layouts_are_named_only_where_there_are_several() -> None:
    wide: dict[str, Any] = {"tensor_parallel": 4, "data_parallel": 2}
    assert "tensor_parallel_size" not in reasons(row("bf16", 100, **wide), row("fp8_kv", 60, **wide), chosen=1)[0]
    assert (
        "on 2 replicas of tensor_parallel_size 4" in reasons(row("bf16", 100), row("fp8_kv", 60, **wide), chosen=1)[0]
    )


@pytest.mark.parametrize(
    ("profile", "extrapolated", "part"),
    [(DATASHEET, True, "Uncalibrated"), (MEASURED, True, "outside"), (MEASURED, False, None)],
)
def test_the_profile_s_limits_are_said(profile: Profile, extrapolated: bool, part: str | None) -> None:
    found = reasons(row("bf16", 100, extrapolated=extrapolated), profile=profile)
    assert len(found) == (1 if part is None else 2)
    assert part is None or part in found[1]


def test_what_was_not_measured_is_named() -> None:
    timed = replace(TIMED, extrapolated=("gemm.bf16: m 20000, measured 1 to 16384",))
    choices = (row("bf16", 100, extrapolated=True),)
    found = explain(Answer(choices, 0, [timed], MEASURED), RISK, CORRECTIONS, REQUEST)
    assert found[-1].endswith("was measured for (gemm.bf16: m 20000, measured 1 to 16384).")


RESTS_ON: dict[str, dict[str, Any]] = {
    "shares": {"measured": 0.916, "extrapolated": 0.06, "theory": 0.02, "imported": 0.004},
    "kernels": {
        "gemm": {"measured": 0.916},
        "attention": {"extrapolated": 0.057},
        "host": {"extrapolated": 0.003, "imported": 0.004},
        "sampling": {"theory": 0.02},
    },
}


def test_the_grounds_of_the_chosen_time_are_named_with_the_parts_that_were_not_measured() -> None:
    found = reasons(row("bf16", 100, rests_on=RESTS_ON))
    assert found[1:] == [
        "The time rests on: 92% measured, 6% extrapolated (attention over the KV cache), 2% theory (sampling)."
    ]
    assert not any("rests on" in sentence for sentence in reasons(row("bf16", 100)))  # a plan of schema 1.2


def test_theory_is_outside_of_a_calibration_and_a_part_of_every_import() -> None:
    imported = replace(MEASURED, kind="imported")
    for shares, profile, outside in (
        ({"extrapolated": 0.2}, MEASURED, True),
        ({"theory": 0.2}, MEASURED, True),
        ({"extrapolated": 0.2}, imported, True),
        ({"theory": 0.2}, imported, False),
    ):
        said = reasons(row("bf16", 100, rests_on={"shares": shares, "kernels": {}}, extrapolated=True), profile=profile)
        assert any("Part of this workload" in sentence for sentence in said) == outside


def test_risk_and_correction_are_passed_on_as_sentences() -> None:
    found = explain(Answer((row("bf16", 100),), 0, [TIMED], MEASURED), RISK, CORRECTIONS, REQUEST)
    for text in (*RISK.reasons, *CORRECTIONS):
        assert any(text in sentence for sentence in found)
    assert all(sentence.endswith(".") and sentence[0].isupper() for sentence in found)
