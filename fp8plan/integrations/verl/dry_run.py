"""The trainer of a dry run in verl: it prints the plan, and then does nothing where verl would start and train."""

from __future__ import annotations

from typing import Any

from omegaconf import open_dict

from fp8plan.integrations.common import announce
from fp8plan.integrations.verl.settings import check_verl, plan_of, refuse, settings_in


class DryRun:
    """A trainer, and a manager of agent loops, with the methods that verl's TaskRunnerV1 calls.

    Raises ConfigError as the planned trainer does.
    """

    def __init__(self, config: Any) -> None:
        check_verl()
        settings = settings_in(config)
        refuse(config)
        announce(plan_of(config, settings), settings.plan or "auto", settings.choice, dry_run=True)
        agent = config.actor_rollout_ref.rollout.agent
        with open_dict(agent):  # verl's own manager would start workers
            agent.agent_loop_manager_class = f"{__name__}.{type(self).__name__}"

    def init(self) -> None:
        """Start nothing."""

    def get_llm_client(self) -> None:
        """Return no client, for there is no server."""

    def get_teacher_client(self) -> None:
        """Return no client."""

    def get_reward_handles(self) -> None:
        """Return no worker."""

    @classmethod
    def create(cls, **_: Any) -> None:
        """Make no manager."""

    def fit(self, manager: None) -> None:
        """Train nothing."""
