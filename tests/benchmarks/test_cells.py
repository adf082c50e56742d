"""Errors, speed-ups, ties and repeats, with numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tables.cells import accuracy, cell_of, merged, names_the_fastest, noise_floor, spreads
from fp8plan.model.validate.validate import speedups


def row(precision: str, seconds: float, predicted: float | None, group: str = "a", **more: Any) -> dict[str, Any]:
    return {"group": group, "precision": precision, "seconds": seconds, "predicted_s": predicted, **more}


FOUR = [
    row("bf16", 10, 11),  # +10%
    row("fp8_block", 8, 6),  # -25%; measured 1.25x, predicted 11/6
    row("fp8_kv", 5, 5.5),  # +10%; measured 2x, predicted 2x
    row("bf16", 4, 3, "b"),  # -25%, alone in its group
]


def test_errors_by_hand() -> None:
    found = accuracy(FOUR)
    assert found.answered == 4
    assert found.makespan_mape == pytest.approx((0.10 + 0.25 + 0.10 + 0.25) / 4)
    assert found.makespan_worst == pytest.approx(0.25)
    assert found.makespan_bias == pytest.approx((0.10 - 0.25 + 0.10 - 0.25) / 4)
    assert found.mape_by_precision == pytest.approx({"bf16": 0.175, "fp8_block": 0.25, "fp8_kv": 0.10})
    worst = 100 * (11 / 6 - 1.25)
    assert found.speedup_mae_points == pytest.approx(worst / 2)
    assert found.speedup_worst_points == pytest.approx(worst)
    assert (found.groups, found.ranked, found.ranked_right) == (1, 1, 1)  # fp8_kv is first on both sides


def test_a_refusal_counts_for_nothing_but_leaves_its_group_unranked() -> None:
    refused = [*FOUR[:2], row("fp8_kv", 5, None), FOUR[3]]
    found = accuracy(refused)
    assert (found.answered, found.groups, found.ranked, found.ranked_right) == (3, 1, 0, 0)
    assert found.makespan_mape == pytest.approx(0.2)
    assert "fp8_kv" not in found.mape_by_precision
    assert found.speedup_mae_points == pytest.approx(100 * (11 / 6 - 1.25))
    without_bf16 = accuracy([row("bf16", 10, None), *FOUR[1:3]])
    assert without_bf16.speedup_mae_points is without_bf16.speedup_worst_points is None


def test_a_method_that_answers_nothing_has_no_errors() -> None:
    found = accuracy([row("bf16", 10, None), row("fp8_kv", 9, None)])
    assert (found.answered, found.mape_by_precision, found.groups, found.ranked) == (0, {}, 1, 0)
    assert found.makespan_mape != found.makespan_mape  # nan
    assert found.speedup_mae_points is None


@pytest.mark.parametrize(("noise", "right"), [(0.0, False), (0.009, False), (0.011, True)])
def test_a_tie_within_the_noise_is_right(noise: float, right: bool) -> None:
    group = [row("bf16", 10.0, 9.0), row("fp8_kv", 10.1, 8.0)]  # the slower by 1% is predicted the faster
    assert names_the_fastest(group, noise) is right
    assert accuracy(group, noise).ranked_right == right
    assert names_the_fastest(group[::-1], noise) is right


def test_a_speedup_is_against_the_median_bf16_row() -> None:
    group = [row("bf16", 9, 10), row("bf16", 1, 10), row("bf16", 6, 10), row("fp8_kv", 3, 4, line=7)]
    (gain,) = speedups(group)
    assert gain == {
        "line": 7, "precision": "fp8_kv", "measured_speedup": 2.0, "predicted_speedup": 2.5, "error_points": 50.0,
    }  # fmt: skip


def test_a_speedup_is_against_bf16_on_the_same_card_where_that_was_measured() -> None:
    slow_host = [row("bf16", 10, 9, gpu_uuid="slow"), row("fp8_kv", 8, 7.5, gpu_uuid="slow")]
    fast_host = [row("bf16", 6, 5, gpu_uuid="fast"), row("fp8_kv", 5, 4, gpu_uuid="fast")]
    unpaired = row("fp8_kv", 4, 3.5, gpu_uuid="third")
    gains = speedups([*slow_host, *fast_host, unpaired])
    assert [gain["measured_speedup"] for gain in gains] == [1.25, 1.2, 2.0]
    assert [gain["predicted_speedup"] for gain in gains] == [1.2, 1.25, 2.0]


def test_repeats_of_a_cell_are_merged_to_their_median() -> None:
    runs = [row("bf16", seconds, 5, boot=seconds) for seconds in (9, 4, 5)]
    other_pool = row("bf16", 7, 5, kv_cache_tokens=4096)
    assert [cell["seconds"] for cell in merged([*runs, other_pool])] == [5, 7]
    assert merged(runs)[0] == runs[0] | {"seconds": 5.0}
    assert cell_of(runs[0]) == ("a", "bf16", None)


def test_the_noise_floor_is_the_median_spread_on_one_card() -> None:
    steady = [row("bf16", seconds, 1, gpu_uuid="x") for seconds in (10.0, 10.1, 10.05)]
    assert noise_floor(steady) == pytest.approx(0.1 / 10.05)
    assert noise_floor([*steady, row("bf16", 20.0, 1, gpu_uuid="y")]) == noise_floor(steady)  # cards differ
    disturbed = [row("fp8_kv", seconds, 1) for seconds in (1.0, 1.5)]
    assert spreads([*steady, *disturbed]) == pytest.approx([0.1 / 10.05, 0.4])
    quiet = [row("fp8_block", seconds, 1) for seconds in (2.0, 2.0)]
    assert noise_floor([*steady, *disturbed, *quiet]) == noise_floor(steady)  # one disturbed cell makes no tie
    assert noise_floor(steady[:1]) is None
