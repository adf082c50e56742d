"""The theory of `theory`, scaled to published observations, and the error of the result.

    KL = exp(engines) * (1 [+ exp(moe)]) * (BF16 + exp(linears) * FP8 linears + exp(kv [+ kv_no_qk_norm]) * FP8 KV)

The terms of the last bracket are `theory.kl_terms`. Parts in [] are for MoE, or for models without QK-norm. exp(moe) =
1 means that routing doubles the KL. Replaying the routes removes half of it (R3, arXiv 2510.11370: 1.535e-3 -> 7.5e-4)
to two thirds (prime-rl#3543). The five exponents are fitted on log KL by Gauss-Newton steps, each one scikit-learn
Ridge, which shrinks them to 0, the theory. The positive terms keep the order BF16 <= FP8 <= both, and dense <= MoE.

tools/risk_report.py runs the fit.
"""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from fp8plan.model.cost.base import FloatArray
from fp8plan.model.risk.theory import REFERENCE_LAYERS, RoundingErrors, Setting, kl_terms

DATA: Final = Path(__file__).parent / "data"
OBSERVATIONS: Final = DATA / "mismatch_observations.csv"
FIT: Final = DATA / "mismatch_fit.json"

COEFFICIENTS: Final = ("engines", "moe", "linears", "kv", "kv_no_qk_norm")
Z90: Final = NormalDist().inv_cdf(0.95)  # half-width of a two-sided 90% interval

# Standard deviations of the theory's log KL before any data: a factor of two for each term. The common level of all
# runs (first coefficient) is free.
PRIOR_SD: Final = (7.0, 0.7, 0.7, 0.7, 0.7)


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
        """The variance of log KL around the model: 1/weight times that of a run, plus the width of a range."""
        return noise_variance / self.weight + self.spread**2


@dataclass(frozen=True, slots=True)
class MismatchFit:
    """The part of the fit that a plan needs.

    coefficients, covariance: values of COEFFICIENTS, and their covariance
    noise_sd:                 standard deviation of log KL between runs of the same setting
    errors:                   the rounding errors that the terms were computed from
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise_sd: float
    errors: RoundingErrors


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
    fp8 = row["weights"] == "fp8_block"
    kl, spread = (float(row["kl"]) if row["kl"] else None), 0.0
    if row["kind"] == "range":
        low, high = float(row["kl_low"]), float(row["kl_high"])
        kl, spread = sqrt(low * high), log(high / low) / (2 * Z90)
    setting = Setting(
        layers=layers,
        quantised_layers=layers if fp8 else 0.0,
        kv_layers=float(row.get("kv_layers") or layers),
        moe=row["moe"] == "1",
        qk_norm=row["qk_norm"] != "0",
        fp8_weights=fp8,
        fp8_kv=row["kv"] == "fp8",
        e8m0=row["e8m0"] == "1",
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


def predicted_kl(setting: Setting, coefficients: FloatArray, errors: RoundingErrors) -> tuple[float, float]:
    """The KL per token, and the part of it due to quantisation."""
    bf16, linears, kv = _scaled_terms(setting, coefficients, errors)
    return bf16 + linears + kv, linears + kv


def log_gradient(
    setting: Setting, coefficients: FloatArray, errors: RoundingErrors, quantisation_only: bool = False
) -> FloatArray:
    """The derivatives d log KL / d coefficient, shape (5,)."""
    bf16, linears, kv = _scaled_terms(setting, coefficients, errors)
    total = linears + kv + (0.0 if quantisation_only else bf16)
    no_qk_norm = 0.0 if setting.qk_norm else kv / total
    routing = setting.moe / (1 + exp(-float(coefficients[1])))
    return np.array([1.0, routing, linears / total, kv / total, no_qk_norm])


def _scaled_terms(setting: Setting, coefficients: FloatArray, errors: RoundingErrors) -> tuple[float, float, float]:
    engines, moe, linears, kv, no_qk_norm = coefficients.tolist()
    terms = kl_terms(setting, errors)
    level = exp(engines) * (1 + exp(moe) * setting.moe)
    return (
        level * terms[0],
        level * exp(linears) * terms[1],
        level * exp(kv + no_qk_norm * (not setting.qk_norm)) * terms[2],
    )


def fit(observations: list[Observation], errors: RoundingErrors, steps: int = 100) -> MismatchFit:
    """Fit the coefficients and the spread between runs to the rows of positive weight."""
    from sklearn.linear_model import Ridge  # here, because importing scikit-learn takes a second

    rows = [(o, log(o.kl)) for o in observations if o.weight > 0 and o.kl is not None]
    prior = np.array(PRIOR_SD)
    beta, noise = np.zeros(len(COEFFICIENTS)), 0.5
    for _ in range(steps):
        jacobian = np.array([log_gradient(o.setting, beta, errors, o.quantisation_only) for o, _ in rows])
        residual = np.array([y - log(compared_kl(o, beta, errors)) for o, y in rows])
        weights = np.array([1 / o.variance(noise**2) for o, _ in rows])
        # Columns scaled by the prior make Ridge's penalty of 1 that prior.
        model = Ridge(alpha=1.0, fit_intercept=False, solver="cholesky")
        model.fit(jacobian * prior, residual + jacobian @ beta, sample_weight=weights)
        beta = model.coef_ * prior
        # The spread for which the weighted squares average 1: the scatter of rows beyond their own width.
        noise *= float(np.sqrt(weights @ residual**2 / (len(rows) - len(COEFFICIENTS))))
    covariance = np.linalg.inv(jacobian.T @ (jacobian * weights[:, None]) + np.diag(prior**-2))
    return MismatchFit(_rounded(beta), tuple(_rounded(row) for row in covariance), round(noise, 6), errors)


def _rounded(values: FloatArray) -> tuple[float, ...]:
    return tuple(round(float(v), 6) for v in values)


def compared_kl(observation: Observation, coefficients: FloatArray, errors: RoundingErrors) -> float:
    return predicted_kl(observation.setting, coefficients, errors)[observation.quantisation_only]


def coefficient_variance(result: MismatchFit, gradient: FloatArray) -> float:
    """Variance of log KL that the coefficients leave open."""
    return float(gradient @ np.array(result.covariance) @ gradient)


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
        "errors": {name: round(value, 8) for name, value in asdict(result.errors).items()},
    }


def from_dict(values: dict[str, Any]) -> MismatchFit:
    return MismatchFit(
        coefficients=tuple(values["coefficients"][name] for name in COEFFICIENTS),
        covariance=tuple(tuple(row) for row in values["covariance"]),
        noise_sd=values["noise_sd"],
        errors=RoundingErrors(**values["errors"]),
    )
