"""Fit the expected mismatch anew to the published observations, and report the errors of the fit.

    python tools/risk_report.py

It writes fp8plan/model/risk/data/mismatch_fit.json. It prints residuals, bounds, coefficients and the error for each
source, predicted without that source.
"""

from __future__ import annotations

import json
from math import exp, sqrt
from pathlib import Path
from statistics import median

import numpy as np

from fp8plan.model.risk.fit import (
    COEFFICIENTS,
    FIT,
    LeftOut,
    MismatchFit,
    Observation,
    compared_kl,
    fit,
    leave_one_source_out,
    read_observations,
    to_dict,
)
from fp8plan.model.risk.theory import rounding_errors


def run(path: Path | None = FIT) -> str:
    """Fit, write the coefficients to `path` (None: do not write), and return the report to print."""
    errors = rounding_errors()
    observations = read_observations()
    result = fit(observations, errors)
    left = leave_one_source_out(observations, errors)
    summary = leave_one_out_summary(left)
    if path is not None:
        values = to_dict(result) | {"leave_one_source_out": summary}
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return report(result, observations, left, summary)


def leave_one_out_summary(left: list[LeftOut]) -> dict[str, float]:
    """Errors as factors (1.0 = exact) and coverage of the 90% interval, over all rows and over those of weight 1."""
    sizes = [abs(row.residual) for row in left]
    full = [row for row in left if row.observation.weight >= 1]
    return {
        "rows": len(left),
        "sources": len({row.observation.source for row in left}),
        "median_factor": round(exp(median(sizes)), 3),
        "rms_factor": round(exp(sqrt(sum(s * s for s in sizes) / len(sizes))), 3),
        "median_factor_weight_1": round(exp(median(abs(row.residual) for row in full)), 3),
        "coverage_90": round(sum(abs(row.residual) <= row.halfwidth for row in left) / len(left), 3),
        "coverage_90_weight_1": round(sum(abs(row.residual) <= row.halfwidth for row in full) / len(full), 3),
    }


def report(result: MismatchFit, observations: list[Observation], left: list[LeftOut], summary: dict[str, float]) -> str:
    """Rows predicted without their source, bounds, coefficients and the leave-one-source-out error, as text."""
    lines = [
        "KL per token, each row predicted without its source",
        _row("source", "model", "rollout", "weight", "observed", "predicted", "factor", "90%"),
        *(_left_out_row(row) for row in left),
        "",
        "bounds, not fitted (predicted by the whole fit)",
        _row("source", "model", "rollout", "kind", "bound", "predicted", "", "holds"),
        *(_bound_row(o, o.kl, result) for o in observations if o.kind in ("low", "high") and o.kl is not None),
        "",
        "log factors on the theory, with standard deviation",
    ]
    for i, (name, value) in enumerate(zip(COEFFICIENTS, result.coefficients, strict=True)):
        lines.append(f"  {name:14s} {value:+.2f} +- {sqrt(result.covariance[i][i]):.2f}  (x {exp(value):.2f})")
    lines += [f"  between runs   x {exp(result.noise_sd):.2f} (one standard deviation)", "", "leave one source out"]
    return "\n".join(lines + [f"  {name}: {value:g}" for name, value in summary.items()])


def _left_out_row(row: LeftOut) -> str:
    o, inside = row.observation, "in" if abs(row.residual) <= row.halfwidth else "OUT"
    numbers = (f"{o.weight:g}", f"{o.kl:.5f}", f"{row.predicted:.5f}", f"{exp(row.residual):.2f}")
    return _row(o.source, o.model, _rollout(o), *numbers, inside)


def _bound_row(o: Observation, bound: float, result: MismatchFit) -> str:
    predicted = compared_kl(o, np.array(result.coefficients), result.errors)
    holds = predicted >= bound if o.kind == "low" else predicted <= bound
    return _row(
        o.source, o.model, _rollout(o), o.kind, f"{bound:.5f}", f"{predicted:.5f}", "", "yes" if holds else "NO"
    )


def _rollout(o: Observation) -> str:
    s = o.setting
    name = "+".join(part for part, on in (("fp8_block", s.fp8_weights), ("fp8_kv", s.fp8_kv)) if on) or "bf16"
    return name + (" moe" if s.moe else "")


def _row(*cells: str) -> str:
    widths = (16, 30, 22, 6, 9, 9, 6, 5)
    return "  ".join(cell[:width].ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


if __name__ == "__main__":
    print(run())
