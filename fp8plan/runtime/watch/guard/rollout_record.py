"""A rollout record of an engine's facts and an observation, and an observation of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.model.cost.front import OWN
from fp8plan.model.limits import RECORDED, EngineLimits
from fp8plan.model.profile.profile import ENGINE
from fp8plan.runtime.watch.guard.observation import COUNTS, EngineFacts, Observation
from fp8plan.schemas import LENGTHS


def rollout_fields(rollout: Observation | Mapping[str, Any] | None, facts: EngineFacts | None) -> dict[str, Any]:
    """The rollout record: facts about the engine and the rollout; empty if neither is known."""
    row: dict[str, Any] = {} if facts is None else _engine_fields(facts)
    if rollout is None or isinstance(rollout, Mapping):
        return {**row, **(rollout or {})}
    numbers = ("seconds", *COUNTS, "arrival_s", "idle_s", "concurrent")
    row |= {name: getattr(rollout, name) for name in numbers}
    lengths = {name: getattr(rollout, name) for name in LENGTHS}
    row |= {name: list(each) for name, each in lengths.items() if each is not None}
    if rollout.sampling is not None:
        row["sampling"] = asdict(rollout.sampling)
    return row | {"measured_kv_cache_tokens": rollout.kv_cache_tokens}


def _engine_fields(facts: EngineFacts) -> dict[str, Any]:
    """Facts about the engine that runs, under the names of a rollout record."""
    limits: EngineLimits = facts.limits
    imposed = None if limits.num_gpu_blocks is None else (limits.num_gpu_blocks + 1) * limits.block_size
    optional = {
        "max_cudagraph_capture_size": limits.max_cudagraph_capture_size,
        "keep_bf16": list(facts.remedies.keep_bf16) if any(facts.remedies.keep_bf16) else None,
        "delta_bytes": facts.delta_bytes,
        "host_loop_s": facts.host_loop_s,
    }
    return {
        "model": facts.model,
        "gpu": facts.gpu,
        "engine": ENGINE,
        "engine_version": facts.engine_version,
        "precision": facts.precision,
        **{name: getattr(limits, limit) for name, limit in RECORDED.items()},
        "kv_cache_tokens": imposed,
        "kernel_backends": dict(facts.kernel_backends),
        "e8m0": facts.e8m0,
        "inside": None if facts.inside == OWN else facts.inside,
        **{name: value for name, value in optional.items() if value is not None},
    }


def observation_in(record: Mapping[str, Any]) -> Observation:
    """The guard's observation, from the fields of a rollout record as plain data.

    Raises ConfigError as Observation does, and for a record without its seconds or lengths.
    """
    missing = [name for name in ("seconds", "prompt_lengths", "response_lengths") if record.get(name) is None]
    if missing:
        raise ConfigError(f"a rollout with its seconds lacks {', '.join(missing)}; give the tokens of each response")
    known = {field.name for field in fields(Observation)} - {"kv_cache_tokens"}
    values = {name: value for name, value in record.items() if name in known and value is not None}
    return Observation(**values, kv_cache_tokens=record.get("measured_kv_cache_tokens"))
