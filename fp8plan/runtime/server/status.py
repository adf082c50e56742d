"""The status of a server, as its route GET /fp8plan/status answers it, and the report of a sync in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.weight_sync.kv_scales import PARTS
from fp8plan.runtime.weight_sync.state import SyncReport, SyncState
from fp8plan.runtime.worker.facts import preset_of
from fp8plan.version import __version__


def status_of(
    state: SyncState,
    facts: Mapping[str, Any],
    worker: Mapping[str, Any],
    *,
    model: str,
    kv_cache_tokens: int | None,
    named: str | None,
    kv_source: str | None,
    serve_s: float,
    failure: str | None,
    sampling: Sampling | None,
    under_way: tuple[str, ...],
) -> dict[str, Any]:
    """Return a server's status as JSON holds it.

    backend, fp8plan_version, model
    precision:   running preset of fp8plan; None for another quantisation
    facts:       as runtime.worker.facts reads them
    kv_cache_tokens: size of the pool; None: not known
    serving, refusal: whether the weights may be used, and why not
    weights:     "version": number of the serving update (0: the checkpoint); "name": the client's name of it
    kv_scales:   "source", and "scales": layer -> {"q", "k", "v", and on the host "q_host"}; None with a BF16 KV cache
    last_update: the last complete update, as the worker reports it (runtime.worker.updates), with seconds of each phase
    last_failure: error of an update since then; None without one
    sampling:    fp8plan.Sampling of the requests since the weights serve, field by field; None without any
    under_way:   calls that block the workers, such as "update_weights"; all else is older than these

    facts, worker: a worker's answers to fp8plan_attach and fp8plan_status; named: the client's name of the weights
    """
    refusal = state.refusal or worker["refusal"]
    update = worker["last_update"]
    if update is not None:
        update = update | {"seconds": update["seconds"] | {"kv_scales": serve_s}}
    scales = {"source": kv_source, "scales": worker["kv_scales"]} if state.fp8_kv else None
    return {
        "backend": "fp8plan",
        "fp8plan_version": __version__,
        "model": model,
        "precision": preset_of(facts),
        "facts": dict(facts),
        "kv_cache_tokens": kv_cache_tokens,
        "serving": refusal is None,
        "refusal": refusal,
        "weights": {"version": worker["version"], "name": named},
        "kv_scales": scales,
        "last_update": update,
        "last_failure": failure,
        "sampling": None if sampling is None else sampling.to_dict(),
        "under_way": list(under_way),
    }


def report_of(status: Mapping[str, Any], seconds: float) -> SyncReport:
    """The report of a sync, from the server's status. seconds: duration, as the client saw it"""
    update, scales = status["last_update"], status["kv_scales"]
    layers = scales["scales"] if scales else {}
    parts = {layer: [float(values[part]) for part in PARTS] for layer, values in layers.items()}
    known = {field.name for field in fields(SyncReport)}
    return SyncReport(
        **{name: value for name, value in update.items() if name in known and name != "seconds"},
        seconds=update["seconds"] | {"total": seconds},
        kv_scales=parts if scales else None,
        kv_source=scales and scales["source"],
        scored_k3=None,
    )
