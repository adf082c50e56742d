"""One call per training step: mismatch, thresholds, correction, guard, record.

    monitor = Monitor(sinks=[JsonLines("run.jsonl")], plan=plan, engine=engine)
    for ...:
        step = monitor.step(train_logprobs, rollout_logprobs, mask)
        loss = step.loss(token_losses)

One call sees the whole batch of one optimiser step, as thresholds follow from all its tokens. Cut weights and mask
into micro-batches afterwards, like everything else. Over ranks, divide by the mask's sum over all of them.

With torch.distributed every rank calls `step`, even without tokens. The first rank of the group decides for all, and
writes alone; a failure to write stops no rank. Make the monitor after the process group, or let the launcher set RANK:
the monitor opens its files at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from fp8plan.checks import instance, whole
from fp8plan.errors import ConfigError, warn
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.remedies import Remedies
from fp8plan.packages import check_torch
from fp8plan.runtime.watch.controller.alarms import MEANINGS
from fp8plan.runtime.watch.controller.fit import suited
from fp8plan.runtime.watch.controller.laws import Controller, after_correction
from fp8plan.runtime.watch.controller.state import ControllerState, Update, expecting
from fp8plan.runtime.watch.correction.correct import Correction, CorrectionSettings, Thresholds, correct
from fp8plan.runtime.watch.guard.guard import Guard, Judged
from fp8plan.runtime.watch.guard.observation import EngineFacts
from fp8plan.runtime.watch.mismatch.attribution import attributed
from fp8plan.runtime.watch.mismatch.expectation import Expected, Probe, expected_by, has_experts
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.metrics import MismatchSums
from fp8plan.runtime.watch.mismatch.pieces import check_group
from fp8plan.runtime.watch.mismatch.routing import differing, share_of_all
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.mismatch.sums import gathered, rank
from fp8plan.runtime.watch.monitor.record import (
    Metrics,
    Step,
    checked_rollout,
    control_metrics,
    own_metrics,
    record_of,
    speed_metrics,
)
from fp8plan.runtime.watch.monitor.sinks import Sink, Sinks
from fp8plan.runtime.watch.monitor.witness import Engine, Witness
from fp8plan.schemas import ROUTING_DIFFERS

if TYPE_CHECKING:
    from fp8plan.runtime.watch.mismatch.measure import Array
    from fp8plan.runtime.watch.mismatch.metrics import Mismatch
    from fp8plan.runtime.watch.monitor.record import Rollout


class _Context(NamedTuple):
    """Facts about a step beside its log-probs.

    number, rollout, fresh: arguments of `Monitor.step`
    begun:    seconds, by time.perf_counter
    tokens:   those of this rank's batch; None: not known
    sampling: the step's, or else the Monitor's; None: that of the rollout
    own:      the loop's own figures
    nearer:   "synced" and "replayed", arguments of `attributed`
    """

    number: int
    begun: float
    tokens: int | None
    rollout: Rollout
    sampling: Sampling | None
    own: Metrics
    nearer: Mapping[str, Mismatch]
    fresh: bool = False


class Monitor:
    """One call per training step: measure, decide the thresholds, correct, judge the rollout, write the record.

    settings:   settings of the correction, with the controller's initial thresholds; None: token TIS
    controller: ConstantThresholds, or LevelThresholds, which tighten when the KL rises. None: the default law
                (fp8plan.runtime.watch.controller.fit): C of token TIS from 4 to 2, all else constant
    sinks:      destinations of the records; opened here, on rank 0 only
    plan:       gives the controller its initial thresholds, and the expected KL of the precision that runs: the
                engine's, also after a step down; without an engine, that of the plan's choice
    engine:     the RolloutEngine, AsyncRolloutEngine or RolloutFleet that samples. Its rollouts since the last step,
                its guard's verdict and its facts go into the record, and it gets the KL (`report_kl`). A warning says
                if the rollout has other tokens than the batch
    guard:      without an engine: judges the rollouts that `step` gets, in the caller's time (1,536 responses of 20,000
                tokens: 2 s)
    facts:      without an engine: facts about the one that runs, for the record; None: the guard's
    probe:      the result of `fp8plan.probe` for the precision that runs; `step.attribution` prefers it to the plan
    sampling:   how rollouts are sampled, as Sampling.of reads it; None: that of the engine's last rollout, if known
    router_replay: the trainer's log-probs have the engine's experts: no part of the KL is routing. None: as planned
    group:      process group of the ranks that share the batch; None: all
    sequence_group: process group of the ranks that hold pieces of the same sequences, as under context or sequence
                parallelism: each passes its piece of every sequence. It is a part of `group`. None: each rank's
                sequences are whole

    If thresholds cannot help further, `step.decided.escalate` names the next action. With a RolloutEngine, call
    `engine.apply(step.verdict, step.decided.escalate)` before the next sync.

    It follows the guard's advice, or else `escalate`. With another engine, the training loop acts itself: on
    "recalibrate_kv", and at a KL beyond repair on "step_down", to a precision with less FP8. `escalate` is None if the
    engine has no safer precision left; `step.decided.reason` says so.

    `failures` counts the lost records of each sink: a sink never stops training.
    Raises ConfigError for arguments that cannot work, for a sink that cannot be opened, and without torch.
    """

    def __init__(
        self,
        settings: CorrectionSettings | None = None,
        controller: Controller | None = None,
        sinks: Sequence[Sink] = (),
        *,
        plan: Plan | None = None,
        engine: Engine | None = None,
        guard: Guard | None = None,
        facts: EngineFacts | None = None,
        probe: Probe | None = None,
        sampling: Any = None,
        router_replay: bool | None = None,
        group: Any = None,
        sequence_group: Any = None,
    ) -> None:
        check_torch("a Monitor")
        if sequence_group is not None:
            check_group(sequence_group, group)
        if plan is not None:
            instance("plan", plan, Plan, "fp8plan.plan(...), or Plan.from_json(text)")
        self._witness = Witness(engine, guard, facts)
        self.settings = CorrectionSettings() if settings is None else settings
        instance("settings", self.settings, CorrectionSettings, "CorrectionSettings(level='token')")
        # Any: each law takes its own kind of state.
        self.controller: Any = suited(self.settings, controller, plan)
        self.engine, self.facts, self.group, self.sequence_group = engine, facts, group, sequence_group
        if probe is not None:
            instance("probe", probe, Probe, "fp8plan.probe(...)")
        self._plan, self._probe, self._sampling = plan, probe, Sampling.of(sampling)
        model = getattr(self._witness.running(), "model", None) if plan is None else plan.model
        planned = Remedies() if plan is None else plan.remedies
        self._remedies = planned if router_replay is None else replace(planned, router_replay=router_replay)
        self._expected, self._routed = self._expectation(), not self._remedies.router_replay and has_experts(model)
        self._planned_for = self._precision()
        self.state: ControllerState = self.controller.initial(plan, self._planned_for)
        self._fresh = self.state
        self.steps, self._resumed = 0, False
        self._rolled_out = False  # True once a record has a rollout
        self._sinks = Sinks(sinks)
        self._open = rank(group) == 0
        if self._open:
            self._sinks.open()

    @property
    def guard(self) -> Guard | None:
        """The guard that judges the rollouts: the engine's, or the Monitor's own."""
        return self._witness.guard

    @property
    def thresholds(self) -> Thresholds:
        """The last thresholds; the initial ones before the first step."""
        return self.state.thresholds

    @property
    def failures(self) -> list[int]:
        return self._sinks.failures

    def step(
        self,
        train_logprobs: Array,
        rollout_logprobs: Array,
        mask: Array | None = None,
        *,
        lengths: Sequence[int] | Array | None = None,
        versions: Any = None,
        synced_logprobs: Array | None = None,
        replayed_logprobs: Array | None = None,
        routing_differs: float | None = None,
        fresh: bool = False,
        rollout: Rollout = None,
        sampling: Any = None,
        number: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Step:
        """Measure, decide, correct, judge, record.

        train_logprobs, rollout_logprobs, mask, lengths: arguments of `pack`: padded [batch, length] with a mask, or
                  packed [tokens] with lengths; in nats
        versions: argument of `measure`: versions of the weights that sampled, as `turn_versions` makes them of turns
        synced_logprobs: the trainer's log-probs under the very weights that sampled, in the form of train_logprobs, on
                  every rank or on none. They separate staleness from precision in `step.attribution`
        replayed_logprobs: the trainer's log-probs with the experts that the engine picked for each token, and with the
                  weights of synced_logprobs, or else of train_logprobs; likewise. They separate routing from precision
        routing_differs: the share of this rank's tokens with another expert in some layer; NaN: not known; likewise
        fresh:    the trainer still has the weights that sampled: nothing is stale
        rollout:  the rollout's seconds and lengths as an Observation, or the fields of a rollout record; None: the
                  engine's rollouts since the last step
        sampling: how the rollout was sampled, as Sampling.of reads it; None: the Monitor's, or else the rollout's. If
                  it biases the ratios, a warning and every step's reason say so
        number:   the step's number in the record; None: one more than the last
        metrics:  the loop's own figures for the record, from the first rank; the report draws `schemas.REWARD`,
                  "critic/rewards/mean". The Monitor's figures keep their names

        Weights made inside torch.inference_mode cannot be used in a loss: use torch.no_grad there.
        Raises ConfigError for log-probs that do not agree in shape or are above 0, and for a mask of other numbers than
        0 and 1. Raises it, too, for a `number` that is not whole, `metrics` that are no numbers, a `sampling` that vLLM
        does not allow, and settings that differ between ranks. All ranks then raise, and nothing has changed. A
        malformed rollout is left out of the record, with a warning.
        """
        begun = time.perf_counter()
        sums, routed, refusal, others = MismatchSums(), None, None, dict[str, MismatchSums]()
        optional: dict[str, Any] = {"synced_logprobs": synced_logprobs, "replayed_logprobs": replayed_logprobs}
        optional["routing_differs"] = routing_differs
        ways = {name: None if value is None else "present" for name, value in optional.items()}
        try:
            if self.sequence_group is not None:  # its ranks meet in each `pack`
                gathered(None, ways, self.sequence_group)
            tokens = pack(train_logprobs, rollout_logprobs, mask, lengths, self.sequence_group)
            for name, logprobs in (("synced", synced_logprobs), ("replayed", replayed_logprobs)):
                if logprobs is not None:
                    others[name] = measure(pack(logprobs, rollout_logprobs, mask, lengths, self.sequence_group))
                    others[name].check_units()
            if routing_differs is not None:
                routed = differing(tokens, routing_differs)
            done = self.steps + 1 if number is None else whole("number", number, 0, ", the step's")
            rollout, own = self._checked(rollout, done), own_metrics(metrics)
            sampled = self._sampling if sampling is None else Sampling.of(sampling)
            sums = measure(tokens, versions)
            sums.check_units()
        except Exception as error:  # the other ranks wait for this one, to refuse with it
            refusal = error
        mismatch = sums.reduced(self.group, refusal).metrics()
        update = self._decided(mismatch, ways)
        nearer = {name: other.reduced(self.group).metrics() for name, other in others.items()}
        enough = (1.0 - self.controller.limits.invalid) * mismatch.tokens
        nearer = {name: side for name, side in nearer.items() if side.tokens >= enough}
        if routed is not None:
            own[ROUTING_DIFFERS] = share_of_all(routed, self.group)
        correction = correct(tokens, self.settings, self.group, update[0])
        context = _Context(done, begun, self._tokens_in(sums), rollout, sampled, own, nearer, fresh)
        return self._concluded(mismatch, update, correction, context)

    def conclude(self, sums: MismatchSums, correction: Correction) -> Step | None:
        """Finish a step with micro-batches that were corrected one by one, with `thresholds`; decide the next ones.

        sums:       sums of `measure` over this rank's micro-batches
        correction: a Correction with the sums of all of this rank's corrections

        Every rank calls it, even without tokens. Returns None, and does nothing, if no rank has any.
        """
        context = _Context(self.steps + 1, time.perf_counter(), self._tokens_in(sums), None, self._sampling, {}, {})
        mismatch = sums.reduced(self.group).metrics()
        if not mismatch.tokens + mismatch.invalid:
            return None
        return self._concluded(mismatch, self._decided(mismatch, {}), correction, context)

    def _tokens_in(self, sums: MismatchSums) -> int | None:
        """The tokens of this rank's batch, also those without a finite log-prob. None if it holds pieces of sequences.

        The first rank of a sequence group counts the tokens of all of them.
        """
        return None if self.sequence_group is not None else int(sums["tokens"] + sums["invalid"])

    def _decided(self, mismatch: Mismatch, ways: dict[str, Any]) -> Update:
        """The first rank's update, for all ranks. ways: further settings of the step, which all ranks share

        Ranks may differ by rounding or in the checkpoint. Raises ConfigError, on all, if they correct in other ways.
        """
        self._follow_precision()
        own = self.controller.update(self.state, mismatch, self._witness.can)
        shared = {name: value for name, value in asdict(self.settings).items() if name != "thresholds"}
        update: Update = gathered(own, shared | ways, self.group)[0]
        return update

    def _concluded(self, mismatch: Mismatch, update: Update, correction: Correction, context: _Context) -> Step:
        """Go on to the next state, judge and record."""
        _, state, decided = update
        thresholds = correction.thresholds
        whole_batch = correction.reduced(self.group)
        # From here on nothing may raise: the other ranks have gone on.
        self.state, self.steps = state, context.number
        judged = self._witness.judged(context.rollout, mismatch, context.tokens)
        kv_clipped = judged.observation is not None and bool(judged.observation.kv_clipped)
        sampling = self._witness.sampling(context.rollout) if context.sampling is None else context.sampling
        decided = after_correction(decided, self.controller.limits, whole_batch, kv_clipped, sampling)
        if sampling is not None and sampling.biased and not rank(self.group):
            self._witness.warn_once("sampling", f"the ratios are biased: {'; '.join(sampling.remarks())}")
        metrics = {
            **context.own,
            **mismatch.recorded,
            **whole_batch.recorded,
            **control_metrics(thresholds, state, decided),
            **speed_metrics(judged.observation, judged.verdict),
            "fp8plan/sink_failures": float(sum(self.failures)),
            "fp8plan/monitor_s": time.perf_counter() - context.begun,
        }
        metrics = {name: None if value != value else value for name, value in metrics.items()}  # NaN: not known
        parts = attributed(
            mismatch, **context.nearer, fresh=context.fresh, sampling=sampling,
            expected=self._expected, routed=self._routed,
        )  # fmt: skip
        weights, mask = correction.weights, correction.mask
        step = Step(weights, mask, thresholds, mismatch, decided, judged.verdict, sampling, parts, metrics)
        for alarm in () if rank(self.group) else decided.alarms:
            self._witness.warn_once(alarm, f"alarm {alarm}: {': '.join(MEANINGS[alarm])}")
        if self._writes():
            self._sinks.write(self._record(context.number, step, context.rollout, judged))
        return step

    def _precision(self) -> str | None:
        """The engine's precision; None without an engine, and without plan and probe."""
        unexpected = self._plan is None and self._probe is None
        return None if self.engine is None or unexpected else self.engine.launch.precision

    def _follow_precision(self) -> None:
        """After a step down, expect the KL of the precision that runs now."""
        running = self._precision()
        if running == self._planned_for:
            return
        self._planned_for = running
        self._expected = self._expectation()
        try:
            self._fresh = self.controller.initial(self._plan, running)
        except ConfigError as error:  # the plan is not the engine's, which is no reason to stop a step
            self._witness.warn_once("plan", f"the expected KL is still that from before the step down: {error}")
        else:
            self.state = expecting(self.state, self._fresh)

    def _expectation(self) -> Expected | None:
        """The expected KL of the precision that runs, from the probe or else from the plan."""
        choice = self._precision()
        if self._probe is not None:
            other = self._witness.running() if self.engine is None else None
            probed = self._probe.interval_of(choice if other is None else other.precision, self._remedies)
            if probed is not None:
                return Expected(*probed, self._remedies.router_replay)
        return None if self._plan is None else expected_by(self._plan, choice)

    def _checked(self, rollout: Rollout, number: int) -> Rollout:
        """The rollout of a step; None, with a warning, for a malformed one."""
        try:
            return checked_rollout(rollout)
        except Exception as error:
            self._witness.warn_once("rollout", f"the rollout of step {number} is left out of the record: {error}")
            return None

    def _record(self, number: int, step: Step, rollout: Rollout, judged: Judged) -> dict[str, Any]:
        shown = rollout if isinstance(rollout, Mapping) else judged.observation
        off = None if self.guard is None and self.engine is None else judged.off
        record = record_of(number, step, self._witness.running(), self.guard, off, shown)
        if self._resumed:  # an earlier run may have written the same steps
            record["resumed"] = True
            self._resumed = False
        if record.get("seconds") is not None and not self._rolled_out:
            self._rolled_out = True
            record.setdefault("first_rollout", True)  # `validate` leaves it out: its engine warms up
        return record

    def _writes(self) -> bool:
        """True on the rank that writes, after opening its sinks. Only a process group tells which rank that is."""
        if rank(self.group) or not self._sinks.sinks:
            return False
        if not self._open:
            self._open = True
            try:
                self._sinks.open()
            except Exception as error:  # it is too late to refuse the run
                warn(f"a sink cannot be opened: {error}")
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state to save with a checkpoint, as plain data for JSON."""
        guard = None if self.guard is None else self.guard.state_dict()
        return {"steps": self.steps, "controller": self.state.to_dict(), "guard": guard}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ConfigError for anything but a result of `state_dict`."""
        instance("the monitor's state", data, Mapping, "what state_dict() returned")
        if set(data) != {"steps", "controller", "guard"}:
            raise ConfigError(f"the monitor's state has {', '.join(map(str, data))}; give what state_dict() returned")
        steps = whole("the monitor's saved steps", data["steps"], 0)
        state = self.controller.resume(ControllerState.from_dict(data["controller"]), self._fresh)
        if self.guard is not None and data["guard"] is not None:
            self.guard.load_state_dict(data["guard"])
        self.steps, self.state, self._resumed = steps, state, True

    def close(self) -> None:
        """Close the sinks."""
        if self._open:
            self._sinks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
