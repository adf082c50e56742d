"""The one pipeline from an engine and a batch to seconds: memory, then the schedule, then its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fp8plan.model.cost.step import StepModel
from fp8plan.model.memory import MemoryPlan
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, rollout, schedules
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch


class Simulated(NamedTuple):
    """A simulated rollout of one batch, and what it was found with. schedules: one per replica"""

    model: StepModel
    memory: MemoryPlan
    schedules: list[Schedule]
    rollout: Rollout

    @property
    def extrapolated(self) -> bool:
        """True if the profile was used outside of what was measured for it."""
        return bool(self.rollout.extrapolated) or self.model.profile.layout_error(*self.model.limits.cut) > 0


def simulate(
    setup: EngineSetup,
    batch: Batch,
    profile: Profile,
    *,
    memory: MemoryPlan | None = None,
    known: Sequence[Schedule] | None = None,
    experts_hit: int | None = None,
) -> Simulated:
    """Simulate the rollout of `batch` on an engine.

    memory: the engine's memory, if it is already known
    known:  schedules of the same batch with another KV pool; each is reused if it also holds for this pool
    experts_hit: as in StepModel

    Raises ConfigError for a model that is not modelled, CapacityError for one that does not fit, and ProfileError for a
    kernel that was never measured.
    """
    found = memory or setup.memory(batch.longest)
    model = setup.step_model(profile, experts_hit)
    planned = schedules(batch.split(setup.limits.data_parallel_size), found.kv, setup.limits, known)
    return Simulated(model, found, planned, rollout(planned, model))
