"""AIConfigurator 0.12's answers for one rollout: its own estimate, and its step times put through a schedule of ours.

AIConfigurator runs on the CPU and offline, on Linux x86-64. It is imported where it is called, so that the rest of this
file can be tested without it. Models come to it as a folder with config.json: it sees the shape that fp8plan sees and
downloads nothing (for Qwen3-8B, 1.7B and 30B-A3B, whose configs it carries, the answers are those it gives by name).

FP8 KV needs a mode for the attention of prefill, and its tables hold but one per engine: BF16 for vLLM, FP8 for
SGLang. It is told that one; for SGLang it would refuse otherwise.

Backend `vllm` has its tables as shipped. `vllm+DONOR` has DONOR's fp8_block GEMMs of the same GPU instead of vLLM's, as
docs/evidence/accuracy.md explains (ai-dynamo/aiconfigurator issue 1414, mended in its successor).
"""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from fp8plan.model.architecture import Experts
from fp8plan.model.configs import find_config
from fp8plan.model.cost.base import Array, StepBatch
from fp8plan.model.rollout import Simulated, step_batch
from fp8plan.model.validate.records import Record
from tools.import_aic import find_data

BACKENDS = ("vllm", "vllm+trtllm", "vllm+sglang", "sglang")
LINEAR_MODE = {"bf16": "bfloat16", "fp8_block": "fp8_block"}
KV_MODE = {"bf16": "bfloat16", "fp8": "fp8"}


def estimate(record: Record, prepared: Simulated, backend: str) -> tuple[float, str | None]:
    """(makespan in seconds, AIConfigurator's warning) by its own `cli estimate`. Raises what it raises.

    It knows one batch of equal requests in a steady state, so it gets the requests that run together on one replica,
    the mean prompt, how much of it the prefix cache knows on average, and the mean response: no distribution, no tail,
    no queue. The makespan is the responses over its sequences per second (which is its tokens per second, that count a
    response's tokens less the first).
    """
    from aiconfigurator.cli.api import cli_estimate

    batch, limits = record.batch, record.limits
    replica = max(len(part.prompts) for part in batch.split(limits.data_parallel_size))
    answer = cli_estimate(
        **_setting(record, prepared, backend),
        batch_size=min(replica, limits.max_num_seqs),
        isl=round(float(batch.prompts.mean())),
        osl=max(2, round(float(batch.responses.mean()))),
        prefix=round(float(cached_prompt_tokens(record).mean())),
        free_gpu_memory_fraction=limits.gpu_memory_utilization,  # decides nothing but the warning
        systems_paths=systems(prepared.model.gpu.name, backend),
    )
    return replica / float(answer.raw["seq/s"]), answer.kv_cache_warning


def cached_prompt_tokens(record: Record) -> Array:
    """Prompt tokens of each request that an earlier one's blocks hold, shape (requests,); the last is never cached."""
    prompts, ids, block = record.batch.prompts, record.batch.prompt_ids, record.limits.block_size
    again = np.ones(len(ids), dtype=bool)
    again[np.unique(ids, return_index=True)[1]] = False
    return np.where(again & record.limits.enable_prefix_caching, (prompts - 1) // block * block, 0)


def simulated(record: Record, prepared: Simulated, backend: str) -> tuple[float, None]:
    """(makespan in seconds, no warning): fp8plan's schedule with AIConfigurator's step times. Raises what it raises."""
    from aiconfigurator_core.sdk.engine import EngineHandle

    setting = _setting(record, prepared, backend)
    places = [setting.pop(name) for name in ("model_path", "system_name", "backend_name")]
    engine = EngineHandle.compile(*places, systems_path=systems(prepared.model.gpu.name, backend), **setting)
    return max(float(plan.steps @ step_seconds(engine, step_batch(plan))) for plan in prepared.schedules), None


def step_seconds(engine: Any, batch: StepBatch) -> Array:
    """Seconds of each step by an EngineHandle, shape (steps,). A query takes microseconds, so nothing is cached."""
    decode, new, chunks = batch.decode_requests, batch.prefill_tokens, batch.prefill_requests
    context = batch.decode_kv_tokens / np.maximum(decode, 1)
    length, before = (x / np.maximum(chunks, 1) for x in (new, batch.prefill_kv_tokens - new))
    rows = (np.rint(column).astype(int).tolist() for column in (decode, context, new, chunks, length, before))
    return np.array([_step_ms(engine, *row) for row in zip(*rows, strict=True)]) / 1e3


def _step_ms(engine: Any, decode: int, context: int, new: int, chunks: int, length: int, before: int) -> float:
    """Milliseconds of one step of `decode` requests at `context` tokens each, and `chunks` equal chunks of prefill.

    A mixed step is put together as AIConfigurator does it: everything but attention at all tokens, then the attention
    of the decodes and of the chunks (its own mixed step would take both at one length).
    """
    if not new:
        return engine.predict_decode_latency(decode, context, 2) if decode else 0.0
    if not decode:
        return engine.predict_prefill_latency(chunks, before + length, before)
    _, shared, _, decode_attention = engine.mixed_step_breakdown(new, decode, context, 2)
    prefill, _ = engine.run_static_per_op(
        batch_size=chunks, isl=before + length, osl=1, prefix=before, mode="static_ctx"
    )
    return shared + decode_attention + sum(ms for name, ms, *_ in prefill if name == "context_attention")


@cache
def systems(gpu: str, backend: str) -> str | None:
    """The folder of its tables with the donor's fp8_block GEMMs of `gpu`; None (its own folder) without a donor."""
    engine, _, donor = backend.partition("+")
    if not donor:
        return None
    folder = Path(_temporary().name, "systems", gpu, backend)
    shutil.copytree(find_data()[0].parent, folder, copy_function=os.symlink)
    paths = [folder / f"data/{gpu}/gemm/{x}/{database_version(gpu, x)}/gemm_perf.parquet" for x in (engine, donor)]
    own, others = map(pd.read_parquet, paths)
    paths[0].unlink()  # the link, not the shipped table
    mended = pd.concat([own[own.gemm_dtype != "fp8_block"], others[others.gemm_dtype == "fp8_block"]])
    mended.to_parquet(paths[0])
    return str(folder)


@cache
def database_version(gpu: str, engine: str) -> str:
    """Version of the engine whose kernels its tables were measured with. It takes a second."""
    from aiconfigurator_core.sdk.perf_database import get_latest_database_version

    return str(get_latest_database_version(system=gpu, backend=engine))


def made_of(gpu: str, backend: str) -> str:
    """The backend's engines with the versions of their tables."""
    versions = [f"{engine} {database_version(gpu, engine)}" for engine in backend.split("+")]
    return " with fp8_block GEMMs of ".join(versions)


def _setting(record: Record, prepared: Simulated, backend: str) -> dict[str, Any]:
    model, (engine, _, _) = prepared.model, backend.partition("+")
    linear, kv = LINEAR_MODE[model.precision.weights], KV_MODE[model.precision.kv]
    setting: dict[str, Any] = {
        "model_path": _model_folder(record.fields["model"]),
        "system_name": model.gpu.name,
        "backend_name": engine,
        "backend_version": database_version(model.gpu.name, engine),
        "tp_size": record.limits.tensor_parallel_size,
        "gemm_quant_mode": linear,
        "kvcache_quant_mode": kv,
        "fmha_quant_mode": kv if backend == "sglang" else "bfloat16",
    }
    if model.shape.parts_of(Experts):  # vLLM splits every expert unless expert parallelism is asked for
        setting |= {"moe_quant_mode": linear, "moe_tp_size": record.limits.tensor_parallel_size, "moe_ep_size": 1}
    return setting


@cache
def _model_folder(model: str) -> str:
    folder = Path(_temporary().name, "models", model)
    folder.mkdir(parents=True)
    config = {name: value for name, value in find_config(model)[0].items() if not name.startswith("_")}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def _temporary() -> TemporaryDirectory[str]:
    """The folder of configs and mended tables, removed when the process ends."""
    return TemporaryDirectory(prefix="aiconfigurator-")
