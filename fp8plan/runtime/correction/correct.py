"""Weights and masks that correct the gradient for the mismatch, for given thresholds: TIS, MIS, IcePop, rejection.

    settings = CorrectionSettings(level="token", thresholds=Thresholds(tis=2.0))
    correction = correct(pack(train_logprobs, rollout_logprobs, mask), settings)
    loss = correction.loss(token_losses)

Weights are detached: they change the measure, not the objective. Two uses, as in verl:

decoupled  the trainer recomputes the log-probs before it updates: train_logprobs are these, the weights multiply a loss
           that clips the ratio of the current policy to the recomputed one
bypass     it does not: train_logprobs are the current policy's, in each micro-batch. A PPO loss has the ratio to the
           rollout policy in it already (level=None: only masks); REINFORCE needs the weights
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.correction.settings import CorrectionSettings, Rejection, Thresholds
from fp8plan.runtime.correction.verl import effective, is_metrics, rs_metrics
from fp8plan.runtime.correction.weights import normalised, rejected, weighted
from fp8plan.runtime.mismatch.measure import lost, one_thread
from fp8plan.runtime.mismatch.sums import Moments, Sums, reduced

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.mismatch.measure import Array, Tokens

__all__ = ["Correction", "CorrectionSettings", "Rejection", "Thresholds", "correct"]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Weights and mask for the loss, in the form that came in, and figures of what they cost.

    weights: float32, 0 where a token is masked, invalid or outside of the band; None for level None
    mask:    the mask that came in (bool, if none did), without what MIS, a rejection or the veto takes out and without
             invalid tokens
    settings: the settings that made both
    sums:    sums over tokens and sequences, from which the properties below are computed
    factor:  divisor of the weights with batch_normalize; None without
    """

    weights: Array | None
    mask: Array
    settings: CorrectionSettings
    sums: Sums
    factor: float | None = None

    @property
    def clip_fraction(self) -> float:
        """Share of the tokens whose ratio (at the settings' level) lies outside of the bounds; NaN without tokens."""
        return self._known(self.sums["clipped"].mean if "clipped" in self.sums else 0.0)

    @property
    def clipped_mass(self) -> float:
        """Share of the sum of ratios that was cut away; NaN without tokens."""
        raw = self.sums["raw"].total if "raw" in self.sums else 0.0
        return self._known(max(1 - self.sums["weight"].total / raw, 0.0) if raw else 0.0)

    @property
    def kept_tokens(self) -> float:
        """Share of the tokens that came in, invalid ones included, with a weight above 0 that the mask keeps; NaN if
        none came in."""
        return self.sums["kept"].mean if self.sums["kept"].count else nan

    @property
    def kept_sequences(self) -> float:
        """Share of the sequences with tokens, valid or not, of which at least one token is kept; NaN without any."""
        return self.sums["kept_sequences"].mean if self.sums["kept_sequences"].count else nan

    @property
    def lost_weight(self) -> float:
        """Share of the batch's weight that is gone: 1 less the mean weight of the tokens that came in. A token that
        is left out or invalid weighs 0. NaN if none came in. `batch_normalize` does not change it."""
        kept = self.sums["kept"]
        left = min(kept.total, self.sums["weight"].total) if "weight" in self.sums else kept.total
        return max(1.0 - left / kept.count, 0.0) if kept.count else nan

    @property
    def ess(self) -> float:
        """Effective sample size as a fraction (Kish): (mean weight)^2 / mean weight^2.

        0 if all weights are 0; 1 with level None, which has no weights; NaN without tokens.
        """
        return self._known(effective(self.sums["weight"]) if "weight" in self.sums else 1.0)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures under verl's names, "rollout_corr/rollout_is_mean" and so on; empty without tokens."""
        if not self.sums["valid"].total:
            return {}
        found = rs_metrics(self.sums, self.settings)
        if self.settings.level is not None:
            found |= is_metrics(self.sums, self.settings)
        if self.factor is not None:
            found["rollout_is_batch_norm_factor"] = self.factor
        return {f"rollout_corr/{name}": value for name, value in found.items()}

    def loss(self, token_losses: torch.Tensor) -> torch.Tensor:
        """The mean of weight x loss over the tokens that the mask keeps, as `weighted_mean` makes it."""
        return weighted_mean(token_losses, self.weights, self.mask)

    def _known(self, figure: float) -> float:
        """A figure of the valid tokens; NaN if there are none."""
        return figure if self.sums["valid"].total else nan

    def reduced(self, group: Any = None) -> Correction:
        """The same weights and mask, with the figures of all ranks of `group` (None: all), each of which must call it.

        Raises ConfigError, on all ranks, if they corrected with different settings.
        """
        return replace(self, sums=reduced(self.sums, asdict(self.settings), group))


def weighted_mean(token_losses: torch.Tensor, weights: Array | None, mask: Array) -> torch.Tensor:
    """The mean of weight x loss over the tokens that a mask keeps, a scalar; 0 if it keeps none.

    A loss that is left out is never multiplied: its NaN would stay NaN, as NaN x 0 is NaN. Its gradient is 0; logits
    that are NaN spoil the gradient all the same.

    token_losses, weights, mask: of one shape; weights None: all 1

    Raises ConfigError for losses of another shape.
    """
    import torch

    kept = torch.as_tensor(mask, device=token_losses.device).bool()
    if token_losses.shape != kept.shape:
        raise ConfigError(
            f"token_losses have shape {tuple(token_losses.shape)}; allowed: that of the log-probs, {tuple(kept.shape)}"
        )
    losses = token_losses.masked_fill(~kept, 0.0)
    if weights is not None:
        losses = losses * torch.as_tensor(weights, device=losses.device)
    return losses.sum() / kept.sum().clamp(min=1)


@one_thread()
def correct(tokens: Tokens, settings: CorrectionSettings | None = None, group: Any = None) -> Correction:
    """Compute the weights and the mask of a batch.

    tokens:   the batch, from `pack`
    settings: how to correct; None: token-level TIS at C = 2
    group:    ranks whose weights `batch_normalize` takes the mean over; None: all, if torch.distributed is up

    Weights and mask come back in the form in which the log-probs came in: [batch, length] or [tokens].
    Raises ConfigError without torch, and with batch_normalize if ranks have different settings.
    """
    settings = settings or CorrectionSettings()
    keep, sums = rejected(tokens, settings)
    weights, inside, factor = None, None, None
    if settings.level is not None:
        found = weighted(tokens, settings)
        sums, inside = sums | found.sums, found.inside
        if settings.batch_normalize:
            factor = normalised(tokens, settings, found, group)
        weights = tokens.unpack(found.weights)
    live = _both(keep, inside)
    mask = tokens.mask(live if settings.mode == "mis" else keep)
    return Correction(weights, mask, settings, sums | _kept(tokens, live), factor)


def _both(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _kept(tokens: Tokens, live: torch.Tensor | None) -> Sums:
    """Shares of the tokens that came in which are valid, and alive (None: all of these); of the sequences, likewise."""
    lengths, count = tokens.lengths.numpy(), len(tokens) + tokens.invalid
    dead = np.zeros(len(lengths)) if live is None else lost(tokens, live)
    return {
        "valid": Moments.share(len(tokens), count),
        "kept": Moments.share(len(tokens) - dead.sum(), count),
        "kept_sequences": Moments.share((dead < lengths).sum(), tokens.marked),
    }
