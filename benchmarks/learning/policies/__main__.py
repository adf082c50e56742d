"""Write the checkpoint of a policy, and say which of its linears blockwise FP8 takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.learning.policies.make import fp8_linears, make
from benchmarks.learning.policies.table import POLICIES

parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
parser.add_argument("name", choices=POLICIES)
parser.add_argument("folder", type=Path)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
make(options.name, options.folder, options.device, options.seed)
print(json.dumps({"blockwise FP8 takes": fp8_linears(options.folder)}))
