"""During the run and after it: monitor, report, validate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fp8plan.cli.app import app, print_notes, progress, show


@app.command("monitor")
def monitor_command(
    file: Annotated[Path, typer.Argument(help="the run file of a Monitor (JsonLines), also of a run that goes on")],
    once: Annotated[bool, typer.Option("--once", help="print the present state and exit; so does a pipe")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="to show; default: as many as fit")] = None,
    every: Annotated[float, typer.Option(min=0.05, help="seconds between two looks at the file")] = 1.0,
) -> None:
    """Watch a run.

    KL against its limit, thresholds, ESS, clipping, tokens/s against the prediction, the guard.
    """
    from fp8plan.runtime.monitor.run_file import RunReader
    from fp8plan.views.run.terminal import RunView, begin, watch

    reader = RunReader(file)
    console = Console()
    if console.is_terminal and not once:
        watch(reader, every, steps, console)
    else:
        begin(reader)
        show(RunView(reader, steps))


@app.command("report")
def report_command(
    file: Annotated[Path, typer.Argument(help="the run file of a Monitor (JsonLines)")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="FILE.html; default: beside the run file")
    ] = None,
) -> None:
    """Write the page of a run.

    It is what `monitor` shows, as interactive plots. A plan's page: plan --plot FILE.html.
    """
    from fp8plan.views.run.page import write_report

    target = output or file.with_name(file.name.removesuffix(".gz")).with_suffix(".html")
    write_report(file, target)
    print(f"written: {target}", file=sys.stderr)


@app.command("validate")
def validate_command(
    file: Annotated[Path, typer.Argument(help="rollout records, one JSON object per line")],
    strict: Annotated[bool, typer.Option("--strict", help="only profiles of the records' engine version")] = False,
    include_first: Annotated[
        bool, typer.Option("--include-first", help="count a run's first rollout, too, in which its engine warms up")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare predictions with measured rollouts."""
    from fp8plan.model.validate.records import read_run
    from fp8plan.model.validate.validate import validate

    run = read_run(file, include_first)
    result = validate(run.records, strict, progress=progress("predicting"))
    print_notes([*run.left_out, *result.warnings])
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        from fp8plan.views.report import validation_report

        show(validation_report(result))
