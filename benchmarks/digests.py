"""Digests of plans and validations, to hold two versions of fp8plan against each other.

`python -m benchmarks.digests > FILE` prints the SHA-256 of what each command prints, and the command: `plan --json`
of fourteen set-ups and `validate --json` of all committed rollout records. Another tree: `PYTHONPATH=TREE python
TREE/benchmarks/digests.py`. A change that is meant to leave predictions alone gives the same lines before and after.

The set-ups differ in what the simulated scheduler does: dense models, windows, recurrent layers and latent attention;
pools that hold all requests and pools that do not; layouts; prefix caching with and without siblings; kinds of lengths.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import fp8plan

os.environ["FP8PLAN_IGNORE_VLLM"] = "1"
DENSE, WINDOWS, RECURRENT = "Qwen/Qwen3-8B", "fp8plan/gpt-oss-20b-bf16", "fp8plan/qwen3-next-16-layers"
SETUPS = (
    f"{DENSE} --gpu h200",
    f"{DENSE} --gpu h200 --prompts 250",
    f"{DENSE} --gpu h200 --prompts 64 --gpu-memory-utilization 0.5",
    f"{DENSE} --gpu h200 --prompts 2000 --samples 1 --prompt-lengths lognormal:mean=900,sigma=0.7,max=4000",
    f"{DENSE} --gpu h200 --prompts 625 --max-num-seqs 128",
    f"{DENSE} --gpu h200 --prompts 64 --response-lengths fixed:4096 --no-prefix-caching --no-async-scheduling",
    "Qwen/Qwen3-32B --gpu h100 --gpus 2 --prompts 64",
    "Qwen/Qwen3-32B --gpu h200 --gpus 8 --prompts 128 --prompt-lengths fixed:1008",
    f"{WINDOWS} --gpu h200 --prompts 64",
    "google/gemma-3-12b-it --gpu h200 --prompts 16",
    f"{RECURRENT} --gpu h200 --prompts 64",
    f"{RECURRENT} --gpu h200 --prompts 16 --prefix-caching --engine-version 0.30.0",
    "deepseek-ai/DeepSeek-V2-Lite --gpu h200 --prompts 128",
    "Qwen/Qwen3-30B-A3B --gpu h100 --gpus 4 --prompts 64",
)


PROFILES = Path(fp8plan.__file__).parent.parent / "profiles"


def commands() -> list[list[str]]:
    """Words of each command, without the program."""
    records = sorted(path for name in ("rollouts", "held_out") for path in PROFILES.rglob(f"{name}.jsonl"))
    plans = [["plan", *setup.split()] for setup in SETUPS]
    return plans + [["validate", str(path.relative_to(PROFILES.parent))] for path in records]


def main() -> None:
    for words in commands():
        command = [sys.executable, "-m", "fp8plan", *words, "--json"]
        output = subprocess.run(command, check=True, capture_output=True, cwd=PROFILES.parent).stdout
        print(hashlib.sha256(output).hexdigest(), *words, flush=True)


if __name__ == "__main__":
    main()
