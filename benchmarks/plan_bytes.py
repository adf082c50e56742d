"""Digests of the plans of a dozen set-ups, to hold two versions of fp8plan against each other.

`python -m benchmarks.plan_bytes > FILE` prints a line for each set-up: the SHA-256 of `plan --json`, and the command.
A change that is meant to leave plans alone gives the same lines before and after:

    git stash; python -m benchmarks.plan_bytes > /tmp/before; git stash pop
    python -m benchmarks.plan_bytes | diff /tmp/before -

Set-ups differ in what the simulated scheduler does: dense models, windows, recurrent layers and latent attention; pools
that hold all requests and pools that do not; layouts; prefix caching with and without siblings; and kinds of lengths.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys

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


def main() -> None:
    for setup in SETUPS:
        command = [sys.executable, "-m", "fp8plan", "plan", *setup.split(), "--json"]
        made = subprocess.run(command, check=True, capture_output=True).stdout
        print(hashlib.sha256(made).hexdigest(), setup, flush=True)


if __name__ == "__main__":
    main()
