"""A real `vllm serve` on the CPU, with fp8plan's entry points as pyproject.toml has them."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import requests
from tiny_models import BLOCK_SIZE, KV_BLOCKS, TOKENS

from fp8plan.runtime.apply.vllm_versions import check_vllm_version

ROOT = Path(__file__).parents[2]
START_S = 300.0  # that a server may take to start on a busy machine
BLOCK_FP8 = ("--quantization", "fp8_per_block")
FP8_KV = ("--kv-cache-dtype", "fp8")
BACKEND = '{"backend": "fp8plan"}'
# What tiny_models.cpu_plan asks for: equal engines say the same, bit for bit.
FLAGS = (
    "--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "512",
    "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(KV_BLOCKS + 1), "--enforce-eager",
    "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
)  # fmt: skip


@dataclass
class Server:
    """A server that runs. url: without a slash at its end; log: what it has printed so far"""

    url: str
    log: Path
    process: BaseProcess

    def engine_pid(self) -> int:
        """The process of its engine: the largest that it has started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return int(max(children, key=lambda child: child.memory_info().rss).pid)

    def get(self, path: str) -> dict[str, Any]:
        answer = requests.get(self.url + path, timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def rpc(self, method: str, *args: Any) -> Any:
        """Each worker's answer to one of fp8plan's methods."""
        body = {"method": method, "args": list(args)}
        answer = requests.post(f"{self.url}/collective_rpc", json=body, timeout=60)
        answer.raise_for_status()
        return [one["ok"] for one in answer.json()["results"]]

    def completion(self, prompt: list[int], **more: Any) -> requests.Response:
        """The answer to one request, sampled as tiny_models.answer samples."""
        how = {"temperature": 1.0, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
        more |= {"model": self.model, "prompt": prompt, "return_token_ids": True}
        return requests.post(f"{self.url}/v1/completions", json=how | more, timeout=60)

    @property
    def model(self) -> str:
        found: str = self.get("/v1/models")["data"][0]["id"]
        return found


def line_of(model: Path | str, *flags: str) -> str:
    """A command line for an engine as tiny_models starts it."""
    env = f"VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=fp8plan vllm serve {model}"
    return f"{env} {shlex.join(FLAGS)} {shlex.join(flags)} --weight-transfer-config {shlex.quote(BACKEND)}"


@contextmanager
def serving(line: str) -> Iterator[Server]:
    """The server of a command line, which says `NAME=value ... vllm serve MODEL ...`; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="fp8plan-server-") as folder:
        url, process, log = launched(Path(folder), shlex.split(line))
        try:
            wait_for(url, process, log)
            yield Server(url, log, process)
        finally:
            ended(process)


def launched(folder: Path, words: list[str]) -> tuple[str, BaseProcess, Path]:
    from warm_processes import program  # it imports vLLM

    url, start, log = f"http://127.0.0.1:{(port := free_port())}", words.index("vllm"), folder / "log"
    told = dict(word.split("=", 1) for word in words[:start])
    told["VLLM_PLUGINS"] += ",fp8plan_cpu_kernels"  # blockwise FP8 on any CPU
    told["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    # An environment that was installed before these entry points has not got them.
    told["PYTHONPATH"] = os.pathsep.join(filter(None, [str(entry_points(folder)), os.environ.get("PYTHONPATH")]))
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return url, program(command_line, *words[start:], *address, log=log, env=os.environ | told), log


def command_line(*words: str) -> None:
    """vLLM's own, in a process that has imported it with the tests' environment."""
    from vllm.entrypoints.cli.main import main

    for place in (logger := logging.getLogger("vllm"), *logger.handlers):
        place.setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    sys.argv = list(words)
    main()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    return found


def entry_points(folder: Path) -> Path:
    """A folder for PYTHONPATH with what vLLM asks installed packages for: fp8plan's entry points, and the version of
    `vllm`, as its command line does not find the name of its CPU build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"] | {"console_scripts": project["scripts"]}
    for name, version in (("vllm", check_vllm_version().partition("+")[0] + "+cpu"), ("fp8plan", project["version"])):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line for group, all_of in groups.items() for line in (f"[{group}]", *(f"{n} = {x}" for n, x in all_of.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def wait_for(url: str, process: BaseProcess, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.is_alive():
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def ended(process: BaseProcess) -> None:
    """End a server and what it has started: its own process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.is_alive():
            os.killpg(process.pid, number)
            process.join(30)


def outputs(server: Server, prompts: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of each prompt, as tiny_models.generate gives them."""
    found = []
    for prompt in prompts:
        answer = server.completion(list(prompt))
        assert answer.ok, answer.text
        (choice,) = answer.json()["choices"]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found
