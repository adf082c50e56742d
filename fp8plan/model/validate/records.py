"""Rollout records: what was run and how long it took, one JSON object a line.

The keys are those of DESIGN's rollout record; the monitor and the measurement scripts write them. Unknown keys are
kept, missing ones take vLLM's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.hardware import gpu as find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.profile import ENGINE
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import MOST_TOKENS, Batch

REQUIRED = ("model", "gpu", "engine_version", "precision", "prompt_lengths", "response_lengths", "seconds")
LIMITS = (
    "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "enable_prefix_caching", "async_scheduling", "enforce_eager",
)  # fmt: skip

# What a field must be where it is there and not null. Whether its value makes sense is checked where it is used.
KINDS: dict[str, type] = {
    **dict.fromkeys(("model", "gpu", "engine", "engine_version", "precision"), str),
    **dict.fromkeys(("prompt_lengths", "response_lengths", "prompt_ids"), list),
    **dict.fromkeys(("seconds", "gpu_memory_utilization"), Real),
    **dict.fromkeys(("enable_prefix_caching", "async_scheduling", "enforce_eager"), bool),
    **dict.fromkeys(("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"), int),
    **dict.fromkeys(("tensor_parallel", "data_parallel", "kv_cache_tokens"), int),
    **dict.fromkeys(("preemptions", "measured_kv_cache_tokens"), int),
}
KIND_NAMES = {str: "text", list: "a list", Real: "a number", bool: "true or false", int: "a whole number"}


@dataclass(frozen=True, slots=True)
class Record:
    """One warm `generate()` of a whole batch, as it was measured.

    batch, limits: what ran; limits.num_gpu_blocks is set where the record imposes kv_cache_tokens
    seconds:       measured wall time
    group:         same workload, GPU and limits, whatever the precision and KV size
    fields:        the record as read, unknown keys included
    """

    line: int
    batch: Batch
    limits: EngineLimits
    seconds: float
    group: str
    fields: dict[str, Any]

    @property
    def setup(self) -> EngineSetup:
        """The engine that ran. Raises ConfigError for a model, GPU or precision that fp8plan does not know."""
        return EngineSetup(self.fields["model"], self.fields["gpu"], self.fields["precision"], self.limits)


def read_records(path: str | Path) -> list[Record]:
    """The records of a JSONL file, without a Monitor's lines of steps that had no rollout.

    Raises ConfigError naming the line and the field that cannot be used.
    """
    return read_run(path).records


class Run(NamedTuple):
    """without_rollout: lines of steps that had none; torn: number of a last line that breaks off, as in a run that is
    being written, or was killed. Both are left out of `records`."""

    records: list[Record]
    without_rollout: int
    torn: int | None

    @property
    def left_out(self) -> list[str]:
        """Sentences on what was."""
        lines = len(self.records) + self.without_rollout
        steps = f"{self.without_rollout} of {lines} lines are left out: a Monitor's steps without a rollout"
        torn = f"line {self.torn}, the last one, is left out: it breaks off"
        return [*([steps] if self.without_rollout else []), *([torn] if self.torn else [])]


def read_run(path: str | Path) -> Run:
    """The same, with what was left out."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no record file {file}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    records, left_out, torn = [], 0, None
    lines = text.splitlines()
    if len(lines) > 1 and not text.endswith("\n") and _is_torn(lines[-1]):
        torn = len(lines)
        lines.pop()
    for number, line in enumerate(lines, 1):
        if line.strip():
            fields = _parsed(line, number, file)
            if _without_rollout(fields):
                left_out += 1
            else:
                records.append(_read(fields, number, file))
    if left_out and not records:
        hint = "a Monitor knows rollouts from its engine, or from step(..., rollout=...)"
        raise ConfigError(f"{file} has no records, only {left_out} steps of a Monitor without a rollout; {hint}")
    if not records:
        raise ConfigError(f"{file} has no records; it needs one JSON object per line")
    return Run(records, left_out, torn)


def _is_torn(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _parsed(line: str, number: int, file: Path) -> dict[str, Any]:
    where = f"line {number} of {file}"
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is a {type(fields).__name__}; allowed: a JSON object")
    return fields


def _without_rollout(fields: dict[str, Any]) -> bool:
    """A Monitor's record of a step that trained on what was sampled before: there was no rollout to time."""
    return isinstance(fields.get("metrics"), dict) and fields.get("seconds") is None


def _read(fields: dict[str, Any], number: int, file: Path) -> Record:
    where = f"line {number} of {file}"
    missing = [name for name in REQUIRED if fields.get(name) is None]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; a record needs {', '.join(REQUIRED)}")
    try:
        check_kinds(fields)
        batch, seconds = _batch(fields), _seconds(fields)
        limits = _limits(fields).holding(batch.longest)
    except Fp8PlanError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Record(number, batch, limits, seconds, _group(fields, batch, limits), fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}; allowed: finite numbers, or null")


def check_kinds(fields: Mapping[str, Any]) -> None:
    """Raises ConfigError that names a field of a rollout record of the wrong kind, or an engine that is not ours."""
    for name, kind in KINDS.items():
        value = fields.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ConfigError(f"{name} is {str(value)[:60]!r}; allowed: {KIND_NAMES[kind]}")
    if (fields.get("engine") or ENGINE) != ENGINE:
        raise ConfigError(f"engine is {fields['engine']!r}; allowed: {ENGINE}, the one that is modelled")


def _batch(fields: dict[str, Any]) -> Batch:
    prompts, responses = (_tokens(fields, name) for name in ("prompt_lengths", "response_lengths"))
    if len(prompts) != len(responses):
        raise ConfigError(f"{len(prompts)} prompt_lengths, {len(responses)} response_lengths; allowed: as many of each")
    ids = fields.get("prompt_ids")
    if ids is None:
        return Batch(prompts, responses, np.arange(len(prompts)))
    if len(ids) != len(prompts):
        raise ConfigError(f"{len(ids)} prompt_ids for {len(prompts)} requests; allowed: one per request")
    return Batch(prompts, responses, np.unique(list(map(str, ids)), return_inverse=True)[1].astype(np.int64))


def _tokens(fields: dict[str, Any], name: str) -> Any:
    lengths = fields[name]
    wrong = [x for x in lengths if type(x) is not int or not 1 <= x <= MOST_TOKENS]
    if wrong or not lengths:
        found = f"it has {str(wrong[0])[:60]}" if wrong else "it is empty"
        raise ConfigError(f"{name} must be a list of whole numbers of tokens, 1 to {MOST_TOKENS:,}; {found}")
    return np.array(lengths, dtype=np.int64)


def _limits(fields: dict[str, Any]) -> EngineLimits:
    card = find_gpu(fields["gpu"])
    given = {name: fields[name] for name in LIMITS if fields.get(name) is not None}
    for name in ("tensor_parallel", "data_parallel"):
        if fields.get(name) is not None:
            given[f"{name}_size"] = fields[name]
    defaults = EngineLimits.for_gpu(card)
    blocks, imposed = None, fields.get("kv_cache_tokens")
    if imposed is not None:
        block_size = max(1, given.get("block_size", defaults.block_size))
        if imposed < 2 * block_size:
            raise ConfigError(f"kv_cache_tokens is {imposed}; allowed: at least two blocks of {block_size}, or null")
        blocks = imposed // block_size - 1  # less vLLM's null block
    return EngineLimits(
        **{name: getattr(defaults, name) for name in LIMITS} | given,
        num_gpu_blocks=blocks,
    )


def _seconds(fields: dict[str, Any]) -> float:
    seconds = fields["seconds"]
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds is {seconds!r}; allowed: a finite number above 0")
    return float(seconds)


def _group(fields: dict[str, Any], batch: Batch, limits: EngineLimits) -> str:
    gpu = find_gpu(fields["gpu"]).name
    same = [fields["model"], gpu, fields["engine_version"], *(column.tolist() for column in batch)]
    same += [getattr(limits, name) for name in LIMITS]
    same += [limits.tensor_parallel_size, limits.data_parallel_size]
    name = f"{fields['model']} on {gpu}, {len(batch.responses)} responses"
    return f"{name} [{sha256(json.dumps(same).encode()).hexdigest()[:8]}]"
