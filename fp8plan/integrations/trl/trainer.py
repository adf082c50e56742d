"""A GRPOTrainer that chooses its rollout precision, corrects the mismatch and watches the gain.

Without a plan it is TRL's own. TRL's importance-sampling settings, or a plan's thresholds, become CorrectionSettings,
and a Monitor's step becomes TRL's ratio.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import trl

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import metrics_of
from fp8plan.integrations.trl.colocated import PlannedGeneration
from fp8plan.integrations.trl.mixin import NO_ADVICE, Advice, Planned
from fp8plan.integrations.trl.replay import Replays, refuse_other, refuse_replay
from fp8plan.integrations.trl.server import PlannedServer
from fp8plan.integrations.trl.settings import sampling_in
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.apply.engine.returned_experts import OPTION
from fp8plan.runtime.watch.controller.laws import Controller
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
FIELDS: Final = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))
REPLACED: Final = (
    "the plan's correction replaces TRL's defaults (sequence_mask, 3.0), also where they are written out; "
    "vllm_importance_sampling_clip_min=0.0 keeps TRL's"
)


def correction_of(args: Any) -> CorrectionSettings:
    """TRL's correction if the user has changed one of its settings, else the plan's.

    If TRL's correction is off, the mismatch is still measured, and all weights are 1.

    args: the GRPOConfig. Raises ConfigError for a truncation with a lower bound, or without an upper one.
    """
    if not args.vllm_importance_sampling_correction:
        return CorrectionSettings(level=None, thresholds=Thresholds(None))
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


class GRPOTrainer(Planned, trl.GRPOTrainer):
    """trl.GRPOTrainer with a plan for its engine, colocated or a server's, and a Monitor.

    plan, choice, dry_run: as for Planned
    controller: decides the thresholds of the correction, as in Monitor
    sinks:      destinations of records, as in Monitor, such as [fp8plan.JsonLines("run.jsonl")]
    router_replay: the policy's forwards use the experts that the engine picked (fp8plan.replayed); None: as the plan
                says
    allow_biased_sampling: train with top_p, top_k, penalties and the like, which bias the correction's ratios; False:
                they are refused, unless TRL's correction is off

    All other arguments are TRL's. With a plan the attributes `plan`, `rollout_engine` and `monitor` are the Plan, the
    RolloutEngine and the Monitor, else None. `rollout_engine.shutdown()` frees the engine's memory, `monitor.close()`
    closes the sinks. With a server `rollout_engine` is a ServerEngine, which does not end the server.

    Beside what Planned does, the Monitor's weights take the place of TRL's importance-sampling ratio. All calls that
    generate a training batch, with the turns of tools and environments, are one rollout.

    Raises the errors of Planned, and ConfigError for a sampling that biases the ratios.
    """

    OWN = (*Planned.OWN, "controller", "sinks", "router_replay", "allow_biased_sampling")
    _advice: Advice = NO_ADVICE  # of the last step, until the next sync
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
        if plan is None and (controller is not None or sinks or router_replay):
            raise ConfigError(
                "controller, sinks and router_replay belong to a plan, and plan is None; type: plan='auto'"
            )
        self._controller, self._sinks = controller, sinks
        self._replays, self._router_replay = Replays(), router_replay
        self._allow_biased_sampling = allow_biased_sampling
        super().__init__(*args, plan=plan, choice=choice, dry_run=dry_run, **kwargs)

    def _check_args(self, args: Any) -> None:
        super()._check_args(args)
        if args.vllm_importance_sampling_correction and not self._allow_biased_sampling:
            sampling_in(args).refuse("GRPOConfig's sampling", "GRPOTrainer(..., allow_biased_sampling=True)")

    def _check_planned(self, generation: PlannedGeneration | PlannedServer) -> None:
        """Also take over the plan's router replay and correction, without thresholds that TRL's settings replace."""
        assert self.plan is not None
        self._replaying = self.plan.remedies.router_replay if self._router_replay is None else self._router_replay
        if self._replaying:
            turns = self.tools or self.environment_factories or self.rollout_func
            refuse_replay(self.args, bool(turns), generation.model)
        self._correction = correction_of(self.args)
        if changed(self.args) or self._correction.level is None:
            self.plan = replace(self.plan, thresholds={})

    def _watch(self, engine: Any) -> None:
        """Make the Monitor. The mismatch is measured in any case; settings without a level leave all weights at 1."""
        self.monitor = Monitor(
            self._correction, self._controller, self._sinks, plan=self.plan, engine=engine,
            sampling=sampling_in(self.args), router_replay=self._replaying,
        )  # fmt: skip
        if self._correction.level is not None and not changed(self.args) and self.accelerator.is_main_process:
            print(f"fp8plan: {REPLACED}", flush=True)
        self.vllm_importance_sampling_correction = True

    def _remedies(self) -> Mapping[str, Any]:
        return {"router_replay": bool(self._router_replay)}

    def _of_engine(self) -> dict[str, Any]:
        return {OPTION: True} if self._replaying else {}

    def _advised(self) -> Advice:
        advice, self._advice = self._advice, NO_ADVICE
        return advice

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        if self._replaying and self.model.training:
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
        self._advice = (step.action, step.decided.escalate)
        if step.action != Action.NONE and step.verdict is not None and self._advice != self._logged:
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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._advice = NO_ADVICE  # of the run before this checkpoint was loaded
        super()._load_optimizer_and_scheduler(checkpoint)
