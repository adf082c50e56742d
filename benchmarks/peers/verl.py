"""verl's rollout correction (verl/trainer/ppo/rollout_corr_helper.py), answered by fp8plan.

The tests come from the checkout, and all other modules of verl from the installed verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.peers.adapted import answer, corrected, measured, stand_in
from fp8plan.runtime.watch.correction.settings import REJECTIONS
from fp8plan.runtime.watch.correction.verl import from_verl

FOLDER: Final = "tests/trainer/ppo"
FILES: Final = tuple(
    f"{FOLDER}/test_{name}.py"
    for name in ("rollout_corr", "rollout_corr_integration", "offpolicy_metrics_padding_on_cpu")
)
KNOWN: Final = {
    "test_bool_rollout_is_threshold_is_rejected": "fp8plan refuses it, too, by a ConfigError",
    "test_all_masked_batch_keeps_existing_error_contract": "a batch without a token is no error: it has no figures",
}
PREFIX: Final = "rollout_corr/"


def adapted_text(text: str) -> str:
    """The text of a test file. verl's take a GPU only if there is one."""
    return text


def install(checkout: Path) -> None:
    """Put the adapter in the place of verl's helper."""
    import verl.trainer.ppo

    helper = stand_in(
        "verl.trainer.ppo.rollout_corr_helper",
        SUPPORTED_ROLLOUT_RS_OPTIONS={*REJECTIONS},
        compute_rollout_correction_and_rejection_mask=correction_and_mask,
        compute_rollout_correction_and_add_to_batch=add_to_batch,
        compute_offpolicy_metrics=offpolicy_metrics,
        compute_is_metrics=is_metrics,
    )
    verl.trainer.ppo.rollout_corr_helper = helper


@answer
def correction_and_mask(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, *level: str, **how: Any
) -> tuple[Any, torch.Tensor, dict[str, float]]:
    """(weights in a DataProto or None, mask, figures), as verl's compute_rollout_correction_and_rejection_mask."""
    from verl.protocol import DataProto

    settings = from_verl({"rollout_is": None} | dict(zip(("rollout_is",), level, strict=False)) | how)
    correction = corrected(old_log_prob, rollout_log_prob, response_mask, settings)
    figures = correction.metrics | measured(old_log_prob, rollout_log_prob, response_mask).verl_metrics()
    weights = correction.weights
    proto = None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": torch.as_tensor(weights)})
    return proto, torch.as_tensor(correction.mask), figures


@answer
def add_to_batch(batch: Any, config: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """(batch with the mask and the weights, figures), as verl's compute_rollout_correction_and_add_to_batch."""
    sides = (batch.batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    weights, batch.batch["response_mask"], figures = correction_and_mask(*sides, **config)
    return (batch if weights is None else batch.union(weights)), figures


@answer
def offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, float]:
    """Figures of the mismatch without their prefix; without an engine's log-probs those of the trainer alone."""
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    named = measured(old_log_prob, rollout, response_mask).verl_metrics()
    figures = {name.removeprefix(PREFIX): value for name, value in named.items()}
    if rollout_log_prob is None:
        figures = {name: value for name, value in figures.items() if name.startswith("training_")}
    return figures


@answer
def is_metrics(
    *,
    log_ratio_for_metrics: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    **_: Any,
) -> dict[str, float]:
    """Figures of the weights without their prefix. fp8plan makes the weights itself, from the log ratios."""
    settings = from_verl({"rollout_is": rollout_is, "rollout_is_threshold": rollout_is_threshold})
    nothing = torch.zeros_like(log_ratio_for_metrics)
    correction = corrected(log_ratio_for_metrics, nothing, response_mask, settings)
    return {name.removeprefix(PREFIX): value for name, value in correction.metrics.items()}
