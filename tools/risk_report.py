"""Fit the expected mismatch anew to the published observations, and report the errors of the fit.

    python tools/risk_report.py

It writes fp8plan/model/risk/data/mismatch_fit.json. It prints residuals, bounds, coefficients and the error for each
source, predicted without that source.

The exponents are fitted on log KL by Gauss-Newton steps, each one scikit-learn Ridge, which shrinks them to 0, the
theory. Rows of one model and source have a part of their noise in common, so that a pair counts by its ratio.
"""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike
from sklearn.linear_model import Ridge

from fp8plan.model.cost.base import FloatArray
from fp8plan.model.precision import E4M3_MANTISSA_BITS, E4M3_MAX
from fp8plan.model.risk.expected import (
    COEFFICIENTS,
    FIT,
    OBSERVATIONS,
    Z90,
    MismatchFit,
    coefficient_variance,
    log_gradient,
    predicted_kl,
)
from fp8plan.model.risk.remedies import BF16, BLOCK, POW2, TENSOR, TRAINER_PRECISIONS
from fp8plan.model.risk.theory import REFERENCE_LAYERS, RoundingErrors, Setting, kernel_variance, trainer_sd

# Grids on which a rollout and a trainer round weights and activations. CHANNEL: checkpoints with one scale per row.
# BLOCK_OF_FP32: a trainer that rounds its FP32 weights, while the rollout rounds their BF16 copies.
CHANNEL: Final = "fp8_channel"
BLOCK_OF_FP32: Final = "fp8_block_of_fp32"
ROLLOUT_GRIDS: Final = (BF16, BLOCK, POW2, TENSOR, CHANNEL)
TRAINER_GRIDS: Final = (*TRAINER_PRECISIONS, BLOCK_OF_FP32)

GROUP: Final = 128  # weights in GROUP x GROUP blocks, activations in 1 x GROUP groups (vLLM's FP8_BLOCK)
E4M3_MIN_EXPONENT: Final = -6  # below 2^-6 E4M3 is subnormal: a fixed step of 2^-9 (OCP OFP8 specification)
BF16_MANTISSA_BITS: Final = 7

# Standard deviations of the theory's log KL before any data: a factor of two for each term. The common level of all
# runs (first coefficient) is free.
PRIOR_SD: Final = (7.0, 0.7, 0.7, 0.7, 0.7, 0.7)

# Part of the noise variance that rows of one model and source have in common: the same weights, kernels and prompts.
# Assumed.
SHARED_NOISE: Final = 0.5


def round_e4m3(values: ArrayLike) -> FloatArray:
    """Round to the nearest E4M3 "fn" numbers (ties to even, saturating at 448), as float64 of the same shape."""
    exact = np.asarray(values, dtype=np.float64)
    magnitude = np.minimum(np.abs(exact), E4M3_MAX)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**E4M3_MIN_EXPONENT)))
    step = 2.0 ** (exponent - E4M3_MANTISSA_BITS)
    rounded: FloatArray = np.copysign(np.minimum(np.round(magnitude / step) * step, E4M3_MAX), exact)
    return rounded


def round_bf16(values: ArrayLike) -> FloatArray:
    """Round to the nearest bfloat16 numbers of normal range (ties to even), as float64 of the same shape."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    steps = 2.0 ** (BF16_MANTISSA_BITS + 1)
    return np.asarray(np.ldexp(np.round(mantissa * steps) / steps, exponent), dtype=np.float64)


def quantise_blocks(values: FloatArray, block: tuple[int, int], e8m0: bool = False) -> FloatArray:
    """Round `values`, shape (rows, columns), to E4M3 with one amax/448 scale per block, which divides both sizes.

    e8m0: the scale is the next power of two, never smaller, so that nothing saturates
    """
    rows, columns = values.shape
    tiles = values.reshape(rows // block[0], block[0], columns // block[1], block[1])
    scale = np.abs(tiles).max(axis=(1, 3), keepdims=True) / E4M3_MAX
    scale = 2.0 ** np.ceil(np.log2(scale)) if e8m0 else scale
    return np.asarray(round_e4m3(tiles / scale) * scale).reshape(rows, columns)


def rounding_errors(size: int = 1024) -> RoundingErrors:
    """Measure RoundingErrors on a (size, size) standard normal matrix; deterministic, about 2 s at 1024."""
    exact, noise = np.random.default_rng(0).standard_normal((2, size, size))
    copies = round_bf16(exact)
    weights = {grid: rounded_weights(copies, grid) for grid in ROLLOUT_GRIDS}
    trained = weights | {BLOCK_OF_FP32: rounded_weights(exact, BLOCK)}
    # On Hopper vLLM's DeepGEMM path rounds weights of FP32 scales again, with power-of-two scales. From a trainer on
    # that grid it is assumed to get them as they are.
    twice = quantise_blocks(weights[BLOCK], (GROUP, GROUP), e8m0=True)
    activations = {grid: rounded_activations(exact, grid) for grid in ROLLOUT_GRIDS}
    bf16 = rms(copies - exact)
    weight: dict[str, dict[str, float]] = {}
    activation: dict[str, dict[str, float]] = {}
    for trainer in TRAINER_GRIDS:
        held = weights if trainer == POW2 else weights | {POW2: twice}
        weight[trainer] = {rollout: rms(trained[trainer] - held[rollout]) for rollout in ROLLOUT_GRIDS}
        grid = BLOCK if trainer == BLOCK_OF_FP32 else trainer
        activation[trainer] = {}
        for rollout, difference in weight[trainer].items():
            # Activations of the two differ before they are rounded: by their kernels, and by unequal weights. E4M3 is
            # coarse, so a small difference moves some of them by a whole step. On one grid this makes as much as one
            # rounding error.
            before = noise * sqrt(kernel_variance(REFERENCE_LAYERS, bf16) + difference**2)
            after = rounded_activations(exact + before, grid) - activations[rollout]
            activation[trainer][rollout] = sqrt(max(0.0, rms(after) ** 2 - rms(before) ** 2))
    return RoundingErrors(weight, activation, kv=rms(quantise_blocks(exact, exact.shape) - exact), bf16=bf16)


def rounded_weights(values: FloatArray, grid: str) -> FloatArray:
    """Weights on a grid of ROLLOUT_GRIDS, of the same shape."""
    if grid == BF16:
        return values
    block = {TENSOR: values.shape, CHANNEL: (1, values.shape[1])}.get(grid, (GROUP, GROUP))
    return quantise_blocks(values, block, e8m0=grid == POW2)


def rounded_activations(values: FloatArray, grid: str) -> FloatArray:
    """Activations on a grid of ROLLOUT_GRIDS, of the same shape: with one scale for a group, or for all."""
    if grid == BF16:
        return values
    block = {TENSOR: values.shape, CHANNEL: (1, values.shape[1])}.get(grid, (1, GROUP))
    return quantise_blocks(values, block, e8m0=grid == POW2)


def rms(values: FloatArray) -> float:
    return float(np.sqrt(np.mean(values**2)))


@dataclass(frozen=True, slots=True)
class Observation:
    """One row of the table (data/README.md explains its columns).

    kl, spread: a point and 0, or the geometric centre of a range and the standard deviation of log KL whose 90% it
    spans
    """

    source: str
    model: str
    setting: Setting
    quantisation_only: bool
    kind: str
    kl: float | None
    spread: float
    weight: float

    def variance(self, noise_variance: float) -> float:
        """The variance of log KL around the model: 1/weight times that of a run, plus the width of a range.

        Runs with an FP8 trainer have a variance of their own besides.
        """
        return noise_variance / self.weight + self.spread**2 + trainer_sd(self.setting) ** 2


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One row predicted from the other sources. residual (predicted - observed) and halfwidth (90%) are of log KL."""

    observation: Observation
    predicted: float
    residual: float
    halfwidth: float


def read_observations(path: Path = OBSERVATIONS) -> list[Observation]:
    with path.open(newline="", encoding="utf-8") as file:
        return [_observation(row) for row in csv.DictReader(file)]


def _observation(row: dict[str, str]) -> Observation:
    layers = float(row["layers"] or REFERENCE_LAYERS)
    trainer = row.get("trainer_precision") or BF16
    rollout = POW2 if row["weights"] == BLOCK and row["e8m0"] == "1" else row["weights"]
    kl, spread = (float(row["kl"]) if row["kl"] else None), 0.0
    if row["kind"] == "range":
        low, high = float(row["kl_low"]), float(row["kl_high"])
        kl, spread = sqrt(low * high), log(high / low) / (2 * Z90)
    setting = Setting(
        layers=layers,
        quantised_layers=layers,
        kv_layers=float(row.get("kv_layers") or layers),
        expert_layers=layers if row["moe"] == "1" else 0.0,
        qk_norm=row["qk_norm"] != "0",
        rollout=rollout,
        fp8_kv=row["kv"] == "fp8",
        trainer=trainer,
        router_replay=row.get("router_replay") == "1",
    )
    return Observation(
        source=row["source"],
        model=row["model"],
        setting=setting,
        quantisation_only=row["scope"] == "quantisation",
        kind=row["kind"],
        kl=kl,
        spread=spread,
        weight=float(row["weight"]),
    )


def fit(observations: list[Observation], errors: RoundingErrors, steps: int = 100) -> MismatchFit:
    """Fit the coefficients and the spread between runs to the rows of positive weight."""
    rows = [(o, log(o.kl)) for o in observations if o.weight > 0 and o.kl is not None]
    prior = np.array(PRIOR_SD)
    related = np.array([[a is not b and (a.source, a.model) == (b.source, b.model) for a, _ in rows] for b, _ in rows])
    plain = [trainer_sd(o.setting) == 0 for o, _ in rows]
    beta, noise = np.zeros(len(COEFFICIENTS)), 0.5
    for _ in range(steps):
        jacobian = np.array([log_gradient(o.setting, beta, errors, o.quantisation_only) for o, _ in rows])
        residual = np.array([y - log(compared_kl(o, beta, errors)) for o, y in rows])
        variance = np.diag([o.variance(noise**2) for o, _ in rows]) + SHARED_NOISE * noise**2 * related
        white = np.linalg.inv(np.linalg.cholesky(variance))  # makes rows independent, of variance 1
        # Columns scaled by the prior make Ridge's penalty of 1 that prior.
        model = Ridge(alpha=1.0, fit_intercept=False, solver="cholesky")
        model.fit(white @ jacobian * prior, white @ (residual + jacobian @ beta))
        beta = model.coef_ * prior
        # The spread for which the squares average 1, of rows without a spread of their own: their scatter beyond their
        # own width.
        squares = (residual**2 / variance.diagonal())[plain]
        used = np.count_nonzero(jacobian[plain].any(axis=0))
        noise *= float(np.sqrt(squares.sum() / (len(squares) - used)))
    covariance = np.linalg.inv((white @ jacobian).T @ (white @ jacobian) + np.diag(prior**-2))
    return MismatchFit(_rounded(beta), tuple(_rounded(row) for row in covariance), round(noise, 6), errors)


def _rounded(values: FloatArray) -> tuple[float, ...]:
    return tuple(round(float(v), 6) for v in values)


def compared_kl(observation: Observation, coefficients: FloatArray, errors: RoundingErrors) -> float:
    return predicted_kl(observation.setting, coefficients, errors)[observation.quantisation_only]


def leave_one_source_out(observations: list[Observation], errors: RoundingErrors) -> list[LeftOut]:
    """Predict every fitted row from a fit that has seen no row of its source."""
    rows = []
    for source in sorted({o.source for o in observations if o.weight > 0}):
        others = fit([o for o in observations if o.source != source], errors)
        rows += [_left_out(o, others) for o in observations if o.source == source and o.weight > 0]
    return rows


def _left_out(observation: Observation, result: MismatchFit) -> LeftOut:
    beta = np.array(result.coefficients)
    predicted = compared_kl(observation, beta, result.errors)
    gradient = log_gradient(observation.setting, beta, result.errors, observation.quantisation_only)
    halfwidth = Z90 * sqrt(coefficient_variance(result, gradient) + observation.variance(result.noise_sd**2))
    assert observation.kl is not None  # rows of positive weight have one
    return LeftOut(observation, predicted, log(predicted / observation.kl), halfwidth)


def to_dict(result: MismatchFit) -> dict[str, Any]:
    return {
        "coefficients": dict(zip(COEFFICIENTS, result.coefficients, strict=True)),
        "covariance": [list(row) for row in result.covariance],
        "noise_sd": result.noise_sd,
        "errors": _shortened(asdict(result.errors)),
    }


def _shortened(values: dict[str, Any]) -> dict[str, Any]:
    """The same with rounded numbers, also of the tables within."""
    return {name: _shortened(x) if isinstance(x, dict) else round(x, 8) for name, x in values.items()}


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
        _row("source", "model", "rollout, trainer", "weight", "observed", "predicted", "factor", "90%"),
        *(_left_out_row(row) for row in left),
        "",
        "bounds, not fitted (predicted by the whole fit)",
        _row("source", "model", "rollout, trainer", "kind", "bound", "predicted", "", "holds"),
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
    words = [s.rollout if s.rollout != BF16 or not s.fp8_kv else ""]
    words += ["fp8_kv"] if s.fp8_kv else []
    words += ["moe"] if s.moe else []
    words += ["replay"] if s.router_replay else []
    words += [f"to {s.trainer}"] if s.trainer != BF16 else []
    return " ".join(word for word in words if word)


def _row(*cells: str) -> str:
    widths = (16, 27, 33, 6, 9, 9, 6, 5)
    return "  ".join(cell[:width].ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


if __name__ == "__main__":
    print(run())
