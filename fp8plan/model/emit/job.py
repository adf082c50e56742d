"""The input of all settings: one choice of a plan, for one target, or the reason why the target cannot have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.plan.choice import Choice
from fp8plan.model.risk.expected import TIS_FLOOR, RiskBudget
from fp8plan.model.setup import EngineSetup
from fp8plan.model.targets import TARGETS

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
    tis:        C of token TIS to begin with, on pi_train / pi_rollout; None: no correction
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

    @property
    def engine(self) -> str:
        """The engine as a note names it: model, GPU and precision."""
        return f"{self.model_name} on {self.setup.gpu.name}, {self.setup.precision.name}"

    @property
    def constant_tis(self) -> float | None:
        """C of token TIS in a trainer that keeps it as it is: the end of the default law. None: no correction"""
        return None if self.tis is None else min(self.tis, TIS_FLOOR)

    @property
    def at_once(self) -> dict[str, int]:
        """The target's settings for the plan's trajectories at once; {} if all of them run, and for one turn.

        Raises ConfigError for fewer than the target allows.
        """
        number = (self.workload.get("turns") or {}).get("concurrent")
        if number is None:
            return {}
        starts = TARGETS[self.target]
        least = starts.least_at_once(self.tokens("samples"))
        if number < least:
            raise ConfigError(
                f"{starts.sender} runs all samples of a prompt at once, and this plan has {number} trajectories at "
                f"once; allowed: {least} or more; plan again with --concurrent {least}"
            )
        return starts.settings_at_once(number, self.setup.limits.data_parallel_size)

    def tokens(self, key: str) -> int:
        """One of the workload's counts. Raises ConfigError if the workload does not have it."""
        return workload_tokens(self.workload, key)

    def refuse(self, program: str) -> None:
        """Raise ConfigError for an engine that `program` cannot start: one on a CPU, or a refused one."""
        setup, stored = self.setup, self.setup.stored
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


def scales_in(target: str, setup: EngineSetup, kv_scales: str) -> str:
    """The K and V scales of an FP8 cache in a target, one of KV_SCALES. kv_scales: those where nobody measures them"""
    match TARGETS[target].measures:
        case "fp8plan":
            return "unit" if setup.why_fixed_kv_scales else "calibrated"
        case "trainer":
            return "calibrated"
    return kv_scales
