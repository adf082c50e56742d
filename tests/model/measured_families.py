"""The engines of profiles/h200_sxm/vllm-0.26.0/families, and the shapes of their models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fp8plan.model.architecture import ModelShape

ROOT = Path(__file__).parents[2]
VERSION = "0.26.0"
FAMILIES = ROOT / f"profiles/h200_sxm/vllm-{VERSION}/families"
# Its config is refused for its experts. The copy with BF16 ones has the same caches.
NATIVE_MXFP4 = "openai/gpt-oss-20b"


def planned_name(model: str) -> str:
    return "fp8plan/gpt-oss-20b-bf16" if model == NATIVE_MXFP4 else model


@cache
def shape_of(model: str) -> ModelShape:
    return ModelShape.from_hf(planned_name(model))


def engines() -> list[dict[str, Any]]:
    """One record of each engine, by model, precision and GPUs."""
    files = (FAMILIES / f"{name}.jsonl" for name in ("rollouts", "biased_routers", "engines"))
    records = [json.loads(line) for file in files for line in file.open()]
    return list({engine_name(record): record for record in records}.values())


def engine_name(record: dict[str, Any]) -> str:
    gpus = f"-tp{record['tensor_parallel']}" if record["tensor_parallel"] > 1 else ""
    return f"{record['model'].partition('/')[2]}-{record['precision']}{gpus}"
