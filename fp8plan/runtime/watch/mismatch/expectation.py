"""The KL that a plan or a probe expects of the precision that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.risk.remedies import Remedies


@runtime_checkable
class Probe(Protocol):
    """The result of `fp8plan.probe`."""

    def interval_of(self, precision: str | None, remedies: Remedies) -> tuple[float, float, float] | None:
        """k3 of a preset under these remedies, in nats per token, and the ends of its 90% interval; None if it was not
        measured."""


class Expected(NamedTuple):
    """The expected KL of a precision (k3, nats per token), with its 90% interval.

    replayed: it is that of a trainer which replays the engine's experts; else it includes the KL of their routing
    """

    kl: float
    low: float
    high: float
    replayed: bool = False

    def less(self, routing: float) -> Expected:
        """The expected KL of the precision alone. routing: the measured KL of the routing"""
        if self.replayed:
            return self
        kl, low, high = (max(end - routing, 0.0) for end in self[:3])
        return Expected(kl, low, high, True)


def expected_by(plan: Plan, choice: str | None) -> Expected | None:
    """The KL that a plan expects of a choice, or of the chosen one; None if it has none."""
    try:
        chosen = plan.select(choice)
    except ConfigError:  # another plan than the engine's
        return None
    if chosen.kl_k3 is None or chosen.kl_k3_low is None or chosen.kl_k3_high is None:
        return None
    return Expected(chosen.kl_k3, chosen.kl_k3_low, chosen.kl_k3_high, plan.remedies.router_replay)


def has_experts(model: str | None) -> bool:
    """True for a model that is known to have experts. model: hub id or folder; None: not known"""
    try:
        return model is not None and bool(ModelShape.from_hf(model).parts_of(Experts))
    except ConfigError:  # a model that cannot be planned
        return False
