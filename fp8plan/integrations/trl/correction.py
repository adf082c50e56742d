"""TRL's importance-sampling settings and a plan's thresholds as one CorrectionSettings, and a Monitor's step as TRL's
ratio.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch

from fp8plan.errors import ConfigError
from fp8plan.integrations.correction import WEIGHTS, dropped, settings_of
from fp8plan.runtime.correction.settings import CorrectionSettings, Thresholds

if TYPE_CHECKING:
    from fp8plan.runtime.monitor.record import Step

# TRL's modes as a plan's thresholds: its ratio is pi_train / pi_rollout, too, and what it masks weighs 0.
MODES: Final = {
    "token_truncate": "token_tis",
    "sequence_truncate": "sequence_tis",
    "token_mask": "token_mis",
    "sequence_mask": "sequence_mis",
}
FIELDS: Final = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))


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
    if "sequence_mis" in thresholds and not any(name in thresholds for name in WEIGHTS):  # TRL's sequence_mask
        band = Thresholds(tis=None, band=(*thresholds["sequence_mis"],))
        beside = {name: bound for name, bound in thresholds.items() if name != "sequence_mis"}
        return CorrectionSettings("sequence", "icepop", band, dropped(beside))
    return settings_of(thresholds)


def ratio_of(step: Step, mask: torch.Tensor) -> torch.Tensor:
    """The weights of a step as TRL's importance_sampling_ratio, [batch, length] float32; what is rejected weighs 0.

    A rejected token counts in the loss's mean all the same, as in TRL: to take it out of the completion mask would also
    hide it from the policy's attention.
    """
    kept = torch.as_tensor(step.mask, device=mask.device).to(torch.float32)
    return kept if step.weights is None else torch.as_tensor(step.weights, device=mask.device) * kept
