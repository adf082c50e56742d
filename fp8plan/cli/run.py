"""During the run and after it: monitor, report, validate, import and doctor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from fp8plan.cli import console
from fp8plan.cli.console import STDOUT, print_notes, progress, show, starting_engines
from fp8plan.cli.program import app, not_none, option
from fp8plan.errors import ConfigError
from fp8plan.model.risk.remedies import TRAINER_PRECISIONS
from fp8plan.options import ENGINE, OUTPUT, PREFIX_CACHING


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
    from fp8plan.runtime.watch.monitor.steps import RunReader
    from fp8plan.views.run import RunView, begin, watch

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

    It shows the same as `monitor`, as interactive plots. A plan's page: plan --plot FILE.html.
    """
    from fp8plan.views.run_page import write_report

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
    from fp8plan.views.measured import validation_report

    run = read_run(file, include_first)
    result = validate(run.compared(), strict, progress=progress("predicting"))
    print_notes([*run.notes, *result.warnings])
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        show(validation_report(result))


RUN = "What ran (for validate)"


def byte_progress(what: str) -> Callable[[int, int], None]:
    """A progress bar of bytes on a terminal. Call it with the bytes done, and with their total."""
    bars: list[Any] = []

    def show_bytes(done: int, total: int) -> None:
        if not bars and sys.stderr.isatty():
            from tqdm import tqdm

            scale = {"unit": "B", "unit_scale": True}
            bars.append(tqdm(total=total, desc=what, leave=False, delay=0.5, file=sys.stderr, **scale))
        for bar in bars:
            bar.update(done - bar.n)
            if done >= total:
                bar.close()

    return show_bytes


@app.command("import")
def import_command(
    trainer: Annotated[str, typer.Argument(metavar="TRAINER", help="verl, trl, skyrl, or jsonl: lines of any program")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="verl: trainer.rollout_data_dir; trl: output_dir (log_completions=True); skyrl: trainer.export_path "
            "(trainer.dump_data_batch=true); jsonl: files STEP.jsonl of lines "
            '{"prompt": TOKENS, "turns": [[GENERATED, TOOL, WAIT_S], ...]}',
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="hub id or folder of the run's model; verl and trl log text")
    ] = None,
    tools: Annotated[
        Path | None,
        option(None, "definitions of the run's tools, a JSON list; trl logs the prompts without them", metavar="FILE"),
    ] = None,
    log: Annotated[
        Path | None,
        option(
            None,
            "the trainer's figures, for the seconds: a TensorBoard folder, trainer_state.json, JSON lines, or verl's "
            "console output",
            metavar="LOG",
        ),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="only so many rollouts", show_default="all")] = None,
    model: Annotated[str | None, option(RUN, "hub id or folder with config.json")] = None,
    gpu: Annotated[str | None, option(RUN, "h200, h100, b200, ...")] = None,
    precision: Annotated[str | None, option(RUN, "bf16, fp8_block, fp8_kv or fp8_block+fp8_kv")] = None,
    engine_version: Annotated[str | None, option(RUN, "of vLLM")] = None,
    inside: Annotated[str | None, option(RUN, "its caller, as in `plan`", "verl-stock for verl, else own")] = None,
    tensor_parallel_size: Annotated[int | None, option(ENGINE)] = None,
    data_parallel_size: Annotated[int | None, option(ENGINE, "replicas")] = None,
    expert_parallel: Annotated[bool, option(ENGINE, flag="--expert-parallel")] = False,
    gpu_memory_utilization: Annotated[float | None, option(ENGINE)] = None,
    max_model_len: Annotated[int | None, option(ENGINE)] = None,
    max_num_seqs: Annotated[int | None, option(ENGINE)] = None,
    max_num_batched_tokens: Annotated[int | None, option(ENGINE)] = None,
    prefix_caching: Annotated[bool | None, option(ENGINE, flag=PREFIX_CACHING)] = None,
    enforce_eager: Annotated[bool, option(ENGINE, flag="--enforce-eager")] = False,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="file to write", show_default="stdout", rich_help_panel=OUTPUT
        ),
    ] = STDOUT,
) -> None:
    """Turn a run's logged rollouts into records.

    `plan --workload` takes the last of them as its workload, `validate` compares all of them with their predictions.
    """
    from fp8plan import jsonl
    from fp8plan.importers.records import RolloutStream

    console.check([("the records", output)])
    engine = not_none(
        model=model,
        gpu=gpu,
        precision=precision,
        engine_version=engine_version,
        inside=inside,
        tensor_parallel=tensor_parallel_size,
        data_parallel=data_parallel_size,
        expert_parallel=expert_parallel or None,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        enforce_eager=enforce_eager or None,
    )
    stream = RolloutStream(trainer, folder, tokenizer, log, last, engine, byte_progress("counting tokens"), tools)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(map(jsonl.line, stream))

    if output == STDOUT:  # all of it or nothing, as with a file
        with TemporaryDirectory() as held:
            write(Path(held, "records.jsonl"))
            with Path(held, "records.jsonl").open(encoding="utf-8") as file:
                sys.stdout.writelines(file)
    else:
        console.write({output: write})
        console.print_written([output])
    print_notes(stream.notes)


@app.command("doctor")
def doctor_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="URL of a vllm serve, a Monitor's run file, or a trainer's log",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine",
            help="instead of a TARGET: test the installed vLLM with a tiny random model: one minute, on a GPU five",
        ),
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="instead of a TARGET: time this machine's CPU for `plan --host-loop-us`")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with prompt_token_ids, messages or prompt, that the server has had lately: shows what its "
            "prefix cache holds"
        ),
    ] = None,
    gpu: Annotated[str | None, option(None, "that it runs on", "what it tells, else the driver")] = None,
    precision: Annotated[
        str | None, typer.Option(help="that was planned: bf16, fp8_block, fp8_kv or fp8_block+fp8_kv")
    ] = None,
    trainer_precision: Annotated[
        str | None, option(None, f"of the trainer's linears: {', '.join(TRAINER_PRECISIONS)}", metavar="NAME")
    ] = None,
    api_key: Annotated[
        str | None, option(None, "of the server", "VLLM_API_KEY or OPENAI_API_KEY of the environment", metavar="KEY")
    ] = None,
    timeout: Annotated[float | None, option(None, "for all that a server is asked", "120", metavar="SECONDS")] = None,
    as_json: Annotated[bool, option(OUTPUT, flag="--json")] = False,
) -> None:
    """Say what really runs, and what to type if it is wrong.

    Exits with 1 if there is a fault, and with 2 for a server that cannot be checked. In the engine's own process
    fp8plan.doctor(engine) sees more: weights, kernels, KV scales.
    """
    from fp8plan.views.findings import doctor_report

    for_a_server = not_none(prompts=prompts, api_key=api_key, timeout_s=timeout)
    for_a_target = [target, precision, trainer_precision, *for_a_server]
    if host:
        if engine or gpu or any(for_a_target):
            raise ConfigError("--host times this machine's CPU; leave out TARGET, and options other than --json")
        from fp8plan.runtime.this_host import time_host

        loop_s = time_host()
        option_s = f"--host-loop-us {1e6 * loop_s:.0f}"
        print(json.dumps({"host_loop_s": loop_s}) if as_json else f"for engines on this machine: plan ... {option_s}")
        return
    if engine:
        if any(for_a_target):
            raise ConfigError(
                "--engine tests the installed vLLM; leave out TARGET, and options other than --gpu and --json"
            )
        from fp8plan.runtime.apply.doctor.self_test import self_test

        with starting_engines():
            diagnosis = self_test(gpu, lambda text: print(text, file=sys.stderr))
    elif target is None:
        raise ConfigError("nothing to look at; give a TARGET (a URL or a file), or type: fp8plan doctor --engine")
    else:
        from fp8plan.runtime.apply.doctor.doctor import doctor

        diagnosis = doctor(target, gpu=gpu, precision=precision, trainer_precision=trainer_precision, **for_a_server)
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2, allow_nan=False))
    else:
        show(doctor_report(diagnosis))
    if diagnosis.faults:
        raise typer.Exit(1)
