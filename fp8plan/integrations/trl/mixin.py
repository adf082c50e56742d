"""The engine of any trainer of TRL's that generates by its VLLMGeneration: planned, synced with checks, and guarded.

class RLOOTrainer(Planned, trl.RLOOTrainer): ...

trainer = RLOOTrainer(model, reward_funcs, args, train_dataset, plan="auto")
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.grpo_config import GRPOConfig

from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import (
    announce,
    check_model,
    engine_metrics,
    load_state,
    read_plan,
    safer_than,
    save_state,
)
from fp8plan.integrations.request import Rollouts, plan_of_words, words_of
from fp8plan.integrations.trl.client import PlannedClient, Served
from fp8plan.integrations.trl.colocated import PlannedGeneration
from fp8plan.integrations.trl.request import check_args, prompt_lengths, rollouts_of, rollouts_with
from fp8plan.integrations.trl.server import PlannedServer, ServerEngine, check_server, limits_of
from fp8plan.integrations.trl.settings import check_plan, check_trl, generating_with
from fp8plan.model.distributions import Trace
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.workload import Workload
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import launch
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.this_host import host_loop_s
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.monitor.record import speed_metrics

if TYPE_CHECKING:
    from trl.trainer.base_trainer import _BaseTrainer as Trainer

    from fp8plan.runtime.watch.guard.guard import Verdict
    from fp8plan.runtime.watch.monitor.monitor import Monitor
else:
    Trainer = object

logger = logging.getLogger(__name__)

Advice = tuple[Action, Escalation | None]  # the guard's and the controller's
NO_ADVICE: Advice = (Action.NONE, None)
SEQUENCES = "sequences"  # key of the last rollout's sequences in a checkpoint


def loop_of(served: Served) -> float | None:
    """The loop of a server's host, as the server has timed it; None if it has not."""
    return None if served.status is None else served.status["facts"].get("host_loop_s")


class Planned(Trainer):
    """A mixin that gives a trainer of TRL's a plan for its engine. It stands before the trainer's class.

    plan:   "auto": made from the model, the GPU and TRL's own settings; or a Plan, or the path of a plan's JSON; None:
            TRL's own trainer
    choice: index into the plan's choices, or one of its precisions; the chosen one unless given
    dry_run: print the plan's table, and end the program before an engine starts

    All other arguments are TRL's. With a plan the attributes `plan` and `rollout_engine` are the Plan and the
    RolloutEngine, else None. `rollout_engine.shutdown()` frees the engine's memory. With a server `rollout_engine` is
    a ServerEngine, which does not end the server. `monitor` is None, as most trainers have no log-probs of rollouts.

    Each sync sends the policy's weights, checked, with new KV scales for an FP8 cache. All calls that generate a
    training batch are one rollout; an evaluation is none. The guard's advice is followed before the next sync, and
    logged once it is done. In several processes, and with a server, a step down is only logged, with the words to type.

    Raises ConfigError for an unsupported TRL or setting, a plan of another engine, and a server that runs something
    else. Also raises the errors of `fp8plan.plan` and `RolloutEngine.from_plan`.
    """

    OWN: ClassVar[tuple[str, ...]] = ("plan", "choice", "dry_run")  # arguments beside TRL's
    monitor: Monitor | None = None
    _logged: Advice = NO_ADVICE  # the last one that was only logged

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path | None = None,
        choice: int | str | None = None,
        dry_run: bool = False,
        **kwargs: Any,
    ) -> None:
        of_trl = inspect.signature(super().__init__)
        refuse_names(type(self).__name__, kwargs, of_trl.parameters, self.OWN)
        self.plan: Plan | None = None
        self.rollout_engine: RolloutEngine | ServerEngine | None = None
        if plan is None:
            if choice is not None or dry_run:
                raise ConfigError("choice and dry_run belong to a plan, and plan is None; type: plan='auto'")
            super().__init__(*args, **kwargs)
            return
        check_trl()
        self._check_args(of_trl.bind(*args, **kwargs).arguments.get("args"))
        self.plan, self._choice, self._source = read_plan(plan), choice, plan
        self._dry_run = dry_run
        try:
            with self._generating():
                super().__init__(*args, **kwargs)
            if self.rollout_engine is None:
                raise ConfigError(
                    f"{type(self).__name__} did not start the engine where it was expected to; type: plan=None, or "
                    "give it a vllm serve with fp8plan's backend, which any trainer can sync"
                )
            with self.rollout_engine.rollout():  # an evaluation before the first is none
                pass
            self._watch(self.rollout_engine)
        except BaseException:
            if self.rollout_engine is not None:
                self.rollout_engine.shutdown()
            raise

    # ------------------------------------------------------------------------------------ for a trainer of its own kind

    def _check_args(self, args: Any) -> None:
        """Raise ConfigError for settings that no plan supports, before the policy is loaded. args: TRL's; or None"""
        check_args(args)

    def _generating(self) -> AbstractContextManager[None]:
        """Make the trainer take its engine from `_generation` in this `with`."""
        return generating_with(type(self), self._generation)

    def _check_planned(self, generation: PlannedGeneration | PlannedServer) -> None:
        """Raise ConfigError for a checked plan that does not fit this trainer."""

    def _watch(self, engine: Any) -> None:
        """Begin to watch a started engine."""

    def _remedies(self) -> Mapping[str, Any]:
        """The fields of Remedies to plan with."""
        return {}

    def _of_engine(self) -> dict[str, Any]:
        """Arguments of vllm.LLM beside the plan's and TRL's."""
        return {}

    def _advised(self) -> Advice:
        """The advice to follow before the next sync."""
        verdict = self._engine().verdict
        return NO_ADVICE if verdict is None else (verdict.action, None)

    # ------------------------------------------------------------------------------------------------- plan and engine

    def _generation(self, *args: Any, **settings: Any) -> PlannedGeneration | PlannedServer:
        if getattr(self, "_is_vlm", False) or getattr(self, "is_vision_model", False):
            raise ConfigError(
                "the policy takes images, and no plan has run with them; type: processing_class=AutoTokenizer."
                "from_pretrained(MODEL), which trains on text alone, or plan=None"
            )
        settings |= {"before_sync": self._follow_advice, "rollout": self._rollout}
        if settings["mode"] == "server":
            return PlannedServer(*args, connect=self._connect, **settings)
        return PlannedGeneration(*args, start=self._start, **settings)

    def _start(self, generation: PlannedGeneration, of_trl: dict[str, Any]) -> RolloutEngine:
        """Start the planned engine; with plan="auto", plan first."""
        on_cpu, model = self.accelerator.device.type == "cpu", generation.model.name_or_path
        if self.plan is None:
            loop_s = None if on_cpu else self._host_loop_s()
            self._plan_for(generation, "cpu" if on_cpu else "auto", loop_s)
        plan = self._planned(generation, on_cpu)
        of_trl |= self._of_engine()
        self.rollout_engine = RolloutEngine.from_plan(replace(plan, inside="trl"), model, choice=self._choice, **of_trl)
        return self.rollout_engine

    def _connect(self, generation: PlannedServer, served: Served, client: PlannedClient | None) -> ServerEngine:
        """Check the server; with plan="auto", plan for it first."""
        model = generation.model.name_or_path
        fallback = "cpu" if self.accelerator.device.type == "cpu" else "auto"
        gpu = find_gpu(served.status["facts"]["device"]).name if served.status else fallback
        on_cpu = find_gpu(gpu).is_cpu
        limits = limits_of(served.config, on_cpu)
        self._check_limits(generation, limits)
        if self.plan is None:
            self._plan_for(generation, gpu, loop_of(served), limits)
        plan = self._planned(generation, on_cpu)
        setup = replace(plan.setup(self._choice), inside="server")
        launched = launch(setup, model, precisions=plan.precisions_beside(self._choice))
        check_server(served, launched)
        self.rollout_engine = ServerEngine(launched, served, client, plan.anchor)
        return self.rollout_engine

    def _check_limits(self, generation: PlannedServer, limits: EngineLimits) -> None:
        """Raise ConfigError for a server whose requests are too short for turns of tools.

        TRL asks for `max_completion_length` tokens in every turn, also after a whole completion, and vLLM's server
        refuses a request whose prompt and tokens exceed its longest.
        """
        if not (getattr(self, "tools", None) or getattr(self, "environment_factories", None)):
            return
        lengths = self._prompt_lengths().get("prompt_lengths")
        prompt = 1 if lengths is None else max(lengths.values)
        longest, needed = limits.max_model_len or 0, prompt + 2 * generation.max_completion_length
        if longest < needed:
            raise ConfigError(
                f"the server's max_model_len is {longest}, and turns of tools need {needed}: a prompt of {prompt} and "
                f"twice max_completion_length, {generation.max_completion_length}; type: vllm serve ... "
                f"--max-model-len {needed}, or a shorter max_completion_length"
            )

    def _host_loop_s(self) -> float | None:
        """The loop of the first process's host, for all processes: they must make one plan."""
        timed = [host_loop_s() if self.accelerator.is_main_process else None]
        broadcast_object_list(timed)
        return timed[0]

    def _plan_for(
        self,
        generation: PlannedGeneration | PlannedServer,
        gpu: str,
        host_loop_s: float | None,
        limits: EngineLimits | None = None,
    ) -> None:
        """Plan for the engines of the configuration. limits: a server's"""
        own: dict[str, Any] = {"model": generation.model.name_or_path, "gpu": gpu, "host_loop_s": host_loop_s}
        own["engine_version"] = check_vllm_version().partition("+")[0]
        if limits is not None:
            own["limits"] = limits
        rollouts = replace(self._rollouts(generation), remedies=self._remedies())
        typed = {PlanRequest: own, Workload: self._prompt_lengths()}
        self.plan = plan_of_words(words_of(rollouts, typed), "here" if limits is None else "by the server")

    def _rollouts(self, generation: PlannedGeneration | PlannedServer) -> Rollouts:
        """The rollouts of the configuration."""
        if isinstance(self.args, GRPOConfig):
            return rollouts_of(self.args)
        return rollouts_with(generation, getattr(self, "num_generations", 1), self.accelerator.num_processes)

    def _planned(self, generation: PlannedGeneration | PlannedServer, on_cpu: bool) -> Plan:
        """The checked plan. Raises SystemExit once it is printed in a dry run."""
        assert self.plan is not None
        check_plan(self.plan, self._choice, generation, on_cpu)
        check_model(self.plan.setup(self._choice), generation.model.name_or_path)
        self._check_planned(generation)
        if self.accelerator.is_main_process:
            announce(self.plan, self._source, self._choice, self._dry_run)
        if self._dry_run:
            raise SystemExit(0)
        return self.plan

    def _prompt_lengths(self) -> dict[str, Trace]:
        """Lengths of the dataset's prompts; none where they come from elsewhere, or TRL tokenises them later."""
        of_trl = getattr(self, "_tokenize_prompts", None)
        if of_trl is None or getattr(self, "environment_factories", None) is not None:
            return {}

        def tokenize(prompts: list[Any]) -> Sequence[Sequence[int]]:
            tokenised = of_trl(prompts)
            ids: Sequence[Sequence[int]] = tokenised[0] if isinstance(tokenised, tuple) else tokenised
            return ids  # without images and fields

        return prompt_lengths(self.train_dataset, tokenize)

    # ----------------------------------------------------------------------------------------------- rollouts and guard

    @contextmanager
    def _rollout(self) -> Iterator[None]:
        """Let all that is generated in this `with` be one rollout. An evaluation is none."""
        training = self.rollout_engine is not None and self.model.training
        with self._engine().rollout() if training else nullcontext():
            yield

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does. The turns of a batch are one rollout."""
        with self._rollout():
            return super()._generate(*args, **kwargs)

    def _engine(self) -> RolloutEngine | ServerEngine:
        assert self.rollout_engine is not None
        return self.rollout_engine

    def _engine_figures(self, verdict: Verdict | None) -> dict[str, float]:
        """Figures of the engine and its last rollout for TRL's log."""
        engine = self._engine()
        speed = {name: value for name, value in speed_metrics(engine.observation, verdict).items() if value is not None}
        return speed | engine_metrics(verdict, engine.launch.setup.precision, self.vllm_generation.report)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does. Without a Monitor, which logs more, the last rollout's figures are added to each step's."""
        if self.rollout_engine is not None and self.monitor is None and "loss" in logs:
            logs = logs | self._engine_figures(self.rollout_engine.verdict)
        super().log(logs, *args, **kwargs)

    def _follow_advice(self) -> None:
        """Follow the advice of the guard, or else of the controller, on the last step."""
        self._apply(*self._advised())

    def _apply(self, action: Action, escalate: Escalation | None = None) -> None:
        """Apply advice in a single process, and log that. With several processes or a server, log the words to type,
        once: vLLM would end the trainer's process group with an engine."""
        engine, advice = self._engine(), (action, escalate)
        if isinstance(engine, ServerEngine):
            if advice != self._logged:
                engine.apply(action, escalate)
                self._logged = advice
        elif self.accelerator.num_processes == 1:
            engine.apply(action, escalate)
            if advice != NO_ADVICE:
                what = escalate if action == Action.NONE else action
                logger.warning("fp8plan has applied %s; the engine runs %s", what, engine.launch.precision)
        elif advice != self._logged and (safer := safer_than(running := engine.launch.precision, action, escalate)):
            logger.warning(
                "fp8plan advises a step down from %s, and engines of several processes are not started again in a run; "
                "go on from a checkpoint with choice=%r",
                running,
                safer,
            )
            self._logged = advice

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.rollout_engine is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_state(self._state(), folder)

    def _state(self) -> dict[str, Any]:
        """The state to save: the Monitor's, or else the guard's memory, and sequences of the last rollout."""
        engine = self._engine()
        if self.monitor is not None:
            saved = self.monitor.state_dict()
        else:
            saved = {"guard": None if engine.guard is None else engine.guard.state_dict()}
        if isinstance(engine, ServerEngine):  # it keeps its sequences itself
            return saved
        return saved | {SEQUENCES: engine.last_sequences}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also restore the checkpoint's thresholds, the guard's memory, the precision, and the sequences on which the
        first KV scales are measured."""
        super()._load_optimizer_and_scheduler(checkpoint)
        saved = None if self.rollout_engine is None or checkpoint is None else load_state(Path(checkpoint))
        if saved is None:
            return
        sequences = saved.pop(SEQUENCES, None)
        guard, running = self._engine().guard, self._engine().launch.precision
        if self.monitor is not None:
            self.monitor.load_state_dict(saved)
        elif guard is not None and saved["guard"] is not None:
            guard.load_state_dict(saved["guard"])
        if sequences and isinstance(self.vllm_generation, PlannedGeneration):
            self.vllm_generation.kv_prompts = sequences
        if guard is not None and guard.precision_for(running) != running:
            self._apply(guard.state.rung)
