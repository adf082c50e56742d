"""Mismatch risk: how far a rollout precision moves the rollout policy from the trainer's, and what that costs.

    risk = mismatch_risk(shape, precision, response_lengths)     risk.kl_k3, risk.level, risk.reasons
    replayed = mismatch_risk(shape, precision, response_lengths, remedies=Remedies(router_replay=True))
    bound, notes = recommended_tis(risk, response_lengths)       bound -> Plan.thresholds

The KL is a theory of rounding errors (`theory`), scaled to published observations. It is modelled, not measured here,
and its band is wide. It holds for the start of a run; the Monitor watches its drift.

    dense = BF16 + exp(linears [+ same_grid]) * FP8 linears + exp(kv [+ kv_no_qk_norm]) * FP8 KV
    KL = exp(engines) * (dense [+ exp(routing) * routes(dense)])

The terms of `dense` are `theory.kl_terms`, and routes is `theory.routing_term`. Parts in [] are for trainers on the
rollout's grid, for models without QK-norm, and for MoE without router replay. All terms are positive, so that more FP8
means more KL, and so do routes that differ. tools/risk_report.py fits the coefficients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import exp, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.base import FloatArray
from fp8plan.model.precision import Precision, Stored
from fp8plan.model.risk import theory
from fp8plan.model.risk.remedies import BF16, NO_REMEDIES, POW2, TRAINER_PRECISIONS, Remedies
from fp8plan.model.risk.theory import (
    RoundingErrors,
    Setting,
    kl_terms,
    routing_term,
    sequence_rejection,
    token_log_ratio,
)
from fp8plan.options import Option, group_of

DATA: Final = Path(__file__).parent / "data"
OBSERVATIONS: Final = DATA / "mismatch_observations.csv"
FIT: Final = DATA / "mismatch_fit.json"

COEFFICIENTS: Final = ("engines", "routing", "linears", "same_grid", "kv", "kv_no_qk_norm")
Z90: Final = NormalDist().inv_cdf(0.95)  # half-width of a two-sided 90% interval

Level = Literal["low", "moderate", "high"]
LEVELS: Final[tuple[Level, ...]] = ("low", "moderate", "high")

# A gain below this is not worth more mismatch. Two cards of one kind differ by more: others published 2 to 6%.
LEAST_GAIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class RiskBudget:
    """The limits of a low and of a moderate mismatch (any other is high), and the highest level a plan may accept.

    The unfavourable end of the 90% band must keep the limits. Sources: prime-rl merges a new model below a KL of 0.015.
    verl's docs call 0.001 to 0.03 typical and 1.0 broken. They ask for an ESS of 0.5, and warn below 0.3. `low_kl` is
    the KL of good BF16 MoE runs. The clip limits are this project's choice: token TIS gives up little at these shares.

    max_sequence_rejection: a sequence-level MIS that drops at most this share of the sequences is called usable
    """

    low_kl: float = 1e-2
    low_clip: float = 1e-3
    low_ess: float = 0.9
    moderate_kl: float = 3e-2
    moderate_clip: float = 1e-2
    moderate_ess: float = 0.5
    max_sequence_rejection: float = 0.2
    accept: Annotated[Level, Option(help="highest risk to choose: low, moderate, high", kind=str)] = "moderate"

    def __post_init__(self) -> None:
        if self.accept not in LEVELS:
            raise ConfigError(f"RiskBudget.accept is {self.accept!r}; allowed: {', '.join(LEVELS)}")
        for limit in (f.name for f in fields(self) if f.name != "accept"):
            value = getattr(self, limit)
            if not is_number(value) or value < 0:
                raise ConfigError(f"RiskBudget.{limit} is {value!r}; allowed: a finite number of at least 0")
            object.__setattr__(self, limit, float(value))  # JSON knows no numpy number

    def accepts(self, level: str | None) -> bool:
        """True if a level may be chosen. Raises ValueError for any other than LEVELS."""
        return LEVELS.index(level) <= LEVELS.index(self.accept)

    def level(self, kl_high: float, clip_high: float, ess_low: float) -> Level:
        if kl_high <= self.low_kl and clip_high <= self.low_clip and ess_low >= self.low_ess:
            return "low"
        within = kl_high <= self.moderate_kl and clip_high <= self.moderate_clip and ess_low >= self.moderate_ess
        return "moderate" if within else "high"


BUDGET_OPTIONS: Final = group_of(RiskBudget)


THRESHOLD: Final = "token_tis"  # the threshold that a plan may have: C of token TIS, on pi_train / pi_rollout


def check_thresholds(thresholds: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a plan's thresholds are empty, or a bound of token TIS."""
    if unknown := sorted(thresholds.keys() - {THRESHOLD}):
        raise ConfigError(f"unknown thresholds: {', '.join(unknown)}; allowed: {THRESHOLD}")
    bound = thresholds.get(THRESHOLD, COUNTED_TIS)
    if not is_number(bound) or bound <= 0:
        raise ConfigError(f"thresholds[{THRESHOLD!r}] is {bound!r}; allowed: a number above 0")


# C of token TIS under the default law: it starts at the first, and tightens to the second as the KL rises. 2 is verl's,
# slime's and the FP8-RL paper's constant. miles reports an FP8 MoE run that collapsed at 2 and not at 1.5.
TIS_START, TIS_FLOOR = 4.0, 2.0
TOKEN_TIS: Final[Mapping[Level, float]] = {"low": TIS_START, "moderate": TIS_START, "high": 1.5}

# The C of token TIS that clip_fraction counts for, and the [low, high] of the MIS that seq_reject_fraction counts for.
COUNTED_TIS: Final = 2.0
COUNTED_MIS: Final = (0.5, 2.0)

# KL per token that a KV cache clipped at scale 1.0 costs a model with large K: log(34.84 / 22.62). These are Qwen2-7B's
# perplexities at scale 1.0 and with dynamic scales (vllm-project/vllm#11906).
CLIPPED_KV_KL: Final = 0.43

# Extra standard deviation of log KL for K and V scales of 1.0 that clip nothing. Two language models were probed. Their
# KL at 1.0 was 0.96 and 1.07 times that with measured scales, so the expected KL stays. This number is the spread to
# expect of another model (benchmarks/tables/probe.py, unit_sd).
UNIT_SCALES_SD: Final = 0.33


@dataclass(frozen=True, slots=True)
class MismatchRisk:
    """Expected train/rollout mismatch of one precision.

    kl_k3:               mean over tokens of ratio - 1 - log ratio, the floor of BF16 kernels included
    kl_k3_low, kl_k3_high: the ends of its 90% band
    ess_raw:             1 / mean(ratio^2) over tokens, untruncated, a fraction
    clip_fraction:       share of tokens whose ratio exceeds COUNTED_TIS
    seq_reject_fraction: share of sequences whose product of ratios leaves COUNTED_MIS, over the given lengths
    level, reasons:      the level by RiskBudget's rules, and the reasons for it, in sentences
    moe:                 the ratios have the heavy tail of MoE routes that differ
    """

    kl_k3: float
    kl_k3_low: float
    kl_k3_high: float
    ess_raw: float
    clip_fraction: float
    seq_reject_fraction: float
    level: Level
    reasons: tuple[str, ...]
    moe: bool


def mismatch_risk(
    shape: ModelShape,
    precision: Precision,
    response_lengths: ArrayLike,
    *,
    e8m0: bool = True,
    kv_scales_calibrated: bool = True,
    tensor_parallel_size: int = 1,
    budget: RiskBudget | None = None,
    remedies: Remedies = NO_REMEDIES,
) -> MismatchRisk:
    """Predict the mismatch of `precision` for responses of these lengths.

    response_lengths:     (n,) tokens, each at least 1
    e8m0:                 FP8 GEMMs with power-of-two scales: vLLM's default on Hopper (VLLM_USE_DEEP_GEMM_E8M0)
    kv_scales_calibrated: K and V scales follow the weights; False: they are 1.0, as after an ordinary weight sync
    tensor_parallel_size: ranks that share the linears; it decides which of them stay in BF16
    remedies:             settings of trainer and rollout that lower the mismatch

    Raises ConfigError for `keep_bf16` that the model does not allow.
    """
    budget = budget or RiskBudget()
    lengths = np.asarray(response_lengths, dtype=np.float64)
    setting = theory.setting_of(shape, precision, e8m0, tensor_parallel_size, remedies)
    one_scale = (theory.ONE_SCALE,) if precision.gemm_dtype == "fp8" else ()
    unmeasured = (*theory.unmeasured_parts(shape), *one_scale)
    calibrated = kv_scales_calibrated or not setting.fp8_kv
    clipped = setting.fp8_kv and theory.clipped_keys(shape)
    low, kl, high = _kl_band(setting, calibrated, clipped, unmeasured)
    tokens, worst = (token_log_ratio(value, setting.routing) for value in (kl, high))
    level, reasons = _level(
        setting, calibrated, clipped, unmeasured, budget, high, worst.fraction_above(COUNTED_TIS), worst.ess
    )
    if shape.stored is not None:
        reasons = tuple(_of_checkpoint(reasons, shape.stored))
        if setting.trainer == BF16:
            reasons = (*reasons, _FP8_CHECKPOINT)
    if any(remedies.keep_bf16) and (setting.rollout, setting.trainer) != (BF16, BF16):
        reasons = (*reasons, _KEPT)
    return MismatchRisk(
        kl_k3=kl,
        kl_k3_low=low,
        kl_k3_high=high,
        ess_raw=tokens.ess,
        clip_fraction=tokens.fraction_above(COUNTED_TIS),
        seq_reject_fraction=float(np.mean(sequence_rejection(kl, lengths, *COUNTED_MIS))),
        level=level,
        reasons=reasons,
        moe=setting.routing,
    )


def recommended_tis(
    risk: MismatchRisk, response_lengths: ArrayLike, *, budget: RiskBudget | None = None
) -> tuple[float, tuple[str, ...]]:
    """C of token TIS to start the correction with at this risk, and sentences on it. The default law moves C."""
    budget = budget or RiskBudget()
    start = TOKEN_TIS[risk.level]
    end, (low, high) = min(start, TIS_FLOOR), COUNTED_MIS
    clipped = token_log_ratio(risk.kl_k3, risk.moe).fraction_above(end)
    moves = f"starts at C = {start:g}, and tightens to {end:g} as the KL rises; it " if end < start else ""
    tis_note = f"token TIS {moves}clips about {clipped:.2g} of the tokens at {end:g}"
    mis_note = (
        f"sequence MIS [{low:g}, {high:g}] is not used: it would reject {risk.seq_reject_fraction:.0%} of the "
        f"sequences (mean length {np.asarray(response_lengths).mean():,.0f})"
    )
    usable = risk.seq_reject_fraction <= budget.max_sequence_rejection
    notes = (tis_note,) if usable else (tis_note, mis_note)
    return start, notes


def _kl_band(
    setting: Setting, calibrated: bool, clipped: bool, unmeasured: Sequence[str]
) -> tuple[float, float, float]:
    """The 90% band of KL as (low, middle, high)."""
    result = committed_fit()
    coefficients = np.array(result.coefficients)
    size = theory.SMALL_LANGUAGE_FACTOR if theory.SMALL_LANGUAGE in unmeasured else 1.0
    kl = size * predicted_kl(setting, coefficients, result.errors)[0]
    variance = coefficient_variance(result, log_gradient(setting, coefficients, result.errors)) + result.noise_sd**2
    variance += 0.0 if calibrated else UNIT_SCALES_SD**2
    factor = exp(Z90 * sqrt(variance + theory.unmeasured_sd(unmeasured) ** 2 + theory.trainer_sd(setting) ** 2))
    damage = CLIPPED_KV_KL if clipped and not calibrated else 0.0
    # With scales that follow the weights the failure is possible (verl#4435), not expected: only the upper end has it.
    high = (kl + damage) * factor if not clipped else max((kl + damage) * factor, CLIPPED_KV_KL)
    if setting.same_grid:
        # Rounding on one grid differs no more than rounding on one side alone.
        high = min(high, _kl_band(replace(setting, trainer=BF16), calibrated, clipped, unmeasured)[2])
    return kl / factor + damage / factor, kl + damage, high


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


def _level(
    setting: Setting,
    calibrated: bool,
    clipped: bool,
    unmeasured: Sequence[str],
    budget: RiskBudget,
    kl_high: float,
    clip_high: float,
    ess_low: float,
) -> tuple[Level, tuple[str, ...]]:
    level = budget.level(kl_high, clip_high, ess_low)
    limits = (
        f"KL (k3) up to {kl_high:.2g} per token, {clip_high:.2g} of the tokens clipped, raw ESS down to {ess_low:.2f}"
    )
    reasons = [f"{limits}: {level}"]
    if setting.routing:
        reasons.append("MoE: routing differs between engine and trainer, so the ratios have a heavy tail")
    elif setting.moe:
        reasons.append("router replay: the trainer uses the engine's experts, so routing adds nothing")
    if setting.rollout == POW2 != setting.trainer:
        reasons.append(_ROUNDED_TWICE)
    if setting.same_grid:
        reasons.append(_SAME_GRID)
    elif setting.trainer != BF16:
        sides = f"the trainer's linears are in {setting.trainer} and the rollout's in {setting.rollout}"
        adds = "the trainer's rounding adds to the mismatch" if setting.rollout == BF16 else "both roundings add up"
        reasons.append(f"{sides}: {adds}; no published KL was fitted of it: the range is wider")
        if setting.rollout in TRAINER_PRECISIONS[1:]:
            reasons.append(f"--trainer-precision {setting.rollout} has the rollout's grid")
    if clipped:
        level = "high"
        reasons.append(_CLIPPED[calibrated])
    elif setting.fp8_kv and not setting.qk_norm:
        level = max(level, "moderate", key=LEVELS.index)
        why = (
            "FP8 KV of latents: keys are made of them by a matrix of any size"
            if theory.LATENT in unmeasured
            else "FP8 KV without QK-norm: K has outliers"
        )
        reasons.append(f"{why}; no RL run with a published KL covers it")
    if not calibrated:
        reasons.append("K and V scales are 1.0, not measured: the range is wider")
    elif setting.fp8_kv:
        reasons.append(_RECALIBRATED)
    if unmeasured:
        reasons.append(f"no published KL was fitted of {' and of '.join(unmeasured)}: the range is wider")
    if theory.SMALL_LANGUAGE in unmeasured:
        reasons.append(f"the KL is {theory.SMALL_LANGUAGE_FACTOR:g} times the theory's, as two such models have")
    return level, tuple(reasons)


def _of_checkpoint(reasons: Sequence[str], stored: Stored) -> list[str]:
    """The reasons that hold for an FP8 checkpoint, which has scales of its own."""
    void = {_ROUNDED_TWICE: stored.e8m0, _RECALIBRATED: stored.kv_fp8}
    kept = [reason for reason in reasons if not void.get(reason)]
    return [*kept, *([_HELD_SCALES] if stored.kv_fp8 and _RECALIBRATED in reasons else [])]


_RECALIBRATED: Final = "this assumes K and V scales recalibrated after every weight sync; plain vLLM leaves them at 1.0"
_HELD_SCALES: Final = "this takes K and V scales to be in the checkpoint, which was made for an FP8 KV cache"
_ROUNDED_TWICE: Final = (
    "weights are rounded twice, to power-of-two scales: Blackwell's kernels take no others, and on Hopper "
    "VLLM_USE_DEEP_GEMM_E8M0=0 avoids it"
)
_SAME_GRID: Final = (
    "this assumes that the trainer rounds the very weights that the rollout rounds: then only activations differ; "
    "published runs of such trainers differ much, so the range is wider"
)
_KEPT: Final = "linears kept in BF16 are taken to add as much KL as any others; no published run tells them apart"
_FP8_CHECKPOINT: Final = (
    "the checkpoint is in FP8, and this is for a trainer with BF16 weights; one that dequantises the checkpoint has "
    "the same weights, so that only activations and KV differ, and less"
)
_CLIPPED: Final = {
    False: (
        "known failure: FP8 KV at scale 1.0 with attention bias and no QK-norm (Qwen2, Qwen2.5): K is clipped and the "
        "text breaks (vLLM#11906, verl#4435)"
    ),
    True: (
        "FP8 KV with attention bias and no QK-norm (Qwen2, Qwen2.5): the one public RL run broke although scales were "
        "recalculated each step (verl#4435)"
    ),
}
