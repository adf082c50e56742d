"""The workload of a rollout that was recorded: its prompts, how many responses each had, and all lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.jsonl import left_out, read
from fp8plan.model.workload import MOST_TOKENS, Batch, Trace, Workload
from fp8plan.schemas import RolloutRecord, check_version, checked

NO_ROLLOUT: Final = "a Monitor knows rollouts from its engine, or from step(..., rollout=...)"


def batch_of(fields: Mapping[str, Any]) -> Batch:
    """Requests of a rollout record whose types were checked. Raises ConfigError for lengths that cannot be."""
    prompts, responses = (_tokens(fields, name) for name in ("prompt_lengths", "response_lengths"))
    if len(prompts) != len(responses):
        raise ConfigError(f"{len(prompts)} prompt_lengths, {len(responses)} response_lengths; allowed: as many of each")
    ids = fields.get("prompt_ids")
    if ids is None:
        return Batch(prompts, responses, np.arange(len(prompts)))
    if len(ids) != len(prompts):
        raise ConfigError(f"{len(ids)} prompt_ids for {len(prompts)} requests; allowed: one per request")
    return Batch(prompts, responses, np.unique(list(map(str, ids)), return_inverse=True)[1].astype(np.int64))


def recorded_workload(path: str | Path) -> tuple[Workload, list[str]]:
    """Read the workload of the last rollout in a file of rollout records: a Monitor's run file, what `fp8plan import`
    wrote, or measured records. Returns (workload, notes). Seconds, model and GPU are not needed.

    Responses grow as a policy learns, so the last rollout says most about the next.

    Raises ConfigError for a file without a rollout, and for lengths that cannot be; it names the line.
    """
    file = Path(path)
    lines, torn = read(file, "file of rollout records", whole=False)
    for number, fields in reversed(lines):
        where = f"line {number} of {file}"
        check_version(fields, "record", where)
        if fields.get("response_lengths") is None:  # a Monitor's step that had no rollout
            continue
        checked(fields, RolloutRecord, where)
        try:
            workload, notes = workload_of(batch_of(fields), where)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return workload, notes + ([left_out(torn, file)] if torn else [])
    none = f"no line of {file} has prompt_lengths and response_lengths"
    if any(is_of_monitor(fields) for _, fields in lines):
        raise ConfigError(f"{none}: {NO_ROLLOUT}; give a run file that has them, or what `fp8plan import` wrote")
    raise ConfigError(
        f"{none}; give what `fp8plan import` wrote, or the run file of a Monitor. A trace of one length per line is "
        "for --response-lengths"
    )


def is_of_monitor(fields: Mapping[str, Any]) -> bool:
    """Tell whether a line is a Monitor's record of a step."""
    return isinstance(fields.get("metrics"), Mapping)


def workload_of(batch: Batch, source: str) -> tuple[Workload, list[str]]:
    """Turn requests into a workload in which every prompt has equally many samples. Returns (workload, notes).

    Where prompts have unequally many, as when a prompt was drawn twice or a response was lost, they are taken apart
    into as few parts of equal size as their numbers allow; the parts then share no prefix, which a note says.
    """
    _, first, ids, counts = np.unique(batch.prompt_ids, return_index=True, return_inverse=True, return_counts=True)
    samples = math.gcd(*counts.tolist())
    order = np.argsort(first[ids], kind="stable")  # prompt by prompt, in order of arrival
    notes = []
    if counts.min() < counts.max():
        notes.append(
            f"{source}: its {len(counts)} prompts have {counts.min()} to {counts.max()} responses; planned as "
            f"{len(ids) // samples} prompts x {samples}, which share no prefix with each other"
        )
    prompts, responses = (Trace(tuple(column[order].tolist()), source) for column in (batch.prompts, batch.responses))
    return Workload(len(ids) // samples, samples, prompts, responses), notes


def _tokens(fields: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    lengths = fields.get(name) or []
    wrong = [x for x in lengths if not 1 <= x <= MOST_TOKENS]
    if wrong or not lengths:
        found = f"it has {str(wrong[0])[:60]}" if wrong else "it is empty"
        raise ConfigError(f"{name} must be a list of whole numbers of tokens, 1 to {MOST_TOKENS:,}; {found}")
    return np.array(lengths, dtype=np.int64)
