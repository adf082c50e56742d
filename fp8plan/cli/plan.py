"""Before the run: `fp8plan plan`, and `fp8plan emit` for the settings of a saved plan."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8plan.cli import console
from fp8plan.cli.console import STDOUT, print_notes
from fp8plan.cli.program import ConfiguredCommand, Declared, Options, app, option
from fp8plan.errors import ConfigError
from fp8plan.options import Words

if TYPE_CHECKING:
    from fp8plan.model.plan.planner import Prediction


def _options() -> Options:
    from fp8plan.cli.configured import TrainerConfig
    from fp8plan.cli.request import PlanOutputs
    from fp8plan.model.plan.request import PlanRequest

    return Options((PlanRequest, TrainerConfig, PlanOutputs), without=["max_lag"])


@app.command("plan", cls=ConfiguredCommand)
@partial(Declared, load=_options)
def plan_command(words: Words) -> None:
    """Predict every rollout precision, and choose one.

    Files are written all or none. An output without a file goes to stdout, else the table does. Beside settings on
    stdout the table goes to stderr, as notes do.
    """
    from fp8plan.cli.configured import TrainerConfig, configured
    from fp8plan.cli.request import request_of
    from fp8plan.model.plan.planner import predict
    from fp8plan.model.plan.request import PlanRequest
    from fp8plan.views.report import plan_report

    if words[TrainerConfig]:
        words = configured(words)
    request, outputs, notes = request_of(PlanRequest, words, "predicting")
    outputs.deliver(predict(request), notes, plan_report, _draw)


def _draw(prediction: Prediction, target: Path, kv_scales: str) -> None:
    from fp8plan.views.plan_page import draw  # with all that draws, which a plan without a picture need not load

    draw(prediction, target, kv_scales)


@app.command("emit")
def emit_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN.json", help="the file of `plan --json`; - reads stdin")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="as `plan --emit`")],
    choice: Annotated[
        str | None, option(None, "another precision of the plan, or its number", "the chosen one")
    ] = None,
    kv_scales: Annotated[
        str, option(None, "of FP8 KV that neither fp8plan nor a trainer measures: unit (1.0), or calibrated if you do")
    ] = "unit",
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="file to write; trl: JSON if it ends in .json, else Python",
            show_default="stdout",
        ),
    ] = STDOUT,
) -> None:
    """Print or write the settings of a saved plan."""
    from fp8plan.cli.request import as_python, print_choice
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.syncs import notes_on_sender

    console.check([("the settings", output)])
    text = console.read(plan)
    try:
        saved = Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{plan}: {error}") from None
    if output != STDOUT and os.path.realpath(output) == os.path.realpath(plan):
        raise ConfigError(f"--output {output} is the plan itself; give the settings a file of their own")
    is_number = choice is not None and choice.isdecimal() and len(choice) < 10  # int() refuses thousands of digits
    plan_file = None if plan == STDOUT else os.path.abspath(plan)
    name: int | str | None = int(choice or 0) if is_number else choice
    settings = saved.emit(target, name, kv_scales, plan_file, as_python(output))
    print_notes(notes_on_sender(saved.inside, target))
    if output == STDOUT:
        print_choice(saved, name)
        print(settings)
    else:
        console.write({output: console.text(settings)})
        console.print_written([output])
