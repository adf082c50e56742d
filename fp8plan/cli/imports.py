"""`fp8plan import`: a trainer's logged rollouts become rollout records."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from fp8plan.cli import outputs
from fp8plan.cli.app import ENGINE, OUTPUT, GroupedCommand, app, byte_progress, given, print_notes
from fp8plan.cli.outputs import STDOUT

RUN = "What ran (for validate)"


@app.command("import", cls=GroupedCommand)
def import_command(
    trainer: Annotated[str, typer.Argument(metavar="TRAINER", help="verl, trl or skyrl")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="verl: trainer.rollout_data_dir; trl: output_dir (log_completions=True); skyrl: trainer.export_path "
            "(trainer.dump_data_batch=true)",
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="hub id or folder of the run's model; verl and trl log text")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="definitions of the run's tools, a JSON list; trl logs the prompts without them", metavar="FILE"
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="the trainer's figures, for the seconds: a TensorBoard folder, trainer_state.json, JSON lines, or "
            "verl's console output",
            metavar="LOG",
        ),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="only so many rollouts", show_default="all")] = None,
    model: Annotated[str | None, typer.Option(help="hub id or folder with config.json", rich_help_panel=RUN)] = None,
    gpu: Annotated[str | None, typer.Option(help="h200, h100, b200, ...", rich_help_panel=RUN)] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp8_block, fp8_kv or fp8_block+fp8_kv", rich_help_panel=RUN)
    ] = None,
    engine_version: Annotated[str | None, typer.Option(help="of vLLM", rich_help_panel=RUN)] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    data_parallel_size: Annotated[int | None, typer.Option(help="replicas", rich_help_panel=ENGINE)] = None,
    expert_parallel: Annotated[bool, typer.Option("--expert-parallel", rich_help_panel=ENGINE)] = False,
    gpu_memory_utilization: Annotated[float | None, typer.Option(rich_help_panel=ENGINE)] = None,
    max_model_len: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", rich_help_panel=ENGINE)
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", rich_help_panel=ENGINE)] = False,
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

    outputs.check([("the records", output)])
    engine = given(
        model=model,
        gpu=gpu,
        precision=precision,
        engine_version=engine_version,
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
        outputs.write({output: write})
        outputs.print_written([output])
    print_notes(stream.notes)
