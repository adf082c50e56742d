"""A plan for a trainer that starts: the one that it was given, or one made from the trainer's own settings."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan as make_plan
from fp8plan.model.workload import Fixed, Lengths, LogNormal, Workload
from fp8plan.runtime.vllm_versions import check_vllm_version

ALLOWED: Final = '"auto", a Plan, the path of a plan\'s JSON, or None'

# Of responses before the first was seen: the default of `fp8plan plan`, as a share of the longest, and its sigma.
MEAN_SHARE, SIGMA = 0.3, 0.9
UNKNOWN_PROMPT: Final = 1024  # tokens, as `fp8plan plan` takes it


def read_plan(given: Any, allowed: str = ALLOWED) -> Plan | None:
    """Return the Plan that was given, or that the file holds; None for "auto". Raises ConfigError for anything else.

    allowed: for its text
    """
    if isinstance(given, Plan):
        return given
    if given == "auto":
        return None
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"plan is {given!r}; allowed: {allowed}")
    if not Path(given).is_file():
        raise ConfigError(f"plan is {str(given)!r}, and there is no such file; allowed: {allowed}")
    return Plan.from_json(Path(given).read_text(encoding="utf-8"))


def announce(plan: Plan, source: Any, choice: int | str | None) -> None:
    """Print in two lines what the engines of a trainer will run, and why. The trainer's first process calls it.

    source: as the trainer was given the plan; choice: what it was told to take of it; None: the chosen one
    """
    named = '"auto"' if source == "auto" else "a Plan" if isinstance(source, Plan) else str(source)
    of_choice = "" if choice is None else f", choice={choice!r}"
    print(
        f"fp8plan: plan={named}{of_choice}: {plan.select(choice).precision} for {plan.model} on {plan.gpu}", flush=True
    )
    if plan.reasons:
        advice = "" if choice is None else "without choice: "
        print(f"fp8plan: {advice}{plan.reasons[0]}", flush=True)


def plan_for(
    model: str,
    gpu: str,
    limits: EngineLimits,
    *,
    responses: int,
    samples: int,
    longest_response: int,
    prompt_lengths: Lengths | None = None,
    longest_prompt: int | None = None,
    **more: Any,
) -> Plan:
    """Plan the rollouts of engines whose limits are given: only their precision is to be found.

    model:     hub id or folder of the checkpoint
    gpu:       as find_gpu takes it
    responses: in one rollout of all the engines; samples: of them for each prompt
    longest_response: tokens
    prompt_lengths: tokens; None: UNKNOWN_PROMPT, or longest_prompt if that is less
    longest_prompt: tokens; None: what the responses leave of the longest request
    more:      as `fp8plan.plan` takes it

    Raises what `fp8plan.plan` raises: ConfigError for a model that is not modelled or not found, CapacityError for one
    that does not fit.
    """
    samples = min(samples, responses)
    left = (limits.max_model_len or 0) - longest_response if longest_prompt is None else longest_prompt
    prompts = prompt_lengths or Fixed(max(1, min(UNKNOWN_PROMPT, left)))
    lengths = LogNormal(max(1.0, MEAN_SHARE * longest_response), SIGMA, longest_response)
    workload = Workload(ceil(responses / samples), samples, prompts, lengths)
    installed = check_vllm_version().partition("+")[0]
    return make_plan(model, find_gpu(gpu), workload, limits=limits, engine_version=installed, **more)
