"""The fit of the theory to published observations, as plans use it.

    dense = BF16 + exp(linears [+ same_grid]) * FP8 linears + exp(kv [+ kv_no_qk_norm]) * FP8 KV
    KL = exp(engines) * (dense [+ exp(routing) * routes(dense)])

The terms of `dense` are `theory.kl_terms`, and routes is `theory.routing_term`. Parts in [] are for trainers on the
rollout's grid, for models without QK-norm, and for MoE without router replay. All terms are positive, so that more FP8
means more KL, and so do routes that differ.

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
from fp8plan.model.risk.theory import RoundingErrors, Setting, kl_terms, routing_term

DATA: Final = Path(__file__).parent / "data"
OBSERVATIONS: Final = DATA / "mismatch_observations.csv"
FIT: Final = DATA / "mismatch_fit.json"

COEFFICIENTS: Final = ("engines", "routing", "linears", "same_grid", "kv", "kv_no_qk_norm")
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
    """The KL per token, and that of quantisation alone: of two engines that differ in nothing else."""
    total, alone = (_terms(setting, coefficients, errors, only) for only in (False, True))
    return sum(total), sum(alone)


def log_gradient(
    setting: Setting, coefficients: FloatArray, errors: RoundingErrors, quantisation_only: bool = False
) -> FloatArray:
    """The derivatives d log KL / d coefficient, shape (6,)."""
    bf16, linears, kv, routing = _terms(setting, coefficients, errors, quantisation_only)
    dense = bf16 + linears + kv
    total = dense + routing
    # Routing grows as the square root of the rest, so a share of the rest moves half that share of it.
    per_nat = (1 + routing / (2 * dense)) / total
    same_grid = linears * per_nat if setting.same_grid else 0.0
    no_qk_norm = 0.0 if setting.qk_norm else kv * per_nat
    return np.array([1.0, routing / total, linears * per_nat, same_grid, kv * per_nat, no_qk_norm])


def _terms(
    setting: Setting, coefficients: FloatArray, errors: RoundingErrors, quantisation_only: bool
) -> tuple[float, float, float, float]:
    """KL per token from (BF16 kernels, FP8 linears, FP8 KV, routing)."""
    engines, routing, linears, same_grid, kv, no_qk_norm = coefficients.tolist()
    bf16_term, linears_term, kv_term = kl_terms(setting, errors)
    if quantisation_only:
        bf16_term = 0.0
    linears_term *= exp(linears + same_grid * setting.same_grid)
    kv_term *= exp(kv + no_qk_norm * (not setting.qk_norm))
    routes = 0.0
    if setting.routing:
        routes = exp(routing) * routing_term(bf16_term + linears_term + kv_term, setting.expert_layers, errors)
    level = exp(engines)
    return level * bf16_term, level * linears_term, level * kv_term, level * routes


def coefficient_variance(result: MismatchFit, gradient: FloatArray) -> float:
    """Variance of log KL that the coefficients leave open."""
    return float(gradient @ np.array(result.covariance) @ gradient)
