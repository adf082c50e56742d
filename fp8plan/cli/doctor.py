"""`fp8plan doctor`: what a server, or a run by its files, really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fp8plan.cli.app import OUTPUT, GroupedCommand, app, given, show


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
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="of the server", show_default="VLLM_API_KEY or OPENAI_API_KEY of the environment"
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="for all that a server is asked", show_default="120")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Say what really runs, and what to type where it is wrong.

    Exits with 1 if there is a fault, and with 2 for a server that cannot be looked at. In the engine's own process
    fp8plan.doctor(engine) sees more: weights, kernels, KV scales.
    """
    from fp8plan.runtime.doctor.doctor import doctor

    for_a_server = given(prompts=prompts, api_key=api_key, timeout_s=timeout)
    found = doctor(target, gpu=gpu, precision=precision, **for_a_server)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        from fp8plan.views.doctor import doctor_report

        show(doctor_report(found))
    if found.faults:
        raise typer.Exit(1)
