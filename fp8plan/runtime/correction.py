"""Weights and masks that correct the gradient for the mismatch, for given thresholds: TIS, MIS, IcePop, rejection.

    settings = CorrectionSettings(level="token", thresholds=Thresholds(tis=2.0))
    correction = correct(pack(train_logprobs, rollout_logprobs, mask), settings)
    loss = (correction.weights * token_losses * correction.mask).sum() / correction.mask.sum().clamp(min=1)

Weights are detached: they change the measure, not the objective. Two uses, as in verl:

decoupled  the trainer recomputes the log-probs before it updates: train_logprobs are these, the weights multiply a loss
           that clips the ratio of the current policy to the recomputed one
bypass     it does not: train_logprobs are the current policy's, in each micro-batch. A PPO loss has the ratio to the
           rollout policy in it already (level=None: only masks); REINFORCE needs the weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.runtime.mismatching.rejection import rejected
from fp8plan.runtime.mismatching.segments import Segments, all_reduced
from fp8plan.runtime.mismatching.settings import CorrectionSettings, Rejection, Thresholds
from fp8plan.runtime.mismatching.threads import one_thread
from fp8plan.runtime.mismatching.verl import is_metrics
from fp8plan.runtime.mismatching.weights import normalised, weighted

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.tokens import Array, Tokens

__all__ = ["Correction", "CorrectionSettings", "Rejection", "Thresholds", "correct"]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What the loss needs, in the form that came in, and what it cost.

    weights: float32, 0 where a token is masked, invalid or outside of the band; None for level None
    mask:    the mask that came in (bool, if none did), without what MIS, a rejection or the veto takes out and without
             invalid tokens
    clip_fraction:  share of the tokens whose ratio (at the settings' level) lies outside of the bounds
    clipped_mass:   share of the sum of ratios that was cut away
    kept_tokens:    share of the tokens with a weight above 0 that the mask keeps
    kept_sequences: share of the sequences that are not empty, of which any such token is left
    ess:     (mean weight)^2 / mean weight^2, a fraction; 0 if all weights are 0
    metrics: under verl's names, "rollout_corr/rollout_is_mean" and so on

    Without tokens, all fractions are those of no mismatch, and there are no metrics.
    """

    weights: Array | None
    mask: Array
    clip_fraction: float
    clipped_mass: float
    kept_tokens: float
    kept_sequences: float
    ess: float
    metrics: Mapping[str, float]


@one_thread()
def correct(tokens: Tokens, settings: CorrectionSettings | None = None, group: Any = None) -> Correction:
    """The Correction of a batch (settings None: token TIS at 2).

    group: ranks whose weights `batch_normalize` takes the mean over; None: all, if torch.distributed is up
    """
    settings = settings or CorrectionSettings()
    if not len(tokens):
        return _of_nothing(tokens, settings, group)
    keep, metrics = rejected(tokens, settings)
    found = None if settings.level is None else weighted(tokens, settings)
    if found is None:
        weights, share = None, (0.0, 0.0, 1.0)
    else:
        metrics |= is_metrics(found, settings)
        if settings.batch_normalize:
            metrics["rollout_is_batch_norm_factor"] = normalised(tokens, settings, found, group)
        weights, share = tokens.unpack(found.weights), (found.clipped, found.clipped_mass, found.ess)
    inside = None if found is None else found.inside
    live = _both(keep, inside)
    return Correction(
        weights,
        tokens.mask(live if settings.mode == "mis" else keep),
        *share[:2],
        *((1.0, 1.0) if live is None else _kept(tokens, live)),
        share[2],
        {f"rollout_corr/{name}": value for name, value in metrics.items()},
    )


def _both(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _kept(tokens: Tokens, live: torch.Tensor) -> tuple[float, float]:
    """Shares of tokens and of sequences, those that have any token alive."""
    lost = Segments(tokens.offsets.numpy(), live.device)
    for part in tokens.chunks():
        lost.add(part, ~live[part])
    dead, lengths = lost.numpy(), tokens.lengths.numpy()
    return 1 - float(dead.sum()) / len(tokens), float((dead < lengths).sum() / (lengths > 0).sum())


def _of_nothing(tokens: Tokens, settings: CorrectionSettings, group: Any) -> Correction:
    """Of a batch, or a rank, without tokens: it takes part in the mean over ranks all the same."""
    if settings.batch_normalize and settings.level is not None:
        all_reduced(np.zeros(2), group)
    weights = None if settings.level is None else tokens.unpack(tokens.log_ratio)
    return Correction(weights, tokens.mask(), 0.0, 0.0, 1.0, 1.0, 1.0, {})
