"""Two candidate laws for token TIS that answer to one batch, in units of what clipping does (evidence/gates.md).

Both ask for a reach, as LevelThresholds do (fp8plan/runtime/controller/reach.py), and remember nothing but the last
reach. A law that loses is deleted here, and from the table of arms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8plan.checks import Range, in_range
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.laws import LevelThresholds
from fp8plan.runtime.controller.reach import Demand
from fp8plan.runtime.controller.state import LevelState
from fp8plan.runtime.mismatch.metrics import Mismatch
from fp8plan.runtime.mismatch.sums import FloatArray

BEYOND: Final = 2.0  # the ratio beyond which MassThresholds count mass
REACHES: Final = np.linspace(0.0, 1.0, 101)  # of which EssThresholds choose one: steps finer than the dead band
INSIDE: Final[Range] = (lambda x: 0 < x < 1, "a share above 0 and below 1")


@dataclass(frozen=True, slots=True)
class Gate(LevelThresholds):
    """Settings of both laws: those of LevelThresholds, with an own floor and slew. They control a token's C alone.

    narrowest: 0.5: from C = 2 down to 1.41
    slew:      one step to the floor, two steps back

    Raises ConfigError, when made, for values out of range, a band or another level.
    """

    narrowest: float = 0.5
    slew: tuple[float, float] = (2.0, 1.5)

    def __post_init__(self) -> None:
        LevelThresholds.__post_init__(self)
        if self.tis is None or self.band is not None or self.level != "token":
            raise ConfigError(
                f"tis={self.tis!r}, band={self.band!r}, level={self.level!r}; allowed: a tis, no band, level 'token'"
            )


@dataclass(frozen=True, slots=True)
class EssThresholds(Gate):
    """The widest C at which the batch's truncated weights keep an ESS, up to the initial C.

    target: the ESS to keep, a fraction
    """

    target: float = 0.93

    def __post_init__(self) -> None:
        Gate.__post_init__(self)
        in_range(self, {"target": INSIDE})

    def _demand(self, state: LevelState, mismatch: Mismatch) -> Demand:
        """The largest reach with at least the target; 0 if there is none."""
        assert state.start_tis is not None
        ess = truncated_ess(mismatch, state.start_tis**REACHES)
        # The ESS falls as C rises.
        reach = float(REACHES[max(int(np.sum(ess >= self.target)) - 1, 0)])
        relation = "at or above" if ess[-1] >= self.target else "below"
        return Demand(reach, reach, f"ESS {ess[-1]:.3f} at C {state.start_tis:.4g} is {relation} {self.target:.3g}")


@dataclass(frozen=True, slots=True)
class MassThresholds(Gate):
    """C is the tighter, the more of the weights' mass lies beyond a ratio of BEYOND: reach = (quiet / mass)^gain.

    Mass is what TIS at BEYOND would cut away, without the effect of a few unbounded ratios: Mismatch.cut_share.

    gain:  exponent of the law
    quiet: share of the mass up to which C keeps its initial value
    """

    gain: float = 1.0
    quiet: float = 0.015

    def __post_init__(self) -> None:
        Gate.__post_init__(self)
        in_range(self, {"quiet": INSIDE})

    def _demand(self, state: LevelState, mismatch: Mismatch) -> Demand:
        """The reach for this batch's mass."""
        mass = mismatch.cut_share(BEYOND)
        reach = 1.0 if mass <= self.quiet else float((self.quiet / mass) ** self.gain)
        relation = "within" if mass <= self.quiet else f"{mass / self.quiet:,.1f} times"
        return Demand(reach, reach, f"mass of {mass:.2%} beyond {BEYOND:g} is {relation} its quiet {self.quiet:.1%}")


def truncated_ess(mismatch: Mismatch, bounds: FloatArray) -> FloatArray:
    """ESS of the token weights min(ratio, C), a fraction, for each C of `bounds`.

    From the histogram of log ratios: all ratios of a bin, whose log ratios differ by 3% at most, count as its mean.
    """
    counts, sums = mismatch.sums["histogram_tokens"], mismatch.sums["histogram_ratio"]
    some = counts > 0
    weights = np.minimum(sums[some] / counts[some], bounds[:, None])
    total = weights @ counts[some]
    ess: FloatArray = total**2 / (counts.sum() * (weights**2 @ counts[some]))
    return ess
