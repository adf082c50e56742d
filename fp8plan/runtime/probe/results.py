"""Results of a probe, precision by precision, as Python and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.probe.intervals import Interval
from fp8plan.runtime.probe.sampling import SampleSettings
from fp8plan.schemas import VERSIONS

if TYPE_CHECKING:
    from fp8plan.runtime.mismatch.metrics import Mismatch

# Of a Mismatch, what `to_dict` says beside its profile.
PLAIN = ("k3_robust", "chi2_token", "chi2_seq", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff")
KEYED = ("log_ratio_quantiles", "tail_fractions")


@dataclass(frozen=True, slots=True)
class Probed:
    """The findings of one precision. If it failed, `error` says how and the figures are empty.

    figures:       kl_k3, k1 (nats per token), ess_raw and tails (shares of tokens), with 90% intervals
    mismatch:      the same batch as the Monitor sees one: quantiles, tails, profile by position
    sequences, tokens: that were scored; invalid: tokens whose log-prob is not finite, left out of every figure
    tokens_needed: for kl_k3 to +-10%; None where the interval says nothing
    predicted:     kl_k3 that fp8plan.model.risk.expected expects, with its 90% band; None for models it does not cover
    facts:         what the engine ran (kernels, attention, e8m0, ...) and where its KV scales came from
    seconds:       sample (start of the engine included), score
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
        return named | {"figures": figures, "predicted": predicted, "mismatch": self.mismatch and _plain(self.mismatch)}


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of `probe`: the findings of each precision, and the model, engine and settings behind them."""

    model: str
    gpu: str
    date: str
    engine_version: str
    reference: str
    settings: SampleSettings
    prompts: int
    precisions: Mapping[str, Probed]

    def to_dict(self) -> dict[str, Any]:
        """Return only dicts, lists, strings, numbers, booleans and None."""
        named = {"schema_version": VERSIONS["probe"]}
        named |= {name: getattr(self, name) for name in ("model", "gpu", "date", "engine_version", "reference")}
        settings = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        rows = [one.to_dict() for one in self.precisions.values()]
        return named | settings | {"prompts": self.prompts, "precisions": rows}


def _plain(mismatch: Mismatch) -> dict[str, Any]:
    """The numbers of a mismatch that JSON can hold."""
    named = {name: getattr(mismatch, name) for name in PLAIN}
    named |= {name: {str(key): share for key, share in getattr(mismatch, name).items()} for name in KEYED}
    return named | {"profile": [asdict(span) for span in mismatch.profile]}
