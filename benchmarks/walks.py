"""Count the files of the package that three walks enter, their lines, and the hops from one file to another.

The walks: a plan from the command line, a BF16 tensor into the live FP8 layer, and a log-prob to weights, thresholds
and record.

    python -m benchmarks.walks            # or, of another tree: PYTHONPATH=TREE python benchmarks/walks.py

files: files of the package in which a function runs; hops: pairs of a file and another one that it calls; lines: all
lines of these files. Importing does not count. docs/architecture.md follows the walks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# Set before vLLM reads them.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1"}

import fp8plan

PACKAGE = str(Path(fp8plan.__file__).parent) + os.sep


class Walk:
    """The files of the package that were entered, in order, and the hops between them."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.hops: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        here, caller = frame.f_code.co_filename, None
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename.startswith("<frozen importlib"):
                return
            if caller is None and at is not frame and at.f_code.co_filename.startswith(PACKAGE):
                caller = at.f_code.co_filename
            at = at.f_back
        self.files[here] = None
        if caller is not None and caller != here:
            self.hops[caller, here] = None

    def lines(self) -> int:
        """The lines of all entered files, as a reader of whole files meets them."""
        return sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in self.files)

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.hops)} hops, {self.lines()} lines"


@contextlib.contextmanager
def walked(walk: Walk) -> Iterator[None]:
    sys.setprofile(walk)
    try:
        yield
    finally:
        sys.setprofile(None)


def plan_from_the_command_line(walk: Walk) -> None:
    from fp8plan.cli import main

    sys.argv = ["fp8plan", "plan", "Qwen/Qwen3-8B", "--gpu", "h200"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit), walked(walk):
        main()


def tensor_into_the_live_layer(walk: Walk) -> None:
    sys.path += [str(Path(PACKAGE).parent / "tests" / folder) for folder in (".", "model", "runtime")]
    from tiny_models import started, weights  # small random models on a CPU, as the tests start them

    with started("dense", "a", "fp8_block") as engine:
        tensors = weights("dense", "b")
        with walked(walk):
            engine.sync_weights(tensors)


def logprob_to_record(walk: Walk) -> None:
    import torch

    torch.manual_seed(0)
    workload = fp8plan.Workload(4, 4, fp8plan.Fixed(32), fp8plan.Fixed(32))
    plan = fp8plan.plan("Qwen/Qwen3-8B", "h200", workload)
    rollout = -torch.rand(16, 32)
    with tempfile.TemporaryDirectory() as folder:
        monitor = fp8plan.Monitor(plan=plan, sinks=[fp8plan.JsonLines(f"{folder}/run.jsonl")])
        with walked(walk):
            monitor.step(rollout + 0.1 * torch.randn(16, 32), rollout, torch.ones(16, 32))
        monitor.close()


WALKS: dict[str, Callable[[Walk], None]] = {
    "plan": plan_from_the_command_line,
    "tensor": tensor_into_the_live_layer,
    "log-prob": logprob_to_record,
}


def main(*options: str) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files, in the order in which they are entered")
    parser.add_argument("--only", choices=WALKS, help="one walk")
    words = parser.parse_args(options or None)
    for name, take in WALKS.items():
        if words.only not in (None, name):
            continue
        take(walk := Walk())
        print(f"{name}: {walk}")
        if words.files:
            print(*(f"    {file.removeprefix(PACKAGE)}" for file in walk.files), sep="\n")


if __name__ == "__main__":
    main()
