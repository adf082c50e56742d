"""The comparison of predictions with rollout records: how wrong they are, per record and per speed-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.jsonl import plain
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.speedup import Timed, speed_up, timed
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.simulate import Simulated, simulate
from fp8plan.model.validate.accuracy import accuracy, by_group, relative_error, speedups
from fp8plan.model.validate.records import Record


@dataclass(frozen=True, slots=True)
class Validation:
    """The predictions of all records, and their errors summed up. MAPE and errors are fractions, points are x 100."""

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
        """The result as plain data, as `fp8plan validate --json` prints it. The warnings are not part of it."""
        result: dict[str, Any] = plain(asdict(self))
        del result["warnings"]
        return result


def validate(
    records: Sequence[Record],
    strict: bool = False,
    progress: Callable[[Iterable[Record]], Iterable[Record]] = lambda items: items,
) -> Validation:
    """Predict every record and compare. Raises the errors of the parts, with the record's line."""
    warnings: dict[str, None] = {}
    compared = [_compare(record, strict, warnings) for record in progress(records)]
    rows = [x.row for x in compared]
    found = accuracy(rows)
    half = [(row["predicted_high_s"] - row["predicted_low_s"]) / 2 / row["predicted_s"] for row in rows]
    inside = [row["predicted_low_s"] <= row["seconds"] <= row["predicted_high_s"] for row in rows]
    return Validation(
        records=rows,
        groups=_group_results(compared),
        makespan_mape=found.makespan_mape,
        makespan_worst=found.makespan_worst,
        speedup_mae_points=found.speedup_mae_points,
        speedup_worst_points=found.speedup_worst_points,
        coverage=float(np.mean(inside)),
        interval_median_halfwidth=float(np.median(half)),
        warnings=tuple(warnings),
    )


def simulated(record: Record, profile: Profile) -> Simulated:
    """Simulate the record's rollout by `profile`. Raises as `simulate` does, and ConfigError for a precision that its
    GPU does not have.
    """
    setup = record.setup
    if reason := setup.gpu.why_not(setup.precision):
        raise ConfigError(f"{setup.precision.name} was recorded: {reason}; correct the record's gpu or precision")
    return simulate(setup, record.batch, profile, experts_hit=record.fields.get("experts_hit"))


class Compared(NamedTuple):
    """One record's row of the result, its predicted time and the profile that this is from."""

    row: dict[str, Any]
    time: Timed
    profile: Profile


def _compare(record: Record, strict: bool, warnings: dict[str, None]) -> Compared:
    """Predict one record. Warnings about its profile are added to `warnings`."""
    fields = record.fields
    try:
        profile, said = load_profile(find_gpu(fields["gpu"]), fields["engine_version"], strict)
        warnings.update(dict.fromkeys(said))
        found = simulated(record, profile)
    except Fp8PlanError as error:
        raise type(error)(f"line {record.line}: {error}") from None
    rollout = found.rollout
    lists = ("prompt_lengths", "response_lengths", "prompt_ids")
    row = {name: value for name, value in fields.items() if name not in lists} | {
        "line": record.line,
        "group": record.group,
        "seconds": record.seconds,
        "predicted_s": rollout.makespan_s,
        "predicted_low_s": rollout.makespan_low_s,
        "predicted_high_s": rollout.makespan_high_s,
        "error": relative_error({"seconds": record.seconds, "predicted_s": rollout.makespan_s}),
        "predicted_kv_cache_tokens": found.memory.pool_tokens,
        "predicted_preemptions": rollout.preemptions,
        "extrapolated": found.extrapolated,
    }
    return Compared(row, timed(rollout, record.setup.limits.cut), profile)


def _group_results(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """The result of each group."""
    known = {id(x.row): x for x in compared}
    groups = by_group([x.row for x in compared])
    return [_group_result(name, [known[id(row)] for row in rows]) for name, rows in groups.items()]


def _group_result(name: str, group: Sequence[Compared]) -> dict[str, Any]:
    """The speed-ups against the median bf16 record, and the precisions that are predicted and measured fastest.

    The interval of a predicted speed-up is that against the bf16 record nearest to the median prediction.
    """
    rows = [x.row for x in group]
    gains = speedups(rows)
    if gains:
        bf16, others = ([x for x in group if (x.row["precision"] == "bf16") == wanted] for wanted in (True, False))
        middle = float(np.median([x.time.seconds for x in bf16]))
        nearest = min(bf16, key=lambda x: abs(x.time.seconds - middle))
        for gain, other in zip(gains, others, strict=True):
            _, low, high = speed_up(nearest.time, other.time, other.profile)
            gain |= {"predicted_speedup_low": low, "predicted_speedup_high": high}
    return {
        "group": name,
        "records": len(rows),
        "fastest_measured": min(rows, key=lambda row: row["seconds"])["precision"],
        "fastest_predicted": min(rows, key=lambda row: row["predicted_s"])["precision"],
        "speedups": gains,
    }
