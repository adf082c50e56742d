"""Time that a `vllm serve` and TRL's client take for a token: by vLLM's route for completions, and by fp8plan's.

    .venv-test/bin/python -m benchmarks.trl_outputs [--prompts 64] [--tokens 512] [--runs 3]

writes benchmarks/results/trl_outputs.jsonl, a line for each run, and prints the table of docs/evidence/speed.md. The
model is tiny, with random weights. Any machine will do; with vLLM for CPUs the engine is slow, but it runs in a process
of its own. What is counted is the CPU time of the two others: the server's front end and the client, each one Python
thread. Both ways are asked for the likeliest tokens of the same prompts, and must answer the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import end
from benchmarks.gpu.trl_server import checkpoint, free_port, wait_for
from benchmarks.tables import markdown
from fp8plan import jsonl

RESULTS = Path(__file__).parent / "results" / "trl_outputs.jsonl"
WAYS = {"TRL's own client": False, "fp8plan's": True}
MODEL = "fp8plan/dense-9m"
PROMPT = 64
PATIENCE_S = 180.0


@contextmanager
def serving(model: str, length: int, requests: int) -> Iterator[tuple[str, int]]:
    """The URL of a server with fp8plan's backend, and the id of its front end's process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["--model", model, "--dtype", "bfloat16", "--max-model-len", str(length), "--max-num-seqs", str(requests)]
    words += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--port", str(port)]
    words += ["--weight-transfer-config", '{"backend": "fp8plan"}']
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ  # GiB
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "fp8plan", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(url, process, Path(log.name), PATIENCE_S)
            yield url, process.pid
        finally:
            end(process)


def cpu_s(process: int) -> float:
    """CPU seconds that a process has taken so far, without its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(client: Any, server: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ask in both ways in turn; yield a row for each answer. The first of each is left out."""
    from trl.generation.vllm_client import VLLMClient

    from fp8plan.integrations.trl.client import sampling_of

    prompts = [[(7 * row + word) % 1000 for word in range(PROMPT)] for row in range(given.prompts)]
    how = {"max_tokens": given.tokens, "temperature": 0.0, "generation_kwargs": {"ignore_eos": True}}
    sampling = sampling_of(prompts, **how)
    for run in range(given.runs + 1):
        answers = []
        for what, planned in sorted(WAYS.items(), reverse=bool(run % 2)):  # in either order, as the second finds caches
            front, here = cpu_s(server), time.process_time()
            answers.append(
                client._rolled_out(prompts, sampling) if planned else VLLMClient.generate(client, prompts, **how)
            )
            assert answers[-1] is not None, "the server has not fp8plan's route for rollouts"
            row = {"what": what, "front_s": cpu_s(server) - front, "client_s": time.process_time() - here}
            if run:
                yield row | {"tokens": sum(map(len, answers[-1]["completion_ids"]))}
        assert answers[0] == answers[1], "the two ways answer differently"


def table(path: Path = RESULTS) -> str:
    """The medians of the committed runs, in microseconds per token, in Markdown."""
    rows = jsonl.rows(path)
    lines = []
    for what in WAYS:
        of_way = [row for row in rows if row["what"] == what]
        front, client = (
            statistics.median(row[name] / row["tokens"] * 1e6 for row in of_way) for name in ("front_s", "client_s")
        )
        lines.append((what, f"{front:.1f}", f"{client:.1f}", f"{front + client:.1f}"))
    row = rows[0]
    made = f"Medians of {len(of_way)} runs of {row['tokens']:,} tokens, in microseconds of CPU time, on {row['date']}"
    where = f"{row['cpu_model']}, vLLM {row['vllm']}, TRL {row['trl']}, Python {row['python']}"
    return f"{markdown.table(('client', 'server', 'client', 'both'), lines)}\n\n{made}; {where}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    from importlib.metadata import version

    from fp8plan.integrations.trl.client import PlannedClient
    from fp8plan.runtime.measure.machine import machine_facts
    from fp8plan.runtime.vllm_versions import check_vllm_version

    facts = {name: machine_facts()[name] for name in ("cpu_count", "cpu_model")}
    facts |= {"vllm": check_vllm_version(), "trl": version("trl"), "python": platform.python_version()}
    facts |= {"date": time.strftime("%Y-%m-%d")}
    gc.collect()
    gc.freeze()  # as vLLM's server does; else every third answer visits the 760,000 objects of the imports, for 0.4 s
    with checkpoint(MODEL) as model, serving(model, PROMPT + given.tokens, given.prompts) as (url, process):
        rows = list(measured(PlannedClient(base_url=url, connection_timeout=10), process, given))
    given.output.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    print(table(given.output))


if __name__ == "__main__":
    main()
