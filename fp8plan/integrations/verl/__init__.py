"""fp8plan in verl: with `actor_rollout_ref.rollout.name=fp8plan` rollouts are planned, synced and corrected."""

from typing import Final

NAME: Final = "fp8plan"  # name of the rollout
