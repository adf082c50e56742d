"""The observed KL, split by cause: staleness, routing, sampling, precision, and the rest.

    parts = attributed(mismatch, synced=..., replayed=..., sampling=..., expected=Expected(2e-3, 1e-3, 4e-3))

The trainer's policy differs from the one that sampled for several reasons, one after the other:

    trainer -- staleness -- synced weights -- routing -- engine's experts -- precision -- engine -- sampling -- sample

k1 = mean(rollout - train log-prob) is a sum over tokens, so a policy between the two ends splits it exactly. k3 has the
same expectation if the mean ratio is 1, and far less noise. Each part is therefore a k3, or a difference of two.

staleness  k3(train, rollout) - k3(synced, rollout), where `synced` are the trainer's log-probs under the very weights
           that sampled; without them a lower bound, from the tokens of the newest weights in the batch
routing    k3(synced, rollout) - k3(replayed, rollout), where `replayed` are the trainer's log-probs under the same
           weights as `synced`, with the experts that the engine picked for each token. Without `synced` both have the
           trainer's weights now; experts that changed since the sync then count as routing, too
sampling   vLLM renormalises over the kept tokens. Their mass M under the weights that sampled multiplies each ratio:
           k3 = E[M] - 1 - E[log M], and the mean ratio is E[M]. -log is convex and M lies in [top_p, 1], or hardly
           below: E[-log M] lies between -log E[M] (Jensen) and the chord (1 - E[M]) / (1 - top_p) * -log top_p. The
           expected precision chooses between the two
precision  the remaining KL, up to the most that plan or probe expects. Without `replayed` it is one part with routing
rest       the remainder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log
from typing import TYPE_CHECKING, Final

from fp8plan.runtime.watch.mismatch.metrics import ERRORS
from fp8plan.runtime.watch.mismatch.sampling import PROCESSED

if TYPE_CHECKING:
    from fp8plan.runtime.watch.mismatch.expectation import Expected
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch
    from fp8plan.runtime.watch.mismatch.sampling import Sampling
    from fp8plan.schemas import KlPart

STALENESS, SAMPLING, PRECISION, ROUTING, REST = "staleness", "sampling", "precision", "routing", "rest"
APART: Final = 0.2  # largest uncertainty of a part, as a share of it, with which it still stands alone
SHOWN: Final = 0.02  # smallest share of the KL that a sentence names


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the observed KL.

    causes:    STALENESS, SAMPLING, PRECISION, ROUTING or REST; several: they cannot be told apart here
    kl:        nats per token (k3); the parts of a step add up to its k3
    low, high: bounds on it; equal to kl if it was measured
    how:       its origin: "measured", "bounded" (by theory), "expected" (by a plan or a probe), "left over"
    """

    causes: tuple[str, ...]
    kl: float
    low: float
    high: float
    how: str


def attributed(
    mismatch: Mismatch,
    *,
    synced: Mismatch | None = None,
    replayed: Mismatch | None = None,
    fresh: bool = False,
    sampling: Sampling | None = None,
    expected: Expected | None = None,
    routed: bool = False,
) -> tuple[Part, ...]:
    """Split the KL of a batch by cause; no part without a valid token or a finite KL.

    mismatch: the trainer's log-probs now against the engine's
    synced:   the trainer's log-probs under the weights that sampled against the engine's, over the same tokens
    replayed: the same as `synced`, or else as `mismatch`, but with the engine's experts
    fresh:    the trainer still has the weights that sampled: nothing is stale
    sampling: how the rollout was sampled; None: not known
    expected: the KL of the precision that runs; None: not known
    routed:   the trainer picks the experts, which lower precision changes
    """
    total = mismatch.k3
    if not mismatch.tokens or not isfinite(total):
        return ()
    parts: list[Part] = []
    open_causes: list[str] = []  # causes that cannot be told from the rest here
    engine, left = mismatch, total  # the policy that is known to be nearest to the engine's, and the KL without a part
    if synced is not None and isfinite(synced.k3):  # else a ratio overflows
        parts.append(_measured(STALENESS, total - synced.k3, left))
        engine = synced
    elif (stale := _by_version(mismatch)) is not None:
        parts.append(Part((STALENESS,), stale, stale, total, "bounded"))
    elif not fresh:
        open_causes.append(STALENESS)
    left -= sum(part.kl for part in parts)
    precision = (PRECISION, ROUTING) if routed else (PRECISION,)
    if replayed is not None and isfinite(replayed.k3):
        routing = _measured(ROUTING, engine.k3 - replayed.k3, left)
        parts.append(routing)
        engine, left, precision = replayed, left - routing.kl, (PRECISION,)
        expected = None if expected is None else expected.less(routing.kl)
    elif routed and expected is not None and expected.replayed:  # routing comes on top of what is expected
        open_causes.append(ROUTING)
        precision = (PRECISION,)
    cut = _sampled(engine, sampling, max(left, 0.0))
    if cut is None:
        open_causes.append(SAMPLING)
    elif cut.kl:
        if expected is not None and not open_causes:
            likely = min(max(expected.kl, left - cut.high), left - cut.low)
            cut = replace(cut, kl=left - likely)
        elif (cut.high - cut.low) / 2 > APART * min(cut.kl, left - cut.kl):
            return (*parts, Part((SAMPLING, *precision, *open_causes, REST), left, left, left, "left over"))
        parts.append(cut)
        left -= cut.kl
    parts += _rest(max(left, 0.0), open_causes, expected, precision)
    return tuple(parts)


def _measured(cause: str, kl: float, most: float) -> Part:
    """A measured part. The noise of a difference may make it negative, or more than the KL that is left."""
    kl = min(max(kl, 0.0), most)
    return Part((cause,), kl, kl, kl, "measured")


def _by_version(mismatch: Mismatch) -> float | None:
    """The KL beyond that of the newest weights' tokens; None with tokens of one version."""
    if len(mismatch.versions) < 2:
        return None
    return max(mismatch.k3 - mismatch.versions[max(mismatch.versions)].k3, 0.0)


def _sampled(engine: Mismatch, sampling: Sampling | None, most: float) -> Part | None:
    """The part of the sampling; 0 if it changes nothing, None if it is unknown or inseparable."""
    if sampling is None or sampling.reshapes or sampling.greedy:
        return None
    if not sampling.truncates or sampling.kept_set or sampling.logprobs_mode != PROCESSED:
        return None if sampling.remarks() else _measured(SAMPLING, 0.0, most)
    if len(sampling.remarks()) > 1:
        return None  # the temperature too: one mean ratio cannot separate the two
    mass = engine.mean_ratio
    if 1.0 - mass <= ERRORS * engine.mean_ratio_error:
        return _measured(SAMPLING, 0.0, most)
    low, least = -log(mass) - (1.0 - mass), sampling.smallest_kept
    high = most if least is None else (1.0 - mass) / (1.0 - least) * -log(least) - (1.0 - mass)
    low, high = min(low, most), min(max(high, low), most)
    return Part((SAMPLING,), (low + high) / 2, low, high, "bounded")


def _rest(left: float, unknown: Sequence[str], expected: Expected | None, precision: tuple[str, ...]) -> list[Part]:
    """Parts of the remaining KL: that of the precision, and that of the causes that cannot be told apart."""
    if expected is None:
        return [Part((*precision, *unknown, REST), left, left, left, "left over")]
    most = expected.kl if unknown else expected.high
    kl = left if left <= most else min(expected.kl, left)
    parts = [Part(precision, kl, min(expected.low, kl), min(expected.high, left), "expected")]
    if left - kl > 0:
        low, high = max(left - expected.high, 0.0), left - parts[0].low
        parts.append(Part((*unknown, REST), left - kl, low, high, "left over"))
    return parts


def sentence(parts: Sequence[Part | KlPart], differing: float | None = None) -> str:
    """The parts in words, the largest first: "KL 6e-3: 4e-3 staleness, 2e-3 precision". "" without parts.

    parts:     those of `attributed`, or of a record
    differing: share of the tokens for which the trainer's routers pick other experts; None: not known
    """
    sizes = [(part.kl or 0.0, part.causes) for part in parts]
    total = sum(kl for kl, _ in sizes)
    shown = sorted((size for size in sizes if size[0] > SHOWN * total), key=lambda size: -size[0])
    if len(shown) == 1:
        words = " or ".join(shown[0][1])
    else:
        words = ", ".join(f"{_short(kl)} {' or '.join(causes)}" for kl, causes in shown)
    if not words:
        return ""
    kl = f"KL {_short(total)}: {words}"
    return kl if differing is None else f"{kl}; routers of trainer and engine disagree on {differing:.1%} of the tokens"


def _short(kl: float) -> str:
    """Two digits: 4e-3, 1.2e-2."""
    digits, _, power = f"{kl:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"
