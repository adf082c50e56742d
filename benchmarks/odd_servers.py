"""Servers that are sick, and the doctor's word on them; benchmarks/odd_measurements.py runs `looked` in a process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

from odd_steps import diagnosed, taken

import fp8plan

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "runtime"))

from sick_server import INFO, METRICS, Answer, raw, serving, whole

HEAD = b"HTTP/1.1 200 OK\r\n"
WAITED_S = 10.0  # for an answer of the doctor


def drip(handler: BaseHTTPRequestHandler) -> None:
    """A body of which a byte comes each second."""
    handler.wfile.write(HEAD + b"Content-Length: 4000\r\n\r\n")
    for _ in range(4000):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(1)


def told(**facts: Mapping[str, Any]) -> Answer:
    """/server_info with more facts in its parts."""
    config = {
        name: {**INFO["vllm_config"].get(name, {}), **facts.get(name, {})} for name in {*INFO["vllm_config"], *facts}
    }
    return whole(json.dumps({"vllm_config": config}).encode())


FP8_EXPERTS = {"model_config": {"quantization": "fp8", "enable_return_routed_experts": False},
               "parallel_config": {"is_moe_model": True}}  # fmt: skip

# Name of an example -> what sick pages answer.
SICK: dict[str, dict[str, Answer]] = {
    "chunks that break off": {"/v1/models": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{")},
    "a body that is shorter than its length": {"/v1/models": raw(HEAD + b"Content-Length: 1000\r\n\r\n{")},
    "no HTTP (an SSH server)": {"/v1/models": raw(b"SSH-2.0-OpenSSH_9.6\r\n")},
    "JSON 100,000 lists deep": {"/v1/models": whole(b"[" * 100_000)},
    "/server_info is a list": {"/server_info": whole(b"[1, 2]")},
    "/server_info: vllm_config is text": {"/server_info": whole(b'{"vllm_config": "on"}')},
    "/metrics counts NaN preemptions": {"/metrics": whole(METRICS.replace("3.0", "NaN").encode())},
    "/v1/completions answers a number": {"/v1/completions": whole(b"5")},
    "a byte each second": {"/v1/models": drip},
    "sparse_nccl updates of FP8 weights": {
        "/server_info": told(model_config={"quantization": "fp8"}, weight_transfer_config={"backend": "sparse_nccl"})
    },
    "experts in FP8 whose routes are not returned": {"/server_info": told(**FP8_EXPERTS)},
}  # fmt: skip


def looked(name: str) -> None:
    """The doctor at a server of SICK."""
    with serving(SICK[name]) as url:
        _in_time(lambda: print(diagnosed(url, gpu="h200", **taken(fp8plan.doctor, {"timeout_s": 3.0}))))


def with_key() -> None:
    """The doctor at a server that asks for a key, which the caller has."""
    with serving({}, key="secret") as url:
        print(diagnosed(url, gpu="h200", **taken(fp8plan.doctor, {"api_key": "secret"})))


def _in_time(look: Callable[[], None]) -> None:
    """Print what a function raises, or that it has not come back."""
    outcome: list[str] = []

    def guarded() -> None:
        try:
            look()
        except fp8plan.Fp8PlanError as error:
            outcome.append(f"refused: {error}")
        except Exception as error:
            outcome.append(f"Traceback: {type(error).__name__}: {str(error)[:100]}")
        else:
            outcome.append("")

    thread = Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(WAITED_S)
    print(outcome[0] if outcome else f"no word within {WAITED_S:.0f} s, and no deadline")
