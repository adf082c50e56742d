"""Observations from a run's files: a Monitor's run file, or the log of verl or TRL."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan, pi
from pathlib import Path
from typing import Any, Final

import msgspec

from fp8plan import jsonl
from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.importers.figures import figures
from fp8plan.model.precision import PRESETS
from fp8plan.model.validate.records import NO_ROLLOUT
from fp8plan.runtime.apply.doctor.observe import Notes, Request, measured_kernels
from fp8plan.runtime.apply.doctor.observed import Logged, Observed
from fp8plan.runtime.watch.guard.causes import lost_prefixes_in
from fp8plan.schemas import K3, KL_LIMIT, ROUTING_DIFFERS, RunRecord, check_version, checked

# TRL's mean |log ratio|: s sqrt(2 / pi) for normal ones with standard deviation s, and their k3 is about s^2 / 2.
MEAN_ABS: Final = "sampling/sampling_logp_difference/mean"
TOKENS, INVALID = "fp8plan/tokens", "fp8plan/invalid"  # a record's tokens with finite log-probs, and without
FROM_INSIDE: Final = ("version", "weights", "decode", "prefix", "temperatures")
INSIDE: Final = "a file does not tell; type: fp8plan.doctor(engine) where the engine is, or fp8plan doctor URL"


class Sounded(msgspec.Struct):
    """The alarms of a record."""

    alarms: list[str] | None = None


class Read(msgspec.Struct):
    """Fields of a record for the doctor alone."""

    kernel_backends: dict[str, str] | None = None
    e8m0: bool | None = None


def observe_file(path: Path, request: Request) -> Observed:
    """Observe a run by its file: its last step, and the last rollout in it.

    Raises ConfigError for a file that is neither a Monitor's nor holds a trainer's figures.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")) and path.exists():
        rows = jsonl.rows(path, "run file")
        if rows and isinstance(rows[-1], dict) and "metrics" in rows[-1]:
            return _of_monitor(path, rows, request)
    return _of_trainer(path, request)


def _of_monitor(path: Path, rows: list[dict[str, Any]], request: Request) -> Observed:
    _record(rows[-1], path)
    standing = _standing(rows, path)
    notes = Notes(dict.fromkeys(("ranks", "kv_scales", *FROM_INSIDE), INSIDE))
    engine, _ = _record(_last(standing, "engine_version", "kernel_backends"), path)
    rollout, typed = _record(_last(standing, "preemptions"), path)
    guard = None if typed is None else typed.guard
    verdict = None if guard is None else guard.verdict
    # The engine's facts under the names of runtime.apply.worker.facts.
    facts: dict[str, Any] = {name: engine[name] for name in ("e8m0", "enforce_eager") if name in engine}
    if engine.get("enable_prefix_caching") is not None:
        facts["prefix_caching"] = engine["enable_prefix_caching"]
    if engine.get("engine_version"):
        facts["vllm_version"] = engine["engine_version"]
    gpu = engine.get("gpu") or request.gpu
    runs = engine.get("precision") if engine.get("precision") in PRESETS else None
    if not rollout:
        notes.unseen["counts"] = f"no record counts preemptions: {NO_ROLLOUT}"
    return Observed(
        target=f"{path}, step {standing[-1]['step']}",
        gpu=gpu,
        precision=request.precision,
        runs=runs,
        ranks=[facts] if facts else [],
        kernels=engine.get("kernel_backends"),
        measured_kernels=notes.of("measured_kernels", lambda: measured_kernels(gpu, facts)),
        preemptions=rollout.get("preemptions"),
        requests=len(rollout["response_lengths"]) if rollout.get("response_lengths") else None,
        prefix_cache_queries=rollout.get("prefix_cache_queries"),
        prefix_cache_hits=rollout.get("prefix_cache_hits"),
        lost_prefixes=None if verdict is None else lost_prefixes_in(verdict.causes or ()),
        since=f"step {rollout.get('step')} began",
        log=_logged(standing, path),
        unseen=notes.unseen,
    )


def _standing(rows: Sequence[Any], path: Path) -> list[dict[str, Any]]:
    """The valid records: each replaces earlier ones with its number or a higher one, from before a checkpoint.

    Lines that are no records are left out. Raises ConfigError for alarms that are no words.
    """
    standing: list[dict[str, Any]] = []
    for row in rows:
        if isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("metrics"), dict):
            checked(row, Sounded, f"step {row['step']} of {path}")
            while standing and standing[-1]["step"] >= row["step"]:
                standing.pop()
            standing.append(row)
    return standing


def _record(row: dict[str, Any], path: Path) -> tuple[dict[str, Any], RunRecord | None]:
    """A record as plain data, with None for numbers that are not finite, and as a RunRecord; None for no record.

    Raises ConfigError for a row that is not empty and no record.
    """
    if not row:
        return row, None
    where = f"step {row.get('step')} of {path}"
    check_version(row, "record", where)
    try:
        record: dict[str, Any] = jsonl.plain(row)
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; give a Monitor's run file") from None
    checked(record, Read, where)
    return record, checked(record, RunRecord, where)


def _logged(rows: Sequence[dict[str, Any]], path: Path) -> Logged:
    """The figures and alarms of the records. The k3 is that of the last record which has one, even NaN."""
    last, typed = _record(rows[-1], path)
    having = next((row for row in reversed(rows) if K3 in row["metrics"]), None)
    sounded: dict[str, list[int]] = {}
    for row in rows:
        for name in row.get("alarms") or ():
            sounded.setdefault(name, []).append(row["step"])
    k3: float | None = None
    if having is not None:
        recorded: Any = having["metrics"][K3]
        k3 = float(recorded) if is_number(recorded) else nan
    return Logged(
        step=last["step"],
        k3=k3,
        k3_step=None if having is None else having["step"],
        limit=last["metrics"].get(KL_LIMIT),
        tokens=last["metrics"].get(TOKENS),
        invalid=last["metrics"].get(INVALID),
        steps=[row["step"] for row in rows],
        alarms=sounded,
        causes=(None if typed is None else typed.attribution) or (),
        differing=last["metrics"].get(ROUTING_DIFFERS),
    )


def _last(rows: Sequence[dict[str, Any]], *fields: str) -> dict[str, Any]:
    """The last record that has one of the fields, or {}. Lengths may have been cut from all of them."""
    return next((row for row in reversed(rows) if any(row.get(name) is not None for name in fields)), {})


def _of_trainer(path: Path, request: Request) -> Observed:
    by_step = figures(path)
    logged = [step for step, values in by_step.items() if K3 in values or MEAN_ABS in values]
    if not logged:
        raise ConfigError(
            f"{path} has neither {K3} nor {MEAN_ABS}; switch it on (verl: algorithm.rollout_correction; TRL: use_vllm "
            "with vllm_importance_sampling_correction), or give a Monitor's run file"
        )
    last, step = max(by_step), max(logged)
    values = by_step[step]
    return Observed(
        target=f"{path}, step {last}",
        gpu=request.gpu,
        precision=request.precision,
        log=Logged(step=last, k3=values[K3] if K3 in values else values[MEAN_ABS] ** 2 * pi / 4, k3_step=step),
        unseen=dict.fromkeys(("ranks", "counts", *FROM_INSIDE), INSIDE),
    )
