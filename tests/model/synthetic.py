"""Measurements that no GPU made: what the cost model itself says under other coefficients, with noise.

`nature` plays the GPU. Kernels are timed by the functions that predict them, rollouts step by step, each step alone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fp8plan.model.calibrate.fit import measured_kv
from fp8plan.model.calibrate.kernel_rows import observe
from fp8plan.model.cost.host import start_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.profile.profile import PACES, Profile
from fp8plan.model.rollout import schedule_with, step_batch
from fp8plan.model.validate.records import Record, read_records

H200 = find_gpu("h200")
SHEET = datasheet_profile(H200)
PRIOR = SHEET.with_errors(0.0, SHEET.model_error)  # as `calibrate` has it: no pace is fitted
SMALL = "fp8plan/dense-50m"
POOL = 65536  # KV tokens, vLLM's null block included

LAYERS = [(1024, 512), (512, 512), (3072, 512), (512, 1536), (4096, 4096), (24576, 4096)]  # n, k
HEADS = [(8, 4, 64), (32, 8, 128), (16, 8, 128), (64, 8, 128)]  # query heads, KV heads, size


def nature(seed: int, scale: float = 1.0) -> Profile:
    """A GPU that the datasheet profile allows: each coefficient drawn from it, `scale` of its sds off."""
    rng, values = np.random.default_rng(seed), {}
    for name, value in PRIOR.coefficients.items():
        if name in PACES:
            continue
        drawn = value * np.exp(scale * rng.standard_normal() * PRIOR.log_covariance[name][name] ** 0.5)
        values[name] = float(min(drawn, 1.0) if name.endswith("_efficiency") else drawn)
    return replace(PRIOR, coefficients=PRIOR.coefficients | values)


def gemms(kernel: str = "gemm.bf16", layers: Iterable[tuple[int, int]] = LAYERS) -> pd.DataFrame:
    rows = (1, 16, 64, 256, 1024, 4096)
    return pd.DataFrame([{"kernel": kernel, "m": m, "n": n, "k": k} for n, k in layers for m in rows])


def decodes(kernel: str = "attention_decode.bf16", heads: Iterable[tuple[int, int, int]] = HEADS) -> pd.DataFrame:
    shapes = [dict(zip(("heads", "kv_heads", "head_dim"), x, strict=True)) for x in heads]
    work = [{"batch": batch, "context": context} for batch in (1, 16, 128, 512) for context in (128, 1024, 4096)]
    return pd.DataFrame([{"kernel": kernel} | shape | x for shape in shapes for x in work])


def timed(rows: pd.DataFrame, by: Profile, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """`rows` of one kernel with the seconds that the GPU takes, lognormal `noise` on each."""
    (exact,) = observe(rows.assign(seconds=1.0), H200)
    spread = np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return rows.assign(seconds=exact.predict(by).seconds * spread)


def batch_fields(seed: int, requests: int = 24, longest: int = 300, **changes: Any) -> dict[str, Any]:
    """A record of one rollout, but for its seconds."""
    rng = np.random.default_rng(seed)
    return {
        "key": f"run {seed}",
        "model": SMALL,
        "gpu": H200.name,
        "engine_version": "0.26.0",
        "precision": "bf16",
        "measured_kv_cache_tokens": POOL,
        "gpu_uuid": "GPU-synthetic",
        "date": "2026-11-21T10:00:00+00:00",
        "prompt_lengths": rng.integers(20, 200, requests).tolist(),
        "response_lengths": rng.integers(5, longest, requests).tolist(),
        "prompt_ids": list(range(requests)),
        "seconds": 1.0,
    } | changes


def record(folder: Path, fields: Mapping[str, Any]) -> Record:
    path = folder / "one.jsonl"
    path.write_text(json.dumps(fields))
    return read_records(path)[0]


def trace_of(run: Record, by: Profile, noise: float = 0.0) -> dict[str, Any]:
    """A trace as the engine reports it: when each step that gives tokens ended, and how many it gave."""
    planned = schedule_with(run.batch, measured_kv(run), run.limits, longest_run=1)
    seconds = run.setup.step_model(by).seconds(step_batch(planned))
    seconds = seconds * np.exp(noise * np.random.default_rng(len(seconds)).standard_normal(len(seconds)))
    prompts = run.batch.prompts
    ends = start_cost(prompts.size, int(prompts.sum()), by).seconds + np.cumsum(seconds)
    gives = planned.sampled_requests > 0
    columns = {"core_s": ends[gives], "generation_tokens": planned.sampled_requests[gives]}
    return {"key": run.fields["key"]} | {name: values.tolist() for name, values in columns.items()}


def write_folder(
    folder: Path, by: Profile, runs: Iterable[Mapping[str, Any]], kernels: Iterable[pd.DataFrame] = (), noise: float = 0
) -> Path:
    """A folder as `fp8plan calibrate` leaves it behind: timings of kernels, rollouts and their traces."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    (folder / "steps").mkdir(exist_ok=True)
    for i, rows in enumerate(kernels):
        timed(rows, by, noise, seed=i).to_json(
            folder / "kernels" / f"{i}.jsonl", orient="records", lines=True, double_precision=15
        )
    records, traces = [], []
    for fields in runs:
        trace = trace_of(record(folder, fields), by, noise)
        records.append(fields | {"seconds": trace["core_s"][-1]})
        traces.append(trace)
    (folder / "one.jsonl").unlink(missing_ok=True)
    (folder / "steps" / "rollouts.jsonl").write_text("\n".join(map(json.dumps, records)))
    with gzip.open(folder / "steps" / "rollouts.trace.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, traces)))
    return folder
