"""Weights and masks that correct the gradient for the mismatch, with fixed thresholds: TIS, MIS, IcePop, rejection.

    settings = CorrectionSettings(level="token", thresholds=Thresholds(tis=2.0))
    correction = correct(pack(train_logprobs, rollout_logprobs, mask), settings)
    loss = correction.loss(token_losses)

Weights are detached: they change the measure, not the objective. Weights are float32, their sums float64. Two uses, as
in verl:

decoupled  the trainer recomputes the log-probs before it updates, and train_logprobs are these; the weights multiply a
           loss that clips the ratio of the current policy to the recomputed one
bypass     train_logprobs are the current policy's, in each micro-batch. A PPO loss already has the ratio to the rollout
           policy in it (level=None: only masks); REINFORCE needs the weights
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.correction.rejection import lost, rejected, spread
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Rejection, Thresholds
from fp8plan.runtime.watch.correction.verl import effective, is_metrics, rs_metrics
from fp8plan.runtime.watch.mismatch.measure import one_thread
from fp8plan.runtime.watch.mismatch.pieces import check_group
from fp8plan.runtime.watch.mismatch.sums import (
    LIMIT,
    TINY,
    FloatArray,
    Moments,
    Segments,
    Sums,
    all_reduced,
    gathered,
    of_sequences,
    together,
)

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.watch.mismatch.measure import Array, Tokens

__all__ = ["Correction", "CorrectionSettings", "Rejection", "Thresholds", "correct"]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Weights and mask for the loss, in the form of the input, and figures of their cost.

    weights: float32, 0 for tokens that are masked, invalid or outside the band; None for level None
    mask:    the input's mask (bool without one), less invalid tokens and those that MIS, a rejection or the veto
             removes
    settings, thresholds: those that made both
    sums:    sums over tokens and sequences, from which the properties are computed
    factor:  divisor of the weights with batch_normalize; None without
    """

    weights: Array | None
    mask: Array
    settings: CorrectionSettings
    thresholds: Thresholds
    sums: Sums
    factor: float | None = None

    @property
    def clip_fraction(self) -> float:
        """Share of the tokens with a ratio (at the settings' level) outside the bounds; NaN without tokens."""
        return self._known(self.sums["clipped"].mean if "clipped" in self.sums else 0.0)

    @property
    def clipped_mass(self) -> float:
        """Share of the sum of ratios that is cut away, less what a floor adds; NaN without tokens."""
        raw = self.sums["raw"].total if "raw" in self.sums else 0.0
        return self._known(max(1 - self.sums["weight"].total / raw, 0.0) if raw else 0.0)

    @property
    def kept_tokens(self) -> float:
        """Share of the input's tokens, invalid ones included, with a weight above 0 that the mask keeps; NaN without
        input."""
        return self.sums["kept"].mean if self.sums["kept"].count else nan

    @property
    def kept_sequences(self) -> float:
        """Share of the sequences that keep a token, among those with tokens, valid or not; NaN without any."""
        return self.sums["kept_sequences"].mean if self.sums["kept_sequences"].count else nan

    @property
    def lost_weight(self) -> float:
        """Share of the batch's weight that is gone: 1 less the mean weight of the input's tokens.

        Invalid and removed tokens weigh 0. NaN without input. `batch_normalize` does not change it.
        """
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
        figures = rs_metrics(self.sums, self.settings)
        if self.settings.level is not None:
            figures |= is_metrics(self.sums, self.settings)
        if self.factor is not None:
            figures["rollout_is_batch_norm_factor"] = self.factor
        return {f"rollout_corr/{name}": value for name, value in figures.items()}

    @property
    def recorded(self) -> dict[str, float | None]:
        """The figures of a record on the correction's effect: `metrics`, and the shares that it takes away."""
        return {
            **self.metrics,
            schemas.ESS: self.ess,
            schemas.CLIP_FRACTION: self.clip_fraction,
            schemas.CLIPPED_MASS: self.clipped_mass,
            schemas.LOST_TOKENS: 1.0 - self.kept_tokens,
            schemas.LOST_SEQUENCES: 1.0 - self.kept_sequences,
            schemas.LOST_WEIGHT: self.lost_weight,
        }

    def loss(self, token_losses: torch.Tensor) -> torch.Tensor:
        """The mean of weight x loss over the tokens that the mask keeps, by `weighted_mean`."""
        return weighted_mean(token_losses, self.weights, self.mask)

    def _known(self, figure: float) -> float:
        return figure if self.sums["valid"].total else nan

    def reduced(self, group: Any = None) -> Correction:
        """The same weights and mask with the figures of all ranks of `group` (None: all), each of which must call it.

        Raises ConfigError, on all ranks, if they corrected with different settings.
        """
        same = asdict(self.settings) | {"thresholds": asdict(self.thresholds)}
        return replace(self, sums=together(gathered(self.sums, same, group)))


def weighted_mean(token_losses: torch.Tensor, weights: Array | None, mask: Array) -> torch.Tensor:
    """The mean of weight x loss over the tokens that a mask keeps, a scalar; 0 if it keeps none.

    token_losses, weights, mask: of one shape; weights None: all 1

    A removed token's loss may be NaN, and its gradient is 0; NaN logits still spoil the gradient.
    Raises ConfigError for losses of another shape.
    """
    import torch

    kept = torch.as_tensor(mask, device=token_losses.device).bool()
    if token_losses.shape != kept.shape:
        raise ConfigError(
            f"token_losses have shape {tuple(token_losses.shape)}; allowed: that of the log-probs, {tuple(kept.shape)}"
        )
    losses = token_losses.masked_fill(~kept, 0.0)  # not multiplied by 0: NaN x 0 is NaN
    if weights is not None:
        losses = losses * torch.as_tensor(weights, device=losses.device)
    return losses.sum() / kept.sum().clamp(min=1)


@one_thread()
def correct(
    tokens: Tokens,
    settings: CorrectionSettings | None = None,
    group: Any = None,
    thresholds: Thresholds | None = None,
) -> Correction:
    """Compute the weights and the mask of a batch.

    tokens:   the batch, from `pack`
    settings: how to correct; None: token-level TIS at C = 2
    group:    ranks whose weights `batch_normalize` takes the mean over; None: all, if torch.distributed is up
    thresholds: those of this batch, from a controller; None: the settings' own

    Weights and mask have the form of the log-probs: [batch, length] or [tokens]. Of ranks that hold pieces of the same
    sequences the first has the figures; `Correction.reduced` gives them to all.
    Raises ConfigError without torch, and with batch_normalize for a group without all ranks that hold pieces.
    """
    settings = settings or CorrectionSettings()
    thresholds = thresholds or settings.thresholds or Thresholds()
    keep, sums = None, Sums()
    if settings.reject or settings.veto is not None:
        keep, sums = rejected(tokens, settings)
    weights, live, factor = None, keep, None
    if settings.level is not None:
        weighed = _by_token if settings.level == "token" else _by_sequence
        raw = weighed(tokens, settings, _bounds(settings.mode, thresholds))
        sums |= raw.sums
        if raw.inside is not None:
            live = raw.inside if keep is None else keep & raw.inside
        if settings.batch_normalize:
            factor = _normalised(tokens, settings, raw, group)
        weights = tokens.unpack(raw.weights)
    mask = tokens.mask(live if settings.mode == "mis" else keep)
    sums |= _kept(tokens, live)
    if not tokens.counted:
        sums = dict.fromkeys(sums, Moments())
    return Correction(weights, mask, settings, thresholds, sums, factor)


def _kept(tokens: Tokens, live: torch.Tensor | None) -> Sums:
    """Shares of the input's tokens that are valid, and that are live (None: all); the latter of sequences, too."""
    lengths, count = tokens.lengths.numpy(), len(tokens) + tokens.invalid
    dead = np.zeros(len(lengths)) if live is None else lost(tokens, live)
    return {
        "valid": Moments.share(len(tokens), count),
        "kept": Moments.share(len(tokens) - dead.sum(), count),
        "kept_sequences": Moments.share((dead < lengths).sum(), int(tokens.marked.sum())),
    }


class _Weighted(NamedTuple):
    """Weights of a batch, not normalised, and their sums.

    weights: [tokens] float32
    inside: [tokens] bool, true for ratios within a band's bounds; None without a band
    sums: weight, raw: over tokens, of weights and of raw ratios (clamped to e^+-20)
          clipped: tokens with a weight that is not their raw ratio
          above, below: tokens (level token) or sequences with a raw ratio above or below the bounds
          shown: the numbers whose extremes verl logs: weights of level token, raw ratios of the other two
          sequence, sequence_above, sequence_below: mean weight and raw ratio of each sequence
    """

    weights: torch.Tensor
    inside: torch.Tensor | None
    sums: Sums


def _bounds(mode: str, thresholds: Thresholds) -> tuple[float, float]:
    """(low, high) of the ratios that keep their value. Truncation has no lower bound, but verl counts from 1 / C."""
    if mode == "tis":
        high = inf if thresholds.tis is None else thresholds.tis
        return 1 / high, high
    if thresholds.band is None:
        raise ConfigError(f"mode {mode!r} needs a band; type Thresholds(band=(0.5, 2.0))")
    return thresholds.band


def _by_token(tokens: Tokens, settings: CorrectionSettings, bounds: tuple[float, float]) -> _Weighted:
    low, high = bounds
    band = settings.mode != "tis"
    weights, inside, (weight_sums, raw), totals = _weighed(tokens, low, high, None if band else settings.floor)
    square, above, below, clipped, smallest, largest = totals.tolist()
    count, lengths = len(tokens), tokens.lengths.numpy() + TINY
    weight = Moments.of_sums(count, float(weight_sums.sum()), square, smallest, largest)
    sums = {
        "weight": weight, "shown": weight, "raw": Moments.share(float(raw.sum()), count),
        "clipped": Moments.share(clipped, count),
        "above": Moments.share(above, count), "below": Moments.share(below, count),
    }  # fmt: skip
    return _Weighted(weights, inside, sums | of_sequences(weight_sums / lengths, raw / lengths, low, high))


def _weighed(
    tokens: Tokens, low: float, high: float, floor: float | None
) -> tuple[torch.Tensor, torch.Tensor | None, FloatArray, FloatArray]:
    """Weights within [floor, high] or, without a floor, 0 outside the band [low, high]; and their sums.

    Returns (weights [tokens] float32; inside [tokens] bool, None without a band; [2, sequences] float64: weight, raw
    ratio; [6] float64: weight^2; ratios above `high`, below `low` and clipped; smallest and largest weight).
    """
    import torch

    weights = torch.empty_like(tokens.log_ratio)
    inside = torch.empty(len(tokens), dtype=torch.bool, device=weights.device) if floor is None else None
    per_sequence, raw_per_sequence = (Segments(tokens.offsets.numpy(), weights.device) for _ in range(2))
    totals = torch.zeros(4, dtype=torch.float64, device=weights.device)
    ends = [torch.tensor([inf, -inf], dtype=torch.float64, device="cpu")]
    for part in tokens.chunks():
        raw = tokens.log_ratio[part].clamp(-LIMIT, LIMIT).exp_()
        above, below = raw > high, raw < low
        out = weights[part]
        if inside is None:
            torch.clamp(raw, min=floor, max=high, out=out)
        else:
            torch.logical_not(above | below, out=inside[part])
            torch.mul(raw, inside[part], out=out)
        exact = out.double()
        per_sequence.add(part, exact)
        raw_per_sequence.add(part, raw)
        counts = [changed.count_nonzero() for changed in (above, below, out != raw)]
        totals += torch.stack([torch.dot(exact, exact), *counts])
        ends.append(torch.stack(out.aminmax()).double().cpu())
    smallest, largest = torch.stack(ends).numpy().T
    return (
        weights, inside, np.array([per_sequence.numpy(), raw_per_sequence.numpy()]),
        np.array([*totals.tolist(), smallest.min(), largest.max()]),
    )  # fmt: skip


def _by_sequence(tokens: Tokens, settings: CorrectionSettings, bounds: tuple[float, float]) -> _Weighted:
    low, high = bounds
    lengths = tokens.lengths.numpy()
    per_sequence = Segments(tokens.offsets.numpy(), tokens.log_ratio.device)
    for part in tokens.chunks():
        per_sequence.add(part, tokens.log_ratio[part])
    log_ratio = per_sequence.numpy()
    if settings.level == "geometric":
        log_ratio = log_ratio / lengths
    raw = np.exp(np.clip(log_ratio, -LIMIT, LIMIT))
    above, below = raw > high, raw < low
    within = ~(above | below)
    tis, count = settings.mode == "tis", len(raw)
    weights = np.clip(raw, settings.floor, high) if tis else raw * within
    sums = {
        "weight": Moments.of(weights, lengths), "shown": Moments.of(raw), "raw": Moments.of(raw, lengths),
        "clipped": Moments.of((weights != raw).astype(np.float64), lengths),
        "above": Moments.share(above.sum(), count), "below": Moments.share(below.sum(), count),
        "raw_sequences": Moments.of(raw),
    }  # fmt: skip
    return _Weighted(
        spread(weights.astype(np.float32), tokens),
        None if tis else spread(within, tokens),
        sums | of_sequences(weights, raw, low, high),
    )


def _normalised(tokens: Tokens, settings: CorrectionSettings, raw: _Weighted, group: Any) -> float:
    """Divide the weights, in place, by their mean over all ranks' tokens or sequences; return it."""
    if tokens.sequence_group is not None:
        check_group(tokens.sequence_group, group)
    count, total = float(len(tokens)), raw.sums["weight"].total
    if settings.level != "token":
        count, total = float(tokens.sequences), raw.sums["sequence"].total
    total, count = all_reduced(np.array([total, count]) * tokens.counted, group)
    mean = total / max(count, TINY)
    if mean <= TINY:
        return 1.0
    raw.weights.div_(mean)
    return float(mean)
