"""SkyRL's off-policy correction (off_policy_correction_utils.py), answered by fp8plan.

Of the checkout are the tests and the dataclass of the settings. SkyRL itself need not be installed.
"""

from __future__ import annotations

import ast
import dataclasses
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Optional

import torch

from benchmarks.peers.adapted import CannotBeSaid, answer, corrected, measured, stand_in
from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Rejection, Thresholds
from fp8plan.runtime.watch.mismatch.sums import LIMIT, k3

FILES: Final = ("tests/train/algorithms/test_off_policy_correction.py",)
CONFIG: Final = "skyrl/train/config/config.py"
OTHER_WORDS: Final = "fp8plan refuses it, too, in other words"
KNOWN: Final = {
    "test_compute_tis_ratio_invalid_type": OTHER_WORDS,
    "test_compute_sequence_mask_invalid_type": OTHER_WORDS,
}
SEQUENCES: Final[dict[str, tuple[Any, str]]] = {"geometric": ("seq_mean", "geo"), "product": ("seq_sum", "product")}
Figures = dict[str, float]


def adapted_text(text: str) -> str:
    """The text of a test file. SkyRL's run on a CPU."""
    return text


def install(checkout: Path) -> None:
    """Put the adapter in the place of SkyRL's functions, and its settings beside it."""
    stand_in(
        "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
        compute_off_policy_correction=off_policy_correction,
        compute_outlier_token_mask=outlier_token_mask,
        compute_sequence_mask=sequence_mask,
        compute_tis_ratio=tis_ratio,
        compute_token_mask=token_mask,
    )
    stand_in("skyrl.backends.skyrl_train.utils.ppo_utils", PolicyLossRegistry=SimpleNamespace(get=no_loss))
    settings = dataclass_of((checkout / CONFIG).read_text(encoding="utf-8"), "OffPolicyCorrectionConfig")
    stand_in("skyrl.train.config", OffPolicyCorrectionConfig=settings, AlgorithmConfig=SimpleNamespace)


def dataclass_of(text: str, name: str) -> Any:
    """A dataclass of plain fields from the text of a module, which is not imported."""
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    known = {"dataclass": dataclasses.dataclass, "BaseConfig": object, "Optional": Optional, "__name__": __name__}
    exec(compile(ast.Module([found], []), CONFIG, "exec"), known)
    return known[name]


def no_loss(_: str) -> None:
    raise CannotBeSaid("it is of SkyRL's policy loss; fp8plan's hook has its own tests")


@answer
def tis_ratio(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, level: Any, config: Any
) -> tuple[torch.Tensor, Figures]:
    """(weights [batch, length], or [batch, 1] of sequences; figures)."""
    high = config.token_tis_ratio_clip_high if level == "token" else config.sequence_tis_ratio_clip_high
    correction = corrected(train, rollout, mask, CorrectionSettings(level, thresholds=Thresholds(high)))
    weights = torch.as_tensor(correction.weights)
    if level == "token":
        return weights, {"tis_token_clip_high_ratio": correction.clip_fraction}
    share = correction.metrics["rollout_corr/rollout_is_ratio_fraction_high"]
    return weights.amax(1, keepdim=True), {"tis_seq_clip_high_ratio": share}


@answer
def sequence_mask(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, metric: str, config: Any
) -> tuple[torch.Tensor, Figures]:
    """(1 for sequences that stay [batch, 1]; figures)."""
    over, name = SEQUENCES.get(metric, (metric, metric))
    bounds = getattr(config, f"{name}_mask_high", 1.0), getattr(config, f"{name}_mask_low", 1.0)
    kept, figures = rejected(train, rollout, mask, Rejection(over, "k1", *bounds))
    rule = f"rollout_corr/rollout_rs_{over}_k1_seq"
    # k1 is the log ratio negated: a ratio that is too large has a k1 that is too small.
    return whole(kept, mask), {
        f"{name}_sequence_mask_masked_ratio": figures[f"{rule}_masked_fraction"],
        f"{name}_sequence_mask_over_high_ratio": figures[f"{rule}_fraction_low"],
        f"{name}_sequence_mask_under_low_ratio": figures[f"{rule}_fraction_high"],
    }


@answer
def outlier_token_mask(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor, Figures]:
    """(1 for sequences that stay [batch, 1]; figures).

    The lower bound is fp8plan's veto. The upper one is a bound on the largest k3 of a sequence, which no ratio below 1
    reaches.
    """
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    if high is not None and k3(log(high)) <= k3(-LIMIT):
        raise CannotBeSaid(f"fp8plan has no upper bound of {high} on a sequence's largest ratio alone")
    rules = [] if high is None else [Rejection("seq_max", "k3", k3(log(high)))]
    kept, figures = rejected(train, rollout, mask, *rules, veto=low)
    stays = whole(kept, mask)
    return stays, {
        "outlier_seq_masked_ratio": float(1 - stays.mean()),
        "outlier_seq_over_high_ratio": figures.get("rollout_corr/rollout_rs_seq_max_k3_seq_masked_fraction", 0.0),
        "outlier_seq_under_low_ratio": figures.get("rollout_corr/rollout_is_veto_fraction", 0.0),
    }


@answer
def token_mask(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor, Figures]:
    """(1 for tokens that stay, and for those that were masked before; figures)."""
    bounds = config.token_mask_is_threshold_high, config.token_mask_is_threshold_low
    kept, figures = rejected(train, rollout, mask, Rejection("token", "k1", *bounds))
    share = figures["rollout_corr/rollout_rs_token_k1_masked_fraction"]
    return torch.where(mask > 0, kept, 1.0), {"token_mask_ratio": share}


def rejected(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, *rules: Rejection, veto: float | None = None
) -> tuple[torch.Tensor, Figures]:
    """(the mask after the rules, figures)."""
    correction = corrected(train, rollout, mask, CorrectionSettings(None, reject=rules, veto=veto))
    return torch.as_tensor(correction.mask), correction.metrics


def whole(kept: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, 1]: 1 for sequences that keep all their tokens."""
    return (kept == mask).all(1, keepdim=True).float()


@answer
def off_policy_correction(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor | None, Figures, torch.Tensor]:
    """(weights or None, figures, mask): SkyRL's order of the four."""
    outliers = (config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high)
    by_token = (config.token_mask_is_threshold_low, config.token_mask_is_threshold_high)
    weights, figures = None, Figures()
    if outliers == (None, None) and None in by_token and config.tis_ratio_type is config.sequence_mask_metric is None:
        return None, {}, mask
    figures["is_ratio_mean"] = measured(train, rollout, mask).mean_ratio
    if outliers != (None, None):
        stays, more = outlier_token_mask(train, rollout, mask, config)
        mask, figures = mask * stays, figures | more
    if None not in by_token:
        stays, more = token_mask(train, rollout, mask, config)
        mask, figures = mask * stays, figures | more
    if config.tis_ratio_type is not None:
        weights, more = tis_ratio(train, rollout, mask, config.tis_ratio_type, config)
        figures |= more
    if config.sequence_mask_metric is not None:
        stays, more = sequence_mask(train, rollout, mask, config.sequence_mask_metric, config)
        mask, figures = mask * stays, figures | more
    return weights, figures, mask
