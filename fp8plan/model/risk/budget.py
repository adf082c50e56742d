"""The levels of mismatch risk, and the highest that a plan may accept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError

Level = Literal["low", "moderate", "high"]
LEVELS: Final[tuple[Level, ...]] = ("low", "moderate", "high")

# A precision that is not at least this much faster than a less risky one is not worth its mismatch: two cards of one
# kind differ by more than that (2-6%, from elsewhere).
LEAST_GAIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class RiskBudget:
    """The limits of a low and of a moderate mismatch (any other is high), and the highest level a plan may accept.

    Limits hold against the unfavourable end of the 90% band. Their sources: prime-rl's bar for merging a new model is a
    KL of 0.015. verl's docs call 0.001 to 0.03 typical (and 1.0 broken), and ask for an ESS of 0.5 or more (they warn
    below 0.3). `low_kl` stands for "no worse than good BF16 MoE runs". The clip limits are this project's choice: at
    these shares token TIS gives up little.

    max_sequence_rejection: up to this share of dropped sequences, a sequence-level MIS is called usable
    """

    low_kl: float = 1e-2
    low_clip: float = 1e-3
    low_ess: float = 0.9
    moderate_kl: float = 3e-2
    moderate_clip: float = 1e-2
    moderate_ess: float = 0.5
    max_sequence_rejection: float = 0.2
    accept: Level = "moderate"

    def __post_init__(self) -> None:
        if self.accept not in LEVELS:
            raise ConfigError(f"RiskBudget.accept is {self.accept!r}; allowed: {', '.join(LEVELS)}")
        for limit in (f.name for f in fields(self) if f.name != "accept"):
            value = getattr(self, limit)
            if not is_number(value) or value < 0:
                raise ConfigError(f"RiskBudget.{limit} is {value!r}; allowed: a finite number of at least 0")
            object.__setattr__(self, limit, float(value))  # JSON knows no numpy number

    def accepts(self, level: Level) -> bool:
        return LEVELS.index(level) <= LEVELS.index(self.accept)

    def level(self, kl_high: float, clip_high: float, ess_low: float) -> Level:
        if kl_high <= self.low_kl and clip_high <= self.low_clip and ess_low >= self.low_ess:
            return "low"
        within = kl_high <= self.moderate_kl and clip_high <= self.moderate_clip and ess_low >= self.moderate_ess
        return "moderate" if within else "high"
