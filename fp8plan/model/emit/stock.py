"""What the settings of trainers have in common that run as they are installed, without fp8plan.

A further one takes a row of TARGETS in fp8plan/model/targets.py, and one of EMITTERS in fp8plan/model/emit/targets.py.
It takes a module with a `Stock`, too, and the settings that only it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import replicas_note, rollout_notes, shared_gpu_note
from fp8plan.model.emit.trainers import FP32_SCALES, Trainer
from fp8plan.model.emit.vllm import kept_patterns, vllm_env, vllm_kwargs
from fp8plan.model.targets import TARGETS

# Arguments with values that vLLM has by itself, which need no word. Versions before those that fp8plan runs do not know
# all of them.
_VLLMS_OWN: Final = {
    "async_scheduling": True,
    "enforce_eager": False,
    "scheduler_reserve_full_isl": True,
    "kv_cache_dtype": "auto",
}
# Arguments that every trainer sets as the plan has them. The words for router replay set the last one.
_SET: Final = ("dtype", "logprobs_mode", "enable_return_routed_experts")


@dataclass(frozen=True, slots=True)
class Stock:
    """A trainer as it is installed, and its words.

    title:   its name, with the version or the date that was read
    paste:   the place of the settings
    engine:  the engine that it installs
    words:   argument of vLLM, or "expert_ranks", -> its word
    passed:  the start of the words that hand any other argument to vLLM; None: it has none
    omitted: further arguments for which it has words of its own, such as those of the precision
    trainer: its words for remedies
    keeps:   linears may stay in BF16
    shares:  the trainer may share the engine's GPUs
    tis:     it has a bound of token TIS
    """

    title: str
    paste: str
    engine: str
    words: Mapping[str, str]
    passed: str | None
    trainer: Trainer
    omitted: tuple[str, ...] = ()
    keeps: bool = True
    shares: bool = True
    tis: bool = True


def engine_words(job: Job, stock: Stock) -> dict[str, Any]:
    """The settings of the engine. Raises ConfigError for an engine that the trainer cannot start."""
    job.refuse(stock.title)
    if not stock.keeps and job.setup.precision.weights != "bf16" and kept_patterns(job.setup):
        raise ConfigError(f"{stock.title} has no word for linears that stay in BF16; plan again without --keep-bf16")
    settings: dict[str, Any] = dict(job.at_once)
    for name, value in _arguments(job, stock).items():
        if name in stock.words:
            settings[stock.words[name]] = value
        elif stock.passed is not None:
            settings[f"{stock.passed}{name}"] = value
    return settings


def _arguments(job: Job, stock: Stock) -> dict[str, Any]:
    """The arguments of vLLM that the plan asks for, and that the trainer does not set by itself."""
    arguments = vllm_kwargs(job.setup)
    if job.setup.limits.expert_ranks > 1 and "expert_ranks" in stock.words:
        del arguments["enable_expert_parallel"]
        arguments["expert_ranks"] = job.setup.limits.expert_ranks
    left_out = {*_SET, *stock.omitted}
    return {
        name: value
        for name, value in arguments.items()
        if name not in left_out and (name in stock.words or _VLLMS_OWN.get(name) != value)
    }


def remedy_words(job: Job, stock: Stock) -> list[str]:
    """The trainer's words for the plan's remedies. Raises ConfigError for one that it does not have."""
    return [word for word in stock.trainer.words(job.setup.remedies) if not word.startswith(FP32_SCALES)]


def variable_notes(job: Job, stock: Stock) -> list[str]:
    """A note with the variables of the engine and the trainer, for the environment in which Ray starts; [] if none."""
    variables = []
    if TARGETS[job.target].engine == "vLLM":
        variables += [f"{name}={value}" for name, value in vllm_env(job.setup).items()]
    variables += [word for word in stock.trainer.words(job.setup.remedies) if word.startswith(FP32_SCALES)]
    return [f"type, on each node and before Ray starts: export {' '.join(variables)}"] if variables else []


def notes(job: Job, stock: Stock, replicas: str, *more: str) -> list[str]:
    """The notes below the settings. replicas: how their number comes about; more: what only this trainer needs"""
    setup = job.setup
    known = f"the words are those of {stock.title}, which installs {stock.engine}"
    lines = [
        f"fp8plan: {job.engine}; {stock.paste}, without fp8plan",
        f"{known}; the plan's seconds are of vLLM {setup.engine_version}",
    ]
    if stock.passed is None:
        missing = {name: value for name, value in _arguments(job, stock).items() if name not in stock.words}
        listed = ", ".join(f"{name} (planned {value})" for name, value in missing.items())
        if listed:
            lines.append(f"it has no word for {listed}: the engine's default holds, and the plan's seconds do not")
    lines += [
        *more,
        replicas_note(setup, replicas),
        *([shared_gpu_note(setup)] if stock.shares else []),
        *rollout_notes(job),
    ]
    if job.constant_tis is not None and stock.tis:
        lines.append(f"C of token TIS stays at {job.constant_tis:g} at any KL")
    return lines
