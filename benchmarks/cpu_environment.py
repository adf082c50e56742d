"""The tests' helpers and engines on a CPU, for benchmarks that run them outside of pytest."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELPERS = ("", "benchmarks", "tests/model", "tests/runtime", "tests/integrations")
# As tests/conftest.py has them.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare(more: Mapping[str, str] | None = None) -> None:
    """Make the tests' helpers importable, and set the environment of engines where it is not set.

    Call it before torch or vLLM is imported. more: variables of one benchmark
    """
    sys.path[:0] = [str(ROOT / part) for part in HELPERS]
    for name, value in {**ENVIRONMENT, **(more or {})}.items():
        os.environ.setdefault(name, value)
    importlib.import_module("cpu_engines")
