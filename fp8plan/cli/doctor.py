"""`fp8plan doctor`: what a server, or a run by its files, really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fp8plan.cli.app import OUTPUT, GroupedCommand, app, show


@app.command("doctor", cls=GroupedCommand)
def doctor_command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="URL of a vllm serve, a Monitor's run file, or a trainer's log")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with prompt_token_ids, messages or prompt, that the server has had lately: shows what its "
            "prefix cache holds"
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="that it runs on", show_default="what it tells, else the driver")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="that was planned: bf16, fp8_block, fp8_kv or fp8_block+fp8_kv")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Say what really runs, and what to type where it is wrong.

    Exits with 1 if there is a fault. In the engine's own process fp8plan.doctor(engine) sees more: weights, kernels,
    KV scales.
    """
    from fp8plan.runtime.doctor.doctor import doctor
    from fp8plan.runtime.doctor.server import read_tokens

    tokens = None if prompts is None else read_tokens(target, prompts)
    found = doctor(target, prompts=tokens, gpu=gpu, precision=precision)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        from fp8plan.views.doctor import doctor_report

        show(doctor_report(found))
    if found.faults:
        raise typer.Exit(1)
