"""The guard of a whole fleet: it remembers what was done, and its replicas' guards judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8plan.runtime.guard.fallback import Action, GuardSettings
from fp8plan.runtime.guard.guard import Guard
from fp8plan.runtime.guard.observation import EngineFacts


class FleetGuard(Guard):
    """A Guard that tells all replicas' guards the rung that the fleet has taken, also one of a checkpoint.

    It judges no rollout itself, so that it counts nothing.

    facts: of one replica
    tell:  tells the replicas that live which rung was taken
    """

    def __init__(self, facts: EngineFacts, settings: GuardSettings, tell: Callable[[Action], Any]) -> None:
        super().__init__(facts, settings)
        self._tell = tell

    def took(self, action: Action) -> None:
        """Note that a rung was taken, here and in the replicas."""
        super().took(action)
        self.remind()

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from a saved state, and the replicas with its rung. Raises ConfigError as a Guard does."""
        super().load_state_dict(data)
        self.remind()

    def remind(self) -> None:
        """Tell the replicas, of which some may be new, the rung."""
        self._tell(self.state.rung)
