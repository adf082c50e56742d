"""Wall time of AIConfigurator's `cli estimate` and default search on this machine, whole process, for comparison.

`make bench-aic` installs AIConfigurator 0.12.0 in an environment of its own and runs this there. One JSON object per
command goes to --output and to stdout; nothing of AIConfigurator's predictions is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

COMMON = ["--model-path", "Qwen/Qwen3-8B", "--system", "h200_sxm", "--backend", "vllm"]
COMMANDS = {
    # One point: a fixed batch of requests of one length, FP8_BLOCK weights and FP8 KV.
    "aiconfigurator cli estimate": [
        *("estimate", *COMMON, "--batch-size", "64", "--isl", "512", "--osl", "8192", "--tp", "1"),
        *("--gemm-quant-mode", "fp8_block", "--kvcache-quant-mode", "fp8"),
    ],
    # Its default search: aggregated and disaggregated deployments of one precision on 8 GPUs.
    "aiconfigurator cli default": [
        *("default", *COMMON, "--total-gpus", "8", "--isl", "1024", "--osl", "8192", "--tpot", "100"),
    ],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one run from process start to exit. Raises CalledProcessError if it fails."""
    program = str(Path(sys.executable).parent / "aiconfigurator")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run([program, "cli", *arguments], cwd=folder, check=True, capture_output=True)
        return time.perf_counter() - start


def row(name: str, runs: int) -> dict[str, object]:
    """One warm-up (files come into the page cache), then `runs` measured ones."""
    seconds(COMMANDS[name])
    times = [seconds(COMMANDS[name]) for _ in range(runs)]
    return {
        "what": name,
        "command": " ".join(["aiconfigurator", "cli", *COMMANDS[name]]),
        "runs": runs,
        "median_s": round(statistics.median(times), 3),
        "min_s": round(min(times), 3),
        "max_s": round(max(times), 3),
        "versions": {package: version(package) for package in ("aiconfigurator", "aiconfigurator-core")},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    default_output = Path(__file__).parent / "results" / "aiconfigurator_time.jsonl"
    parser.add_argument("--output", type=Path, default=default_output)
    arguments = parser.parse_args()
    lines = [json.dumps(row(name, arguments.runs)) for name in COMMANDS]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
