"""The committed table of what starts, without vLLM; tests/model/test_start.py compares it with vLLM."""

from __future__ import annotations

import re

import pytest

from benchmarks.starts.cases import GPUS, KINDS
from benchmarks.starts.table import alike, rows, table, why
from fp8plan.model.precision import PRESETS, presets_of
from fp8plan.runtime.apply.weight_sync.fixed_scales import FIXED_SCALES, LIVE_SCALES


def test_every_kind_has_a_row_on_every_gpu_in_every_precision() -> None:
    keys = [(row["kind"], row["gpu"], row["precision"]) for row in rows()]
    assert len(keys) == len({*keys}) == len(KINDS) * len(GPUS) * len({*presets_of("bf16"), *presets_of("fp8_block")})
    assert {precision for *_, precision in keys} <= {*PRESETS}
    assert not [row for row in rows() if "error" in row]


@pytest.mark.parametrize(("scales", "kernels"), [("measured", LIVE_SCALES), ("fixed", FIXED_SCALES)])
def test_scales_are_of_the_kind_that_their_kernels_read(scales: str, kernels: tuple[str, ...]) -> None:
    said = [row for row in rows() if row.get("scales") == scales]
    assert said
    for row in said:
        assert {*row["attention"]} <= {*kernels}, row
        assert "fp8_kv" in row["precision"]


def test_an_fp8_cache_always_says_what_becomes_of_its_scales() -> None:
    for row in (row for row in rows() if "attention" in row):
        assert bool(row["scales"]) == ("fp8_kv" in row["precision"])


def test_columns_of_gpus_that_agree_are_one() -> None:
    assert alike({"a": ["1"], "b": ["1"], "c": ["2"], "d": ["1"]}) == [["a", "b"], ["c"], ["d"]]


def test_each_refusal_has_its_reason_below() -> None:
    body, _, below = table().partition("Reasons of refusals")
    numbers = {int(number) for number in re.findall(r"refused \((\d+)\)", body)}
    listed = re.findall(r"^(\d+)\. (.+)\.$", below, re.MULTILINE)
    assert numbers == {int(number) for number, _ in listed} == {*range(1, len(listed) + 1)}
    assert {reason for _, reason in listed} <= {why(row) for row in rows() if "attention" not in row}
