"""Silent failures from public trackers: the list, and that what was caught once is caught still."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from silent_failures import forward, in_data, in_engine, lab, own_loop, table
from silent_failures.lab import Failure, Lab

ADDRESS = re.compile(r"[\w.-]+/[\w.-]+#\d+")
RANK = [table.MISSED, table.NOTICED, table.BY_NAME]
KNOWN = table.reports()
COMMITTED = {(row["failure"], row["setting"]): row for row in table.results()}
# One for each means: the doctor on weights, on scales and on the cache, a refusal, and log-probs that are not there.
WITH_AN_ENGINE = ("shards_swapped", "kv_scales_unit", "prefix_cache_not_reset", "head_not_synced", "nan_weights")


def outcome(row: dict[str, Any]) -> str:
    return table.outcome(row["signs"], KNOWN[row["failure"]]["names"])


def caught_once(failures: Any, setting: str = "own") -> list[Failure]:
    """Those of which the committed results say that something was said."""
    return [one for one in failures if outcome(COMMITTED[one.name, setting]) != table.MISSED]


def still_caught(run: Lab, failure: Failure) -> None:
    """It is caught at least as well as the committed results say."""
    found = run.run(failure)
    before = outcome(COMMITTED[failure.name, "own"])
    assert RANK.index(outcome(found)) >= RANK.index(before), found


def test_every_failure_has_an_address_an_injection_and_a_result() -> None:
    assert len(KNOWN) >= 30
    for one in KNOWN.values():
        assert one["reports"]
        assert all(ADDRESS.fullmatch(address) for address in one["reports"])
        assert one["group"] in table.GROUPS
        assert one["names"]
    assert {name for name, _ in COMMITTED} == set(KNOWN)
    assert {setting for _, setting in COMMITTED} == set(table.SETTINGS)


def test_an_outcome_is_the_best_of_its_signs() -> None:
    kl, stale = ({"from": "alarm", "name": name, "says": ""} for name in ("kl", "stale_weights"))
    assert table.outcome([], ["stale_weights"]) == table.MISSED
    assert table.outcome([kl], ["stale_weights"]) == table.NOTICED
    assert table.outcome([kl, stale], ["stale_weights"]) == table.BY_NAME


@pytest.fixture(scope="module")
def small_batches() -> Iterator[None]:
    """Batches are half of those of the committed results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "PROMPTS", lab.PROMPTS[: 2 * len(lab.LENGTHS)])
        yield


@pytest.fixture(scope="module")
def without_engine(small_batches: None) -> Iterator[Lab]:
    with forward.lab() as calm:
        yield calm


def test_a_healthy_loop_says_nothing(without_engine: Lab) -> None:
    assert not without_engine.signs.known
    assert not without_engine.run(Failure("healthy", "nothing", in_data.nothing))["signs"]


@pytest.mark.parametrize("failure", caught_once(in_data.FAILURES), ids=lambda failure: failure.name)
def test_what_happens_between_engine_and_loss_is_caught_still(without_engine: Lab, failure: Failure) -> None:
    still_caught(without_engine, failure)


@pytest.fixture(scope="module")
def with_engine(small_batches: None) -> Iterator[Lab]:
    with own_loop.lab() as calm:
        yield calm


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "failure", [one for one in in_engine.DENSE if one.name in WITH_AN_ENGINE], ids=lambda failure: failure.name
)
def test_what_happens_in_an_engine_is_caught_still(with_engine: Lab, failure: Failure) -> None:
    still_caught(with_engine, failure)
