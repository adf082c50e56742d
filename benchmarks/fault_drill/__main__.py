"""Run the drill on a CPU, with tiny engines.

    .venv-test/bin/python -m benchmarks.fault_drill [--where store|server|engine|fleet] [--only WORD]

prints a line for each fault in each place, and writes benchmarks/results/fault_drill.jsonl, from which `make tables`
fills docs/evidence/weight_sync.md. With --where or --only the rows that ran take the place of their old ones. The exit
status is 1 if a row is wrong. All four places take less than half an hour on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
import warnings
from pathlib import Path

from benchmarks import cpu_environment

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {  # a short timeout of stores, and vLLM takes functions to call
    "FP8PLAN_IGNORE_VLLM": "1",
    "FP8PLAN_STORE_TIMEOUT_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRITON_INTERPRET": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
CLASSES = {
    "store": "places.StorePlace",
    "server": "server_place.ServerPlace",
    "engine": "places.EnginePlace",
    "fleet": "places.FleetPlace",
}


def drilled(where: str, only: str, output: Path) -> int:
    """Run the faults of one place, and return how many rows are wrong."""
    begun = time.monotonic()
    from . import report, table
    from .drill import row

    faults = table.at(where, only)
    if not faults:
        return 0
    module, name = CLASSES[where].split(".")
    made = getattr(importlib.import_module(f".{module}", __package__), name)
    wrong = 0
    with made() as place:
        for fault in faults:
            stamped = report.stamped(row(place, fault), begun)
            report.keep(stamped, output)
            print(report.line(stamped), flush=True)
            wrong += bool(stamped["wrong"])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fault_drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--where", choices=tuple(CLASSES))
    parser.add_argument("--only", default="", metavar="WORD", help="faults with this word in their name, or this kind")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "fault_drill.jsonl")
    options = parser.parse_args()
    if options.where is None:  # each place in a process of its own: two engines in one would share torch's state
        command = [sys.executable, "-m", "benchmarks.fault_drill", "--only", options.only, "--output", options.output]
        codes = [subprocess.run([*command, "--where", place], cwd=ROOT, check=False).returncode for place in CLASSES]
        return max(map(abs, codes))
    cpu_environment.prepare(ENVIRONMENT)
    warnings.simplefilter("ignore")
    return int(drilled(options.where, options.only, options.output) > 0)


if __name__ == "__main__":
    sys.exit(main())
