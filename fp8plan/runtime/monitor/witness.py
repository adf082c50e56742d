"""The engine, or the guard, behind a Monitor: its verdict on each rollout, and what runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from fp8plan.checks import instance
from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.controller.state import Escalation
from fp8plan.runtime.engine.rollout_timer import Judged, judged
from fp8plan.runtime.guard.fallback import Action
from fp8plan.runtime.guard.guard import Guard, answer
from fp8plan.runtime.guard.observation import EngineFacts, Observation
from fp8plan.runtime.mismatch.metrics import Mismatch
from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.monitor import record as run_record
from fp8plan.runtime.monitor.sinks import warn

if TYPE_CHECKING:
    from fp8plan.runtime.engine.engine import RolloutEngine
    from fp8plan.runtime.fleet.fleet import RolloutFleet


class Witness:
    """An engine that judges its own rollouts, or a guard and the facts of one that does not; or none of them.

    Raises ConfigError for an engine that does not judge its rollouts, or that comes with a guard or facts.
    """

    def __init__(
        self, engine: RolloutEngine | RolloutFleet | None, guard: Guard | None, facts: EngineFacts | None
    ) -> None:
        if guard is not None:
            instance("guard", guard, Guard, "Guard(facts)")
        if engine is not None and (guard is not None or facts is not None):
            raise ConfigError("an engine and a guard or facts are given; allowed: the engine, which has both, alone")
        if engine is not None and not hasattr(engine, "report_kl"):
            raise ConfigError(
                f"the engine is {type(engine).__name__}, which does not judge its rollouts itself; allowed: "
                "RolloutEngine, or guard=engine.guard, and step(..., rollout=observation_of(outputs, seconds)), which "
                "is in fp8plan.runtime.guard.observation"
            )
        self.engine, self.facts = engine, facts
        self._guard = guard
        self._rollout: Observation | None = None  # the last one of the engine's that is in a record
        self._warned: set[str] = set()

    @property
    def guard(self) -> Guard | None:
        """The guard that judges the rollouts: the engine's, or the one given."""
        return self._guard if self.engine is None else self.engine.guard

    def judged(self, rollout: Observation | Mapping[str, Any] | None, mismatch: Mismatch) -> Judged:
        """The observation of a rollout, and the verdict of the engine or of the guard on it."""
        if self.engine is not None:
            found = self._by_engine(self.engine, mismatch)
            return found._replace(observation=rollout) if isinstance(rollout, Observation) else found
        if rollout is None or (isinstance(rollout, Mapping) and rollout.get("seconds") is None):
            return Judged()

        def observe() -> Observation:
            seen = rollout if isinstance(rollout, Observation) else run_record.observation(rollout)
            return replace(seen, kl_k3=mismatch.k3_robust) if seen.kl_k3 is None and mismatch.tokens else seen

        found = judged(self.guard, observe)
        if found.off is not None and self.guard is not None:
            self.warn_once("guard", found.off)
        return found

    def _by_engine(self, engine: RolloutEngine | RolloutFleet, mismatch: Mismatch) -> Judged:
        """The engine's verdict on its last rollout: once, however many steps train on it. An engine that cannot tell,
        as it has died perhaps, must not cost the step.
        """
        try:
            if mismatch.tokens and isfinite(mismatch.k3_robust):
                engine.report_kl(mismatch.k3_robust)
            found = Judged(engine.observation, engine.verdict, engine.guard_off)
        except Exception as error:
            text = f"the engine does not say how its rollout was: {error}"
            self.warn_once("guard", text)
            return Judged(off=text)
        if found.observation is not None and found.observation is self._rollout:
            return Judged()
        self._rollout = found.observation
        if found.off is not None:
            self.warn_once("guard", found.off)
        return found

    def sampling(self, rollout: Observation | Mapping[str, Any] | None) -> Sampling | None:
        """The sampling of the rollout that a step was given, or else of the engine's last; None: not known."""
        params = rollout.get("sampling") if isinstance(rollout, Mapping) else getattr(rollout, "sampling", None)
        return Sampling.of(params) if params is not None or self._rollout is None else self._rollout.sampling

    def running(self) -> EngineFacts | None:
        """Facts about the engine that runs now.

        An engine that cannot tell them, because it has died perhaps, must not cost the step.
        """
        if self.engine is None:
            return self.facts if self.facts is not None or self.guard is None else self.guard.facts
        try:
            return self.engine.engine_facts()
        except Exception as error:
            text = f"the engine does not say what runs: {error}. Training goes on without it in the records"
            self.warn_once("engine", text)
            return None

    def can(self, escalation: Escalation) -> bool:
        """Return False if the engine that runs has nothing left to do for an escalation. True if that is not known."""
        facts = self.running() if self.guard is None else self.guard.facts
        if facts is None or facts.precision not in PRESETS:
            return True
        return answer(self.guard, facts.precision, escalation) != Action.NONE

    def warn_once(self, of: str, text: str) -> None:
        if of not in self._warned:
            self._warned.add(of)
            warn(text)
