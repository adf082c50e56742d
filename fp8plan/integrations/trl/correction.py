"""TRL's importance-sampling settings and a plan's thresholds as one CorrectionSettings, and a Monitor's step as TRL's
ratio and metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.runtime.correction.settings import CorrectionSettings, Level, Mode, Rejection, Thresholds
from fp8plan.runtime.guard.fallback import DEPTH

if TYPE_CHECKING:
    from fp8plan.model.precision import Precision
    from fp8plan.runtime.monitor.record import Step
    from fp8plan.runtime.weight_sync.state import SyncReport

# TRL's modes as a plan's thresholds: its ratio is pi_train / pi_rollout, too, and what it masks weighs 0.
MODES: Final = {
    "token_truncate": "token_tis",
    "sequence_truncate": "sequence_tis",
    "token_mask": "token_mis",
    "sequence_mask": "sequence_mis",
}
FIELDS: Final = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))

# A plan's thresholds that are weights, the first of which that it has is taken; and those that drop sequences beside.
WEIGHTS: Final[dict[str, tuple[Level, Mode]]] = {
    "token_tis": ("token", "tis"),
    "sequence_tis": ("sequence", "tis"),
    "token_mis": ("token", "icepop"),
}
DROPPED: Final[dict[str, Any]] = {"sequence_mis": "seq_sum", "geometric_mis": "seq_mean"}

# Figures of a Monitor's step that go into TRL's log, by their names in a run file; there they lose verl's prefix.
LOGGED: Final = (
    "rollout_corr/kl", "rollout_corr/k3_kl", "fp8plan/k3_robust", "fp8plan/ess_raw", schemas.ESS,
    schemas.CLIP_FRACTION, schemas.CLIPPED_MASS, schemas.LOST_TOKENS, schemas.LOST_SEQUENCES, schemas.TIS,
    schemas.BAND_LOW, schemas.BAND_HIGH, "fp8plan/alarms", "fp8plan/invalid", schemas.TOKENS_PER_S, schemas.PREDICTED,
    schemas.PREDICTED_LOW, schemas.PREDICTED_HIGH,
)  # fmt: skip


def thresholds_for(args: Any, planned: Mapping[str, Any]) -> dict[str, Any]:
    """The thresholds to begin with: those of TRL's settings if the user has changed one of them, else the plan's.

    args: the GRPOConfig. Raises ConfigError for a truncation that has a lower bound, or none.
    """
    defaults = {field.name: field.default for field in fields(args)}
    if all(getattr(args, name) == defaults[name] for name in FIELDS):
        return dict(planned)
    mode, low, high = (getattr(args, name) for name in FIELDS)
    if mode.endswith("mask"):
        return {MODES[mode]: [low or sys.float_info.min, high or sys.float_info.max]}
    if low is not None or high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode is {mode!r}, with clip_min {low} and clip_max {high}; allowed with a plan: "
            "clip_min=None and a clip_max"
        )
    return {MODES[mode]: high}


def settings_for(args: Any, thresholds: Mapping[str, Any]) -> CorrectionSettings:
    """The correction that TRL's settings and the thresholds ask for; without thresholds, token TIS at C = 2.

    Without TRL's correction the mismatch is measured all the same, and all weights are 1. Raises ConfigError for two
    weights.
    """
    if not args.vllm_importance_sampling_correction:
        return CorrectionSettings(level=None)
    weights = [name for name in WEIGHTS if name in thresholds]
    if len(weights) > 1:
        raise ConfigError(f"the plan asks for {' and '.join(weights)}; allowed: one importance weight")
    if not weights and "sequence_mis" in thresholds:  # TRL's sequence_mask
        band = Thresholds(tis=None, band=(*thresholds["sequence_mis"],))
        beside = {name: bound for name, bound in thresholds.items() if name != "sequence_mis"}
        return CorrectionSettings("sequence", "icepop", band, _dropped(beside))
    if not weights:
        return CorrectionSettings(reject=_dropped(thresholds))
    level, mode = WEIGHTS[weights[0]]
    bound = thresholds[weights[0]]
    bounds = Thresholds(tis=bound) if mode == "tis" else Thresholds(tis=None, band=(*bound,))
    return CorrectionSettings(level, mode, bounds, _dropped(thresholds))


def _dropped(thresholds: Mapping[str, Any]) -> tuple[Rejection, ...]:
    bands = {over: thresholds[name] for name, over in DROPPED.items() if name in thresholds}
    return tuple(Rejection(over, "k1", high, low) for over, (low, high) in bands.items())


def ratio_of(step: Step, mask: torch.Tensor) -> torch.Tensor:
    """The weights of a step as TRL's importance_sampling_ratio, [batch, length] float32; what is rejected weighs 0.

    A rejected token counts in the loss's mean all the same, as in TRL: to take it out of the completion mask would also
    hide it from the policy's attention.
    """
    kept = torch.as_tensor(step.mask, device=mask.device).to(torch.float32)
    return kept if step.weights is None else torch.as_tensor(step.weights, device=mask.device) * kept


def metrics_of(step: Step, preset: Precision, report: SyncReport | None) -> dict[str, float]:
    """The findings of a step and the last sync, and the precision that runs, under the names of TRL's log. What is not
    known is left out."""
    found = {f"fp8plan/{name.partition('/')[2]}": step.metrics.get(name) for name in LOGGED}
    found |= {"fp8plan/fp8_weights": float(preset.weights != "bf16"), "fp8plan/fp8_kv": float(preset.kv == "fp8")}
    found |= dict(_judged(step)) | dict(_synced(report))
    return {name: value for name, value in found.items() if value is not None}


def _judged(step: Step) -> Iterator[tuple[str, float]]:
    """The guard's verdict: whether the gain arrives, and how far down the ladder its advice leads (0: nothing)."""
    if step.verdict is not None:
        yield "fp8plan/speed_ratio", step.verdict.ratio
        yield "fp8plan/within_prediction", float(step.verdict.within)
        yield "fp8plan/advice", float(DEPTH[step.verdict.action])


def _synced(report: SyncReport | None) -> Iterator[tuple[str, float | None]]:
    if report is not None:
        yield "fp8plan/sync_s", report.seconds["total"]
        yield "fp8plan/sync_compared", float(report.compared)
        yield "fp8plan/weight_error", report.weight_error
