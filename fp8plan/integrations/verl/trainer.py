"""verl's trainers with planned rollouts: the plan before anything starts, then thresholds, figures and verdicts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.integrations.common import announce, load_state, metrics_of, report_of, safer_than, save_state
from fp8plan.integrations.verl.settings import (
    WHERE,
    Settings,
    check_verl,
    correcting_with,
    engine_kwargs,
    hand_on,
    plan_of,
    refuse,
    remedies_in,
    sampling_in,
    separate,
    settings_in,
)
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.expected import THRESHOLD
from fp8plan.runtime.apply.engine.options import remarks
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds
from fp8plan.runtime.watch.correction.verl import from_verl
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings
from fp8plan.runtime.watch.guard.guard import Guard
from fp8plan.runtime.watch.guard.observation import Observation
from fp8plan.runtime.watch.mismatch.metrics import SLOTS
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.record import Step

logger = logging.getLogger(__name__)


@cache
def planned_class(stock: type[Any]) -> type[Any]:
    """The planned trainer of a mode. stock: verl's own class"""
    return type(f"Planned{stock.__name__}", (PlannedTrainer, stock), {})


class PlannedTrainer:
    """Methods that extend those of verl's trainer.

    plan:    the plan that its engines run
    monitor: measures, decides and records each batch; set once the engines run

    Raises ConfigError, before anything starts, for a verl that was not tested, and for bad settings.
    """

    config: Any
    global_steps: int
    trainer_mode: str

    def __init__(self, config: Any) -> None:
        check_verl()
        self._settings = settings_in(config)
        refuse(config)
        self._correction, self.plan = started_with(plan_of(config, self._settings), config, self._settings)
        self._planned, self._sampling = self.plan.setup(), sampling_in(config.actor_rollout_ref.rollout)
        # Bad settings raise before engines start.
        self._controller = self._settings.controller(self._correction, self.plan)
        announce(self.plan, self._settings.plan or "auto", self._settings.choice)
        for text in self.plan.warnings:
            logger.info("fp8plan: %s", text)
        for remark in remarks(engine_kwargs(config)):
            logger.warning("fp8plan: %s", remark)
        hand_on(config, self.plan.to_json(), self._planned.limits.max_model_len or 0)
        self.monitor: Monitor
        super().__init__(config=config)  # type: ignore[call-arg]

    def init(self) -> None:
        """Start and sync the engines, as verl does, and then the Monitor."""
        super().init()  # type: ignore[misc]
        facts, guard = self._seen()[0]["facts"], None
        if self._timed:
            try:
                guard = Guard(facts, GuardSettings(anchor=self.plan.anchor))
            except Fp8PlanError as error:  # a GPU without a profile
                logger.warning("fp8plan does not compare rollouts with a prediction: %s", error)
        sinks = self._settings.sinks()
        self.monitor = Monitor(
            self._correction, self._controller, sinks, plan=self.plan, guard=guard, facts=facts,
            router_replay=remedies_in(self.config).router_replay,
        )  # fmt: skip
        if self.global_steps:
            self._load_state()

    @property
    def _timed(self) -> bool:
        """True if a rollout is one batch that begins and ends between two syncs."""
        return self.trainer_mode == "sync"

    def on_sample_begin(self) -> None:
        super().on_sample_begin()  # type: ignore[misc]
        ray.get([server.fp8plan_begin.remote() for server in self._servers()])

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute advantages as verl does, with the Monitor's weights and mask in the place of verl's correction."""
        corrected = []

        def correct(data: Any, _: Any) -> tuple[Any, dict[str, float]]:
            corrected.append(True)
            return data, self._step(data, versions_of(batch.tags))

        with correcting_with(correct):
            computed = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if not corrected:
            raise ConfigError(
                "verl's batch has no rollout_log_probs, so nothing was corrected; allowed: an agent loop that returns "
                "the log-probs of what it sampled, or actor_rollout_ref.rollout.name=vllm"
            )
        return computed

    def _step(self, data: Any, versions: list[int] | None) -> dict[str, float]:
        """Let the Monitor see a batch, and write its mask and weights there. Return the figures for verl's log.

        versions: [batch] versions of the weights that sampled; None if they are not known
        """
        seen = self._seen()
        rollouts = [server["rollout"] for server in seen if server["rollout"] is not None] if self._timed else []
        slowest = max(rollouts, key=lambda rollout: rollout["seconds"], default=None)  # which ends the rollout
        batch = data.batch
        step = self.monitor.step(
            batch["old_log_probs"],
            batch["rollout_log_probs"],
            batch["response_mask"].bool(),
            versions=versions,
            rollout=None if slowest is None else Observation(**slowest),
            sampling=Sampling.mixed(rollout["sampling"] for rollout in rollouts) or self._sampling,
        )
        batch["response_mask"] = torch.as_tensor(step.mask).to(batch["response_mask"].dtype)
        if step.weights is not None:
            batch["rollout_is_weights"] = torch.as_tensor(step.weights)
        status = seen[0]["status"]
        report = None if status["last_update"] is None else report_of(status, status["last_update"]["seconds"]["total"])
        metrics = {name: figure for name, figure in step.metrics.items() if figure is not None}
        of_verl = {name: figure for name, figure in metrics.items() if name.startswith("rollout_corr/")}
        self._advise(step)
        return of_verl | metrics_of(step, self._planned.precision, report)

    def _advise(self, step: Step) -> None:
        """Log the advice of the guard, or else of the controller: verl's engines are not restarted in a run."""
        running = self._planned.precision.name
        safer = safer_than(running, step.action, step.decided.escalate)
        if safer is not None:
            why = step.decided.reason if step.verdict is None or step.action == Action.NONE else step.verdict.reason
            logger.warning(
                "fp8plan advises a step down from %s: %s; go on from a checkpoint with +%s.choice=%s", running, why,
                WHERE, safer,
            )  # fmt: skip

    def _servers(self) -> list[Any]:
        """The servers that sample. If engines have GPUs of their own, they are only these: the others come and go."""
        managers = self._rollout_server_managers()  # type: ignore[attr-defined]
        lasting = managers[-1:] if separate(self.config) else managers
        return [replica.servers[0] for manager in lasting for replica in manager.get_replicas()]

    def _seen(self) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = ray.get([server.fp8plan_seen.remote() for server in self._servers()])
        return seen

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()  # type: ignore[misc]
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        save_state(self.monitor.state_dict(), folder)

    def _load_state(self) -> None:
        """Restore thresholds and the guard's memory from the checkpoint that verl has resumed from."""
        trainer = self.config.trainer
        resumed = trainer.resume_mode == "resume_path"
        step = f"global_step_{self.global_steps}"
        folder = Path(trainer.resume_from_path) if resumed else Path(trainer.default_local_dir) / step
        state = load_state(folder)
        if state is not None:
            self.monitor.load_state_dict(state)


def versions_of(tags: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The version of the weights that began each trajectory, from verl's tags of a batch; None if one has none.

    A tag has the first and the last version, but not the tokens of each. By the first, all tokens of the newest version
    are fresh. Versions that are too old for the Monitor's SLOTS count as the oldest that fits.
    """
    versions = [tag.get("min_global_steps") for tag in tags]
    known = [version for version in versions if version is not None]
    if not known or len(known) < len(versions):
        return None
    oldest = max(known) - SLOTS + 1
    return [max(version, oldest) for version in known]


def started_with(plan: Plan, config: Any, settings: Settings) -> tuple[CorrectionSettings, Plan]:
    """The correction to begin with, and the plan without the thresholds that it replaces.

    verl's rollout_correction goes before the plan's thresholds if the user has set one. Raises ConfigError for a
    rollout_correction that fp8plan does not have.
    """
    if not settings.correct:
        return CorrectionSettings(level=None, thresholds=Thresholds(None)), replace(plan, thresholds={})
    of_verl = config.algorithm.get("rollout_correction") or {}
    if of_verl.get("rollout_is") is None and of_verl.get("rollout_rs") is None:
        return CorrectionSettings(), plan
    correction = from_verl(OmegaConf.to_container(of_verl, resolve=True))
    if (correction.level, correction.thresholds) == ("token", Thresholds(plan.thresholds.get(THRESHOLD))):
        return replace(correction, thresholds=None), plan  # the words of `fp8plan emit`, which repeat the plan
    return correction, replace(plan, thresholds={})
