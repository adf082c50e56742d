"""Words of other programs that people type: what they are told exists, and what is clear is read."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from command import Done
from typed import MODEL

from fp8plan import Fixed, Workload, plan
from fp8plan.checks import number_hint
from fp8plan.cli import ELSEWHERE
from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.version import planned_version


def test_an_option_of_another_program_leads_to_one_of_plan(fp8plan: Callable[..., Done]) -> None:
    known = set(re.findall(r"--[a-z-]+", fp8plan("plan", "--help").out))
    for typed, advice in ELSEWHERE.items():
        assert typed not in known, typed
        assert set(re.findall(r"--[a-z-]+", advice)) <= known, advice


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("8k", "type 8000 or 8192; "),
        ("1.5K", "type 1500 or 1536; "),
        (
            "lognormal:mean=6k,sigma=1,max=20k",
            "type lognormal:mean=6000,sigma=1,max=20000 or lognormal:mean=6144,.*20480; ",
        ),
        ("1_024", "type 1024; "),
        ("90 %", "type 0.9; "),
        ("2h", "type 7200; "),
        ("eight", ""),
        ("4090", ""),
        ("1e-6", ""),
        ("h100", ""),
        ("fixed:8", ""),
    ],
)
def test_a_number_with_a_unit_says_what_to_type(typed: str, advice: str) -> None:
    assert re.fullmatch(advice, number_hint(typed))


@pytest.mark.parametrize("typed", ["0.26", "v0.26", "v0.26.0", "0.26.0"])
def test_a_version_may_leave_out_its_last_number(typed: str) -> None:
    assert planned_version(typed, on_cpu=False) == "0.26.0"


@pytest.mark.parametrize("other", ["0.30.1", "0.30.0rc1", "latest", ""])
def test_another_version_stays_as_it_is(other: str) -> None:
    assert planned_version(other, on_cpu=False) == other


@pytest.mark.parametrize("name", PRESETS)
def test_a_precision_is_read_in_any_case(name: str) -> None:
    assert find_precision(name.upper()) is PRESETS[name]
    with pytest.raises(ConfigError, match="unknown precision 'FP8'; allowed: bf16, fp8_block"):
        find_precision("FP8")


def test_a_plan_of_a_short_version_is_that_of_the_whole_one() -> None:
    work = Workload(2, 2, Fixed(16), Fixed(32))
    assert plan(MODEL, "h200", work, engine_version="0.26") == plan(MODEL, "h200", work, engine_version="0.26.0")
