"""The tables of a fleet, from rows whose figures can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import fleet

GB = 1_000_000_000


def rollout(routing: str, warm: bool, seconds: float, tokens: int) -> dict[str, Any]:
    report = {"seconds": seconds, "predicted_routed_s": 10.0, "routed_tokens": tokens}
    return {"what": "rollout", "routing": routing, "warm": warm, "report": report, "tokens_per_s": 2 * tokens / seconds}


def sync(way: str, total: float, scales: float) -> dict[str, Any]:
    return {"what": "sync", "way": way, "report": {"bytes": 8 * GB, "seconds": {"total": total, "kv_scales": scales}}}


def equal(way: str, differ: list[str]) -> dict[str, Any]:
    return {"what": "equal", "way": way, "tensors": 290, "differ": differ}


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


def test_syncs_are_the_median_of_all_but_the_first_of_each_way() -> None:
    store = [sync("object_store", total, 0.1) for total in (9.0, 2.0, 1.0, 4.0)]
    nccl = [sync("nccl", total, 0.2) for total in (3.0, 0.5, 0.5)]
    rows = [*store, equal("object_store", []), *nccl, equal("nccl", ["1/a"]), equal("replace", [])]
    assert fleet.syncs(rows).splitlines()[2:] == [
        "| object store | 8.0 | 9.00 | 2.00 | 4.0 | 0.10 | 0 of 290 |",
        "| nccl | 8.0 | 3.00 | 0.50 | 16.0 | 0.20 | 1 of 290 |",
    ]


def test_a_measurement_without_a_rollout_of_each_routing_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        fleet.rollouts([rollout("static", True, 8.0, 9000)])


def a_run(replicas: int, start_s: float, ends: str = "replace") -> list[dict[str, Any]]:
    begun = {"what": "fleet", "data_parallel": replicas, "start_s": start_s}
    rollouts = [rollout(routing, True, start_s, 9000) for routing in fleet.ROUTINGS]
    syncs = [sync("nccl", total, 0.2) for total in (3.0, 0.5)]
    return [begun, *rollouts, *syncs, equal("nccl", []), {"what": ends, "part": "replace", "seconds": 40.0}]


def test_the_last_run_of_two_replicas_that_came_to_its_end_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [*a_run(2, 30.0, ends="failed"), *a_run(3, 40.0), {"what": "failed", "part": "fleet"}]
    rows = [{"what": "note"}, *a_run(2, 10.0), *a_run(2, 20.0), {"what": "failed", "part": "fleet"}, *others]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    monkeypatch.setattr(fleet, "MEASURED", tmp_path / "rows.jsonl")
    found = fleet.committed()
    assert found.count("each length | 9,000 | 20.00") == 1
    assert "The fleet started in 20 s, and the place of a killed replica was filled in 40 s." in found
