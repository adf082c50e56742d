"""Packages that not every installation has. Where one is missing, the error says what to type."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from fp8plan.errors import ConfigError

INSTALL: Final = "pip install 'fp8plan[vllm]' (on a CPU: pip install 'fp8plan[cpu]')"
PARQUET: Final = "pip install 'fp8plan[parquet]'"
REPORT: Final = "pip install 'fp8plan[report]'"


def package(name: str, needed_for: str, install: str) -> Any:
    """Import a module. Raises ConfigError if it is not installed.

    needed_for: the start of the error; install: the command to type
    """
    try:
        return import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        raise ConfigError(f"{needed_for} needs {missing}; type: {install}") from None


def check_torch(what: str) -> None:
    """Look for torch, which `what` needs, without importing it. Raises ConfigError if it is not installed."""
    if find_spec("torch") is None:
        raise ConfigError(f"{what} needs torch, which is not installed; type: {INSTALL}")
