"""The reports of predictions beside measurements: of a validation, and of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from fp8plan.model.plan.choice import SpeedUp
from fp8plan.views.text import Column, Fitted, Paragraph

if TYPE_CHECKING:
    from fp8plan.model.calibrate.profile_of import Calibration
    from fp8plan.model.validate.validate import Validation


def validation_report(result: Validation) -> RenderableType:
    """One row per record, one per speed-up, and the totals."""
    rows = result.records
    bands = [f"({row['predicted_low_s']:,.2f}-{row['predicted_high_s']:,.2f})" for row in rows]
    predicted = [f"{row['predicted_s']:,.2f} {band}" for row, band in zip(rows, bands, strict=True)]
    pairs = {
        "preemptions": ("preemptions", "predicted_preemptions"),
        "KV tokens": ("measured_kv_cache_tokens", "predicted_kv_cache_tokens"),
    }
    if any("predicted_prefix_hits" in row for row in rows):
        pairs["prefix hits"] = ("prefix_hits", "predicted_prefix_hits")
    records = [
        Column("line", [str(row["line"]) for row in rows]),
        Column("model", [row["model"] for row in rows], rank=3, left=True),
        Column("precision", [row["precision"] for row in rows], left=True),
        Column("measured\ns", [f"{row['seconds']:,.2f}" for row in rows]),
        Column("predicted s\n(90%)", predicted),
        Column("error", [f"{row['error']:+.1%}" for row in rows]),
        *(
            Column(
                f"{name}:\nmeasured /\npredicted",
                [f"{_count(row.get(measured))} / {_count(row.get(modelled))}" for row in rows],
                rank,
            )
            for rank, (name, (measured, modelled)) in enumerate(pairs.items(), 1)
        ),
    ]
    gains = [(group["group"], entry) for group in result.groups for entry in group["speedups"]]
    speedups = [
        Column("group", [str(group) for group, _ in gains], left=True),
        Column("precision", [entry["precision"] for _, entry in gains], left=True),
        Column("measured", [f"{entry['measured_speedup']:.2f}x" for _, entry in gains]),
        Column("predicted\n(90%)", [_predicted(entry) for _, entry in gains]),
        Column("error,\npoints", [f"{entry['error_points']:+.1f}" for _, entry in gains]),
    ]
    total = f"makespan: MAPE {result.makespan_mape:.1%}, worst {result.makespan_worst:.1%}; "
    if result.speedup_mae_points is not None:
        total += f"speed-up: mean {result.speedup_mae_points:.1f}, worst {result.speedup_worst_points:.1f} points; "
    total += f"90% interval: holds {result.coverage:.0%}, median half-width {result.interval_median_halfwidth:.1%}"
    compared: list[RenderableType] = ["speed-up over bf16", Fitted(speedups), ""] if gains else []
    return Group("records", Fitted(records), "", *compared, Paragraph(total))


def _predicted(entry: Mapping[str, Any]) -> str:
    return SpeedUp(*(entry[f"predicted_speedup{end}"] for end in ("", "_low", "_high"))).cell


def _count(value: Any) -> str:
    """A number, or a share."""
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def calibration_report(result: Calibration) -> RenderableType:
    """Errors of every kernel before and after the fit, and the source of the profile."""
    errors, profile = result.errors, result.profile
    shares = {"before": "before", "after": "fitted", "held out": "held_out", "worst": "worst"}
    rows = [
        Column("kernel", [kernel.kernel for kernel in errors], left=True),
        *(Column(name, [f"{getattr(kernel, name):,}" for kernel in errors]) for name in ("rows", "unseen")),
        *(Column(name, [f"{getattr(kernel, field):.1%}" for kernel in errors]) for name, field in shares.items()),
    ]
    text = (
        f"{profile.label}: {profile.source}. Median errors by {result.prior} (before) and by the fit (after), "
        "of rows that no fit sees or, without any, by fits that have not seen the weight shape, head layout or engine "
        f"(held out; worst). Error beyond the coefficients' covariance: {profile.shared_error:.1%} that all precisions "
        f"share, and {profile.model_error:.1%} of each."
    )
    return Group(Fitted(rows), "", Paragraph(text))
