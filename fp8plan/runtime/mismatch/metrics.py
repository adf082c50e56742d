"""How far the trainer's policy is from the engine's: sums over tokens, and every figure that follows from them.

    sums = measure(pack(train_logprobs, rollout_logprobs, mask))
    mismatch = sums.reduced().metrics()       mismatch.k3, .ess_raw, .clipped_mass(2.0), .log_ratio_quantiles, ...

Everything is a sum over tokens or sequences in float64 (and two extremes), so micro-batches add and ranks reduce:
measure(a) + measure(b) is measure(a and b). What is no sum (quantiles, clipped mass, the robust KL) is read from a
histogram whose bins are sums. Names and definitions are those of verl 0.9.1's compute_offpolicy_metrics, where it has
one; tests/runtime/test_verl_parity.py compares them, and fp8plan.runtime.correction.verl lists what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import expm1, inf, log
from typing import Final, Literal

import numpy as np

from fp8plan.model.arrays import FloatArray
from fp8plan.runtime.mismatch import histogram
from fp8plan.runtime.mismatch.measure import measure
from fp8plan.runtime.mismatch.sums import POSITIONS, MismatchSums, Span, by_position, by_version

__all__ = ["POSITIONS", "Mismatch", "MismatchSums", "Span", "measure"]

QUANTILES: Final = (0.001, 0.01, 0.5, 0.99, 0.999)
TAILS: Final = (2.0, 5.0, 10.0, 100.0)
# k3_robust: of the tokens with the largest |log ratio|, this share counts as the smallest of them, and two at least.
WINSORISED, WINSORISED_TOKENS = 1e-3, 2
LARGEST: Final = 20.0  # up to which a ratio counts in cut_share

Ratios = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Train/rollout mismatch of a batch. ratio = pi_train / pi_rollout of a sampled token; means are over valid tokens.

    tokens, sequences, invalid: counts; invalid tokens (a log-prob NaN or infinite) are in no figure
    k1:            mean of -log ratio: an unbiased estimate of KL(rollout || train), which may be negative
    k3:            mean of ratio - 1 - log ratio, never negative; the same expectation, less variance; not clamped
    k3_robust:     k3 winsorised by |log ratio| at its 99.9% quantile (at least two tokens): no outlier moves it
    ess_raw:       (mean ratio)^2 / mean ratio^2, a fraction: effective sample size of untruncated token weights
    chi2_token, chi2_seq: mean of ratio^2, less 1; over sequences of the product of their ratios; clamped to e^+-20
    training_ppl, rollout_ppl, training_log_ppl, rollout_log_ppl: means over sequences of (log) perplexity
    log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min, ppl_ratio: train against rollout, by sequence
    log_ratio_quantiles: {share of the tokens: |log ratio| that they lie below}
    tail_fractions:      {factor: share of the tokens whose ratio is above it or below 1/factor}
    profile:       mismatch by position in the response, empty bins left out
    versions:      {weight version that sampled: its tokens' mismatch}; empty unless `measure` was given versions

    Without tokens, everything is as if there were no mismatch (k1 = k3 = 0, ess_raw = 1): look at `tokens`.
    """

    tokens: int
    sequences: int
    invalid: int
    k1: float
    k3: float
    k3_robust: float
    ess_raw: float
    chi2_token: float
    chi2_seq: float
    training_ppl: float
    training_log_ppl: float
    rollout_ppl: float
    rollout_log_ppl: float
    log_ppl_diff: float
    log_ppl_abs_diff: float
    log_ppl_diff_max: float
    log_ppl_diff_min: float
    ppl_ratio: float
    log_ratio_quantiles: Mapping[float, float]
    tail_fractions: Mapping[float, float]
    profile: tuple[Span, ...]
    versions: Mapping[int, Span]
    sums: MismatchSums = field(repr=False, compare=False)

    @classmethod
    def from_sums(cls, sums: MismatchSums) -> Mismatch:
        tokens, sequences = sums["tokens"], sums["sequences"]
        counts = sums["histogram_tokens"]
        per_token, per_sequence = 1 / max(tokens, 1), 1 / max(sequences, 1)
        empty = tokens == 0
        # Without sequences, what has 1 for no mismatch is 1.
        mean = {
            name: sums[name] * per_sequence if sequences else float(name.endswith("ppl") or name == "ppl_ratio")
            for name in _SEQUENCE_MEANS
        }
        return cls(
            tokens=int(tokens),
            sequences=int(sequences),
            invalid=int(sums["invalid"]),
            k1=sums["k1"] * per_token,
            k3=sums["k3"] * per_token,
            k3_robust=robust_k3(sums),
            ess_raw=1.0 if empty else sums["ratio"] ** 2 * per_token / sums["ratio_squared"],
            chi2_token=0.0 if empty else sums["ratio_squared"] * per_token - 1,
            chi2_seq=sums["sequence_ratio_squared"] * per_sequence - 1 if sequences else 0.0,
            log_ppl_diff_max=sums.largest if sequences else 0.0,
            log_ppl_diff_min=sums.smallest if sequences else 0.0,
            **mean,
            log_ratio_quantiles={q: histogram.quantile(counts, q * tokens) for q in QUANTILES},
            tail_fractions={factor: 1 - _between(counts, 1 / factor, factor) for factor in TAILS},
            profile=by_position(sums),
            versions=by_version(sums),
            sums=sums,
        )

    def verl_metrics(self) -> dict[str, float]:
        """The figures that verl 0.9.1 logs, under its names: "rollout_corr/kl" and so on."""
        named = {"kl": self.k1, "k3_kl": self.k3, "chi2_token": self.chi2_token, "chi2_seq": self.chi2_seq}
        named |= {name: getattr(self, name) for name in (*_SEQUENCE_MEANS, "log_ppl_diff_max", "log_ppl_diff_min")}
        return {f"rollout_corr/{name}": value for name, value in named.items()}

    def clipped_mass(self, c: float, level: Ratios = "token") -> float:
        """Share of the ratios' sum that TIS at c cuts away: sum over tokens of max(ratio - c, 0) over sum of ratio.

        level: whose ratio counts for a token: its own, or that of its sequence's summed or mean log ratio
        """
        counts, ratios = _histograms(self.sums, level)
        total = float(ratios.sum())
        return histogram.excess(counts, ratios, c) / total if total else 0.0

    def cut_share(self, c: float, level: Ratios = "token") -> float:
        """clipped_mass less what a few ratios without bound do to it: each counts up to LARGEST, and of the tokens with
        the largest, two (or those of two sequences of mean length) do not count at all."""
        counts, ratios = histogram.without_largest(*_histograms(self.sums, level), 2 * self.unit(level))
        beyond = histogram.excess(counts, ratios, LARGEST)
        total = float(ratios.sum()) - beyond
        return max(histogram.excess(counts, ratios, c) - beyond, 0.0) / total if total else 0.0

    def kept_fraction(self, low: float, high: float, level: Ratios = "token") -> float:
        """Share of the tokens with low <= ratio <= high, at `level` as in clipped_mass. 1 without tokens."""
        return _between(_histograms(self.sums, level)[0], low, high)

    def unit(self, level: Ratios) -> float:
        """Tokens that share one ratio at `level`: 1, or those of a sequence of mean length."""
        return 1.0 if level == "token" else self.tokens / max(self.sequences, 1)


_SEQUENCE_MEANS: Final = (
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl",
    "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio",
)  # fmt: skip


def robust_k3(sums: MismatchSums) -> float:
    """Mean of k3 in which the tokens beyond a quantile q of |log ratio| count as if they lay at +-q."""
    counts, k3, tokens = sums["histogram_tokens"], sums["histogram_k3"], sums["tokens"]
    if not tokens:
        return 0.0
    beyond = max(WINSORISED * tokens, min(WINSORISED_TOKENS, tokens / 2))
    q = histogram.quantile(counts, tokens - beyond)
    ends = np.minimum(histogram.MAGNITUDES, histogram.LIMIT)
    # Of each bin, the share of its tokens that lies below q.
    width = np.diff(ends)  # 0 of the last one, all beyond the limit
    below = np.clip((q - ends[:-1]) / np.where(width > 0, width, 1.0), 0.0, 1.0)
    positive, negative = slice(histogram.SIDE, None), slice(histogram.SIDE - 1, None, -1)
    total = 0.0
    for side, at_q in ((positive, expm1(q) - q), (negative, expm1(-q) + q)):
        inside = below * np.where(below > 0, k3[side], 0.0)
        total += float(np.minimum(inside + at_q * (1 - below) * counts[side], k3[side]).sum())
    return total / float(tokens)


def _histograms(sums: MismatchSums, level: Ratios) -> tuple[FloatArray, FloatArray]:
    """[BINS] tokens and sums of ratios, by the log ratio that counts at `level`."""
    prefix = "histogram" if level == "token" else level
    return sums[f"{prefix}_tokens"], sums[f"{prefix}_ratio"]


def _between(counts: FloatArray, low: float, high: float) -> float:
    tokens = float(counts.sum())
    if not tokens:
        return 1.0
    return max(tokens - _above(counts, high) - _below(counts, low), 0.0) / tokens


def _above(counts: FloatArray, high: float) -> float:
    """Tokens with a ratio above `high`."""
    end = inf if high == inf else log(high)
    if end >= histogram.LIMIT:
        return 0.0
    # A ratio of exactly 1 is common (tokens that both policies are sure of) and no ratio above 1.
    at_most = histogram.SMALLEST if 0 <= end < histogram.SMALLEST else end
    return float(counts.sum()) - histogram.count_below(counts, at_most)


def _below(counts: FloatArray, low: float) -> float:
    """Tokens with a ratio below `low`."""
    end = -inf if low <= 0 else log(low)
    return 0.0 if end <= -histogram.LIMIT else histogram.count_below(counts, end)
