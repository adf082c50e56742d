"""Commands that measure, and that list what is known: probe, calibrate, profiles, models."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fp8plan.cli.console import print_notes, show, starting_engines
from fp8plan.cli.program import app, option
from fp8plan.errors import ConfigError
from fp8plan.model.risk.remedies import BF16, TRAINER_PRECISIONS, Remedies, typed_kept
from fp8plan.options import ENGINE, OUTPUT, REMEDIES


class Grid(StrEnum):
    quick = "quick"
    full = "full"


@app.command("probe")
def probe_command(
    model: Annotated[str, typer.Argument(help="hub id or folder of the BF16 checkpoint")],
    precision: Annotated[
        list[str] | None, option(None, "bf16, fp8_block, fp8_kv, fp8_block+fp8_kv; repeat", "all", metavar="NAME")
    ] = None,
    gpu: Annotated[str, typer.Option(help="of this machine; auto asks the driver; cpu: slow, for a try")] = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt_token_ids, messages or prompt; default: 16 tasks")
    ] = None,
    most_prompts: Annotated[int | None, typer.Option(min=1, help="take the first so many")] = None,
    trainer_precision: Annotated[
        list[str] | None,
        option(REMEDIES, f"of the trainer's linears: {', '.join(TRAINER_PRECISIONS)}; repeat", "bf16", metavar="NAME"),
    ] = None,
    router_replay: Annotated[
        bool, option(REMEDIES, "score also with the experts that the engine picked", flag="--router-replay")
    ] = False,
    keep_bf16: Annotated[
        list[str] | None,
        option(
            REMEDIES,
            "first and last layers whose linears stay in BF16, in engine and trainer, or 1,1,o_proj; repeat",
            "0,0",
            metavar="FIRST,LAST",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="responses per prompt")] = 4,
    max_tokens: Annotated[int, typer.Option(help="of a response")] = 512,
    temperature: Annotated[float, typer.Option(help="of the run's rollouts")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    kv_scales: Annotated[str, typer.Option(help="of FP8 KV: calibrated, or unit (1.0)")] = "calibrated",
    after: Annotated[
        str | None, typer.Option(help="the trainer's checkpoint, which the engine gets from MODEL by a sync")
    ] = None,
    top_k: Annotated[str | None, typer.Option(help="with --after: 1e-4 (of the values), 20MB or residual=1e-3")] = None,
    gpu_memory_utilization: Annotated[float | None, option(ENGINE)] = None,
    tensor_parallel_size: Annotated[int, option(ENGINE)] = 1,
    max_num_seqs: Annotated[int | None, option(ENGINE)] = None,
    num_gpu_blocks: Annotated[int | None, option(ENGINE, "impose the KV pool")] = None,
    enforce_eager: Annotated[bool, option(ENGINE, flag="--enforce-eager")] = False,
    attention_backend: Annotated[str | None, option(ENGINE, "FLASHINFER, TRITON_ATTN ...", "vLLM's own choice")] = None,
    as_json: Annotated[bool, option(OUTPUT, flag="--json")] = False,
) -> None:
    """Measure the mismatch of each precision.

    vLLM samples, the trainer's model scores the same tokens. With several trainer precisions, numbers of kept layers,
    or router replay, each combination is measured.
    """
    from fp8plan.model.hardware import find_gpu
    from fp8plan.model.setup import default_limits
    from fp8plan.model.weight_changes import TopK
    from fp8plan.runtime.measure.probe.probe import probe
    from fp8plan.runtime.measure.probe.sampling import SampleSettings, read_prompts
    from fp8plan.views.findings import probe_report

    card = find_gpu(gpu)
    remedies = [
        Remedies(replayed, trainer, kept)
        for kept in map(typed_kept, keep_bf16 or ["0,0"])
        for trainer in trainer_precision or [BF16]
        for replayed in ([False, True] if router_replay else [False])
    ]
    scales = cast("Any", kv_scales)  # checked there
    sparse = None if top_k is None else TopK.parse(top_k)
    settings = SampleSettings(max_tokens, samples, temperature, seed, scales, after=after, top_k=sparse)
    limits = default_limits(
        card,
        model,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=enforce_eager or None,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks=num_gpu_blocks,
    )
    kernel = {} if attention_backend is None else {"attention_backend": attention_backend}
    with starting_engines():
        measured = probe(
            model,
            precision,
            None if prompts is None else read_prompts(prompts),
            gpu=card,
            remedies=remedies,
            settings=settings,
            limits=limits,
            most_prompts=most_prompts,
            progress=lambda text: print(text, file=sys.stderr),
            **kernel,
        )
    if as_json:
        print(json.dumps(measured.to_dict(), indent=2, allow_nan=False))
    else:
        show(probe_report(measured))
    if all(probed.error for probed in measured.findings):
        raise typer.Exit(1)


@app.command("calibrate")
def calibrate_command(
    gpu: Annotated[str, typer.Option(help="the GPU of this machine; auto asks the driver")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="folder of measurements and profile.json; default: where plans look for it")
    ] = None,
    grid: Annotated[
        Grid,
        typer.Option(help="quick: about 25 minutes; full: longer"),
    ] = Grid.quick,
    fit_only: Annotated[bool, typer.Option("--fit-only", help="fit the measurements that are there")] = False,
) -> None:
    """Measure this GPU, and fit its profile.

    Through vLLM's own kernels and engine. Type it again to go on.
    """
    from fp8plan.model.calibrate.profile_of import calibrate, measured_version
    from fp8plan.model.hardware import find_gpu
    from fp8plan.model.profile.library import of_another_version, own_profiles_path, profile_path
    from fp8plan.views.measured import calibration_report

    card = find_gpu(gpu)
    if not fit_only:
        from fp8plan.runtime.measure.calibrate import measure
        from fp8plan.runtime.measure.rollouts.jobs import engine_version

        version = engine_version()
        folder = output or profile_path(own_profiles_path(), card.name, version).parent
        measure(folder, card, grid.value)
    elif output is None:
        raise ConfigError("--fit-only needs --output, the folder of the measurements")
    else:
        folder, version = output, measured_version(output)
    print(f"fitting what {folder} holds, some minutes", file=sys.stderr)
    calibration = calibrate(folder, card, version, of_another_version(card, version))
    (folder / "profile.json").write_text(calibration.profile.to_json(), encoding="utf-8")
    show(calibration_report(calibration))
    print(f"written: {folder / 'profile.json'}", file=sys.stderr)


@app.command("profiles")
def profiles_command(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the profiles: which GPU and engine version was measured."""
    from fp8plan.model.profile.library import list_profiles, unused_folder

    entries = list_profiles()
    print_notes(unused_folder())
    if as_json:
        print(json.dumps([entry._asdict() | {"path": str(entry.path)} for entry in entries], indent=2))
    else:
        from fp8plan.views.known import profiles_report

        show(profiles_report(entries))


@app.command("models")
def models_command(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the bundled models."""
    from fp8plan.model.architecture import ModelShape, bundled_models

    shapes = [ModelShape.from_hf(name) for name in bundled_models()]
    if as_json:
        from fp8plan.model.architecture.shape import sizes_of

        # default: the linears that a checkpoint keeps in BF16 are a set
        print(json.dumps([sizes_of(shape) for shape in shapes], indent=2, default=sorted))
    else:
        from fp8plan.views.known import models_report

        show(models_report(shapes))
