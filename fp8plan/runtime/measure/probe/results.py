"""Results of a probe with their intervals, as Python and as JSON.

Intervals come from resampled prompts: only these are independent, as tokens share a text, and sequences a prompt. A
resample draws as many prompts as there are, with replacement (bootstrap, 5th and 95th percentile). Every figure is made
of sums over tokens, so a resample is one row of a matrix product of counts and sums. Heavy tails stay invisible: a
token that is rarer than once in the sample is in no resample.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, log
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fp8plan.errors import ConfigError
from fp8plan.model.precision import find_precision
from fp8plan.model.risk.remedies import BF16, NO_REMEDIES, Remedies
from fp8plan.runtime.measure.probe.sampling import SampleSettings
from fp8plan.runtime.watch.mismatch.sums import LIMIT, FloatArray, k3
from fp8plan.schemas import VERSIONS

if TYPE_CHECKING:
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch

RESAMPLES: Final = 4000
LEVEL: Final = 0.90
WANTED: Final = 0.1  # relative half-width of `tokens_needed`

# Shares of tokens: name -> bounds on the log ratio.
TAILS: Final = {
    "ratio_above_2": (log(2.0), inf),  # what token TIS at C = 2 cuts
    "ratio_below_half": (-inf, -log(2.0)),
}


class Interval(NamedTuple):
    """A figure and its 90% interval."""

    value: float
    low: float
    high: float


def sequence_sums(log_ratios: Sequence[ArrayLike]) -> FloatArray:
    """Sums over the tokens of each sequence: 1, log ratio, k3, weight, weight^2, then TAILS.

    Shape (sequences, 5 + tails). Tokens that are not finite are left out.
    """
    rows = []
    for values in log_ratios:
        ratios = np.asarray(values, np.float64)
        ratios = ratios[np.isfinite(ratios)]
        weight = np.exp(np.clip(ratios, -LIMIT, LIMIT))
        tails = [((ratios > low) & (ratios < high)).sum() for low, high in TAILS.values()]
        rows.append([len(ratios), ratios.sum(), k3(ratios).sum(), weight.sum(), (weight**2).sum(), *tails])
    return np.array(rows, np.float64).reshape(-1, 5 + len(TAILS))


def figures(sums: FloatArray) -> dict[str, Any]:
    """Figures kl_k3, k1, ess_raw and TAILS from sums (..., 5 + tails), each of shape (...)."""
    tokens, log_ratio, k3, weight, squares = (sums[..., i] for i in range(5))
    means = {"kl_k3": k3 / tokens, "k1": -log_ratio / tokens, "ess_raw": weight**2 / (tokens * squares)}
    return means | {name: sums[..., 5 + i] / tokens for i, name in enumerate(TAILS)}


def intervals(
    log_ratios: Sequence[ArrayLike],
    seed: int = 0,
    resamples: int = RESAMPLES,
    prompts: Sequence[Hashable] | None = None,
) -> dict[str, Interval]:
    """The figures of some sequences [tokens of each], with their intervals, which the seed determines.

    prompts: that of each sequence; None: all differ

    A share of 0 in the sample has an upper end of 2.3 / tokens: a larger share would show among so many independent
    tokens with a probability of 90%. Raises ValueError without a token.
    """
    sums = _by_prompt(sequence_sums(log_ratios), prompts)
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        raise ValueError("no tokens with finite log-probs")
    counts = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), resamples)
    resampled = figures(counts @ sums)
    total = sums.sum(0)
    by_name = {}
    for name, value in figures(total).items():
        low, high = np.quantile(resampled[name], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        if name in TAILS and value == 0:
            high = -np.log(1 - LEVEL) / total[0]
        by_name[name] = Interval(float(value), float(low), float(high))
    return by_name


def _by_prompt(sums: FloatArray, prompts: Sequence[Hashable] | None) -> FloatArray:
    if prompts is None:
        return sums
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    totals = np.zeros((len(number), sums.shape[1]))
    np.add.at(totals, [number[prompt] for prompt in prompts], sums)
    return totals


def tokens_needed(tokens: int, kl: Interval) -> int | None:
    """The number of such tokens that would give a relative half-width of WANTED.

    Intervals shrink with the square root of that number. None if the interval says nothing (one prompt, no mismatch).
    """
    half = (kl.high - kl.low) / 2
    return round(tokens * (half / (WANTED * kl.value)) ** 2) if kl.value > 0 and half > 0 else None


# Fields of a Mismatch in `Probed.to_dict`, beside its profile.
PLAIN = ("k3_robust", "chi2_token", "chi2_seq", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff")
KEYED = ("log_ratio_quantiles", "tail_fractions")


@dataclass(frozen=True, slots=True)
class Probed:
    """The findings of one precision with some remedies. After a failure `error` has the reason, and figures are empty.

    figures:       kl_k3, k1 (nats per token), ess_raw and tails (shares of tokens), with 90% intervals
    mismatch:      the Monitor's figures of the same batch: quantiles, tails, profile by position
    sequences, tokens: numbers of scored ones; invalid: tokens in no figure, because a log-prob is not finite
    tokens_needed: for kl_k3 to +-10%; None if the interval says nothing
    predicted:     kl_k3 that fp8plan.model.risk.expected expects, with its 90% band; None for models it does not cover
    facts:         facts of the engine (kernels, attention, e8m0, ...), and the origin of its KV scales
    seconds:       sample (with the engine's start), score
    remedies:      the run's, without those that change nothing for this precision (`in_effect`)
    experts_differ: share of response tokens for which the trainer's own routers pick other experts than the engine in
                   some layer; None if the engine returned no experts, or `replayed` does not know these routers
    """

    precision: str
    error: str | None = None
    figures: Mapping[str, Interval] | None = None
    mismatch: Mismatch | None = None
    sequences: int = 0
    tokens: int = 0
    invalid: int = 0
    tokens_needed: int | None = None
    predicted: Interval | None = None
    facts: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] | None = None
    remedies: Remedies = NO_REMEDIES
    experts_differ: float | None = None

    @property
    def kl_k3(self) -> Interval:
        """KL (k3, nats per token) with its 90% interval. Raises ConfigError if the precision failed."""
        if self.figures is None:
            raise ConfigError(f"{self.precision} was not measured: {self.error}")
        return self.figures["kl_k3"]

    def to_dict(self) -> dict[str, Any]:
        """Return only dicts, lists, strings, numbers, booleans and None."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        figures = {name: value._asdict() for name, value in (self.figures or {}).items()}
        predicted = self.predicted and self.predicted._asdict()
        mismatch, remedies = self.mismatch and _plain(self.mismatch), asdict(self.remedies)
        remedies["keep_bf16"] = list(self.remedies.keep_bf16)
        return named | {"figures": figures, "predicted": predicted, "mismatch": mismatch, "remedies": remedies}


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of `probe`: the findings of each precision, and the model, engine and settings behind them.

    findings: a Probed for each precision and each of its remedies. Those of one engine follow each other
    """

    model: str
    gpu: str
    date: str
    engine_version: str
    reference: str
    settings: SampleSettings
    prompts: int
    findings: Sequence[Probed]

    @property
    def precisions(self) -> dict[str, Probed]:
        """The first finding of each precision."""
        first: dict[str, Probed] = {}
        for probed in self.findings:
            first.setdefault(probed.precision, probed)
        return first

    def interval_of(self, precision: str | None, remedies: Remedies | None = None) -> Interval | None:
        """KL (k3, nats per token) of a preset with its 90% interval; None if it was not measured.

        remedies: those of the run; None: it has none
        """
        if precision is None:
            return None
        wanted = in_effect(remedies or NO_REMEDIES, precision)
        for probed in self.findings:
            if (probed.precision, probed.remedies) == (precision, wanted) and probed.error is None:
                return probed.kl_k3
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return only dicts, lists, strings, numbers, booleans and None."""
        named = {"schema_version": VERSIONS["probe"]}
        named |= {name: getattr(self, name) for name in ("model", "gpu", "date", "engine_version", "reference")}
        settings = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        settings["top_k"] = self.settings.top_k and str(self.settings.top_k)
        rows = [probed.to_dict() for probed in self.findings]
        return named | settings | {"prompts": self.prompts, "precisions": rows}


def in_effect(remedies: Remedies, precision: str) -> Remedies:
    """The remedies that change the mismatch of a precision. Layers are kept in BF16 only beside linears in FP8."""
    if find_precision(precision).weights == remedies.trainer_precision == BF16:
        return replace(remedies, keep_bf16=(0, 0))
    return remedies


def _plain(mismatch: Mismatch) -> dict[str, Any]:
    """The numbers of a mismatch that JSON can hold."""
    named = {name: getattr(mismatch, name) for name in PLAIN}
    named |= {name: {str(key): share for key, share in getattr(mismatch, name).items()} for name in KEYED}
    return named | {"profile": [asdict(span) for span in mismatch.profile]}
