"""Predictions beside rollout records: the errors of makespans and of speed-ups.

A row is a mapping with `group` (one workload on one GPU with the same limits), `precision`, `seconds` and
`predicted_s`, which is None without a prediction. Its other fields are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.jsonl import plain
from fp8plan.model.architecture import Experts
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.choice import speed_up
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, Simulated, simulate
from fp8plan.model.validate.records import Record
from fp8plan.schemas import LENGTHS
from fp8plan.version import has

K = TypeVar("K")
R = TypeVar("R")
Row: TypeAlias = Mapping[str, Any]
ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # environment variable of vLLM


def relative_error(row: Row) -> float:
    return float((row["predicted_s"] - row["seconds"]) / row["seconds"])


def by_group(rows: Iterable[Row]) -> dict[str, list[Row]]:
    return grouped(rows, itemgetter("group"))


def on_same_card(row: Row, bf16: Sequence[Row]) -> Sequence[Row]:
    """The bf16 rows that were measured on the row's card, or all of them if none was.

    Cards have different hosts, whose speed must not count as the precision's.
    """
    return [other for other in bf16 if other.get("gpu_uuid") == row.get("gpu_uuid")] or bf16


def bf16_rows(group: Iterable[Row]) -> list[Row]:
    return [row for row in group if row["precision"] == "bf16"]


def speedups(group: Sequence[Row]) -> list[dict[str, Any]]:
    """Measured and predicted speed-up of each row against the median bf16 row of its card.

    Empty without a bf16 row.
    """
    bf16 = bf16_rows(group)
    gains = []
    for row in group:
        if bf16 and row["precision"] != "bf16":
            base = on_same_card(row, bf16)
            measured = float(np.median([other["seconds"] for other in base]))
            predicted = float(np.median([other["predicted_s"] for other in base]))
            real, expected = measured / row["seconds"], predicted / row["predicted_s"]
            gain = {"precision": row["precision"], "measured_speedup": real, "predicted_speedup": expected}
            gains.append({"line": row.get("line")} | gain | {"error_points": 100 * (expected - real)})
    return gains


def grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


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
    records: Sequence[Record], strict: bool = False, progress: Callable[[Iterable[Record]], Iterable[Record]] = iter
) -> Validation:
    """Predict every record and compare. Raises the errors of the parts, with the record's line."""
    warnings: dict[str, None] = {}
    compared = [_compare(record, strict, warnings) for record in progress(records)]
    rows = [result.row for result in compared]
    by_precision = grouped(rows, itemgetter("precision")).values()
    errors = np.abs([row["error"] for group in by_precision for row in group])
    groups = grouped(compared, lambda result: result.row["group"])
    points = np.abs([gain["error_points"] for group in by_group(rows).values() for gain in speedups(group)])
    half = [(row["predicted_high_s"] - row["predicted_low_s"]) / 2 / row["predicted_s"] for row in rows]
    inside = [row["predicted_low_s"] <= row["seconds"] <= row["predicted_high_s"] for row in rows]
    return Validation(
        records=rows,
        groups=[_group_result(group) for group in groups.values()],
        makespan_mape=float(errors.mean()),
        makespan_worst=float(errors.max()),
        speedup_mae_points=float(points.mean()) if points.size else None,
        speedup_worst_points=float(points.max()) if points.size else None,
        coverage=float(np.mean(inside)),
        interval_median_halfwidth=float(np.median(half)),
        warnings=tuple(warnings),
    )


def routing_warnings(record: Record) -> list[str]:
    """A warning for a model whose experts vLLM drew with kernels that no rollout of a user has; else []."""
    is_drawn = (record.fields.get("env") or {}).get(ROUTING) is not None
    routed = is_drawn and record.setup.shape.parts_of(Experts)
    if not routed or not has(record.fields["engine_version"], "simulated routing sorts"):
        return []
    model = record.fields["model"]
    costs = "vLLM then sorts random numbers in each layer of experts, for which no plan counts time"
    return [f"{model} was measured with {ROUTING}: {costs}. Measure it without"]


def simulated(record: Record, profile: Profile, before: Simulated | None = None) -> Simulated:
    """Simulate the record's rollout by `profile`, on the record's host if that was timed.

    before: the same engine and batch by another profile; memory and schedules depend on no profile, and are reused

    Raises as `simulate` does, and ConfigError if its GPU lacks its precision.
    """
    setup = record.setup
    if reason := setup.gpu.why_not(setup.precision):
        raise ConfigError(f"{setup.precision.name} was recorded: {reason}; correct the record's gpu or precision")
    profile = profile.on_host(record.fields.get("host_loop_s"))
    hit, memory, known = record.fields.get("experts_hit"), before and before.memory, before and before.schedules
    return simulate(setup, record.batch, profile, memory=memory, known=known, experts_hit=hit)


class Compared(NamedTuple):
    """One record's row of the result, its predicted rollout and the profile behind it."""

    row: dict[str, Any]
    rollout: Rollout
    profile: Profile


def _compare(record: Record, strict: bool, warnings: dict[str, None]) -> Compared:
    """Predict one record. Warnings about its profile are added to `warnings`."""
    fields = record.fields
    try:
        profile, remarks = load_profile(find_gpu(fields["gpu"]), fields["engine_version"], strict)
        warnings.update(dict.fromkeys([*remarks, *routing_warnings(record)]))
        result = simulated(record, profile)
    except Fp8PlanError as error:
        raise type(error)(f"line {record.line}: {error}") from None
    rollout = result.rollout
    row = {name: value for name, value in fields.items() if name not in LENGTHS} | {
        "line": record.line,
        "group": record.group,
        "seconds": record.seconds,
        "predicted_s": rollout.makespan_s,
        "predicted_low_s": rollout.makespan_low_s,
        "predicted_high_s": rollout.makespan_high_s,
        "error": relative_error({"seconds": record.seconds, "predicted_s": rollout.makespan_s}),
        "predicted_kv_cache_tokens": result.memory.pool_tokens,
        "predicted_preemptions": rollout.preemptions,
        "extrapolated": result.extrapolated,
        "rests_on": rollout.rests_on,
    }
    if rollout.turns is not None:
        queries, hits = fields.get("prefix_cache_queries"), fields.get("prefix_cache_hits")
        row["prefix_hits"] = hits / queries if queries and hits is not None else None
        row["predicted_prefix_hits"] = rollout.turns["hit_share"]
    return Compared(row, rollout, result.model.profile)


def _group_result(group: Sequence[Compared]) -> dict[str, Any]:
    """The speed-ups of one group against its bf16 records, and its fastest precisions, predicted and measured.

    The interval of a predicted speed-up is against one bf16 row `on_same_card`: the nearest to their median.
    """
    rows = [result.row for result in group]
    results = {result.row["line"]: result for result in group}
    gains = speedups(rows)
    for gain in gains:
        other = results[gain["line"]]
        base = [results[row["line"]].rollout for row in on_same_card(other.row, bf16_rows(rows))]
        middle = float(np.median([run.makespan_s for run in base]))
        nearest = min(base, key=lambda run: abs(run.makespan_s - middle))
        _, low, high = speed_up(nearest, other.rollout, other.profile)
        gain |= {"predicted_speedup_low": low, "predicted_speedup_high": high}
    return {
        "group": rows[0]["group"],
        "records": len(rows),
        "fastest_measured": min(rows, key=lambda row: row["seconds"])["precision"],
        "fastest_predicted": min(rows, key=lambda row: row["predicted_s"])["precision"],
        "speedups": gains,
    }
