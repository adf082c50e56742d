"""The tables of a fleet, from rows whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import fleet

GB = 1_000_000_000


def rollout(routing: str, warm: bool, seconds: float, tokens: int) -> dict[str, Any]:
    report = {"seconds": seconds, "predicted_routed_s": 10.0, "routed_tokens": tokens}
    return {"what": "rollout", "routing": routing, "warm": warm, "report": report, "tokens_per_s": 2 * tokens / seconds}


def sync(total: float, scales: float) -> dict[str, Any]:
    return {"what": "sync", "report": {"bytes": 8 * GB, "seconds": {"total": total, "kv_scales": scales}}}


EQUAL = {"object_store": ["1/a"], "replace": []}


def test_a_rollout_stands_beside_its_prediction_and_cold_ones_do_not_count() -> None:
    times = {"static": (8.0, 9000), "last": (10.0, 8000), "known": (12.5, 7000)}
    rows = [
        rollout(name, warm, seconds if warm else 99.0, n) for warm in (0, 1) for name, (seconds, n) in times.items()
    ]
    assert fleet.rollouts(rows).splitlines()[2:] == [
        "| nothing: the static split | 9,000 | 8.00 | 10.00 | +25.0% | 2,250 |",
        "| the mean of the prompt's responses in another rollout | 8,000 | 10.00 | 10.00 | +0.0% | 1,600 |",
        "| each length | 7,000 | 12.50 | 10.00 | -20.0% | 1,120 |",
    ]


def test_syncs_are_the_median_of_all_but_the_first() -> None:
    rows = [sync(total, 0.1) for total in (9.0, 2.0, 1.0, 4.0)]
    rows += [{"what": "equal", "way": way, "tensors": 290, "differ": differ} for way, differ in EQUAL.items()]
    assert fleet.syncs(rows).splitlines()[2:] == [
        "| object store | 8.0 | 9.00 | 2.00 | 4.0 | 0.10 | 1 of 290 |",
    ]
