"""The command line: parse, call, print. Results go to stdout, notes and progress to stderr; bad input exits with 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.streams import standard_streams

T = TypeVar("T")


class Grid(StrEnum):
    quick = "quick"
    full = "full"


app = typer.Typer(
    name="fp8plan",
    help="Predict what each rollout precision (BF16, blockwise FP8, FP8 KV cache, both) gains and risks in LLM RL.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

WORKLOAD, ENGINE, TRAINER, OUTPUT = "Workload", "Engine (vLLM's names)", "RL step", "Output"
LENGTHS = "fixed:TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS (mean before clipping), or a .jsonl/.parquet trace"


BAD_INPUT, INTERRUPTED = 2, 130  # exit codes; 130 is 128 + SIGINT

# typer's errors of usage. Which package they come from depends on its version: click, or a copy inside typer.
UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point. Bad usage and errors raised on purpose are one line on stderr and exit code 2."""
    with standard_streams():
        raise SystemExit(_run(sys.argv[1:] or ["--help"]))


def _run(words: list[str]) -> Any:
    """The exit code."""
    try:
        code = app(words, prog_name="fp8plan", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here at the latest
    except Fp8PlanError as error:
        return _told(str(error), BAD_INPUT)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "fp8plan"
        return _told(f"{error.format_message().rstrip('.')}; for what is allowed, type: {command} --help", BAD_INPUT)
    except typer.Abort:
        code = INTERRUPTED
    return _told("interrupted", code) if code == INTERRUPTED else code  # typer gives it for ctrl-c


def _told(message: str, code: int) -> int:
    print(f"fp8plan: {' '.join(message.split())}", file=sys.stderr)
    return code


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="hub id (Qwen/Qwen3-8B) or a folder with config.json")],
    gpu: Annotated[str, typer.Option(help="h200, h100, b200, ...; auto asks the driver")],
    prompts: Annotated[int, typer.Option(rich_help_panel=WORKLOAD)] = 32,
    samples: Annotated[int, typer.Option(help="responses per prompt", rich_help_panel=WORKLOAD)] = 16,
    prompt_lengths: Annotated[str, typer.Option(help=LENGTHS, rich_help_panel=WORKLOAD)] = "fixed:1024",
    response_lengths: Annotated[
        str, typer.Option(help="the same", rich_help_panel=WORKLOAD)
    ] = "lognormal:mean=6000,sigma=0.9,max=20480",
    seed: Annotated[int, typer.Option(rich_help_panel=WORKLOAD)] = 0,
    gpus: Annotated[
        int | None, typer.Option(help="try every TP x DP layout of so many GPUs", rich_help_panel=ENGINE)
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(rich_help_panel=ENGINE)] = 1,
    data_parallel_size: Annotated[int, typer.Option(help="replicas", rich_help_panel=ENGINE)] = 1,
    gpu_memory_utilization: Annotated[float | None, typer.Option(rich_help_panel=ENGINE)] = None,
    max_model_len: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    block_size: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    num_gpu_blocks: Annotated[int | None, typer.Option(help="impose the KV pool", rich_help_panel=ENGINE)] = None,
    prefix_caching: Annotated[bool, typer.Option(rich_help_panel=ENGINE)] = True,
    async_scheduling: Annotated[bool, typer.Option(rich_help_panel=ENGINE)] = True,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", rich_help_panel=ENGINE)] = False,
    engine_version: Annotated[str, typer.Option(help="of vLLM", rich_help_panel=ENGINE)] = "0.26.0",
    strict: Annotated[
        bool, typer.Option("--strict", help="only a profile of this very version", rich_help_panel=ENGINE)
    ] = False,
    precision: Annotated[
        list[str] | None, typer.Option(help="bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat; default: all")
    ] = None,
    accept: Annotated[str, typer.Option(help="highest risk to choose: low, moderate, high")] = "moderate",
    kv_scales: Annotated[
        str,
        typer.Option(help="of FP8 KV: calibrated (after each weight sync) or unit (1.0, as plain vLLM leaves them)"),
    ] = "calibrated",
    train_s: Annotated[float | None, typer.Option(help="training, seconds a step", rich_help_panel=TRAINER)] = None,
    logprob_s: Annotated[float | None, typer.Option(help="log-probs, seconds a step", rich_help_panel=TRAINER)] = None,
    train_tokens_per_s: Annotated[float | None, typer.Option(rich_help_panel=TRAINER)] = None,
    logprob_tokens_per_s: Annotated[float | None, typer.Option(rich_help_panel=TRAINER)] = None,
    sync_gb_per_s: Annotated[
        float | None,
        typer.Option(help="10^9 bytes/s at which new weights reach an engine GPU", rich_help_panel=TRAINER),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the plan as JSON", rich_help_panel=OUTPUT)] = False,
    emit: Annotated[str | None, typer.Option(help="settings for vllm, verl or trl", rich_help_panel=OUTPUT)] = None,
    plot: Annotated[Path | None, typer.Option(help="FILE.png or FILE.html", rich_help_panel=OUTPUT)] = None,
) -> None:
    """Predict every rollout precision for a model, a GPU and a workload, and choose one."""
    from dataclasses import replace

    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.hardware import gpu as find_gpu
    from fp8plan.model.limits import EngineLimits
    from fp8plan.model.mismatch import RiskBudget
    from fp8plan.model.mismatch_budget import LEVELS
    from fp8plan.model.planner import predict
    from fp8plan.model.rl_step import Trainer
    from fp8plan.model.workload import Workload, parse_lengths

    card = find_gpu(gpu)
    if as_json and emit is not None:
        raise ConfigError("both --json and --emit are given; give one of them")
    if kv_scales not in ("calibrated", "unit"):
        raise ConfigError(f"--kv-scales is {kv_scales!r}; allowed: calibrated, unit")
    if accept not in LEVELS:
        raise ConfigError(f"--accept is {accept!r}; allowed: {', '.join(LEVELS)}")
    if sync_gb_per_s is not None and not 0 < sync_gb_per_s < float("inf"):
        raise ConfigError(f"--sync-gb-per-s is {sync_gb_per_s!r}; allowed: a number above 0")
    if gpus is not None and (tensor_parallel_size, data_parallel_size) != (1, 1):
        raise ConfigError("both --gpus and a layout are given; give --gpus, or the two parallel sizes")
    limits = replace(
        EngineLimits.for_gpu(card),
        enable_prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        enforce_eager=enforce_eager,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        **_given(
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
        ),
    )
    trainer = _given(
        train_s=train_s,
        logprob_s=logprob_s,
        train_tokens_per_s=train_tokens_per_s,
        logprob_tokens_per_s=logprob_tokens_per_s,
        sync_bandwidth=None if sync_gb_per_s is None else sync_gb_per_s * 1e9,
    )
    prediction = predict(
        ModelShape.from_hf(model),
        card,
        Workload(
            prompts,
            samples,
            parse_lengths(prompt_lengths, "prompt_length"),
            parse_lengths(response_lengths, "response_length"),
            seed,
        ),
        limits=limits,
        gpus=gpus,
        precisions=precision,
        trainer=Trainer(**trainer) if trainer else None,
        budget=RiskBudget(accept=accept),
        kv_scales_calibrated=kv_scales == "calibrated",
        engine_version=engine_version,
        strict=strict,
        progress=_progress("predicting"),
    )
    settings = None
    if emit is not None:
        from fp8plan.model.emit import emit as emit_plan

        settings = emit_plan(prediction.plan, emit)
    if plot is not None:
        from fp8plan.plots import plot as draw

        draw(prediction, plot)
    _notes(prediction.warnings)  # after all that may fail, so that an error stands alone
    if settings is not None:
        print(settings)
    elif as_json:
        print(prediction.plan.to_json())
    else:
        from fp8plan.report import plan_report

        _print(plan_report(prediction.plan))


@app.command("validate")
def validate_command(
    file: Annotated[Path, typer.Argument(help="rollout records, one JSON object per line")],
    strict: Annotated[bool, typer.Option("--strict", help="only profiles of the records' engine version")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare predictions with measured rollouts."""
    from fp8plan.model.records import read_run
    from fp8plan.model.validate import validate

    run = read_run(file)
    result = validate(run.records, strict, progress=_progress("predicting"))
    _notes([*run.left_out, *result.warnings])
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        from fp8plan.report import validation_report

        _print(validation_report(result))


@app.command("probe")
def probe_command(
    model: Annotated[str, typer.Argument(help="hub id or folder of the BF16 checkpoint")],
    precision: Annotated[
        list[str] | None, typer.Option(help="bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat; default: all")
    ] = None,
    gpu: Annotated[str, typer.Option(help="of this machine; auto asks the driver; cpu: slow, for a try")] = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt_token_ids, messages or prompt; default: 16 tasks")
    ] = None,
    most_prompts: Annotated[int | None, typer.Option(min=1, help="take the first so many")] = None,
    samples: Annotated[int, typer.Option(help="responses per prompt")] = 4,
    max_tokens: Annotated[int, typer.Option(help="of a response")] = 512,
    temperature: Annotated[float, typer.Option(help="of the run's rollouts")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    kv_scales: Annotated[str, typer.Option(help="of FP8 KV: calibrated, or unit (1.0)")] = "calibrated",
    gpu_memory_utilization: Annotated[float | None, typer.Option(rich_help_panel=ENGINE)] = None,
    tensor_parallel_size: Annotated[int, typer.Option(rich_help_panel=ENGINE)] = 1,
    max_num_seqs: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    num_gpu_blocks: Annotated[int | None, typer.Option(help="impose the KV pool", rich_help_panel=ENGINE)] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", rich_help_panel=ENGINE)] = False,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT)] = False,
    observations: Annotated[
        Path | None, typer.Option(help="append rows to this CSV of observations", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure the mismatch of each precision: vLLM samples, the BF16 reference scores the same tokens."""
    from dataclasses import replace

    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.hardware import gpu as find_gpu
    from fp8plan.model.limits import EngineLimits
    from fp8plan.runtime.probe import probe
    from fp8plan.runtime.probing.observation import append_observations
    from fp8plan.runtime.probing.observation import observations as rows_of
    from fp8plan.runtime.probing.prompts import read_prompts
    from fp8plan.runtime.probing.sampling import SampleSettings
    from fp8plan.runtime.probing.table import probe_report

    # vLLM writes its log to stdout unless told otherwise, and reads this when it is imported. What it writes while an
    # engine runs is held back; errors at the end of the process are not.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    card = find_gpu(gpu)
    settings = SampleSettings(max_tokens, samples, temperature, seed, kv_scales)
    limits = EngineLimits.for_gpu(card)
    limits = replace(
        limits,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=enforce_eager or limits.enforce_eager,
        **_given(
            gpu_memory_utilization=gpu_memory_utilization, max_num_seqs=max_num_seqs, num_gpu_blocks=num_gpu_blocks
        ),
    )
    if observations is not None:  # what cannot be written must not be found out after the measurement
        ModelShape.from_hf(model)
        append_observations(observations, [])
    try:
        found = probe(
            model,
            precision,
            None if prompts is None else read_prompts(prompts),
            gpu=card,
            settings=settings,
            limits=limits,
            most_prompts=most_prompts,
            progress=lambda text: print(text, file=sys.stderr),
        )
    except KeyboardInterrupt as end:
        _notes(getattr(end, "__notes__", []))  # where the log of an engine that did not start is
        raise
    if observations is not None:
        append_observations(observations, rows_of(found))
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        _print(probe_report(found))
    if all(one.error for one in found.precisions.values()):
        raise typer.Exit(1)


@app.command("monitor")
def monitor_command(
    file: Annotated[Path, typer.Argument(help="the run file of a Monitor (JsonLines), also of a run that goes on")],
    once: Annotated[bool, typer.Option("--once", help="print the present state and exit; so does a pipe")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="to show; default: as many as fit")] = None,
    every: Annotated[float, typer.Option(min=0.05, help="seconds between two looks at the file")] = 1.0,
) -> None:
    """Watch a run: KL against its limit, thresholds, ESS, clipping, tokens/s against the prediction, the guard."""
    from fp8plan.run_view import RunView, begin, watch
    from fp8plan.runtime.record import RunReader

    reader = RunReader(file)
    console = Console()
    if console.is_terminal and not once:
        watch(reader, every, steps, console)
    else:
        begin(reader)
        _print(RunView(reader, steps))


@app.command("report")
def report_command(
    file: Annotated[Path, typer.Argument(help="the run file of a Monitor (JsonLines)")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="FILE.html; default: beside the run file")
    ] = None,
) -> None:
    """Write the page of a run: what `monitor` shows, as interactive plots. A plan's page: plan --plot FILE.html."""
    from fp8plan.run_report import write_report

    target = output or file.with_suffix(".html")
    write_report(file, target)
    print(f"written: {target}", file=sys.stderr)


@app.command("calibrate")
def calibrate_command(
    gpu: Annotated[str, typer.Option(help="the GPU of this machine; auto asks the driver")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="folder of measurements and profile.json; default: where plans look for it")
    ] = None,
    grid: Annotated[Grid, typer.Option(help="quick: about ten minutes; full: about forty")] = Grid.quick,
    fit_only: Annotated[bool, typer.Option("--fit-only", help="fit what is measured already")] = False,
) -> None:
    """Measure this GPU through vLLM's own kernels and engine, and fit its profile. Type it again to go on."""
    from fp8plan.model.calibration import calibrate, measured_version
    from fp8plan.model.hardware import gpu as find_gpu
    from fp8plan.model.profile import own_profiles_path, profile_path
    from fp8plan.report import calibration_report

    card = find_gpu(gpu)
    if fit_only:
        if output is None:
            raise ConfigError("--fit-only needs --output, the folder of the measurements")
        folder, version = output, measured_version(output)
    else:
        from fp8plan.runtime.measure.cells import engine_version
        from fp8plan.runtime.measure.everything import measure

        version = engine_version()
        folder = output or profile_path(own_profiles_path(), card.name, version).parent
        measure(folder, card, grid.value)
    print(f"fitting what {folder} holds, about a minute", file=sys.stderr)
    found = calibrate(folder, card, version)
    (folder / "profile.json").write_text(found.profile.to_json(), encoding="utf-8")
    _print(calibration_report(found))
    print(f"written: {folder / 'profile.json'}", file=sys.stderr)


profiles_app = typer.Typer(help="List the profiles, or import some.", invoke_without_command=True)
app.add_typer(profiles_app, name="profiles")


@profiles_app.callback()
def profiles_command(context: typer.Context, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the profiles: which GPU and engine version was measured."""
    if context.invoked_subcommand is not None:
        return
    from fp8plan.model.profile import list_profiles

    entries = list_profiles()
    if as_json:
        print(json.dumps([entry._asdict() | {"path": str(entry.path)} for entry in entries], indent=2))
    else:
        from fp8plan.report import profiles_report

        _print(profiles_report(entries))


@profiles_app.command("import-aic")
def import_aic_command(
    gpu: Annotated[list[str] | None, typer.Option(help="h100, b200, ...; repeat; default: all it has")] = None,
    rollouts: Annotated[
        list[Path] | None, typer.Option(help="records of an H200, to test its import with; repeat")
    ] = None,
    kernels: Annotated[list[Path] | None, typer.Option(help="timings of kernels on an H200; repeat")] = None,
    output: Annotated[Path | None, typer.Option(help="folder of profiles; default: fp8plan's own")] = None,
) -> None:
    """Fit profiles of GPUs nobody measured here to the tables of aiconfigurator-core (pip install 'fp8plan[aic]')."""
    from fp8plan.model.aic_import import import_all
    from fp8plan.model.profile import profiles_path

    written = import_all(gpu, rollouts or [], kernels or [], output or profiles_path(), _progress("fitting"))
    for path, profile in written:
        print(f"{path}: {profile.label}, {profile.source}")


@app.command("models")
def models_command(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the bundled models."""
    from fp8plan.model.architecture import ModelShape, bundled_models

    shapes = [ModelShape.from_hf(name) for name in bundled_models()]
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(shape) | {"num_parameters": shape.num_parameters} for shape in shapes], indent=2))
    else:
        from fp8plan.report import models_report

        _print(models_report(shapes))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _notes(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)


def _progress(what: str) -> Callable[[Iterable[T]], Iterable[T]]:
    """A bar on a terminal, and only for work that lasts."""

    def bar(items: Iterable[T]) -> Iterable[T]:
        if not sys.stderr.isatty():
            return items
        from tqdm import tqdm

        return tqdm(items, desc=what, leave=False, delay=0.5, file=sys.stderr)

    return bar


def _print(report: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width: keep every row on one line
        console = Console(width=200)
    console.print(report)


if __name__ == "__main__":
    main()
