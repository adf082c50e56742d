"""fp8plan in verl: with `actor_rollout_ref.rollout.name=fp8plan` rollouts are planned, synced and corrected.

fp8plan.integrations.verl.planned(config, gpu="h200")  # the plan alone
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8plan.integrations.verl.settings import planned as planned

if not TYPE_CHECKING:  # verl imports this package whenever it is imported itself

    def __getattr__(name: str) -> Any:
        if name != "planned":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fp8plan.integrations.verl.settings import planned

        return planned
