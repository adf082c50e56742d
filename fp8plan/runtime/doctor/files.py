"""Observations from what a run has written: a Monitor's run file, or the log of verl or TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import pi
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers.figures import figures
from fp8plan.jsonl import read
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS
from fp8plan.model.recorded import NO_ROLLOUT
from fp8plan.runtime.doctor.observe import Given, Notes, measured_kernels
from fp8plan.runtime.doctor.observed import Observed
from fp8plan.schemas import K3, KL_LIMIT, RunRecord, check_version, checked

# TRL's mean |log ratio|. Of normal ones with standard deviation s it is s sqrt(2 / pi), and their k3 about s^2 / 2.
MEAN_ABS: Final = "sampling/sampling_logp_difference/mean"
FROM_INSIDE: Final = ("version", "weights", "decode", "prefix", "temperatures")
INSIDE: Final = "a file does not tell; type: fp8plan.doctor(engine) where the engine is, or fp8plan doctor URL"


def observe_file(path: Path, given: Given) -> Observed:
    """Observe a run by its file: the last rollout and the last KL that it tells of.

    Raises ConfigError for a file that is neither a Monitor's nor holds a trainer's figures.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")) and path.exists():
        rows = [row for _, row in read(path, "run file", whole=False).rows]
        if rows and isinstance(rows[-1], dict) and "metrics" in rows[-1]:
            return _of_monitor(path, rows, given)
    return _of_trainer(path, given)


def _of_monitor(path: Path, rows: list[dict[str, Any]], given: Given) -> Observed:
    last = rows[-1]
    check_version(last, "record", f"the last line of {path}")
    checked(last, RunRecord, f"the last line of {path}")
    notes = Notes(dict.fromkeys(("ranks", "kv_scales", *FROM_INSIDE), INSIDE))
    engine, rollout = _last(rows, "engine_version", "kernel_backends"), _last(rows, "preemptions")
    facts = _facts(engine)
    gpu = engine.get("gpu") or given.gpu
    runs = engine.get("precision") if engine.get("precision") in PRESETS else None
    if not rollout:
        notes.unseen["preemptions"] = f"no record counts preemptions: {NO_ROLLOUT}"
    return Observed(
        target=f"{path}, step {last['step']}",
        gpu=gpu,
        precision=given.precision,
        runs=runs,
        ranks=[facts] if facts else [],
        kernels=engine.get("kernel_backends"),
        measured_kernels=notes.of("measured_kernels", lambda: measured_kernels(_known(gpu), facts)),
        preemptions=rollout.get("preemptions"),
        requests=len(rollout["response_lengths"]) if rollout.get("response_lengths") else None,
        since=f"step {rollout.get('step')} began",
        kl_k3=last["metrics"].get(K3),
        kl_limit=last["metrics"].get(KL_LIMIT),
        unseen=notes.unseen,
    )


def _known(gpu: str | None) -> str | None:
    return None if gpu is None else find_gpu(gpu).name


def _last(rows: Sequence[Mapping[str, Any]], *fields: str) -> Mapping[str, Any]:
    """Return the last record that has one of the fields, or {}. Lengths may have been cut from all of them."""
    return next((row for row in reversed(rows) if any(row.get(name) is not None for name in fields)), {})


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a record tells of an engine, as runtime.worker.facts names it."""
    facts = {name: record[name] for name in ("e8m0", "enforce_eager") if name in record}
    return facts | ({"vllm_version": record["engine_version"]} if record.get("engine_version") else {})


def _of_trainer(path: Path, given: Given) -> Observed:
    found = figures(path)
    logged = [step for step in found if K3 in found[step] or MEAN_ABS in found[step]]
    if not logged:
        raise ConfigError(
            f"{path} has neither {K3} nor {MEAN_ABS}; switch it on (verl: algorithm.rollout_correction; TRL: use_vllm "
            "with vllm_importance_sampling_correction), or give a Monitor's run file"
        )
    last = max(logged)
    kl = found[last].get(K3)
    if kl is None:
        kl = found[last][MEAN_ABS] ** 2 * pi / 4
    return Observed(
        target=f"{path}, step {last}",
        gpu=given.gpu,
        precision=given.precision,
        kl_k3=kl,
        unseen=dict.fromkeys(("ranks", "preemptions", *FROM_INSIDE), INSIDE),
    )
