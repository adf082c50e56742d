"""Before the run: `fp8plan plan`, and `fp8plan emit` for the settings of a saved plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from fp8plan.cli import console as outputs
from fp8plan.cli.console import (
    ENGINE,
    EXPERTS,
    OUTPUT,
    PREFIX_CACHING,
    STDOUT,
    TRAINER,
    WORKLOAD,
    PlanCommand,
    app,
    not_none,
    option,
    options_of,
    print_notes,
    progress,
    show,
)
from fp8plan.errors import ConfigError
from fp8plan.version import DEFAULT_ON_CPU, DEFAULT_VERSION, check_starts, planned_version

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction
    from fp8plan.model.workload import Workload

# The rollout of DAPO (arXiv 2503.14476) on one GPU.
PROMPTS: Final = 32
SAMPLES: Final = 16
RESPONSES: Final = "lognormal:mean=6000,sigma=0.9,max=20480"
LENGTHS: Final = (
    "fixed:TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS (mean before clipping), or a .jsonl/.parquet trace"
)
VLLM_S: Final = "vLLM's for this GPU"  # a default


def _workload(
    recorded: Path | None,
    prompts: int | None,
    samples: int | None,
    prompt_lengths: str | None,
    response_lengths: str | None,
    seed: int | None,
) -> tuple[Workload, list[str]]:
    """The workload of the options (None: not set), and notes.

    Raises ConfigError for a recorded rollout beside any other option, and as the workload's own readers do.
    """
    from fp8plan.model.validate.records import recorded_workload
    from fp8plan.model.workload import Workload, parse_both_lengths

    if recorded is not None:
        others = {"prompts": prompts, "samples": samples, "prompt-lengths": prompt_lengths}
        others |= {"response-lengths": response_lengths, "seed": seed}
        if names := ", ".join(f"--{name}" for name in not_none(**others)):
            raise ConfigError(f"both --workload and {names} are given; --workload {recorded} says all of them")
        return recorded_workload(recorded)
    prompt_tokens, response_tokens, notes = parse_both_lengths(
        prompt_lengths, RESPONSES if response_lengths is None else response_lengths
    )
    counts = (PROMPTS if prompts is None else prompts, SAMPLES if samples is None else samples)
    return Workload(*counts, prompt_tokens, response_tokens, seed or 0), notes


def planned(
    model: Annotated[str, typer.Argument(help="hub id (Qwen/Qwen3-8B) or a folder with config.json")],
    gpu: Annotated[
        str, typer.Option(help="h200, a100-80gb, rtx4090, ...; auto asks the driver; datasheet:NUMBERS, any other card")
    ],
    workload: Annotated[
        Path | None,
        option(
            WORKLOAD,
            "the last rollout in a file of rollout records (`import`, a Monitor's run file); goes alone",
            metavar="FILE.jsonl",
        ),
    ] = None,
    observed: Annotated[
        Path | None,
        option(
            WORKLOAD,
            "measured rollouts of this machine, in any precision, which correct the prediction (the same files)",
            metavar="FILE.jsonl",
        ),
    ] = None,
    prompts: Annotated[int | None, option(WORKLOAD, default="32")] = None,
    samples: Annotated[int | None, option(WORKLOAD, "responses per prompt", "16")] = None,
    prompt_lengths: Annotated[
        str | None, option(WORKLOAD, LENGTHS, "those of the responses' trace, else fixed:1024")
    ] = None,
    response_lengths: Annotated[str | None, option(WORKLOAD, "the same", RESPONSES)] = None,
    seed: Annotated[int | None, option(WORKLOAD, "of lengths that are drawn", "0")] = None,
    gpus: Annotated[
        int | None, option(ENGINE, "try every layout of so many GPUs: TP x DP, and with experts EP")
    ] = None,
    gpus_per_node: Annotated[
        int | None, option(ENGINE, "that reach each other without the network", "8, or the NVLink domain")
    ] = None,
    tensor_parallel_size: Annotated[int, option(ENGINE)] = 1,
    data_parallel_size: Annotated[int, option(ENGINE, "replicas")] = 1,
    expert_parallel: Annotated[bool, option(ENGINE, EXPERTS, flag="--expert-parallel")] = False,
    gpu_memory_utilization: Annotated[float | None, option(ENGINE, default=VLLM_S)] = None,
    max_model_len: Annotated[int | None, option(ENGINE, default="the longest prompt + response")] = None,
    max_num_seqs: Annotated[int | None, option(ENGINE, default=VLLM_S)] = None,
    max_num_batched_tokens: Annotated[int | None, option(ENGINE, default=VLLM_S)] = None,
    block_size: Annotated[int | None, option(ENGINE, default=VLLM_S)] = None,
    num_gpu_blocks: Annotated[int | None, option(ENGINE, "impose the KV pool", "what the memory holds")] = None,
    max_cudagraph_capture_size: Annotated[
        int | None, option(ENGINE, "tokens of the largest step with a CUDA graph", VLLM_S)
    ] = None,
    prefix_caching: Annotated[
        bool | None, option(ENGINE, default="on, off for recurrent layers", flag=PREFIX_CACHING)
    ] = None,
    async_scheduling: Annotated[bool, option(ENGINE)] = True,
    enforce_eager: Annotated[bool, option(ENGINE, flag="--enforce-eager")] = False,
    inside: Annotated[
        str | None,
        option(
            ENGINE,
            "its caller: own, verl, trl (colocated), server (of TRL); without fp8plan: verl-stock, trl-stock, "
            "server-stock",
            "that of --emit, else own",
            metavar="NAME",
        ),
    ] = None,
    engine_version: Annotated[
        str | None, option(ENGINE, "of vLLM", f"the installed one, else {DEFAULT_VERSION}, on a CPU {DEFAULT_ON_CPU}")
    ] = None,
    host_loop_us: Annotated[
        float | None,
        option(
            ENGINE,
            "speed of its host: type there `fp8plan doctor --host`",
            "measured here if this machine has the GPU, else as seen on others",
        ),
    ] = None,
    strict: Annotated[bool, option(ENGINE, "only a profile of this very version", flag="--strict")] = False,
    precision: Annotated[
        list[str] | None, option(None, "bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat", "all", metavar="NAME")
    ] = None,
    accept: Annotated[str, typer.Option(help="highest risk to choose: low, moderate, high")] = "moderate",
    kv_scales: Annotated[
        str | None,
        option(
            None,
            "of FP8 KV: calibrated after each weight sync, as fp8plan does, or unit: 1.0, as vLLM leaves them",
            "unit with --emit vllm, else calibrated",
        ),
    ] = None,
    train_s: Annotated[float | None, option(TRAINER, "training, seconds a step")] = None,
    logprob_s: Annotated[float | None, option(TRAINER, "log-probs, seconds a step")] = None,
    train_tokens_per_s: Annotated[float | None, option(TRAINER)] = None,
    logprob_tokens_per_s: Annotated[float | None, option(TRAINER)] = None,
    link: Annotated[
        str | None, option(TRAINER, "bandwidth of new weights to an engine GPU: 25Gb/s (bits), 3GB/s", "400Gb/s")
    ] = None,
    max_lag: Annotated[
        int | None, option(TRAINER, "policy versions that a token may be behind, in asynchronous training", "4")
    ] = None,
    learning_rate: Annotated[
        float | None, option(TRAINER, "finds the fastest mode of a weight sync", "none: all of BF16 is sent")
    ] = None,
    optimizer: Annotated[str | None, option(TRAINER, "adamw or muon", "adamw", metavar="NAME")] = None,
    top_k: Annotated[
        str | None,
        option(
            TRAINER,
            "with a learning rate, also top-k: 1e-4 (of the values), 20MB, or residual=1e-3 (of the weights)",
            "none: syncs are lossless",
        ),
    ] = None,
    as_json: Annotated[
        str | None, option(OUTPUT, "the plan, to a file or, alone, to stdout", flag="--json", metavar="[FILE.json]")
    ] = None,
    emit: Annotated[
        list[str] | None,
        option(
            OUTPUT,
            "settings for vllm, verl or trl (Python; JSON in a FILE.json), to a file or stdout; repeat",
            metavar="TARGET[=FILE]",
        ),
    ] = None,
    every: Annotated[bool, option(OUTPUT, "every row of the table, not ten", flag="--all")] = False,
    plot: Annotated[Path | None, option(OUTPUT, "a picture: FILE.png or FILE.html", metavar="FILE")] = None,
    ask: Callable[..., Any] | None = None,
) -> None:
    """Predict, and write or print the results of `plan` and, with `ask`, of another command.

    ask: a function with the parameters of `predict` that returns a Result; None: `predict` itself
    """
    from dataclasses import replace

    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.emit.vllm import KV_SCALES
    from fp8plan.model.hardware import find_gpu
    from fp8plan.model.limits import EngineLimits
    from fp8plan.model.plan.anchor import host_of
    from fp8plan.model.profile.profile import LOOPS_S
    from fp8plan.model.risk.expected import LEVELS, RiskBudget
    from fp8plan.model.rl_step import StepTimes
    from fp8plan.model.shards import strictest
    from fp8plan.model.validate.records import read_run
    from fp8plan.model.weight_changes import TopK

    card = find_gpu(gpu)
    emissions = _emissions(emit or [])
    if emissions:
        check_starts(planned_version(engine_version, card.is_cpu))
    in_json = [("--json", as_json)] if as_json is not None else []
    outputs.check([*in_json, *((f"--emit {target}", file) for target, file in emissions), *_plot_file(plot)])
    if kv_scales not in (None, *KV_SCALES):
        raise ConfigError(f"--kv-scales is {kv_scales!r}; allowed: {', '.join(KV_SCALES)}")
    if accept not in LEVELS:
        raise ConfigError(f"--accept is {accept!r}; allowed: {', '.join(LEVELS)}")
    if gpus is not None and (tensor_parallel_size, data_parallel_size, expert_parallel) != (1, 1, False):
        raise ConfigError(
            "both --gpus and a layout are given; give --gpus, which tries every layout, or --tensor-parallel-size, "
            "--data-parallel-size and --expert-parallel"
        )
    host_loop_s = None if host_loop_us is None else host_loop_us * 1e-6
    if host_loop_s is not None and not LOOPS_S[0] < host_loop_s < LOOPS_S[1]:
        raise ConfigError(f"--host-loop-us is {host_loop_us!r}; allowed: microseconds, such as 300")
    shape = ModelShape.from_hf(model)
    limits = EngineLimits.for_gpu(
        card,
        shape.recurrent,
        async_scheduling=async_scheduling,
        enforce_eager=enforce_eager,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=expert_parallel,
        enable_prefix_caching=prefix_caching,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        max_cudagraph_capture_size=max_cudagraph_capture_size,
    )
    trainer = not_none(
        train_s=train_s,
        logprob_s=logprob_s,
        train_tokens_per_s=train_tokens_per_s,
        logprob_tokens_per_s=logprob_tokens_per_s,
        max_lag=max_lag,
    )
    at_one = kv_scales is None and any(target == "vllm" for target, _ in emissions)
    scales = kv_scales or ("unit" if at_one else "calibrated")
    rollout, notes = _workload(workload, prompts, samples, prompt_lengths, response_lengths, seed)
    measured = None if observed is None else read_run(observed)
    notes += measured.notes if measured else []
    if host_loop_s is None and card.is_here and host_of(measured.records if measured else (), card.name) is None:
        from fp8plan.runtime import this_host

        host_loop_s = this_host.host_loop_s()
        notes += [] if host_loop_s is None else [this_host.said(host_loop_s)]
    result = (ask or _predicted)(
        shape,
        card,
        rollout,
        limits=limits,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        target=strictest(target for target, _ in emissions),
        inside=inside,
        precisions=precision,
        trainer=StepTimes(**trainer) if trainer else None,
        link=link,
        learning_rate=learning_rate,
        optimizer=optimizer,
        top_k=None if top_k is None else TopK.parse(top_k),
        budget=RiskBudget(accept=accept),
        kv_scales_calibrated=scales == "calibrated",
        engine_version=engine_version,
        strict=strict,
        host_loop_s=host_loop_s,
        observed=measured.records if measured else (),
        progress=progress("predicting" if ask is None else "searching"),
        workers=_cores(),
    )
    prediction = result.prediction
    if at_one and any(choice.unit_kv_scales for choice in prediction.plan.choices):
        notes.append("K and V scales are 1.0, as vLLM leaves them; if you calibrate: --kv-scales calibrated")
    plan = replace(prediction.plan, warnings=(*prediction.plan.warnings, *notes))
    prediction = replace(prediction, plan=plan)
    plan_file = None if as_json in (None, STDOUT) else os.path.abspath(as_json)
    texts = {
        file: plan.emit(target, kv_scales=scales, plan_file=plan_file, python=_as_python(file))
        for target, file in emissions
    }
    if as_json is not None:
        texts[as_json] = plan.to_json(**result.beside)
    printed = texts.pop(STDOUT, None)
    writers = {file: outputs.text(content) for file, content in texts.items()}
    if plot is not None:
        writers[str(plot)] = lambda path: result.draw(prediction, path, kv_scales or "unit")  # as `emit` does
    outputs.write(writers)
    print_notes(plan.warnings)  # after all steps that may fail, so that an error stands alone
    outputs.print_written(writers)
    if as_json == STDOUT:
        _print_choice(plan)  # without the report, which names it
    else:
        show(result.report(plan, every=every), on_stderr=printed is not None)
    if printed is not None:
        print(printed)


@app.command("plan", cls=PlanCommand)
@options_of(planned, without=("ask", "max_lag"))
def plan_command(**options: Any) -> None:
    """Predict every rollout precision, and choose one.

    Files are written all or none. An output without a file goes to stdout, else the table does. Beside settings on
    stdout the table goes to stderr, as notes do.
    """
    planned(**options)


class Result(NamedTuple):
    """The result of a command that plans: the prediction, more fields for its JSON, and its report and its picture.

    report: of a plan; `every` is true for every row of its table
    draw: writes the picture to a file; the text is the KV scales of its settings
    """

    prediction: Prediction
    beside: dict[str, Any]
    report: Callable[..., RenderableType]
    draw: Callable[[Prediction, Path, str], None]


def _predicted(*arguments: Any, **options: Any) -> Result:
    from fp8plan.model.plan.planner import predict
    from fp8plan.views.report import plan_report

    return Result(predict(*arguments, **options), {}, plan_report, _draw)


def _draw(prediction: Prediction, target: Path, kv_scales: str) -> None:
    from fp8plan.views.plan_page import draw  # with all that draws, which a plan without a picture need not load

    draw(prediction, target, kv_scales)


@app.command("emit")
def emit_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN.json", help="the file of `plan --json`; - reads stdin")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="vllm, verl or trl")],
    choice: Annotated[
        str | None, option(None, "another precision of the plan, or its number", "the chosen one")
    ] = None,
    kv_scales: Annotated[
        str, option(None, "for vllm, of FP8 KV: unit (1.0, as vLLM leaves them), or calibrated if you calibrate them")
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
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.syncs import notes_on_sender

    outputs.check([("the settings", output)])
    text = outputs.read(plan)
    try:
        saved = Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{plan}: {error}") from None
    if output != STDOUT and os.path.realpath(output) == os.path.realpath(plan):
        raise ConfigError(f"--output {output} is the plan itself; give the settings a file of their own")
    is_number = choice is not None and choice.isdecimal() and len(choice) < 10  # int() refuses thousands of digits
    plan_file = None if plan == STDOUT else os.path.abspath(plan)
    name: int | str | None = int(choice or 0) if is_number else choice
    settings = saved.emit(target, name, kv_scales, plan_file, _as_python(output))
    print_notes(notes_on_sender(saved.inside, target))
    if output == STDOUT:
        _print_choice(saved, name)
        print(settings)
    else:
        outputs.write({output: outputs.text(settings)})
        outputs.print_written([output])


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_python(file: str) -> bool:
    """True if settings for TRL go there as Python: to stdout, and to any file whose name does not end in .json."""
    return not file.endswith(".json")


def _print_choice(plan: Plan, name: int | str | None = None) -> None:
    """Print the choice and its reason on stderr. If `name` is another choice, say so first."""
    notes, index = list(plan.headlines), plan.index(name)
    if index != plan.chosen:
        other = plan.choices[index]
        where = f" on {other.data_parallel} x {other.replica_label}" if plan.several_layouts else ""
        notes.insert(0, f"these settings are of {other.precision}{where}, which is not the plan's choice")
    print_notes(notes)


def _emissions(words: list[str]) -> list[tuple[str, str]]:
    """The target, and the file or STDOUT, of each `--emit TARGET[=FILE]`."""
    from fp8plan.model.shards import check_target

    parts = [word.partition("=") for word in words]
    for target, *_ in parts:
        check_target(target)
    return [(target, file if equals else STDOUT) for target, equals, file in parts]


def _plot_file(plot: Path | None) -> list[tuple[str, str]]:
    if plot is None:
        return []
    from fp8plan.views.page import check_suffix

    check_suffix(plot)
    return [("--plot", str(plot))]
