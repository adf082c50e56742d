"""A real `vllm serve --api-key` runs no code that comes from the wire. What fails there leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from native_client import send, trainer_of, without_cuda
from tiny_models import weights
from trl_runs import model
from vllm_server import BLOCK_FP8, FP8_KV, Server, free_port, line_of, serving

from fp8plan.runtime.apply.plugin import ROLLOUT, STATUS, weight_sync_client

pytestmark = pytest.mark.vllm

KEY = {"Authorization": "Bearer sesame"}
LIMIT_S = 3  # of silence
VOCABULARY = 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = f"FP8PLAN_TRANSFER_TIMEOUT_S={LIMIT_S} VLLM_LOGGING_LEVEL=WARNING"
    with serving(f"{env} {line_of(model(), *BLOCK_FP8, *FP8_KV, '--api-key', 'sesame')}") as found:
        yield found


def post(server: Server, path: str, body: Any = None, key: bool = True) -> requests.Response:
    return requests.post(server.url + path, json=body, headers=KEY if key else {}, timeout=60)


def rolled_out(server: Server, prompt: list[int], **sampling: Any) -> requests.Response:
    return post(server, ROLLOUT, {"prompts": [prompt], "sampling": {"max_tokens": 4} | sampling})


def status(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(server.url + STATUS, timeout=5).json()
    return found


def update_of(sent: dict[str, Any]) -> dict[str, Any]:
    shapes = [list(tensor.shape) for tensor in sent.values()]
    return {"update_info": {"names": list(sent), "dtype_names": ["bfloat16"] * len(sent), "shapes": shapes}}


def met(server: Server) -> Any:
    """A store of one's own that the server's workers have joined, with vLLM's group around it."""
    from vllm.distributed.utils import StatelessProcessGroup

    port = free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, server, "/init_weight_transfer_engine", {"init_info": info})
        group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2)
        assert answer.result().ok
    return group


class Program:
    """An object whose pickle runs a command when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


def serves(server: Server) -> bool:
    """The checkpoint's weights, or those of the last complete update, answer; and an update can begin and end."""
    assert status(server)["serving"]
    return rolled_out(server, [1, 2, 3]).ok


def test_code_from_the_wire_is_refused_and_logged_and_the_server_serves_on(server: Server, tmp_path: Path) -> None:
    """Any user of the machine, who has no key; and one with the key, whose store holds a program."""
    trace, sent = tmp_path / "it_ran", weights("dense", "b")
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    refused = post(server, "/init_weight_transfer_engine", {"init_info": info}, key=False)
    assert refused.status_code == 401
    before = server_digests(server)
    group = met(server)
    for key in ("broadcast_tensor/0/0", "broadcast_from/0/0", "send_tensor/1/0", "send_to/1/0"):
        group.store.set(key, pickle.dumps(Program(trace)))
    assert post(server, "/start_weight_update").ok
    answer = post(server, "/update_weights", update_of(sent))
    assert answer.status_code == 400
    assert "allowed: {" in answer.text
    assert "the old weights serve" in answer.text
    address = ["cuda", pickle.dumps(Program(trace), 0).decode(), 8]  # the place of a buffer, in another process
    staged = {"address": address, "layout": []}
    answer = post(server, "/collective_rpc", {"method": "fp8plan_load", "args": [[], staged]})
    assert "error" in answer.json()["results"][0]
    assert not trace.exists()
    assert serves(server)
    assert server_digests(server) == before
    log = server.log.read_text(errors="replace")
    assert "fp8plan refused POST /init_weight_transfer_engine from 127.0.0.1" in log
    assert "fp8plan broke a transfer of weights off" in log
    pickle.loads(pickle.dumps(Program(trace)))
    assert trace.exists()  # the program does what the server must not


def server_digests(server: Server) -> Any:
    answer = post(server, "/collective_rpc", {"method": "fp8plan_digests"})
    assert answer.ok
    return answer.json()


def test_weights_are_sent_with_the_key(server: Server) -> None:
    with without_cuda():
        trainer = trainer_of(weight_sync_client(server.url, "sesame", timeout=60))
        version = status(server)["weights"]["version"]
        for which in "ba":
            send(trainer, weights("dense", which))
        assert status(server)["weights"]["version"] == version + 2


@pytest.mark.trl
def test_trls_client_gives_the_key_of_its_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.integrations.trl.client import PlannedClient

    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    client, sent = PlannedClient(base_url=server.url, group_port=free_port()), weights("dense", "a")
    assert client.generate([[1, 2, 3]], max_tokens=4)["completion_ids"][0]
    client.init_communicator("cpu")
    metadata = [(name, "bfloat16", list(tensor.shape)) for name, tensor in sent.items()]
    client.update_named_params(metadata, iter(sent.items()))
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(Exception, match="401"):
        PlannedClient(base_url=server.url)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": seed} for seed in (2**70, 2**64, -(2**63) - 1)),
        {"seed": 2**64 - 1, "n": 3},
        {"top_k": 2**70},
    ],
    ids=str,
)
def test_what_cannot_be_sent_to_the_engine_leaves_nothing_behind(server: Server, wrong: dict[str, Any]) -> None:
    answer = rolled_out(server, [1, 2, 3], **wrong)
    assert answer.status_code == 400
    assert "allowed: whole numbers of 64 bits" in answer.json()["error"]
    assert post(server, "/start_weight_update").ok  # no request is left that would forbid it
    assert post(server, "/finish_weight_update").status_code == 400  # nothing was sent
    assert serves(server)


@pytest.mark.parametrize("token", [VOCABULARY, VOCABULARY + 1, 2**31, 2**63, 2**70])
def test_a_token_that_the_model_has_not_is_named_on_every_route(server: Server, token: int) -> None:
    name = requests.get(f"{server.url}/v1/models", headers=KEY, timeout=30).json()["data"][0]["id"]
    words = f"token 1 is id {token}; allowed: 0 to 1,023, the model's vocabulary"
    for path, body in (
        (ROLLOUT, {"prompts": [[1], [1, token]]}),
        ("/v1/completions", {"model": name, "prompt": [1, token], "max_tokens": 2}),
        ("/v1/completions", {"model": name, "prompt": [[1, token]], "max_tokens": 2}),
        ("/invocations", {"model": name, "prompt": [1, token], "max_tokens": 2}),
        ("/inference/v1/generate", {"model": name, "token_ids": [1, token], "sampling_params": {"max_tokens": 2}}),
    ):
        answer = post(server, path, body)
        if answer.status_code == 404 or "Scale-out endpoints are disabled" in answer.text:  # by version
            continue
        assert answer.status_code == 400, (path, answer.text)
        assert words in answer.text or token > 2**62, path
    assert serves(server)


def test_an_open_update_forbids_what_would_run_a_half_written_model(server: Server) -> None:
    request = threading.Thread(target=rolled_out, args=(server, [1, 2, 3]), kwargs={"max_tokens": 200})
    request.start()
    post(server, "/pause?mode=keep")
    assert post(server, "/start_weight_update").ok
    for path in ("/resume", "/sleep?level=1", "/wake_up"):
        answer = post(server, path)
        assert answer.status_code == 400, path
        assert "an update of the weights is open" in answer.text
    assert post(server, "/finish_weight_update").status_code == 400  # nothing was sent: the old weights serve
    assert post(server, "/resume").ok
    request.join(60)
    assert not request.is_alive()
    assert serves(server)


@pytest.mark.slow
def test_an_update_that_nobody_ends_is_ended_and_the_old_weights_serve(server: Server) -> None:
    """A mistyped call opens none. One that is opened is shown, with its age, until the limit ends it and its pause."""
    before = server_digests(server)
    assert post(server, "/start_weight_update", {"is_checkpoint": True}).status_code == 400
    assert serves(server)
    assert post(server, "/pause?mode=keep").ok
    assert post(server, "/start_weight_update").ok
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(rolled_out, server, [1, 2, 3])
        shown = status(server)
        assert (shown["serving"], shown["paused"], shown["open_update"]["limit_s"]) == (False, True, LIMIT_S)
        assert "an update of the weights is open for " in shown["refusal"]
        health = requests.get(f"{server.url}/health", timeout=5)
        assert (health.status_code, health.json()["serving"]) == (200, False)
        assert answer.result().ok
    assert LIMIT_S <= time.monotonic() - begun < LIMIT_S + 20
    shown = status(server)
    assert (shown["open_update"], shown["paused"]) == (None, False)
    assert f"the update was ended, as its trainer was silent for {LIMIT_S} s" in shown["last_failure"]
    late = post(server, "/finish_weight_update")
    assert late.status_code == 400
    assert "no update is open. The last one: the update was ended" in late.text
    assert serves(server)
    assert server_digests(server) == before
    with without_cuda():
        send(trainer_of(weight_sync_client(server.url, "sesame", timeout=60)), weights("dense", "a"))
    assert serves(server)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["known", "unknown"])
def test_a_trainer_that_announces_and_sends_nothing_is_let_go(server: Server, names: str) -> None:
    """The status answers while the worker waits for it, and afterwards the old weights serve."""
    before, _group = server_digests(server), met(server)
    sent = weights("dense", "b")
    if names == "unknown":
        sent = {"nobody.weight": sent["model.norm.weight"]}
    assert post(server, "/start_weight_update").ok
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, server, "/update_weights", update_of(sent))
        seen = []
        while not answer.done():
            seen.append(status(server)["under_way"])
            time.sleep(0.1)
    assert ["update_weights"] in seen
    assert LIMIT_S <= time.monotonic() - begun < LIMIT_S + 20
    assert answer.result().status_code == 400
    text = answer.result().text
    assert f"nothing came from the trainer for {LIMIT_S} s" in text
    assert "connect again (init_weight_transfer_engine)" in text
    assert ("nobody.weight" in text) == (names == "unknown")
    assert status(server)["under_way"] == []
    assert serves(server)
    assert server_digests(server) == before
    with without_cuda():  # the next trainer is taken
        send(trainer_of(weight_sync_client(server.url, "sesame", timeout=60)), weights("dense", "a"))
    assert serves(server)


def test_a_trainer_that_stops_midway_leaves_no_mixture_to_be_served(server: Server) -> None:
    from fp8plan.runtime.apply.worker.backend import StoreCommunicator

    with without_cuda():  # from now on parts of an update stream
        send(trainer_of(weight_sync_client(server.url, "sesame", timeout=60)), weights("dense", "a"))
    group, sent = StoreCommunicator(met(server)), weights("dense", "b")
    for tensor in list(sent.values())[:5]:
        group.broadcast(tensor, src=0)
    assert post(server, "/start_weight_update").ok
    answer = post(server, "/update_weights", update_of(sent))
    assert answer.status_code == 400
    assert "the server refuses to generate until a complete update" in answer.text
    assert rolled_out(server, [1, 2, 3]).status_code == 400
    assert not status(server)["serving"]
    with without_cuda():
        send(trainer_of(weight_sync_client(server.url, "sesame", timeout=60)), weights("dense", "a"))
    assert serves(server)


def test_an_engine_that_is_killed_ends_the_server_with_an_error(server: Server) -> None:
    """Last, as the server is gone then: killed while an update waits for its trainer, and a request for the update."""
    _group = met(server)
    sent = weights("dense", "b")
    post(server, "/pause?mode=keep")
    assert post(server, "/start_weight_update").ok
    with ThreadPoolExecutor(3) as thread:
        calls = [
            thread.submit(post, server, "/update_weights", update_of(sent)),
            thread.submit(rolled_out, server, [1, 2, 3]),
        ]
        while status(server)["under_way"] != ["update_weights"]:
            time.sleep(0.05)
        begun = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert all(call.exception(30) is not None or call.result().status_code >= 400 for call in calls)
    server.process.join(30)
    assert server.process.exitcode == 1
    assert time.monotonic() - begun < 30
    assert "the engine's process has ended; the server ends, too" in server.log.read_text(errors="replace")
