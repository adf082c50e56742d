"""The command line: parse, call, print. Results go to stdout, notes and progress to stderr; bad input exits with 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand

from fp8plan import outputs
from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.outputs import STDOUT
from fp8plan.streams import standard_streams

T = TypeVar("T")


class Grid(StrEnum):
    quick = "quick"
    full = "full"


# Help is plain text: rich's boxes break long option names at 80 columns, and rich takes [aic] for markup.
app = typer.Typer(
    name="fp8plan",
    help="Predict what each rollout precision (BF16, blockwise FP8, FP8 KV cache, both) gains and risks in LLM RL.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

WORKLOAD, ENGINE, TRAINER, OUTPUT = "Workload", "Engine (vLLM's names)", "RL step", "Output"
LENGTHS = "fixed:TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS (mean before clipping), or a .jsonl/.parquet trace"
VLLM_S = "vLLM's for this GPU"  # a default


BAD_INPUT, INTERRUPTED = 2, 130  # exit codes; 130 is 128 + SIGINT

# typer's errors of usage. Which package they come from depends on its version: click, or a copy inside typer.
UsageError: Any = typer.BadParameter.__mro__[1]


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups, by `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or plain, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


class PlanCommand(GroupedCommand):
    """A command whose `--json` may stand alone, and then prints: typer wants a value always, or never."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            f"--json={STDOUT}" if word == "--json" and not (after == STDOUT or after.endswith(".json")) else word
            for word, after in pairwise([*args, ""])
        ]
        return super().parse_args(ctx, words)


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
        told = f"{error.format_message().rstrip('.')}{_typed(error, words)}"
        return _told(f"{told}; for what is allowed, type: {command} --help", BAD_INPUT)
    except typer.Abort:
        code = INTERRUPTED
    return _told("interrupted", code) if code == INTERRUPTED else code  # typer gives it for ctrl-c


def _told(message: str, code: int) -> int:
    print(f"fp8plan: {' '.join(message.split())}", file=sys.stderr)
    return code


def _typed(error: Any, words: list[str]) -> str:
    """The value that was typed for the option which an error of usage is about; typer does not always say it."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = [(*word.partition("="), after) for word, after in pairwise([*words, ""])]
    values = [value if equals else after for name, equals, value, after in pairs if name in names]
    return f" (given: {values[-1]!r})" if values else ""


def _version(asked: bool) -> None:
    if asked:
        from fp8plan import __version__

        print(f"fp8plan {__version__}")
        raise typer.Exit


@app.callback()
def fp8plan_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Options of the program itself; `app` says what it is for."""


@app.command("plan", cls=PlanCommand)
def plan_command(
    model: Annotated[str, typer.Argument(help="hub id (Qwen/Qwen3-8B) or a folder with config.json")],
    gpu: Annotated[str, typer.Option(help="h200, h100, b200, ...; auto asks the driver")],
    prompts: Annotated[int, typer.Option(rich_help_panel=WORKLOAD)] = 32,
    samples: Annotated[int, typer.Option(help="responses per prompt", rich_help_panel=WORKLOAD)] = 16,
    prompt_lengths: Annotated[
        str | None,
        typer.Option(
            help=LENGTHS, show_default="those of the responses' trace, else fixed:1024", rich_help_panel=WORKLOAD
        ),
    ] = None,
    response_lengths: Annotated[
        str, typer.Option(help="the same", rich_help_panel=WORKLOAD)
    ] = "lognormal:mean=6000,sigma=0.9,max=20480",
    seed: Annotated[int, typer.Option(rich_help_panel=WORKLOAD)] = 0,
    gpus: Annotated[
        int | None, typer.Option(help="try every TP x DP layout of so many GPUs", rich_help_panel=ENGINE)
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="that reach each other without the network",
            show_default="8, or the NVLink domain",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(rich_help_panel=ENGINE)] = 1,
    data_parallel_size: Annotated[int, typer.Option(help="replicas", rich_help_panel=ENGINE)] = 1,
    gpu_memory_utilization: Annotated[float | None, typer.Option(show_default=VLLM_S, rich_help_panel=ENGINE)] = None,
    max_model_len: Annotated[
        int | None, typer.Option(show_default="the longest prompt + response", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(show_default=VLLM_S, rich_help_panel=ENGINE)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(show_default=VLLM_S, rich_help_panel=ENGINE)] = None,
    block_size: Annotated[int | None, typer.Option(show_default=VLLM_S, rich_help_panel=ENGINE)] = None,
    num_gpu_blocks: Annotated[
        int | None,
        typer.Option(help="impose the KV pool", show_default="what the memory holds", rich_help_panel=ENGINE),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(rich_help_panel=ENGINE)] = True,
    async_scheduling: Annotated[bool, typer.Option(rich_help_panel=ENGINE)] = True,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", rich_help_panel=ENGINE)] = False,
    engine_version: Annotated[str, typer.Option(help="of vLLM", rich_help_panel=ENGINE)] = "0.26.0",
    strict: Annotated[
        bool, typer.Option("--strict", help="only a profile of this very version", rich_help_panel=ENGINE)
    ] = False,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat", metavar="NAME", show_default="all"),
    ] = None,
    accept: Annotated[str, typer.Option(help="highest risk to choose: low, moderate, high")] = "moderate",
    kv_scales: Annotated[
        str | None,
        typer.Option(
            help="of FP8 KV: calibrated after each weight sync, as RolloutEngine does, or unit: 1.0, as vLLM, verl and "
            "TRL leave them",
            show_default="unit with --emit, else calibrated",
        ),
    ] = None,
    train_s: Annotated[float | None, typer.Option(help="training, seconds a step", rich_help_panel=TRAINER)] = None,
    logprob_s: Annotated[float | None, typer.Option(help="log-probs, seconds a step", rich_help_panel=TRAINER)] = None,
    train_tokens_per_s: Annotated[float | None, typer.Option(rich_help_panel=TRAINER)] = None,
    logprob_tokens_per_s: Annotated[float | None, typer.Option(rich_help_panel=TRAINER)] = None,
    sync_gb_per_s: Annotated[
        float | None,
        typer.Option(
            help="10^9 bytes/s at which new weights reach an engine GPU", show_default="50", rich_help_panel=TRAINER
        ),
    ] = None,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="[FILE.json]", help="the plan, to a file or, alone, to stdout", rich_help_panel=OUTPUT
        ),
    ] = None,
    emit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TARGET[=FILE]",
            help="settings for vllm, verl or trl, to a file or stdout; repeat",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a picture: FILE.png or FILE.html", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Predict every rollout precision, and choose one.

    Files are written all or none. Stdout has what is asked for without a file, else the table; notes go to stderr.
    """
    from dataclasses import replace

    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.emit import emit as emit_plan
    from fp8plan.model.hardware import gpu as find_gpu
    from fp8plan.model.limits import EngineLimits
    from fp8plan.model.mismatch import RiskBudget
    from fp8plan.model.mismatch_budget import LEVELS
    from fp8plan.model.plan import KV_SCALES
    from fp8plan.model.planner import predict
    from fp8plan.model.rl_step import Trainer
    from fp8plan.model.workload import Workload, parse_both_lengths

    card = find_gpu(gpu)
    wanted = _emissions(emit or [])
    asked = [("--json", as_json)] if as_json is not None else []
    outputs.check([*asked, *((f"--emit {target}", file) for target, file in wanted), *_plot_file(plot)])
    if kv_scales not in (None, *KV_SCALES):
        raise ConfigError(f"--kv-scales is {kv_scales!r}; allowed: {', '.join(KV_SCALES)}")
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
    scales = kv_scales or ("unit" if wanted else "calibrated")
    shape = ModelShape.from_hf(model)
    prompt_tokens, response_tokens, notes = parse_both_lengths(prompt_lengths, response_lengths)
    prediction = predict(
        shape,
        card,
        Workload(prompts, samples, prompt_tokens, response_tokens, seed),
        limits=limits,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        target="verl" if "verl" in dict(wanted) else "vllm",  # what verl can start, the others can
        precisions=precision,
        trainer=Trainer(**trainer) if trainer else None,
        budget=RiskBudget(accept=accept),
        kv_scales_calibrated=scales == "calibrated",
        engine_version=engine_version,
        strict=strict,
        progress=_progress("predicting"),
        workers=os.cpu_count() or 1,
    )
    if wanted and kv_scales is None and any(choice.unit_kv_scales for choice in prediction.plan.choices):
        notes.append("K and V scales are 1.0, as --emit's targets leave them; if you calibrate: --kv-scales calibrated")
    plan = replace(prediction.plan, warnings=(*prediction.plan.warnings, *notes))
    prediction = replace(prediction, plan=plan)
    made = {file: emit_plan(plan, target, kv_scales=scales) for target, file in wanted}
    if as_json is not None:
        made[as_json] = plan.to_json()
    printed = made.pop(STDOUT, None)
    writers = {file: outputs.text(content) for file, content in made.items()}
    if plot is not None:
        from fp8plan.plots import plot as draw

        writers[str(plot)] = lambda path: draw(prediction, path)
    outputs.write(writers)
    _notes(plan.warnings)  # after all that may fail, so that an error stands alone
    _written(writers)
    if printed is not None:
        print(printed)
    else:
        from fp8plan.report import plan_report

        _print(plan_report(plan))


@app.command("emit")
def emit_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN.json", help="what `plan --json` wrote; - reads stdin")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="vllm, verl or trl")],
    choice: Annotated[
        str | None, typer.Option(help="another precision of the plan, or its number", show_default="the chosen one")
    ] = None,
    kv_scales: Annotated[
        str, typer.Option(help="of FP8 KV: unit (1.0, as the targets leave them), or calibrated if you calibrate them")
    ] = "unit",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="file to write", show_default="stdout")
    ] = STDOUT,
) -> None:
    """Print or write the settings of a saved plan."""
    from fp8plan.model.emit import emit
    from fp8plan.model.plan import Plan

    outputs.check([("the settings", output)])
    text = outputs.read(plan)
    try:
        saved = Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{plan}: {error}") from None
    if output != STDOUT and os.path.realpath(output) == os.path.realpath(plan):
        raise ConfigError(f"--output {output} is the plan itself; give the settings a file of their own")
    settings = emit(saved, target, int(choice) if choice and choice.isdecimal() else choice, kv_scales)
    if output == STDOUT:
        print(settings)
    else:
        outputs.write({output: outputs.text(settings)})
        _written([output])


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


@app.command("probe", cls=GroupedCommand)
def probe_command(
    model: Annotated[str, typer.Argument(help="hub id or folder of the BF16 checkpoint")],
    precision: Annotated[
        list[str] | None,
        typer.Option(help="bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat", metavar="NAME", show_default="all"),
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
    """Measure the mismatch of each precision.

    vLLM samples, the BF16 reference scores the same tokens.
    """
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
    """Watch a run.

    KL against its limit, thresholds, ESS, clipping, tokens/s against the prediction, the guard.
    """
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
    """Write the page of a run.

    It is what `monitor` shows, as interactive plots. A plan's page: plan --plot FILE.html.
    """
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
    """Measure this GPU, and fit its profile.

    Through vLLM's own kernels and engine. Type it again to go on.
    """
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
    from fp8plan.model.profile import list_profiles, unused_folder

    entries = list_profiles()
    _notes(unused_folder())
    if as_json:
        print(json.dumps([entry._asdict() | {"path": str(entry.path)} for entry in entries], indent=2))
    else:
        from fp8plan.report import profiles_report

        _print(profiles_report(entries))


@profiles_app.command("import-aic")
def import_aic_command(
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="h100, b200, ...; repeat", metavar="NAME", show_default="all that the tables have"),
    ] = None,
    rollouts: Annotated[
        list[Path] | None, typer.Option(help="records of an H200, to test its import with; repeat", metavar="FILE")
    ] = None,
    kernels: Annotated[
        list[Path] | None, typer.Option(help="timings of kernels on an H200; repeat", metavar="FILE")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder of profiles", metavar="FOLDER", show_default="fp8plan's own")
    ] = None,
) -> None:
    """Import profiles of GPUs that nobody measured here.

    They are fitted to the tables of aiconfigurator-core.

    \b
    Needs: pip install 'fp8plan[aic]'
    """
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


def _emissions(words: list[str]) -> list[tuple[str, str]]:
    """(target, file or STDOUT) of each `--emit TARGET[=FILE]`."""
    from fp8plan.model.shards import check_target

    found = []
    for word in words:
        target, equals, file = word.partition("=")
        check_target(target)
        found.append((target, file if equals else STDOUT))
    return found


def _plot_file(plot: Path | None) -> list[tuple[str, str]]:
    if plot is None:
        return []
    if plot.suffix not in (".png", ".html"):
        raise ConfigError(f"cannot plot to {plot}; allowed: a name that ends in .png or .html")
    return [("--plot", str(plot))]


def _written(files: Iterable[str]) -> None:
    for file in files:
        print(f"written: {file}", file=sys.stderr)


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
