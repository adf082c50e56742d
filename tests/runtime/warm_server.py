"""`vllm serve`, as its command line runs it, with processes that are forked from one that has imported vLLM."""

from __future__ import annotations

import os
from multiprocessing.forkserver import ensure_running

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import warm_processes  # noqa: F401 -- it changes how vLLM starts processes

if __name__ == "__main__":
    ensure_running()  # it imports vLLM while this process does
    from vllm.entrypoints.cli.main import main

    main()
