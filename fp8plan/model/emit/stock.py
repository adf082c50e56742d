"""The common part of the settings for trainers that run as they are installed, without fp8plan.

A further one takes a row of TARGETS in fp8plan/model/targets.py, and one of EMITTERS in fp8plan/model/emit/targets.py.
It takes a module with a `Stock`, too, and the settings that only it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import replicas_note, rollout_notes, shared_gpu_note
from fp8plan.model.emit.spelling import flags, pasted
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
# Counts of the workload, which a trainer may have words for.
_COUNTS: Final = ("prompts", "samples", "max_prompt_tokens", "max_response_tokens")
# Arguments that every trainer sets as the plan has them. The words for router replay set the last one.
_SET: Final = ("dtype", "logprobs_mode", "enable_return_routed_experts")


@dataclass(frozen=True, slots=True)
class Stock:
    """A trainer as it is installed, and its words.

    title:     its name, with the version or the date that was read
    paste:     the place of the settings
    engine:    the engine that it installs
    words:     argument of vLLM, "expert_ranks", "gpus" of all replicas, or count of the workload -> its word
    replicas:  the settings that decide how many replicas there are, for a note
    passed:    the start of the words that hand any other argument to vLLM; None: it has none
    trainer:   its words for remedies
    spelled:   makes a setting's words for a shell; a trainer whose settings are a file does not use it
    variables: the start of the words that set variables of the engine's processes; None: the reader exports them
    megatron:  its word for Megatron, which its remedies need; "": they need none
    omitted:   further arguments for which it has words of its own, such as those of the precision
    keeps:     linears may stay in BF16
    shares:    the trainer may share the engine's GPUs
    tis:       it has a bound of token TIS
    """

    title: str
    paste: str
    engine: str
    words: Mapping[str, str]
    replicas: str
    passed: str | None
    trainer: Trainer
    spelled: Callable[[str, Any], list[str]] = flags
    variables: str | None = None
    megatron: str = ""
    omitted: tuple[str, ...] = ()
    keeps: bool = True
    shares: bool = True
    tis: bool = True


def under(start: str, *names: str) -> dict[str, str]:
    """The words for arguments that keep vLLM's own name behind `start`."""
    return {name: f"{start}{name}" for name in names}


def common_settings(job: Job, stock: Stock) -> dict[str, Any]:
    """The settings of the engine and the batch. Raises ConfigError for an engine that the trainer cannot start."""
    job.refuse(stock.title)
    setup, limits = job.setup, job.setup.limits
    if not stock.keeps and setup.precision.weights != "bf16" and kept_patterns(setup):
        raise ConfigError(f"{stock.title} has no word for linears that stay in BF16; plan again without --keep-bf16")
    settings: dict[str, Any] = {}
    for name, value in _arguments(job, stock).items():
        if name in stock.words:
            settings[stock.words[name]] = value
        elif stock.passed is not None:
            settings[f"{stock.passed}{name}"] = value
    for name in ("data_parallel_size", "gpus"):
        if name in stock.words:
            settings[stock.words[name]] = getattr(limits, name)
    settings |= batch_settings(job, stock)
    if stock.variables is not None:
        settings |= {f"{stock.variables}{name}": value for name, value in vllm_env(setup).items()}
    return settings | job.at_once


def batch_settings(job: Job, stock: Stock) -> dict[str, Any]:
    """The settings of the counts of the workload that the trainer has words for."""
    return {stock.words[count]: job.tokens(count) for count in _COUNTS if count in stock.words}


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
    words = [word for word in stock.trainer.words(job.setup.remedies) if not word.startswith(FP32_SCALES)]
    return [stock.megatron, *words] if words and stock.megatron else words


def stock_words(job: Job, stock: Stock, settings: Mapping[str, Any], *more: str) -> str:
    """The settings and the remedies as words to paste into a shell, and notes. more: those that only it needs"""
    words = [stock.spelled(name, value) for name, value in settings.items()]
    words += [word.split() for word in remedy_words(job, stock)]
    return pasted(filter(None, words), notes(job, stock, *more))


def notes(job: Job, stock: Stock, *more: str) -> list[str]:
    """The notes below the settings. more: those that only this trainer needs"""
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
    lines += [*more, *_variables_note(job, stock), replicas_note(setup, stock.replicas)]
    if stock.shares:
        lines.append(shared_gpu_note(setup))
    lines += rollout_notes(job)
    if job.constant_tis is not None and stock.tis:
        lines.append(f"C of token TIS stays at {job.constant_tis:g} at any KL")
    return lines


def _variables_note(job: Job, stock: Stock) -> list[str]:
    """A note with the variables of the engine and the trainer, for the environment in which Ray starts; [] if none."""
    variables = []
    if stock.variables is None and TARGETS[job.target].engine == "vLLM":
        variables += [f"{name}={value}" for name, value in vllm_env(job.setup).items()]
    variables += [word for word in stock.trainer.words(job.setup.remedies) if word.startswith(FP32_SCALES)]
    return [f"type, on each node and before Ray starts: export {' '.join(variables)}"] if variables else []
