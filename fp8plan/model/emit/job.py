"""The input of all settings: one choice of a plan, for one target, or the reason why the target cannot have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.emit.notes import check_risk
from fp8plan.model.emit.vllm import known_shape, stored_as
from fp8plan.model.plan.choice import Choice, seconds
from fp8plan.model.risk.expected import LEVELS, THRESHOLD, RiskBudget
from fp8plan.model.setup import EngineSetup, check_kv_scales
from fp8plan.model.shards import TARGETS, why_not_shardable
from fp8plan.version import check_starts

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan

UNWRITTEN: Final = "plan.json"  # in settings of a plan that has no file yet


@dataclass(frozen=True, slots=True)
class Job:
    """The input of one target's settings.

    target:     one of TARGETS
    setup:      the engine, with max_model_len filled in; data_parallel_size: the number of them that the trainer starts
    picked:     the plan's choice, with the expected mismatch
    counted:    the plan counts on K and V scales that are calibrated
    budget:     the plan's
    workload:   prompts, samples, max_prompt_tokens, max_response_tokens, and other facts on the rollout
    tis:        C of token TIS, on pi_train / pi_rollout; None: no correction
    kv_scales:  one of KV_SCALES: the K and V scales of the engine that the settings start
    choice:     the plan's name for the engine: its precision, or its number if several layouts have that precision
    plan_file:  full path of the plan; None: it has not been written
    refused:    the reason why the target cannot start this engine though vLLM can, and the way out; "" if it can
    """

    target: str
    setup: EngineSetup
    workload: Mapping[str, Any]
    tis: float | None
    picked: Choice
    counted: bool
    budget: RiskBudget
    kv_scales: str
    choice: int | str
    plan_file: str | None = None
    refused: str = ""

    @property
    def plan(self) -> str:
        """The plan's file in the settings."""
        return self.plan_file or UNWRITTEN

    @property
    def plan_note(self) -> str:
        """A note on the path of the plan's file."""
        if self.plan_file is None:
            return f"save the plan with --json {UNWRITTEN}, and give its full path where the trainer runs"
        return "the plan's path is this machine's; where the trainer runs elsewhere, give that of a copy there"

    @property
    def model_name(self) -> str:
        """The model as a message names it."""
        return self.setup.model if isinstance(self.setup.model, str) else self.setup.model.name

    def tokens(self, key: str) -> int:
        """One of the workload's counts. Raises ConfigError if the workload does not have it."""
        return workload_tokens(self.workload, key)

    def refuse(self, program: str) -> None:
        """Raise ConfigError for an engine that `program` cannot start: one on a CPU, or a refused one."""
        setup, stored = self.setup, stored_as(self.setup)
        if setup.gpu.is_cpu:
            raise ConfigError(f"{program} runs vLLM on GPUs, and this plan is for a CPU; allowed: --emit vllm")
        if reason := stored.not_synced if stored else self.refused:
            raise ConfigError(f"{program} cannot start {setup.precision.name} of {self.model_name}: {reason}")


def workload_tokens(workload: Mapping[str, Any], key: str) -> int:
    """One of a workload's counts as a whole number. Raises ConfigError if the workload does not have it."""
    value = workload.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"workload[{key!r}] is {value!r}; to emit a configuration it must be a whole number above 0")
    return value


def measured_scales(setup: EngineSetup) -> str:
    """The K and V scales in verl and TRL, where fp8plan's engines calibrate those of an FP8 cache if they can."""
    return "unit" if setup.why_fixed_kv_scales else "calibrated"


def job_of(
    plan: Plan, target: str, choice: int | str | None, kv_scales: str = "unit", plan_file: str | None = None
) -> Job:
    """The input of `target`'s settings for one choice of a plan. kv_scales: those that vLLM's own engine has

    Raises ConfigError if its K and V scales are too risky, or if the plan is of a vLLM that is not started.
    """
    check_starts(plan.engine_version)
    check_kv_scales(kv_scales)
    setup, number = plan.setup(choice), plan.index(choice)
    match TARGETS[target].measures:
        case "fp8plan":
            kv_scales = measured_scales(setup)
        case "trainer":
            kv_scales = "calibrated"
    picked = plan.select(choice)
    reason = _refusal(plan, number, target)
    job = Job(
        target=target,
        setup=setup,
        workload=plan.workload,
        tis=plan.thresholds.get(THRESHOLD),
        picked=picked,
        counted=plan.kv_scales == "calibrated",
        budget=plan.budget,
        kv_scales=kv_scales,
        choice=picked.precision if plan.index(picked.precision) == number else number,
        plan_file=plan_file,
        refused=f"{reason}; {_way_out(plan, number, target)}" if reason else "",
    )
    check_risk(job)
    return job


def check_budget(plan: Plan, target: str) -> None:
    """Raise ConfigError if the plan chose a precision that its own risk budget rules out."""
    picked = plan.select()
    if picked.risk is None or plan.accepts(picked.risk):
        return
    allowed = " or ".join(LEVELS[: LEVELS.index(plan.budget.accept) + 1])
    raise ConfigError(
        f"the risk of {picked.precision} is {picked.risk}, and no precision stays within the risk budget; allowed: "
        f"{allowed}; plan again with --accept {picked.risk}, or "
        f"save the plan (--json plan.json), and type: fp8plan emit plan.json {target} --choice {picked.precision}"
    )


def _refusal(plan: Plan, number: int, target: str) -> str:
    """The reason why `target` cannot start a choice that vLLM can; "" if it can."""
    choice = plan.choices[number]
    if target in choice.refused_by:
        return choice.refused_by[target]
    setup = plan.setup(number)
    shape = known_shape(setup)
    if shape is None or shape.stored is not None:
        return ""
    ranks, whole_experts = setup.limits.cut
    return why_not_shardable(shape, setup.precision, ranks, target, whole_experts) or ""


def _way_out(plan: Plan, number: int, target: str) -> str:
    """Advice for a choice that `target` cannot start: the best one that it can, or another plan."""
    again, refused = f"plan again with --emit {target}", plan.choices[number]
    safe = [
        (index, choice)
        for index, choice in enumerate(plan.choices)
        if choice.available and choice.riskiness <= refused.riskiness and not _refusal(plan, index, target)
    ]
    if not safe:
        return f"{again}, which looks for another layout"
    index, best = min(safe, key=lambda pair: pair[1].seconds)
    cost = ""
    if best.makespan_s is not None and refused.makespan_s is not None:
        cost = f", in {seconds(best.makespan_s)} s instead of {seconds(refused.makespan_s)} s"
    return (
        f"the next best is choice {index}, {best.precision} at {best.sizes} with "
        f"{best.data_parallel} replica(s){cost}: --choice {index} (in Python choice={index}), or {again}"
    )
