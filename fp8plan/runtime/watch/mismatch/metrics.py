"""Distance between the trainer's and the engine's policy: sums over tokens, and all figures made from them.

    sums = measure(pack(train_logprobs, rollout_logprobs, mask))
    mismatch = sums.reduced().metrics()       mismatch.k3, .ess_raw, .clipped_mass(2.0), .log_ratio_quantiles, ...

Everything is a float64 sum over tokens or sequences (and two extremes), so micro-batches add and ranks reduce:
measure(a) + measure(b) is measure(a and b). Quantiles, clipped mass and the robust KL come from a histogram.
Names and definitions are those of verl 0.9.1's compute_offpolicy_metrics, as far as it has them
(tests/runtime/watch/correction/test_verl_parity.py); fp8plan.runtime.watch.correction.verl lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan, sqrt
from typing import Any, Final, Literal

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.sums import (
    BINS,
    FloatArray,
    IntArray,
    all_reduced,
    excess,
    kept,
    quantile,
    raise_first,
    robust_k3,
    several,
    without_largest,
)

QUANTILES: Final = (0.001, 0.01, 0.5, 0.99, 0.999)
TAILS: Final = (2.0, 5.0, 10.0, 100.0)
ERRORS: Final = 5.0  # standard errors by which a mean of ratios may miss 1
LARGEST: Final = 20.0  # up to which a ratio counts in cut_share

Ratios = Literal["token", "sequence", "geometric"]

# First tokens of the bins of position in a response: [0, 64), [64, 128), [128, 256), ..., [2^20, infinity).
POSITIONS: Final = (0, *(64 << i for i in range(15)))
# Weight versions of one batch: at most this many in a row; version v has slot v mod SLOTS.
SLOTS: Final = 64
VERSION_SUMS: Final = ("tokens", "turns", "turns_squared", "k1", "k3")

# log p is the mean log-prob of a sequence; ratio is clamped to e^+-20, k3 is not.
_SCALARS: Final = (
    "tokens", "sequences", "invalid", "placeholders",
    "k1", "k3", "ratio", "ratio_squared",  # over tokens
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl",  # over sequences, from here on
    "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "sequence_ratio_squared",
    "train_above_0", "rollout_above_0",  # sequences whose mean log-prob no distribution over tokens has
)  # fmt: skip
_LAYOUT: Final = (
    *((name, 1) for name in _SCALARS),
    *((f"histogram_{name}", BINS) for name in ("tokens", "ratio", "k3")),
    # By the log ratio of each token's sequence: the sum over its tokens (sequence) or their mean (geometric).
    *((f"{level}_{name}", BINS) for level in ("sequence", "geometric") for name in ("tokens", "ratio")),
    *((f"position_{name}", len(POSITIONS)) for name in ("tokens", "k1", "k3")),
    *((f"version_{name}", SLOTS) for name in VERSION_SUMS),
)
_ENDS: Final = np.cumsum([size for _, size in _LAYOUT]).tolist()
_PLACES: Final = {name: slice(end - size, end) for (name, size), end in zip(_LAYOUT, _ENDS, strict=True)}
SIZE: Final[int] = _ENDS[-1]


@dataclass(frozen=True, slots=True, eq=False)
class MismatchSums:
    """Sums of one or more batches, zero at first. a + b has the sums of both together.

    values:   [SIZE] float64; `sums["k3"]` is a number, `sums["histogram_k3"]` an array
    smallest, largest: extremes of log_ppl_diff, a sequence's mean log ratio negated
    """

    values: FloatArray = field(default_factory=lambda: np.zeros(SIZE))
    smallest: float = inf
    largest: float = -inf

    def __getitem__(self, name: str) -> Any:
        part = self.values[_PLACES[name]]
        return float(part[0]) if name in _SCALARS else part

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[_PLACES[name]] = value

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.values + other.values, min(self.smallest, other.smallest), max(self.largest, other.largest)
        )

    def reduced(self, group: Any = None, refusal: Exception | None = None) -> MismatchSums:
        """Sum over the ranks of `group` (None: all), by one all_reduce; unchanged without torch.distributed.

        Every rank of the group must call it, even without tokens, and even if its batch was refused.

        refusal: the reason for which this rank's batch was refused, if it was

        Raises the refusal; on the other ranks a ConfigError that names the rank and quotes it.
        """
        from torch import distributed

        if not several(group):
            if refusal is not None:
                raise refusal
            return self
        ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
        # Each rank has two places for its extremes, and adds zero to those of the others.
        vector = np.zeros(SIZE + 2 * ranks + 1)
        vector[:SIZE] = self.values
        vector[SIZE + 2 * rank :][:2] = self.smallest, self.largest
        vector[-1] = refusal is not None
        vector = all_reduced(vector, group)
        if vector[-1]:
            raise_first(refusal, group)
        extremes = vector[SIZE:-1]
        return MismatchSums(vector[:SIZE], float(extremes[::2].min()), float(extremes[1::2].max()))

    def check_units(self) -> None:
        """Raise ConfigError for sequences with a mean log-prob above 0, as losses and probabilities have it."""
        for side in ("train", "rollout"):
            if above := int(self[f"{side}_above_0"]):
                raise ConfigError(
                    f"{side}_logprobs have a mean above 0 in {above:,} of {int(self['sequences']):,} sequences; "
                    "allowed: log-probabilities in nats, which are 0 or less; type -x for losses (negative "
                    "log-likelihoods), x.log() for probabilities"
                )

    def metrics(self) -> Mismatch:
        """All figures that follow from the sums."""
        return Mismatch.from_sums(self)


@dataclass(frozen=True, slots=True)
class Span:
    """Mismatch of the tokens of one bin of position, [first, last + 1), or of one weight version."""

    tokens: int
    k1: float
    k3: float
    first: int = 0
    last: float = inf


def _by_position(sums: MismatchSums) -> tuple[Span, ...]:
    """Bins of position that have tokens, in order; `first` and `last` count from the response's beginning."""
    ends = (*POSITIONS[1:], inf)
    rows = zip(POSITIONS, ends, *(sums[f"position_{name}"] for name in ("tokens", "k1", "k3")), strict=True)
    return tuple(Span(int(n), float(k1 / n), float(k3 / n), first, end - 1) for first, end, n, k1, k3 in rows if n)


def _by_version(sums: MismatchSums) -> dict[int, Span]:
    """Figures of each weight version, in order.

    Raises ConfigError if versions that were added are SLOTS or more apart.
    """
    spans, apart = {}, False
    for slot in np.flatnonzero(sums["version_tokens"]):
        tokens, turns, squared, k1, k3 = (float(sums[f"version_{name}"][slot]) for name in VERSION_SUMS)
        apart |= turns**2 != squared * tokens  # more than one version in this slot
        spans[int(turns / tokens) * SLOTS + int(slot)] = Span(int(tokens), k1 / tokens, k3 / tokens)
    if apart or (spans and max(spans) - min(spans) >= SLOTS):
        raise ConfigError(f"weight versions of one step are {SLOTS} or more apart; allowed: less than {SLOTS}")
    return dict(sorted(spans.items()))


def by_slot(versions: IntArray, tokens: IntArray, sums: FloatArray) -> FloatArray:
    """[VERSION_SUMS, SLOTS] from each part's version (turn * SLOTS + slot), tokens and sums."""
    turn, slot = (versions // SLOTS).astype(np.float64), versions % SLOTS
    rows = tokens, turn * tokens, turn * turn * tokens, -sums[0], sums[1]
    return np.array([np.bincount(slot, row, SLOTS) for row in rows])


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Train/rollout mismatch of a batch. ratio = pi_train / pi_rollout of a sampled token; means are over valid tokens.

    tokens, sequences, invalid: counts; invalid tokens (a log-prob NaN or infinite) are in no figure, and a row without
                   a valid token is no sequence
    invalid_share: share of the input's tokens that are invalid; 0 without input
    placeholder_share: share of the tokens with a log-prob of exactly 0.0 on one side, and a probability below 0.9 on
                   the other
    k1:            mean of -log ratio: an unbiased estimate of KL(rollout || train), which may be negative
    k3:            mean of ratio - 1 - log ratio, never negative; the same expectation, less variance; not clamped
    k3_robust:     k3 winsorised by |log ratio| at its 99.9% quantile (at least two tokens): no outlier moves it
    ess_raw:       (mean ratio)^2 / mean ratio^2, a fraction: effective sample size of untruncated token weights
    chi2_token:    mean of ratio^2, less 1; ratios are clamped to e^+-20
    chi2_seq:      the same over sequences, of the product of their ratios
    training_ppl, rollout_ppl, training_log_ppl, rollout_log_ppl: means over sequences of (log) perplexity
    log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min, ppl_ratio: train against rollout, by sequence
    log_ratio_quantiles: {share of the tokens: |log ratio| below which they lie}
    tail_fractions:      {factor: share of the tokens with a ratio above factor or below 1/factor}
    profile:       mismatch by position in the response, without empty bins
    versions:      {weight version that sampled: its tokens' mismatch}; empty if `measure` had no versions

    Without a valid token every figure is NaN: nothing was measured.
    """

    tokens: int
    sequences: int
    invalid: int
    invalid_share: float
    placeholder_share: float
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
        per_token, per_sequence = (1 / tokens, 1 / sequences) if tokens else (nan, nan)
        return cls(
            tokens=int(tokens),
            sequences=int(sequences),
            invalid=int(sums["invalid"]),
            invalid_share=sums["invalid"] / max(tokens + sums["invalid"], 1),
            placeholder_share=sums["placeholders"] * per_token,
            k1=sums["k1"] * per_token,
            k3=sums["k3"] * per_token,
            k3_robust=robust_k3(counts, sums["histogram_k3"]),
            ess_raw=sums["ratio"] ** 2 * per_token / sums["ratio_squared"] if tokens else nan,
            chi2_token=sums["ratio_squared"] * per_token - 1,
            chi2_seq=sums["sequence_ratio_squared"] * per_sequence - 1,
            log_ppl_diff_max=sums.largest if tokens else nan,
            log_ppl_diff_min=sums.smallest if tokens else nan,
            **{name: sums[name] * per_sequence for name in _SEQUENCE_MEANS},
            log_ratio_quantiles={q: quantile(counts, q * tokens) for q in QUANTILES},
            tail_fractions={factor: float(1 - kept(counts, 1 / factor, [factor])[0]) for factor in TAILS},
            profile=_by_position(sums),
            versions=_by_version(sums),
            sums=sums,
        )

    @property
    def mean_ratio(self) -> float:
        """The mean of the ratios, clamped to e^+-20; near 1 if they are those of the policy that sampled."""
        return sqrt(self.ess_raw * (self.chi2_token + 1.0))

    @property
    def mean_ratio_error(self) -> float:
        """The standard error of `mean_ratio`, for independent tokens."""
        return sqrt(max(1.0 - self.ess_raw, 0.0) * (self.chi2_token + 1.0) / self.tokens) if self.tokens else nan

    def verl_metrics(self) -> dict[str, float]:
        """The figures that verl 0.9.1 logs, under its names: "rollout_corr/kl" and so on."""
        named = {"kl": self.k1, "k3_kl": self.k3, "chi2_token": self.chi2_token, "chi2_seq": self.chi2_seq}
        named |= {name: getattr(self, name) for name in (*_SEQUENCE_MEANS, "log_ppl_diff_max", "log_ppl_diff_min")}
        return {f"rollout_corr/{name}": value for name, value in named.items()}

    @property
    def recorded(self) -> dict[str, float | None]:
        """The figures of a record on the distance between the policies, before any correction."""
        own = ("k3_robust", "ess_raw", "tokens", "sequences", "invalid")
        return {
            **self.verl_metrics(),
            **{f"fp8plan/{name}": getattr(self, name) for name in own},
            **{f"fp8plan/log_ratio_p{100 * q:g}": value for q, value in self.log_ratio_quantiles.items()},
            **{f"fp8plan/beyond_{factor:g}x": share for factor, share in self.tail_fractions.items()},
        }

    def clipped_mass(self, c: float, level: Ratios = "token") -> float:
        """Share of the ratios' sum that TIS at c cuts away: sum over tokens of max(ratio - c, 0) over sum of ratio.

        level: the ratio that counts for a token: its own, or that of its sequence's summed or mean log ratio
        """
        counts, ratios = _histograms(self.sums, level)
        total = float(ratios.sum())
        return excess(counts, ratios, c) / total if total else nan

    def cut_share(self, c: float, level: Ratios = "token") -> float:
        """clipped_mass without the effect of a few unbounded ratios.

        Each ratio counts up to LARGEST. The two tokens (or two sequences of mean length) with the largest do not count.
        """
        counts, ratios = without_largest(*_histograms(self.sums, level), 2 * self.unit(level))
        beyond = excess(counts, ratios, LARGEST)
        total = float(ratios.sum()) - beyond
        if not total:
            return 0.0 if self.tokens else nan
        return max(excess(counts, ratios, c) - beyond, 0.0) / total

    def kept_fraction(self, low: float, high: float, level: Ratios = "token") -> float:
        """Share of the tokens with low <= ratio <= high, at `level` as in clipped_mass."""
        return float(kept(_histograms(self.sums, level)[0], low, [high])[0])

    def unit(self, level: Ratios) -> float:
        """Tokens that share one ratio at `level`: 1, or those of a sequence of mean length."""
        return 1.0 if level == "token" else self.tokens / max(self.sequences, 1)


_SEQUENCE_MEANS: Final = (
    "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl",
    "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio",
)  # fmt: skip


def _histograms(sums: MismatchSums, level: Ratios) -> tuple[FloatArray, FloatArray]:
    """[BINS] tokens and sums of ratios, by the log ratio at `level`."""
    prefix = "histogram" if level == "token" else level
    return sums[f"{prefix}_tokens"], sums[f"{prefix}_ratio"]
