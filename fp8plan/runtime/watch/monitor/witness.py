"""The engine or guard behind a Monitor: what it saw of a rollout, its verdict, and the actions that it has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, Protocol

from fp8plan.checks import instance
from fp8plan.errors import ConfigError, warn
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action, answered
from fp8plan.runtime.watch.guard.guard import Guard, Judged, Verdict, judged
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation
from fp8plan.runtime.watch.guard.rollout_record import observation_in
from fp8plan.runtime.watch.mismatch.metrics import Mismatch
from fp8plan.runtime.watch.mismatch.sampling import Sampling


class Launched(Protocol):
    """How an engine was started."""

    @property
    def precision(self) -> str:
        """Name of its preset."""


class Engine(Protocol):
    """An engine that judges its own rollouts, such as RolloutEngine, AsyncRolloutEngine and RolloutFleet."""

    @property
    def guard(self) -> Guard | None:
        """The guard that judges the rollouts."""

    @property
    def guard_off(self) -> str | None:
        """Why there is no verdict."""

    @property
    def launch(self) -> Launched:
        """Its start."""

    @property
    def observation(self) -> Observation | None:
        """The rollouts since the last step."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on them."""

    def report_kl(self, kl_k3: float) -> None:
        """Take the mean k3 of the last rollout, in nats per token."""

    def engine_facts(self) -> EngineFacts:
        """Facts about what runs now."""


class Witness:
    """An engine that judges its own rollouts; or a guard and the facts of another engine; or none of them.

    Raises ConfigError for an engine that does not judge its rollouts, or that comes with a guard or facts.
    """

    def __init__(self, engine: Engine | None, guard: Guard | None, facts: EngineFacts | None) -> None:
        if guard is not None:
            instance("guard", guard, Guard, "Guard(facts)")
        if engine is not None and (guard is not None or facts is not None):
            raise ConfigError("an engine and a guard or facts are given; allowed: the engine, which has both, alone")
        if engine is not None and not hasattr(engine, "report_kl"):
            raise ConfigError(
                f"the engine is {type(engine).__name__}, which does not judge its rollouts itself; allowed: an engine "
                "of fp8plan (RolloutEngine, AsyncRolloutEngine, RolloutFleet), or guard=engine.guard, and step(..., "
                "rollout=observation_of(outputs, seconds)), which is in fp8plan.runtime.watch.guard.observation"
            )
        self.engine, self.facts, self._guard = engine, facts, guard
        self._rollout: Observation | None = None  # the engine's last rollout that is in a record
        self._judged_at: float | None = None  # the last rollout without an engine, by time.perf_counter
        self._warned: set[str] = set()

    @property
    def guard(self) -> Guard | None:
        """The guard that judges the rollouts: the engine's, or the Witness's own."""
        return self._guard if self.engine is None else self.engine.guard

    def judged(
        self, rollout: Observation | Mapping[str, Any] | None, mismatch: Mismatch, own: int | None = None
    ) -> Judged:
        """The observation of a rollout, and the verdict of the engine or of the guard on it.

        own: tokens of this rank's batch; None: not known
        """
        if self.engine is not None:
            by_engine = self._by_engine(self.engine, mismatch)
            if own is not None and by_engine.observation is not None:
                self._compare(by_engine.observation.output_tokens, own, mismatch.tokens + mismatch.invalid)
            return by_engine._replace(observation=rollout) if isinstance(rollout, Observation) else by_engine
        if rollout is None or (isinstance(rollout, Mapping) and rollout.get("seconds") is None):
            return Judged()
        before, self._judged_at = self._judged_at, time.perf_counter()
        since_s = None if before is None else self._judged_at - before

        def observe() -> Observation:
            seen = rollout if isinstance(rollout, Observation) else observation_in(rollout)
            seen = seen.after(since_s)
            return replace(seen, kl_k3=mismatch.k3_robust) if seen.kl_k3 is None and mismatch.tokens else seen

        by_guard = judged(self.guard, observe)
        if by_guard.off is not None and self.guard is not None:
            self.warn_once("guard", by_guard.off)
        return by_guard

    def _by_engine(self, engine: Engine, mismatch: Mismatch) -> Judged:
        """The engine's verdict on the rollouts since the last step, once for all steps that train on them.

        An engine that does not answer, perhaps because it has died, must not cost the step.
        """
        try:
            if mismatch.tokens and isfinite(mismatch.k3_robust):
                engine.report_kl(mismatch.k3_robust)
            last = Judged(engine.observation, engine.verdict, engine.guard_off)
        except Exception as error:
            text = f"the engine does not say how its rollout was: {error}"
            self.warn_once("guard", text)
            return Judged(off=text)
        if last.observation is not None and last.observation is self._rollout:
            return Judged()
        self._rollout = last.observation
        if last.off is not None:
            self.warn_once("guard", last.off)
        return last

    def _compare(self, sampled: int, own: int, every: int) -> None:
        """Warn if a rollout is not that of the batch.

        sampled: tokens of the rollout; own, every: tokens of the batch, in this rank and in all
        """
        if not own <= sampled <= every:
            self.warn_once(
                "batch",
                f"a step's batch has {every:,} tokens, and its rollout {sampled:,}. If calls beside the rollout were "
                "counted (an evaluation, a scoring), type: with engine.rollout(): around the calls of the batch; if "
                "responses were cut or left out, or the step has a part of the batch, nothing is wrong",
            )

    def sampling(self, rollout: Observation | Mapping[str, Any] | None) -> Sampling | None:
        """The sampling of a step's rollout, or else of the engine's last; None: not known."""
        params = rollout.get("sampling") if isinstance(rollout, Mapping) else getattr(rollout, "sampling", None)
        if params is not None:
            return Sampling.of(params)
        return None if self._rollout is None else self._rollout.sampling

    def running(self) -> EngineFacts | None:
        """Facts about the engine that runs now; None, with a warning, if it does not answer."""
        if self.engine is None:
            return self.facts if self.facts is not None or self.guard is None else self.guard.facts
        try:
            return self.engine.engine_facts()
        except Exception as error:
            text = f"the engine does not say what runs: {error}. Training goes on without it in the records"
            self.warn_once("engine", text)
            return None

    def can(self, escalation: Escalation) -> bool:
        """False if the engine that runs has no action left for an escalation; True if that is not known."""
        facts = self.running() if self.guard is None else self.guard.facts
        if facts is None or facts.precision not in PRESETS:
            return True
        state = None if self.guard is None else self.guard.state
        return answered(state, facts.precision, escalation, facts.kv_fixed) != Action.NONE

    def warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warn(text)
