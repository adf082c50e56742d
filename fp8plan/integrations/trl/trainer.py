"""A GRPOTrainer that chooses its rollout precision, keeps it correct and watches it; without a plan it is TRL's own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import trl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from fp8plan.errors import ConfigError
from fp8plan.integrations.checkpoint import load_state, save_state
from fp8plan.integrations.correction import metrics_of, safer_than
from fp8plan.integrations.planning import plan_for, read_plan
from fp8plan.integrations.trl import correction, planning
from fp8plan.integrations.trl.client import PlannedClient, Served
from fp8plan.integrations.trl.generation import PlannedGeneration
from fp8plan.integrations.trl.internals import check_trl, generating_with
from fp8plan.integrations.trl.served import ServerEngine, check_server, gpu_of, limits_of
from fp8plan.integrations.trl.server import PlannedServer
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.controller.laws import Controller
from fp8plan.runtime.controller.state import Escalation
from fp8plan.runtime.engine.engine import RolloutEngine
from fp8plan.runtime.engine.launch import launch
from fp8plan.runtime.guard.fallback import Action
from fp8plan.runtime.monitor.monitor import Monitor
from fp8plan.runtime.monitor.sinks import Sink

logger = logging.getLogger(__name__)

# What TRL puts out when it corrects for the mismatch, and what its correction logs.
NEEDED: Final = ("completion_mask", "importance_sampling_ratio", "old_per_token_logps", "sampling_per_token_logps")
LOGGED_RATIO: Final = "sampling/importance_sampling_ratio"


class GRPOTrainer(trl.GRPOTrainer):
    """trl.GRPOTrainer with a plan for its engine, colocated or a server's.

    plan:       "auto": made here, from the model, the GPU and TRL's own settings; or a Plan, or the path of one's JSON.
                None: all is TRL's own
    choice:     index into the plan's choices, or one of its precisions; the chosen one unless given
    controller: decides the thresholds of the correction, as in Monitor
    sinks:      where records go, as in Monitor, such as [fp8plan.JsonLines("run.jsonl")]
    allow_biased_sampling: train with top_p, top_k, penalties and the like, which bias the correction's ratios; False:
                they are refused, unless TRL's correction is off

    All other arguments are TRL's. `plan`, `rollout_engine` and `monitor` are then the Plan, the RolloutEngine and the
    Monitor; None without a plan. `rollout_engine.shutdown()` frees the engine's memory, `monitor.close()` the sinks.
    With a server `rollout_engine` is a ServerEngine, which tells what the server runs and does not end it.

    In each step the engine gets the policy's weights, checked, with new KV scales for an FP8 cache. The Monitor's
    weights take the place of TRL's importance-sampling ratio. What the guard advises is done before the next sync; in
    several processes, and with a server, a step down is only logged, with what to type.

    Raises ConfigError for a TRL whose inside is not known, for settings that a plan does not go with, for a plan of
    another engine, for a server that runs something else, and as `fp8plan.plan` and `RolloutEngine.from_plan` do.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path | None = None,
        choice: int | str | None = None,
        controller: Controller | None = None,
        sinks: Sequence[Sink] = (),
        allow_biased_sampling: bool = False,
        **kwargs: Any,
    ) -> None:
        self.plan: Plan | None = None
        self.rollout_engine: RolloutEngine | ServerEngine | None = None
        self.monitor: Monitor | None = None
        if plan is None:
            if choice is not None or controller is not None or sinks:
                raise ConfigError("choice, controller and sinks belong to a plan, and plan is None; type: plan='auto'")
            super().__init__(*args, **kwargs)
            return
        check_trl()
        of_trl = inspect.signature(super().__init__).bind(*args, **kwargs).arguments.get("args")
        planning.check_args(of_trl, allow_biased_sampling)
        self.plan, self._choice = read_plan(plan), choice
        self._advice: tuple[Action, Escalation | None] = (Action.NONE, None)
        try:
            with generating_with(self._generation):
                super().__init__(*args, **kwargs)
            if self.rollout_engine is None:
                raise ConfigError("TRL did not start the engine where it was expected to; type: plan=None")
            settings = correction.settings_for(self.args, self.plan.thresholds)
            engine: Any = self.rollout_engine
            sampling = planning.sampling_in(self.args)
            self.monitor = Monitor(settings, controller, sinks, plan=self.plan, engine=engine, sampling=sampling)
        except BaseException:
            if self.rollout_engine is not None:
                self.rollout_engine.shutdown()
            raise
        # The mismatch is measured in any case; settings without a level leave all weights at 1.
        self.vllm_importance_sampling_correction = True

    def _generation(self, *args: Any, **settings: Any) -> PlannedGeneration | PlannedServer:
        """Make what TRL generates with. settings: of its VLLMGeneration"""
        if settings["mode"] == "server":
            return PlannedServer(*args, connect=self._connect, before_sync=self._follow_advice, **settings)
        return PlannedGeneration(*args, start=self._start, before_sync=self._follow_advice, **settings)

    def _start(self, generation: PlannedGeneration, of_trl: dict[str, Any]) -> RolloutEngine:
        """Start the planned engine; plan first, if that was asked for."""
        on_cpu, model = self.accelerator.device.type == "cpu", generation.model.name_or_path
        if self.plan is None:
            responses = generation.max_num_seqs
            limits = planning.colocated_limits(model, self.args, responses, on_cpu)
            self._plan_for(model, "cpu" if on_cpu else "auto", limits, responses)
        plan = self._planned(model, on_cpu)
        self.rollout_engine = RolloutEngine.from_plan(plan, model, choice=self._choice, **of_trl)
        return self.rollout_engine

    def _connect(self, generation: PlannedServer, found: Served, client: PlannedClient | None) -> ServerEngine:
        """Check the server that was found; plan for it first, if that was asked for."""
        model = generation.model.name_or_path
        gpu = "cpu" if found.status is None and self.accelerator.device.type == "cpu" else gpu_of(found)
        on_cpu = find_gpu(gpu).is_cpu
        if self.plan is None:
            self._plan_for(model, gpu, limits_of(found.config, on_cpu), self.args.generation_batch_size)
        plan = self._planned(model, on_cpu)
        launched = launch(plan.setup(self._choice), model, precisions=plan.precisions_beside(self._choice))
        check_server(found, launched)
        self.rollout_engine = ServerEngine(launched, found, client)
        return self.rollout_engine

    def _plan_for(self, model: str, gpu: str, limits: EngineLimits, responses: int) -> None:
        self.plan = plan_for(
            model,
            gpu,
            limits,
            responses=responses,
            samples=self.args.num_generations,
            longest_response=self.args.max_completion_length,
            prompt_lengths=self._prompt_lengths(),
        )

    def _planned(self, model: str, on_cpu: bool) -> Plan:
        """The plan, checked, with the thresholds to begin with. model: that is trained"""
        assert self.plan is not None
        planning.check_plan(self.plan, self._choice, self.args, on_cpu)
        self.plan.setup(self._choice).check_model(model)
        self.plan = replace(self.plan, thresholds=correction.thresholds_for(self.args, self.plan.thresholds))
        return self.plan

    def _prompt_lengths(self) -> Any:
        """Lengths of the dataset's prompts; None where prompts come from elsewhere, or hold more than text."""
        rows = self.train_dataset
        if not hasattr(rows, "__len__") or self.environment_factories is not None or self._is_vlm:
            return None
        prompts = [rows[index]["prompt"] for index in planning.spread(len(rows))]
        return planning.lengths_of(self._tokenize_prompts(prompts)[0])

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Let the Monitor correct what TRL has generated and scored. An evaluation stays as it is."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.monitor is None or not self.model.training:
            return output
        if missing := [name for name in NEEDED if name not in output]:
            raise ConfigError(f"TRL's batch lacks {', '.join(missing)}, which a plan needs; type: plan=None")
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        step = self.monitor.step(output["old_per_token_logps"], output["sampling_per_token_logps"], mask.bool())
        ratio = correction.ratio_of(step, mask)
        output["importance_sampling_ratio"] = ratio
        action = Action.NONE if step.verdict is None else step.verdict.action
        if action != Action.NONE and step.verdict is not None:
            logger.warning("fp8plan: %s", step.verdict.reason)
        self._advice = (action, step.decided.escalate)
        preset = self._engine().launch.setup.precision
        self._log_step(metrics_of(step, preset, self.vllm_generation.report), ratio[mask.bool()])
        return output

    def _log_step(self, found: dict[str, float], ratio: torch.Tensor) -> None:
        """Add figures to TRL's own, and put those of the ratio that the loss gets in the place of TRL's.

        ratio: of this process's tokens
        """
        metrics = self._metrics["train"]
        for name, value in found.items():
            metrics[name].append(value)
        known = ratio if ratio.numel() else torch.zeros(1, device=ratio.device)
        for name in ("min", "mean", "max"):
            every = self.accelerator.gather(getattr(known, name)())
            metrics[f"{LOGGED_RATIO}/{name}"][-1] = getattr(every, name)().item()

    def _engine(self) -> RolloutEngine | ServerEngine:
        assert self.rollout_engine is not None
        return self.rollout_engine

    def _follow_advice(self) -> None:
        """Do what the guard, or else the controller, advised after the last step."""
        (action, escalate), self._advice = self._advice, (Action.NONE, None)
        self._apply(action, escalate)

    def _apply(self, action: Action, escalate: Escalation | None = None) -> None:
        """Do it in one process. Engines of several stay what they are, as vLLM ends the trainer's process group with an
        engine; they say what to type instead."""
        engine = self._engine()
        if self.accelerator.num_processes == 1 or isinstance(engine, ServerEngine):
            engine.apply(action, escalate)
        elif (safer := safer_than(running := engine.launch.precision, action, escalate)) is not None:
            logger.warning(
                "fp8plan advises a step down from %s, and engines of several processes are not started again in a run; "
                "go on from a checkpoint with choice=%r",
                running,
                safer,
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.monitor is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_state(self.monitor, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on with the thresholds, the guard's memory and the precision of a checkpoint, too."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.monitor is None or checkpoint is None or not load_state(self.monitor, Path(checkpoint)):
            return
        guard, running = self._engine().guard, self._engine().launch.precision
        if guard is not None and guard.precision_for(running) != running:
            self._apply(guard.state.rung)
