"""A plan for a trainer that starts: the one that it was given, or one made from the trainer's own settings.

A plan's thresholds as the correction of a trainer's batches, and a Monitor's step as figures for a trainer's log.

A Monitor's state in the checkpoints of a trainer: the thresholds, and the guard's memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan as make_plan
from fp8plan.model.risk.expected import THRESHOLDS, rejections_in, weights_in
from fp8plan.model.workload import Fixed, Lengths, LogNormal, Workload
from fp8plan.runtime.controller.state import Escalation
from fp8plan.runtime.correction.settings import CorrectionSettings, Rejection, Thresholds
from fp8plan.runtime.guard.fallback import DEPTH, Action, stepped_down
from fp8plan.runtime.vllm_versions import check_vllm_version

if TYPE_CHECKING:
    from fp8plan.model.precision import Precision
    from fp8plan.runtime.monitor.monitor import Monitor
    from fp8plan.runtime.monitor.record import Step
    from fp8plan.runtime.weight_sync.state import SyncReport

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


# Figures of a Monitor's step that go into a trainer's log, by their names in a run file; there they lose verl's prefix.
LOGGED: Final = (
    "rollout_corr/kl", "rollout_corr/k3_kl", "fp8plan/k3_robust", "fp8plan/ess_raw", schemas.ESS,
    schemas.CLIP_FRACTION, schemas.CLIPPED_MASS, schemas.LOST_TOKENS, schemas.LOST_SEQUENCES, schemas.TIS,
    schemas.BAND_LOW, schemas.BAND_HIGH, "fp8plan/alarms", "fp8plan/invalid", schemas.TOKENS_PER_S, schemas.PREDICTED,
    schemas.PREDICTED_LOW, schemas.PREDICTED_HIGH,
)  # fmt: skip


def settings_of(thresholds: Mapping[str, Any]) -> CorrectionSettings:
    """The correction that a plan's thresholds ask for; without any, token TIS at C = 2.

    Raises ConfigError for two weights.
    """
    weights = weights_in(thresholds)
    if len(weights) > 1:
        raise ConfigError(f"the plan asks for {' and '.join(weights)}; allowed: one importance weight")
    for name in weights:
        level, mode = THRESHOLDS[name].weight or ("token", "tis")
        bound = thresholds[name]
        bounds = Thresholds(tis=None, band=(*bound,)) if THRESHOLDS[name].is_band else Thresholds(tis=bound)
        return CorrectionSettings(level, mode, bounds, dropped(thresholds))
    return CorrectionSettings(reject=dropped(thresholds))


def dropped(thresholds: Mapping[str, Any]) -> tuple[Rejection, ...]:
    """The rejections of sequences that a plan's thresholds ask for."""
    return tuple(Rejection(over, "k1", high, low) for over, (low, high) in rejections_in(thresholds).items())


def metrics_of(step: Step, preset: Precision, report: SyncReport | None) -> dict[str, float]:
    """The findings of a step and the last sync, and the precision that runs, under the names of a trainer's log.

    What is not known is left out.
    """
    found = {f"fp8plan/{name.partition('/')[2]}": step.metrics.get(name) for name in LOGGED}
    found |= {"fp8plan/fp8_weights": float(preset.weights != "bf16"), "fp8plan/fp8_kv": float(preset.kv == "fp8")}
    found |= dict(_judged(step)) | dict(_synced(report))
    return {name: value for name, value in found.items() if value is not None}


def _judged(step: Step) -> Iterator[tuple[str, float]]:
    """The guard's verdict: whether the gain arrives, and how far down the ladder its advice leads (0: nothing)."""
    if step.verdict is not None:
        yield "fp8plan/speed_ratio", step.verdict.ratio
        yield "fp8plan/as_fast_as_predicted", float(step.verdict.as_fast)
        yield "fp8plan/advice", float(DEPTH[step.verdict.action])


def _synced(report: SyncReport | None) -> Iterator[tuple[str, float | None]]:
    if report is not None:
        yield "fp8plan/sync_s", report.seconds["total"]
        yield "fp8plan/sync_compared", float(report.compared)
        yield "fp8plan/weight_error", report.weight_error


def safer_than(running: str, action: Action, escalate: Escalation | None) -> str | None:
    """The precision that the guard, or else the controller, advises to step down to; None if that is not advised.

    running: preset of the engine. KV scales are measured at each sync, so advice to do that needs nothing
    """
    if action not in (Action.NONE, Action.RECALIBRATE_KV):
        return stepped_down(running, action)
    return "bf16" if escalate == Escalation.STEP_DOWN and running != "bf16" else None


STATE_FILE: Final = "fp8plan.json"


def save_state(monitor: Monitor, checkpoint: Path) -> None:
    """Write the state into the folder of a checkpoint, whole or not at all."""
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(json.dumps(monitor.state_dict()), encoding="utf-8")
    part.replace(checkpoint / STATE_FILE)


def load_state(monitor: Monitor, checkpoint: Path) -> bool:
    """Go on with the state in the folder of a checkpoint. Return False if there is none.

    Raises ConfigError for a file that cannot be read, that is not JSON, and for values that no state has.
    """
    file = checkpoint / STATE_FILE
    if not file.is_file():
        return False
    where = f"{file}, without which thresholds begin anew,"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; take it from another checkpoint, or delete it") from None
    monitor.load_state_dict(parse(text, where, finite=False))  # limit_kl and C may be infinite
    return True
