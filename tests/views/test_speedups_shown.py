"""No doubt is kept from the reader: wherever a plan's speed-up is named, its interval stands beside it."""

from __future__ import annotations

import io
import re
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from fp8plan.errors import CapacityError, Fp8PlanError
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import gpus
from fp8plan.model.plan.planner import Prediction, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import PRESETS
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.targets import TARGETS
from fp8plan.model.workload import Workload
from fp8plan.views.plan_pictures import label, points
from fp8plan.views.report import plan_report

SHORT = Workload(2, 4, Fixed(200), Fixed(30))
LONG = Workload(3, 4, Fixed(64), LogNormal(300, 0.9, 1200))
# A ratio of speeds in words. "1.00x" alone is that of bf16 over itself, in a table.
RATIO = re.compile(r"\d+\.\d\dx(?! \(|.{0,3}\d)|\d+(?:\.\d)?% (?:slower|faster)")
BAND = re.compile(r" \(90%: [^()]*\)")
TABLE_BAND = re.compile(r"\d+\.\d\dx \(\d+\.\d\d-\d+\.\d\d\)")
CARDS = [card.name for card in gpus() if not card.is_cpu]
LONGEST = 25  # words of a sentence

CASES: dict[str, tuple[str, str, Workload, dict[str, Any]]] = {
    **{f"0.6B on {name}": ("Qwen/Qwen3-0.6B", name, LONG, {}) for name in CARDS},
    **{f"0.6B short on {name}": ("Qwen/Qwen3-0.6B", name, SHORT, {}) for name in ("h200_sxm", "h100_sxm", "b200")},
    "low risk": ("Qwen/Qwen3-8B", "h200_sxm", LONG, {"accept": "low"}),
    "whole step": ("Qwen/Qwen3-0.6B", "h200_sxm", LONG, {"trainer": StepTimes(train_s=1, logprob_s=0)}),
    "layouts": ("Qwen/Qwen3-0.6B", "h100_sxm", SHORT, {"gpus": 2}),
    "experts": ("Qwen/Qwen3-30B-A3B", "h200_sxm", SHORT, {"gpus": 2}),
    "experts, whole step": (
        "Qwen/Qwen3-30B-A3B", "h100_sxm", SHORT, {"gpus": 2, "trainer": StepTimes(train_s=1, logprob_s=1)}
    ),
    "cpu": ("Qwen/Qwen3-0.6B", "cpu", Workload(1, 2, Fixed(64), Fixed(16)), {"engine_version": "0.30.0"}),
}  # fmt: skip


@cache
def made(name: str) -> Prediction | None:
    """The plan of a case; None if nothing of it can run there."""
    from fp8plan.model.risk.expected import RiskBudget

    model, card, work, options = CASES[name]
    accept = options.get("accept")
    more = {key: x for key, x in options.items() if key != "accept"}
    try:
        return predict(
            PlanRequest(model, card, work, **more | ({"budget": RiskBudget(accept=accept)} if accept else {}))
        )
    except CapacityError:
        return None


def naked(text: str) -> list[str]:
    """Ratios of speeds in a text that no interval follows, before the next ratio or the end of the sentence."""
    bands, found = [x.span() for x in BAND.finditer(text)], []
    ratios = [x for x in RATIO.finditer(text) if not any(a <= x.start() < b for a, b in bands)]
    for ratio, end in zip(ratios, [*(x.start() for x in ratios[1:]), len(text)], strict=False):
        if not any(ratio.end() <= a < end for a, _ in bands):
            found.append(ratio[0])
    return found


def test_the_search_finds_a_ratio_without_its_interval() -> None:
    assert naked("It is 1.20x as fast as bf16.") == ["1.20x"]
    assert naked("It is 1.20x as fast as bf16 (90%: 0.88 to 1.64), and 1.10x for the step.") == ["1.10x"]
    assert naked("fp8_kv is 1.5% faster than bf16, 20% slower than that (90%: 3% slower to 1% faster).") == [
        "1.5% faster"
    ]
    assert not naked("1.5% faster than bf16 (90%: 2.0% slower to 5.1% faster): 3 s")


@pytest.mark.parametrize("name", CASES)
def test_every_speed_up_stands_beside_its_interval(name: str) -> None:
    prediction = made(name)
    if prediction is None:
        pytest.skip("nothing fits")
    plan = prediction.plan
    for sentence in (*plan.reasons, *plan.warnings):
        assert not naked(sentence), sentence
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(plan_report(plan))
    rows = [line for line in console.export_text().split("\n- ")[0].splitlines() if line[2:].split(" ")[0] in PRESETS]
    speeds = [line for line in rows if re.search(r"\d\.\d\dx", line)]
    assert speeds
    for line in speeds:
        assert TABLE_BAND.search(line) or (line[2:].startswith("bf16 ") and " 1.00x" in line), line
    for point in points(plan):
        assert point.precision == "bf16" or point.gain is None or TABLE_BAND.search(label(point, True))
    for target in TARGETS:
        try:
            text = plan.emit(target, kv_scales="calibrated", python=True)
        except Fp8PlanError:
            continue
        assert not naked(text)


@pytest.mark.parametrize("name", CASES)
def test_sentences_are_short_and_each_ratio_names_what_it_is_relative_to(name: str) -> None:
    prediction = made(name)
    if prediction is None:
        pytest.skip("nothing fits")
    for reason in prediction.plan.reasons:
        if reason.startswith(("Mismatch: ", "Correction: ", "Part of this workload", "FP8 weights")):
            continue
        for sentence in re.split(r"(?<=[.:;]) ", BAND.sub("", reason)):
            assert len(sentence.split()) <= LONGEST, sentence
        for match in re.finditer(r"\d+\.\d\dx (.{11})", reason):
            assert match[1] == "as fast as ", reason
        for match in re.finditer(r"% (?:slower|faster) (\w+)", BAND.sub("", reason)):
            assert match[1] == "than", reason
        assert not re.search(r"\b0 s\b", reason)


def test_a_choice_that_may_gain_nothing_says_so() -> None:
    """The issue's kind: wherever the chosen one's interval holds 1.00, the headline says it, and only there."""
    doubted = set()
    for name in CASES:
        plan = prediction.plan if (prediction := made(name)) else None
        if plan is None or not plan.reasons[0].startswith("Choose"):
            continue
        gains = [x for x in (plan.select().gain, plan.select().step_gain) if x is not None]
        expected = sum(x.in_doubt and round(x.ratio, 2) >= 1 for x in gains)
        assert plan.reasons[0].count("its interval holds 1.00") >= expected
        doubted.add(bool(expected))
    assert doubted == {True, False}
