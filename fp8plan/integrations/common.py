"""The shared part of all trainers' integrations: settings, plan, correction, log and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from rich.console import Console

from fp8plan import schemas
from fp8plan.checks import refuse_names
from fp8plan.errors import ConfigError
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.expected import TIS_START
from fp8plan.model.risk.remedies import NO_REMEDIES
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.weight_sync.kv_scales import device_scales
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.this_host import TIMED
from fp8plan.runtime.watch.controller.fit import constant, default_law
from fp8plan.runtime.watch.controller.laws import Controller, LevelThresholds
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds
from fp8plan.runtime.watch.guard.fallback import DEPTH, Action, stepped_down
from fp8plan.runtime.watch.monitor.sinks import JsonLines
from fp8plan.schemas import parse
from fp8plan.views.report import plan_report

if TYPE_CHECKING:
    from fp8plan.model.precision import Precision
    from fp8plan.runtime.watch.guard.guard import Verdict
    from fp8plan.runtime.watch.monitor.record import Step

# ------------------------------------------------------------------------------------------------------ settings


class TrainerSettings(msgspec.Struct, frozen=True):
    """The settings that users write in any trainer's configuration. Every key may be left out.

    plan:       path of a plan's JSON
    thresholds: "level" (LevelThresholds), or "constant"; null: the default law (fp8plan.runtime.watch.controller.fit)
    target_kl:  KL in nats per token up to which a law keeps the thresholds; null: as the plan expects, or 0.01
    limit_kl:   KL in nats per token above which the alarm sounds; null: likewise
    run_file:   path of a file for `fp8plan monitor`; null: none is written
    """

    plan: str | None = None
    thresholds: str | None = None
    target_kl: float | None = None
    limit_kl: float | None = None
    run_file: str | None = None

    def __post_init__(self) -> None:
        if self.thresholds not in (None, "constant", "level"):
            raise ConfigError(
                f'thresholds is {self.thresholds!r}; allowed: null, the default law, "constant", or "level", which '
                "tightens while the KL is above its target"
            )

    def controller(self, correction: CorrectionSettings, plan: Plan | None = None) -> Controller:
        """The law of a correction's thresholds. The plan's thresholds go before the correction's.

        Raises ConfigError for settings that do not fit the law or the correction.
        """
        levels = {"target_kl": self.target_kl, "limit_kl": self.limit_kl}
        kl: dict[str, Any] = {name: level for name, level in levels.items() if level is not None}
        if self.thresholds is None:
            return default_law(correction, plan, **kl)
        if self.thresholds == "constant":
            return constant(correction, plan, **kl)
        if correction.level is None:
            raise ConfigError('thresholds is "level" and nothing is corrected; allowed: "constant"')
        start = correction.thresholds or Thresholds(TIS_START)
        return LevelThresholds(start.tis, start.band, correction.level, **kl)

    def sinks(self) -> list[JsonLines]:
        """The run file, if there is one. Raises ConfigError for a folder that does not exist."""
        return [] if self.run_file is None else [JsonLines(self.run_file)]


S = TypeVar("S", bound=TrainerSettings)


def read_settings(data: Any, kind: type[S], where: str, example: str) -> S:
    """Convert fp8plan's part of a trainer's configuration to a `kind`.

    Raises ConfigError, which begins with `where`, for unknown keys and values of a wrong type.

    example: the words to type, for the error
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is {data!r:.60}; allowed: an object with named keys, such as {example}")
    refuse_names(where, data, kind.__struct_fields__)
    return schemas.checked(dict(data), kind, where)


# ---------------------------------------------------------------------------------------------------------- plan

ALLOWED: Final = '"auto", a Plan, the path of a plan\'s JSON, or None'

WIDTH: Final = 200  # columns of a table in a log, as where the command line has no terminal


def read_plan(source: Any, allowed: str = ALLOWED) -> Plan | None:
    """Return a Plan, or the one in the file that `source` names; None for "auto". Raises ConfigError for anything else.

    allowed: the end of the error
    """
    if isinstance(source, Plan):
        return source
    if source == "auto":
        return None
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"plan is {source!r}; allowed: {allowed}")
    if not Path(source).is_file():
        raise ConfigError(f"plan is {str(source)!r}, and there is no such file; allowed: {allowed}")
    return Plan.from_json(Path(source).read_text(encoding="utf-8"))


def check_model(setup: EngineSetup, model: str) -> None:
    """Raise ConfigError if a checkpoint has other layers than an engine's model.

    model: hub id or folder of the checkpoint; one without a readable config passes
    """
    plain = replace(setup, remedies=NO_REMEDIES)
    shape, planned = replace(plain, model=model).known_shape, plain.shape
    if shape is None or (shape.hidden_size, shape.layers) == (planned.hidden_size, planned.layers):
        return
    sizes, others = (f"{x.num_layers} layers of width {x.hidden_size}" for x in (planned, shape))
    differ = f"both have {sizes}, of other parts" if sizes == others else f"{sizes}, and {others}"
    raise ConfigError(
        f"the plan is for {planned.name}, and the model is {model} ({differ}); "
        f"plan again: fp8plan plan {model} --gpu {setup.gpu.name}"
    )


def announce(plan: Plan, source: Any, choice: int | str | None, dry_run: bool = False) -> None:
    """Print the engines' precision and the reason, or the table of a plan that was made at the start, and the host's
    speed if it was timed. The trainer's first process calls it.

    source: the trainer's setting of the plan; choice: index or precision; None: the chosen one; dry_run: print the
    table of any plan, and that nothing was started
    """
    named = "a Plan" if isinstance(source, Plan) else str(source)
    if source == "auto":
        named = '"auto"'
    chosen = "" if choice is None else f", choice={choice!r}"
    print(f"fp8plan: plan={named}{chosen}: {plan.select(choice).precision} for {plan.model} on {plan.gpu}", flush=True)
    if source == "auto" or dry_run:
        print_table(plan)
    elif plan.reasons:
        print(f"fp8plan: {'' if choice is None else 'without choice: '}{plan.reasons[0]}", flush=True)
    for note in plan.warnings:
        if note.startswith(TIMED):
            print(f"fp8plan: {note}", flush=True)
    if dry_run:
        print("fp8plan: dry_run: no engine and no training was started", flush=True)


def print_table(plan: Plan) -> None:
    """Print the table of a plan, with its reasons, as `fp8plan plan` does."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(plan_report(plan), crop=False)


# ----------------------------------------------------------------------------------------------------------- log

# Figures of a Monitor's step for a trainer's log, by their names in a run file; in the log all begin with "fp8plan/".
LOGGED: Final = (
    "rollout_corr/kl", "rollout_corr/k3_kl", "fp8plan/k3_robust", "fp8plan/ess_raw", schemas.ESS,
    schemas.CLIP_FRACTION, schemas.CLIPPED_MASS, schemas.LOST_TOKENS, schemas.LOST_SEQUENCES, schemas.TIS,
    schemas.BAND_LOW, schemas.BAND_HIGH, "fp8plan/alarms", "fp8plan/invalid", schemas.ROUTING_DIFFERS,
    schemas.TOKENS_PER_S, schemas.PREDICTED, schemas.PREDICTED_LOW, schemas.PREDICTED_HIGH,
)  # fmt: skip


def metrics_of(step: Step, preset: Precision, report: SyncReport | None) -> dict[str, float]:
    """Figures of a step, beside those of its engine, by their names in a trainer's log. Unknown ones are left out."""
    figures = {f"fp8plan/{name.partition('/')[2]}": step.metrics.get(name) for name in LOGGED}
    known = {name: value for name, value in figures.items() if value is not None}
    return known | engine_metrics(step.verdict, preset, report)


def engine_metrics(verdict: Verdict | None, preset: Precision, report: SyncReport | None) -> dict[str, float]:
    """Figures of the guard's verdict, the running precision and the last sync, by their names in a trainer's log."""
    figures = {"fp8plan/fp8_weights": float(preset.weights != "bf16"), "fp8plan/fp8_kv": float(preset.kv == "fp8")}
    if verdict is not None:
        figures["fp8plan/speed_ratio"] = verdict.ratio
        figures["fp8plan/as_fast_as_predicted"] = float(verdict.as_fast is not False)
        figures["fp8plan/advice"] = float(DEPTH[verdict.action])  # steps down the ladder of precisions; 0: none
    if report is not None:
        figures["fp8plan/sync_s"] = report.seconds["total"]
        figures["fp8plan/sync_compared"] = float(report.compared)
        if report.weight_error is not None:  # without FP8 weights there is none
            figures["fp8plan/weight_error"] = report.weight_error
    return figures


def safer_than(running: str, action: Action, escalate: Escalation | None) -> str | None:
    """The safer precision that the guard, or else the controller, advises; None if neither does.

    running: preset of the engine

    Advice to recalibrate KV scales needs no action, as each sync measures them.
    """
    if action not in (Action.NONE, Action.RECALIBRATE_KV):
        return stepped_down(running, action)
    return "bf16" if escalate == Escalation.STEP_DOWN and running != "bf16" else None


def report_of(status: Mapping[str, Any], seconds: float) -> SyncReport:
    """The report of a sync with a server. status: as Front.status; seconds: duration, as the client saw it"""
    update, scales = status["last_update"], status["kv_scales"]
    known = {field.name for field in fields(SyncReport)}
    return SyncReport(
        **{name: value for name, value in update.items() if name in known and name != "seconds"},
        seconds=update["seconds"] | {"total": seconds},
        kv_scales=device_scales(scales["scales"]) if scales else None,
        kv_source=scales and scales["source"],
        scored_k3=None,
    )


# --------------------------------------------------------------------------------------------------- checkpoints

STATE_FILE: Final = "fp8plan.json"


def save_state(state: Mapping[str, Any], checkpoint: Path) -> None:
    """Write a state, such as a Monitor's, into a checkpoint's folder, whole or not at all."""
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(json.dumps(state), encoding="utf-8")
    part.replace(checkpoint / STATE_FILE)


def load_state(checkpoint: Path) -> dict[str, Any] | None:
    """Return the state that a checkpoint's folder holds; None if there is none.

    Raises ConfigError for a file that is unreadable, or no JSON object.
    """
    file = checkpoint / STATE_FILE
    if not file.is_file():
        return None
    where = f"{file}, without which thresholds begin anew,"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; take it from another checkpoint, or delete it") from None
    return schemas.checked(parse(text, where, finite=False), dict[str, Any], where)  # limit_kl and C may be infinite
