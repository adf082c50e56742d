"""Which choice of its plan the measurement of a fleet takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import fleet
from fp8plan.errors import ConfigError

PLAN: Any = SimpleNamespace(
    choices=[SimpleNamespace(precision=name, tensor_parallel=size) for name, size in (("bf16", 1), ("fp8_kv", 2))]
)


def test_a_choice_is_found_by_its_precision_and_its_layout() -> None:
    assert fleet.choice_of(PLAN, "fp8_kv", 2) == 1


def test_a_precision_that_the_plan_lacks_is_noted_with_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    measurement = fleet.Measurement.__new__(fleet.Measurement)
    monkeypatch.setattr(fleet.Measurement, "planned", lambda self: (PLAN, fleet.choice_of(PLAN, "fp8_kv", 1)))
    monkeypatch.setattr(fleet.Measurement, "note", lambda self, what, **found: rows.append({"what": what} | found))
    measurement.run()
    (row,) = rows
    assert (row["what"], row["part"]) == ("failed", "fleet")
    assert "the plan has no fp8_kv with --tensor-parallel 1; allowed: bf16 (1), fp8_kv (2)" in row["error"]
    assert row["error"].startswith(ConfigError.__name__)
