"""A real `vllm serve` that follows a store: after each pull it has the bits of a server that got all weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from native_client import send, trainer_of, without_cuda
from tiny_models import weights
from trl_runs import model
from vllm_server import BLOCK_FP8, FP8_KV, Server, line_of, serving

from fp8plan.runtime.apply.plugin import PULL, STATUS, STORE
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with serving(f"{STORE}={store} {line_of(model(), *BLOCK_FP8, *FP8_KV)}") as running:
        yield running


@pytest.fixture(scope="module")
def publisher(server: Server, store: Path) -> Publisher:
    """A trainer that begins once the server runs, which says how it holds the model."""
    return Publisher(str(store), every=100)


@pytest.fixture(scope="module")
def trainer(server: Server) -> Iterator[Any]:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    with without_cuda():
        yield trainer_of(HTTPVLLMWeightSyncClient(server.url, timeout=60))


def pulled(server: Server) -> requests.Response:
    return requests.post(server.url + PULL, timeout=60)


def changed(tensors: Tensors, seed: int) -> Tensors:
    """The weights of the next step: some values differ."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(x.shape, generator=generator) < 0.02, x * 1.1, x).to(x.dtype)
        for name, x in tensors.items()
    }


def test_each_pull_leaves_the_bits_of_an_update_of_all_weights(
    server: Server, publisher: Publisher, trainer: Any
) -> None:
    assert pulled(server).json() is None  # nothing was published
    steps, live = [weights("dense", "b")], []
    for seed in range(2):
        steps.append(changed(steps[-1], seed))
    for number, tensors in enumerate(steps, 1):
        publisher.publish(tensors)
        record, status = pulled(server).json(), server.get(STATUS)
        assert record["patched"] == (number > 1)
        assert record["version"] == status["weights"]["version"] == status["last_update"]["version"] == number
        assert record["bytes"] == status["last_update"]["bytes"] > 0
        assert (record["store_version"], status["weights"]["name"]) == (number, str(number))
        assert status["serving"]
        assert pulled(server).json() is None
        assert server.completion([1, 2, 3]).ok
        live.append(server.rpc("fp8plan_digests"))
    assert live[0] != live[1] != live[2]
    for tensors, digests in zip(steps, live, strict=True):
        send(trainer, tensors)
        assert "store_version" not in server.get(STATUS)["last_update"]
        assert server.rpc("fp8plan_digests") == digests
    assert server.get(STATUS)["last_update"]["tensors"] == len(steps[0])
    assert pulled(server).json()["patched"] is False  # the trainer's updates are no versions of the store
    assert server.rpc("fp8plan_digests") == live[-1]


def test_a_damaged_version_is_named_and_the_next_whole_one_heals(
    server: Server, publisher: Publisher, store: Path
) -> None:
    publisher.publish(changed(weights("dense", "b"), 7))
    files = sorted(store.glob("*.patches")) + sorted(store.glob("*.whole"))
    before = {file: file.read_bytes() for file in files}
    for file in files:
        file.write_bytes(before[file][: len(before[file]) // 2])
    answer = pulled(server)
    assert answer.status_code == 400
    assert "cut off or damaged" in answer.json()["error"]
    assert server.get(STATUS)["last_failure"] == answer.json()["error"]
    for file, data in before.items():
        file.write_bytes(data)
    assert pulled(server).ok
    status = server.get(STATUS)
    assert (status["serving"], status["refusal"], status["last_failure"]) == (True, None, None)


@pytest.mark.slow
def test_requests_that_run_are_given_no_mixture(server: Server, publisher: Publisher) -> None:
    """They end before the write."""
    publisher.publish(changed(weights("dense", "a"), 1))
    ended: list[float] = []

    def ask() -> None:
        assert len(server.completion([1, 2, 3], max_tokens=240).json()["choices"][0]["token_ids"]) == 240
        ended.append(time.monotonic())

    request = threading.Thread(target=ask)
    request.start()
    time.sleep(0.3)
    assert not ended
    assert pulled(server).ok
    answered = time.monotonic()
    request.join()
    assert ended[0] < answered


@pytest.mark.slow
def test_requests_that_a_pause_keeps_go_on_with_the_new_weights_and_the_scales_of_their_cache(
    server: Server, publisher: Publisher
) -> None:
    publisher.publish(changed(weights("dense", "b"), 3))
    answers: list[requests.Response] = []
    kept = threading.Thread(target=lambda: answers.append(server.completion([1, 2, 3], max_tokens=240)))
    kept.start()
    time.sleep(0.3)
    assert requests.post(f"{server.url}/pause?mode=keep&clear_cache=false", timeout=60).ok
    scales = server.get(STATUS)["kv_scales"]
    assert pulled(server).ok
    now = server.get(STATUS)["kv_scales"]
    assert now == {"scales": scales["scales"], "source": f"{scales['source']}, kept while requests wait"}
    assert requests.post(f"{server.url}/resume", timeout=60).ok
    kept.join()
    assert answers[0].ok
    assert len(answers[0].json()["choices"][0]["token_ids"]) == 240


def test_a_pull_in_an_empty_pause_measures_scales_and_stays_paused(server: Server, publisher: Publisher) -> None:
    publisher.publish(changed(weights("dense", "b"), 4))
    assert requests.post(f"{server.url}/pause?mode=keep", timeout=60).ok
    assert pulled(server).ok
    assert server.get(STATUS)["kv_scales"]["source"] == "the last sequences that were generated"
    assert server.get("/is_paused") == {"is_paused": True}
    assert requests.post(f"{server.url}/resume", timeout=60).ok


@pytest.mark.slow
def test_a_server_that_starts_late_takes_the_newest_version(server: Server, store: Path, publisher: Publisher) -> None:
    publisher.publish(weights("dense", "b"))
    assert pulled(server).ok
    with serving(f"{STORE}={store} {line_of(model(), *BLOCK_FP8, *FP8_KV)}") as late:
        assert late.rpc("fp8plan_digests") == server.rpc("fp8plan_digests")
        assert late.get(STATUS)["weights"]["version"] == 1
        told_to_end_while_requests_wait(late)


def told_to_end_while_requests_wait(server: Server) -> None:
    """SIGTERM ends a server in which a request waits for an update that nobody ends."""
    assert requests.post(f"{server.url}/pause?mode=keep", timeout=60).ok
    assert requests.post(f"{server.url}/start_weight_update", timeout=60).ok
    failed: list[Exception] = []

    def ask() -> None:
        try:
            server.completion([1, 2, 3])
        except requests.ConnectionError as error:
            failed.append(error)

    request = threading.Thread(target=ask)
    request.start()
    time.sleep(0.5)
    os.kill(server.process.pid or 0, signal.SIGTERM)
    server.process.join(30)
    assert not server.process.is_alive()
    request.join(30)
    assert not request.is_alive()
