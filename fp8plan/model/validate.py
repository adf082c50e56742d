"""Predictions against rollout records: how wrong, per record and per speed-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import gpu as find_gpu
from fp8plan.model.memory import memory_plan
from fp8plan.model.precision import precision
from fp8plan.model.profile import load_profile
from fp8plan.model.records import Record
from fp8plan.model.rollout import rollout, schedules
from fp8plan.model.step import StepModel


@dataclass(frozen=True, slots=True)
class Validation:
    """Predictions of all records, and what they add up to. MAPE and errors are fractions, points are x 100."""

    records: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    makespan_mape: float
    makespan_worst: float
    speedup_mae_points: float | None  # None: no group has a bf16 record and another
    speedup_worst_points: float | None
    coverage: float  # share of records whose measured time lies in the predicted 90% interval
    interval_median_halfwidth: float  # (high - low) / 2 / predicted
    warnings: tuple[str, ...]  # about the profiles that were used

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `fp8plan validate --json` prints it; the warnings go elsewhere."""
        plain = asdict(self)
        del plain["warnings"]
        return plain


def validate(
    records: Sequence[Record],
    strict: bool = False,
    progress: Callable[[Iterable[Record]], Iterable[Record]] = lambda items: items,
) -> Validation:
    """Predict every record and compare. Raises the errors of the parts, with the record's line."""
    warnings: dict[str, None] = {}
    rows = [_compare(record, strict, warnings) for record in progress(records)]
    groups = _groups(rows)
    errors = np.array([row["error"] for row in rows])
    points = np.array([entry["error_points"] for group in groups for entry in group["speedups"]])
    half = [(row["predicted_high_s"] - row["predicted_low_s"]) / 2 / row["predicted_s"] for row in rows]
    inside = [row["predicted_low_s"] <= row["seconds"] <= row["predicted_high_s"] for row in rows]
    return Validation(
        records=rows,
        groups=groups,
        makespan_mape=float(np.abs(errors).mean()),
        makespan_worst=float(np.abs(errors).max()),
        speedup_mae_points=float(np.abs(points).mean()) if points.size else None,
        speedup_worst_points=float(np.abs(points).max()) if points.size else None,
        coverage=float(np.mean(inside)),
        interval_median_halfwidth=float(np.median(half)),
        warnings=tuple(warnings),
    )


def _compare(record: Record, strict: bool, warnings: dict[str, None]) -> dict[str, Any]:
    """The record's row of the result; what there is to say of its profile is added to `warnings`."""
    fields, limits = record.fields, record.limits
    try:
        shape, card = ModelShape.from_hf(fields["model"]), find_gpu(fields["gpu"])
        wanted = precision(fields["precision"])
        if wanted.uses_fp8 and not card.has_fp8:
            raise ConfigError(f"{wanted.name} was recorded: {card.fp8_reason}; correct the record's gpu or precision")
        profile, said = load_profile(card, fields["engine_version"], strict)
        warnings.update(dict.fromkeys(said))
        memory = memory_plan(shape, wanted, card, limits, record.batch.longest)
        parts = record.batch.split(limits.data_parallel_size)
        planned = schedules(parts, memory.usable_blocks, limits)
        timed = rollout(planned, StepModel(shape, card, wanted, limits, profile))
    except Fp8PlanError as error:
        raise type(error)(f"line {record.line}: {error}") from None
    lists = ("prompt_lengths", "response_lengths", "prompt_ids")
    return {name: value for name, value in fields.items() if name not in lists} | {
        "line": record.line,
        "group": record.group,
        "seconds": record.seconds,
        "predicted_s": timed.makespan_s,
        "predicted_low_s": timed.makespan_low_s,
        "predicted_high_s": timed.makespan_high_s,
        "error": (timed.makespan_s - record.seconds) / record.seconds,
        "predicted_kv_cache_tokens": memory.kv_cache_tokens,
        "predicted_preemptions": timed.preemptions,
        "extrapolated": bool(timed.extrapolated),
    }


def _groups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per group: speed-ups against the median bf16 record, and which precision is predicted and measured fastest."""
    names = list(dict.fromkeys(row["group"] for row in rows))
    return [_group_result(name, [row for row in rows if row["group"] == name]) for name in names]


def _group_result(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bf16 = [row for row in rows if row["precision"] == "bf16"]
    speedups = []
    if bf16:
        measured, predicted = (float(np.median([row[key] for row in bf16])) for key in ("seconds", "predicted_s"))
        for row in rows:
            if row["precision"] != "bf16":
                real, expected = measured / row["seconds"], predicted / row["predicted_s"]
                speedups.append(
                    {
                        "line": row["line"],
                        "precision": row["precision"],
                        "measured_speedup": real,
                        "predicted_speedup": expected,
                        "error_points": 100 * (expected - real),
                    }
                )
    return {
        "group": name,
        "records": len(rows),
        "fastest_measured": min(rows, key=lambda row: row["seconds"])["precision"],
        "fastest_predicted": min(rows, key=lambda row: row["predicted_s"])["precision"],
        "speedups": speedups,
    }
