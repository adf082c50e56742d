"""A GRPOTrainer that chooses its rollout precision, corrects the mismatch and watches the gain.

Without a plan it is TRL's own. TRL's importance-sampling settings, or a plan's thresholds, become CorrectionSettings,
and a Monitor's step becomes TRL's ratio.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import trl
from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from fp8plan import schemas
from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import (
    announce,
    check_model,
    load_state,
    metrics_of,
    read_plan,
    safer_than,
    save_state,
)
from fp8plan.integrations.request import plan_of_words, words_of
from fp8plan.integrations.trl.client import PlannedClient, Served
from fp8plan.integrations.trl.colocated import PlannedGeneration
from fp8plan.integrations.trl.replay import Replays, refuse_other, refuse_replay
from fp8plan.integrations.trl.request import prompt_lengths, rollouts_of
from fp8plan.integrations.trl.server import PlannedServer, ServerEngine, check_server, limits_of
from fp8plan.integrations.trl.settings import check_args, check_plan, check_trl, generating_with, sampling_in
from fp8plan.model.distributions import Trace
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.workload import Workload
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import launch
from fp8plan.runtime.apply.engine.returned_experts import OPTION
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.this_host import host_loop_s
from fp8plan.runtime.watch.controller.laws import Controller
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Sink

if TYPE_CHECKING:
    from fp8plan.runtime.watch.monitor.record import Step

logger = logging.getLogger(__name__)

# Fields of TRL's batch when it corrects for the mismatch, and the figure that its correction logs.
NEEDED: Final = ("completion_mask", "importance_sampling_ratio", "old_per_token_logps", "sampling_per_token_logps")
LOGGED_RATIO: Final = "sampling/importance_sampling_ratio"
ROUTES: Final = "fp8plan_routes"  # key of the routes in a batch
Advice = tuple[Action, Escalation | None]  # the guard's and the controller's
OWN: Final = ("plan", "choice", "controller", "sinks", "router_replay", "dry_run")  # arguments of a planned trainer
FIELDS: Final = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))


def correction_of(args: Any) -> CorrectionSettings:
    """TRL's correction if the user has changed one of its settings, else the plan's.

    If TRL's correction is off, the mismatch is still measured, and all weights are 1.

    args: the GRPOConfig. Raises ConfigError for a truncation with a lower bound, or without an upper one.
    """
    if not args.vllm_importance_sampling_correction:
        return CorrectionSettings(level=None)
    if not changed(args):
        return CorrectionSettings()
    mode, low, high = (getattr(args, name) for name in FIELDS)
    level, _, kind = mode.partition("_")
    if kind == "mask":  # TRL's ratio is pi_train / pi_rollout too, and a masked token weighs 0
        band = low or sys.float_info.min, high or sys.float_info.max
        return CorrectionSettings(level, "icepop", Thresholds(tis=None, band=band))
    if low is not None or high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode is {mode!r}, with clip_min {low} and clip_max {high}; allowed with a plan: "
            "clip_min=None and a clip_max"
        )
    return CorrectionSettings(level, thresholds=Thresholds(high))


def changed(args: Any) -> bool:
    """True if the user has changed one of TRL's settings of its correction."""
    defaults = {field.name: field.default for field in fields(args)}
    return any(getattr(args, name) != defaults[name] for name in FIELDS)


def ratio_of(step: Step, mask: torch.Tensor) -> torch.Tensor:
    """The weights of a step as TRL's importance_sampling_ratio, [batch, length] float32; a rejected token weighs 0.

    A rejected token still counts in the loss's mean, as in TRL. It stays in the completion mask, so that the policy
    attends to it. Outside the mask (padding, and the output of tools) the ratio is 1, as TRL's own: VESPO sums its
    logarithm over all positions.
    """
    kept = torch.as_tensor(step.mask, device=mask.device).to(torch.float32)
    ratio = kept if step.weights is None else torch.as_tensor(step.weights, device=mask.device) * kept
    return torch.where(mask.bool(), ratio, 1.0)


def loop_of(served: Served) -> float | None:
    """The loop of a server's host, as the server has timed it; None if it has not."""
    return None if served.status is None else served.status["facts"].get("host_loop_s")


class GRPOTrainer(trl.GRPOTrainer):
    """trl.GRPOTrainer with a plan for its engine, colocated or a server's.

    plan:       "auto": made from the model, the GPU and TRL's own settings; or a Plan, or the path of a plan's JSON;
                None: TRL's own trainer
    choice:     index into the plan's choices, or one of its precisions; the chosen one unless given
    controller: decides the thresholds of the correction, as in Monitor
    sinks:      destinations of records, as in Monitor, such as [fp8plan.JsonLines("run.jsonl")]
    router_replay: the policy's forwards use the experts that the engine picked (fp8plan.replayed); None: as the plan
                says
    dry_run:    print the plan's table, and end the program before an engine starts
    allow_biased_sampling: train with top_p, top_k, penalties and the like, which bias the correction's ratios; False:
                they are refused, unless TRL's correction is off

    All other arguments are TRL's. With a plan the attributes `plan`, `rollout_engine` and `monitor` are the Plan, the
    RolloutEngine and the Monitor, else None. `rollout_engine.shutdown()` frees the engine's memory, `monitor.close()`
    closes the sinks. With a server `rollout_engine` is a ServerEngine, which does not end the server.

    In each step the engine gets the policy's weights, checked, with new KV scales for an FP8 cache. All calls that
    generate a training batch, with the turns of tools and environments, are one rollout; an evaluation is none. The
    Monitor's weights take the place of TRL's importance-sampling ratio. The guard's advice is followed before the next
    sync, and logged once it is done. In several processes, and with a server, a step down is only logged, with the
    words to type.

    Raises ConfigError for an unsupported TRL or setting, a plan of another engine, and a server that runs something
    else. Also raises the errors of `fp8plan.plan` and `RolloutEngine.from_plan`.
    """

    _advice: Advice = (Action.NONE, None)  # of the last step, until the next sync
    _logged: Advice = (Action.NONE, None)  # the last one that was only logged
    _replaying = False  # forwards use the engine's experts

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path | None = None,
        choice: int | str | None = None,
        controller: Controller | None = None,
        sinks: Sequence[Sink] = (),
        router_replay: bool | None = None,
        dry_run: bool = False,
        allow_biased_sampling: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_names("GRPOTrainer", kwargs, inspect.signature(super().__init__).parameters, OWN)
        self.plan: Plan | None = None
        self.rollout_engine: RolloutEngine | ServerEngine | None = None
        self.monitor: Monitor | None = None
        self._replays, self._router_replay, self._dry_run = Replays(), router_replay, dry_run
        if plan is None:
            if choice is not None or controller is not None or sinks or router_replay or dry_run:
                raise ConfigError(
                    "choice, controller, sinks, router_replay and dry_run belong to a plan, and plan is None; type: "
                    "plan='auto'"
                )
            super().__init__(*args, **kwargs)
            return
        check_trl()
        of_trl = inspect.signature(super().__init__).bind(*args, **kwargs).arguments.get("args")
        check_args(of_trl, allow_biased_sampling)
        self.plan, self._choice, self._source = read_plan(plan), choice, plan
        try:
            with generating_with(self._generation):
                super().__init__(*args, **kwargs)
            if self.rollout_engine is None:
                raise ConfigError("TRL did not start the engine where it was expected to; type: plan=None")
            with self.rollout_engine.rollout():  # an evaluation before the first is none
                pass
            engine: Any = self.rollout_engine
            sampling = sampling_in(self.args)
            self.monitor = Monitor(
                self._correction, controller, sinks, plan=self.plan, engine=engine, sampling=sampling,
                router_replay=self._replaying,
            )  # fmt: skip
        except BaseException:
            if self.rollout_engine is not None:
                self.rollout_engine.shutdown()
            raise
        # The mismatch is measured in any case; settings without a level leave all weights at 1.
        self.vllm_importance_sampling_correction = True

    def _generation(self, *args: Any, **settings: Any) -> PlannedGeneration | PlannedServer:
        if settings["mode"] == "server":
            return PlannedServer(*args, connect=self._connect, before_sync=self._follow_advice, **settings)
        return PlannedGeneration(*args, start=self._start, before_sync=self._follow_advice, **settings)

    def _start(self, generation: PlannedGeneration, of_trl: dict[str, Any]) -> RolloutEngine:
        """Start the planned engine; with plan="auto", plan first."""
        on_cpu, model = self.accelerator.device.type == "cpu", generation.model.name_or_path
        if self.plan is None:
            loop_s = None if on_cpu else self._host_loop_s()
            self._plan_for(model, "cpu" if on_cpu else "auto", loop_s)
        plan = self._planned(generation, on_cpu)
        if self._replaying:
            of_trl = of_trl | {OPTION: True}
        self.rollout_engine = RolloutEngine.from_plan(replace(plan, inside="trl"), model, choice=self._choice, **of_trl)
        return self.rollout_engine

    def _connect(self, generation: PlannedServer, served: Served, client: PlannedClient | None) -> ServerEngine:
        """Check the server; with plan="auto", plan for it first."""
        model = generation.model.name_or_path
        fallback = "cpu" if self.accelerator.device.type == "cpu" else "auto"
        gpu = find_gpu(served.status["facts"]["device"]).name if served.status else fallback
        on_cpu = find_gpu(gpu).is_cpu
        if self.plan is None:
            self._plan_for(model, gpu, loop_of(served), limits_of(served.config, on_cpu))
        plan = self._planned(generation, on_cpu)
        setup = replace(plan.setup(self._choice), inside="server")
        launched = launch(setup, model, precisions=plan.precisions_beside(self._choice))
        check_server(served, launched)
        self.rollout_engine = ServerEngine(launched, served, client, plan.anchor)
        return self.rollout_engine

    def _host_loop_s(self) -> float | None:
        """The loop of the first process's host, for all processes: they must make one plan."""
        timed = [host_loop_s() if self.accelerator.is_main_process else None]
        broadcast_object_list(timed)
        return timed[0]

    def _plan_for(self, model: str, gpu: str, host_loop_s: float | None, limits: EngineLimits | None = None) -> None:
        """Plan for the engines of the configuration. limits: a server's"""
        own: dict[str, Any] = {"model": model, "gpu": gpu, "host_loop_s": host_loop_s}
        own["engine_version"] = check_vllm_version().partition("+")[0]
        if limits is not None:
            own["limits"] = limits
        rollouts = replace(rollouts_of(self.args), remedies={"router_replay": bool(self._router_replay)})
        typed = {PlanRequest: own, Workload: self._prompt_lengths()}
        self.plan = plan_of_words(words_of(rollouts, typed), "here" if limits is None else "by the server")

    def _planned(self, generation: PlannedGeneration | PlannedServer, on_cpu: bool) -> Plan:
        """The checked plan, without thresholds that TRL's settings replace."""
        assert self.plan is not None
        check_plan(self.plan, self._choice, self.args, on_cpu)
        check_model(self.plan.setup(self._choice), generation.model.name_or_path)
        self._replaying = self.plan.remedies.router_replay if self._router_replay is None else self._router_replay
        if self._replaying:
            turns = self.tools or self.environment_factories or self.rollout_func
            refuse_replay(self.args, bool(turns), generation.model)
        self._correction = correction_of(self.args)
        if changed(self.args):
            self.plan = replace(self.plan, thresholds={})
        if self.accelerator.is_main_process:
            announce(self.plan, self._source, self._choice, self._dry_run)
        if self._dry_run:
            raise SystemExit(0)
        return self.plan

    def _prompt_lengths(self) -> dict[str, Trace]:
        """Lengths of the dataset's prompts; none where prompts come from elsewhere, or hold more than text."""
        if self.environment_factories is not None or self._is_vlm:
            return {}
        return prompt_lengths(self.train_dataset, lambda prompts: self._tokenize_prompts(prompts)[0])

    def _generate(self, prompts: Any) -> Any:
        if self.rollout_engine is None or not self.model.training:
            return super()._generate(prompts)
        with self.rollout_engine.rollout():
            generated = super()._generate(prompts)
        if self._replaying:
            llm = self.vllm_generation.llm
            routes, llm.routes = llm.routes, []  # a batch alone keeps them: some GB for long responses
            refuse_other(routes, *generated[:2])
            self._replays.take(routes)
        return generated

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        with self._replays.scoring(model, attention_mask, logits_to_keep):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with self._replays.of(inputs.get(ROUTES)):
            return super()._compute_loss(model, inputs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Let the Monitor correct the batch that TRL has generated and scored. Evaluations are left alone."""
        with self._replays.of(None):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if self._replays.routes is not None:
                output[ROUTES] = self._replays.routes
        if self.monitor is None or not self.model.training:
            return output
        if missing := [name for name in NEEDED if name not in output]:
            raise ConfigError(f"TRL's batch lacks {', '.join(missing)}, which a plan needs; type: plan=None")
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        reward = {schemas.REWARD: self._metrics["train"]["reward"][-1]}  # this batch's, over all processes
        train, rollout = output["old_per_token_logps"], output["sampling_per_token_logps"]
        step = self.monitor.step(train, rollout, mask.bool(), metrics=reward, routing_differs=self._replays.differing)
        ratio = ratio_of(step, mask)
        output["importance_sampling_ratio"] = ratio
        action = Action.NONE if step.verdict is None else step.verdict.action
        self._advice = (action, step.decided.escalate)
        if action != Action.NONE and step.verdict is not None and self._advice != self._logged:
            logger.warning("fp8plan: %s", step.verdict.reason)
        preset = self._engine().launch.setup.precision
        self._log_step(metrics_of(step, preset, self.vllm_generation.report), ratio[mask.bool()])
        return output

    def _log_step(self, figures: dict[str, float], ratio: torch.Tensor) -> None:
        """Add figures to TRL's own, and replace TRL's figures on the ratio with those of the ratio in the loss.

        ratio: ratios of this process's tokens
        """
        metrics = self._metrics["train"]
        for name, value in figures.items():
            metrics[name].append(value)
        known = ratio if ratio.numel() else torch.zeros(1, device=ratio.device)
        for name in ("min", "mean", "max"):
            every = self.accelerator.gather(getattr(known, name)())
            metrics[f"{LOGGED_RATIO}/{name}"][-1] = getattr(every, name)().item()

    def _engine(self) -> RolloutEngine | ServerEngine:
        assert self.rollout_engine is not None
        return self.rollout_engine

    def _follow_advice(self) -> None:
        """Follow the advice of the guard, or else of the controller, on the last step."""
        (action, escalate), self._advice = self._advice, (Action.NONE, None)
        self._apply(action, escalate)

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
            if advice != (Action.NONE, None):
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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.monitor is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_state(self.monitor, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also restore the checkpoint's thresholds, the guard's memory and the precision."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.monitor is None or checkpoint is None or not load_state(self.monitor, Path(checkpoint)):
            return
        self._advice = (Action.NONE, None)  # of the run before this checkpoint was loaded
        guard, running = self._engine().guard, self._engine().launch.precision
        if guard is not None and guard.precision_for(running) != running:
            self._apply(guard.state.rung)
