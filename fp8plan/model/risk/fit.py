"""The fit of the theory to published observations, as plans use it.

    KL = exp(engines) * (1 [+ exp(moe)]) * (BF16 + exp(linears) * FP8 linears + exp(kv [+ kv_no_qk_norm]) * FP8 KV)

The terms of the last bracket are `theory.kl_terms`. Parts in [] are for MoE, or for models without QK-norm. exp(moe) =
1 means that routing doubles the KL. The positive terms keep the order BF16 <= FP8 <= both, and dense <= MoE.

tools/risk_report.py makes the fit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from math import exp
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np

from fp8plan.model.cost.base import FloatArray
from fp8plan.model.risk.theory import RoundingErrors, Setting, kl_terms

DATA: Final = Path(__file__).parent / "data"
OBSERVATIONS: Final = DATA / "mismatch_observations.csv"
FIT: Final = DATA / "mismatch_fit.json"

COEFFICIENTS: Final = ("engines", "moe", "linears", "kv", "kv_no_qk_norm")
Z90: Final = NormalDist().inv_cdf(0.95)  # half-width of a two-sided 90% interval


@dataclass(frozen=True, slots=True)
class MismatchFit:
    """The result of a fit.

    coefficients, covariance: values of COEFFICIENTS, and their covariance
    noise_sd:                 standard deviation of log KL between runs of the same setting
    errors:                   the rounding errors that the terms were computed from
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise_sd: float
    errors: RoundingErrors


@lru_cache(maxsize=1)
def committed_fit() -> MismatchFit:
    """The coefficients in data/mismatch_fit.json."""
    values = json.loads(FIT.read_text(encoding="utf-8"))
    return MismatchFit(
        coefficients=tuple(values["coefficients"][name] for name in COEFFICIENTS),
        covariance=tuple(tuple(row) for row in values["covariance"]),
        noise_sd=values["noise_sd"],
        errors=RoundingErrors(**values["errors"]),
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


def coefficient_variance(result: MismatchFit, gradient: FloatArray) -> float:
    """Variance of log KL that the coefficients leave open."""
    return float(gradient @ np.array(result.covariance) @ gradient)
