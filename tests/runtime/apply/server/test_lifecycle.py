"""A real `vllm serve` with FP8 weights and KV, over HTTP: vLLM's own client and trainer engine send the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import requests
from native_client import send, send_in_parts, trainer_of, without_cuda
from tiny_models import BLOCK_SIZE, LONG_PROMPT, PROMPTS, generate, started, weights
from trl_runs import model
from vllm_server import BLOCK_FP8, FP8_KV, Server, free_port, line_of, outputs, serving

import fp8plan

pytestmark = pytest.mark.vllm

STATUS = "/fp8plan/status"
UNSEEN_FROM_OUTSIDE = {"weights", "prefix_cache", "temperature", "mismatch", "trainer"}  # the last four: not given


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(line_of(model(), *BLOCK_FP8, *FP8_KV)) as found:
        yield found


@pytest.fixture(scope="module")
def trainer(server: Server) -> Iterator[Any]:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    with without_cuda():
        yield trainer_of(HTTPVLLMWeightSyncClient(server.url, timeout=60))


def test_it_says_what_runs_before_the_first_update(server: Server) -> None:
    found = server.get(STATUS)
    assert (found["backend"], found["precision"], found["model"]) == ("fp8plan", "fp8_block+fp8_kv", model())
    assert (found["serving"], found["weights"]["version"], found["last_update"]) == (True, 0, None)
    assert found["kv_scales"]["source"] == "random tokens, as no rollout has run yet"
    scales = [x for layer in found["kv_scales"]["scales"].values() for x in layer.values()]
    assert len(scales) == 18
    assert all(0 < scale < 1 for scale in scales)  # never 1.0 in silence


def test_updates_over_http_leave_what_a_fresh_engine_has(server: Server, trainer: Any) -> None:
    """The same parameters, KV scales, tokens and log-probs, bit for bit."""
    before = outputs(server, PROMPTS)
    send(trainer, weights("dense", "b"))
    found, after = server.get(STATUS), outputs(server, PROMPTS)
    assert after != before
    sequences = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, before, strict=True)]
    with started("dense", "b", "fp8_block+fp8_kv") as engine:
        engine.recalibrate_kv(kv_prompts=sequences)
        assert server.rpc("fp8plan_digests") == [engine.llm.collective_rpc("fp8plan_digests")[0]["ok"]]
        assert found["kv_scales"]["scales"] == engine.kv_scales()
        assert after == generate(engine, cold=True)[: len(PROMPTS)]
    assert found["kv_scales"]["source"] == "the last sequences that were generated"
    assert (found["serving"], found["weights"]["version"]) == (True, 1)
    assert found["last_update"]["compared"] > 0
    assert found["last_update"]["tensors"] == len(weights("dense", "b"))


def test_vllms_name_of_the_weights_is_told(server: Server, trainer: Any) -> None:
    trainer.client.start_weight_update()
    send_in_parts(SkipStart(trainer), [weights("dense", "a")])
    trainer.client.finish_weight_update("step 7")
    assert server.get(STATUS)["weights"] == {"version": 2, "name": "step 7"}
    assert server.get("/weight_info") == {"weight_version": "step 7"}


def test_it_says_how_requests_to_these_weights_were_sampled(server: Server) -> None:
    """After an update, and after the tests of KV scales, which are measured on what was served."""
    assert server.completion([1, 2, 3], top_p=0.9).ok
    found = server.get(STATUS)
    assert found["sampling"] == asdict(fp8plan.Sampling(top_p=0.9, logprobs_mode=found["facts"]["logprobs_mode"]))


@pytest.mark.slow
def test_the_doctor_sees_what_a_server_runs(server: Server) -> None:
    """All that its status, its pages and its log-probs tell."""
    before = fp8plan.doctor(server.url).observed
    for more in ([], [5, 6, 7]):  # a prompt, and a turn that continues it
        assert server.completion([*LONG_PROMPT, *more]).ok
    found = fp8plan.doctor(server.url)
    assert (found.observed.prefix_cache_hits or 0) - (before.prefix_cache_hits or 0) == BLOCK_SIZE
    assert (found.observed.prefix_cache_queries or 0) > (before.prefix_cache_queries or 0) + 2 * len(LONG_PROMPT)
    assert found.observed.facts["prefix_caching"] is True
    states = {one.check: one.state.value for one in found.findings}
    assert found.faults == ()
    assert {check for check, state in states.items() if state == "unknown"} == UNSEEN_FROM_OUTSIDE
    assert found.observed.gpu == "cpu"  # which its workers tell
    source = server.get(STATUS)["kv_scales"]["source"]
    (fault,) = fp8plan.doctor(server.url, precision="fp8_block").faults
    assert server.get(STATUS)["kv_scales"]["source"] == source
    assert fault.fault == "wrong_precision"


class SkipStart:
    """A trainer that has begun its update already, and does not finish it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self.client = trainer, self
        self.update_weights = trainer.client.update_weights

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def said(answer: requests.Response) -> str:
    """The text of an answer that is the caller's fault."""
    assert answer.status_code == 400, answer.text
    text: str = answer.json()["error"]["message"]
    return text


def test_what_the_model_does_not_take_is_said_and_the_old_weights_serve(server: Server, trainer: Any) -> None:
    sent, before = weights("dense", "b"), server.rpc("fp8plan_digests")
    del sent["model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(requests.HTTPError) as raised:
        send(trainer, sent)
    assert "missing: " in (text := said(raised.value.response))
    assert "the old weights serve" in text
    assert server.rpc("fp8plan_digests") == before
    found = server.get(STATUS)
    assert found["serving"]
    assert "missing: " in found["last_failure"]
    assert server.completion([1, 2, 3]).ok


def test_garbage_is_named_and_the_server_refuses_to_generate_until_a_complete_update(
    server: Server, trainer: Any
) -> None:
    sent = weights("dense", "b")
    sent["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
    with pytest.raises(requests.HTTPError) as raised:
        send(trainer, sent)
    assert "not finite: model.layers.2.mlp.down_proj.weight" in (text := said(raised.value.response))
    assert "the server refuses to generate until a complete update" in text
    assert "not finite" in said(server.completion([1, 2, 3]))
    assert not server.get(STATUS)["serving"]
    send(trainer, weights("dense", "b"))
    assert server.get(STATUS)["serving"]
    assert server.get(STATUS)["last_failure"] is None
    assert server.completion([1, 2, 3]).ok


def test_an_update_that_was_left_open_does_not_lock_out_the_next_trainer(server: Server, trainer: Any) -> None:
    trainer.client.start_weight_update()
    assert "an update of the weights is under way" in said(server.completion([1, 2, 3]))
    send(trainer, weights("dense", "a"))
    assert server.completion([1, 2, 3]).ok


class Running:
    """A long request in a thread of its own, which runs by now."""

    def __init__(self, server: Server, tokens: int) -> None:
        deadline = time.monotonic() + 60
        _, before = figures(server)
        self._begin(server, tokens)
        while (now := figures(server))[0] == 0 or now[1] == before:
            assert time.monotonic() < deadline
            if self.answers:  # it was over before it was seen
                assert self.answers[0].ok, self.answers[0].text
                before = now[1]
                self._begin(server, tokens)

    def _begin(self, server: Server, tokens: int) -> None:
        self.answers: list[requests.Response] = []
        self.thread = threading.Thread(target=self._ask, args=(server, tokens))
        self.thread.start()

    def _ask(self, server: Server, tokens: int) -> None:
        self.answers.append(server.completion([1, 2, 3], max_tokens=tokens))

    def joined(self) -> requests.Response:
        self.thread.join(60)
        (answer,) = self.answers
        return answer


def kept_by_a_pause(server: Server, pause: Callable[[], None] | None = None) -> Running:
    """A request that a pause has met while it ran; on a busy machine one may be over before the pause comes."""
    for _ in range(20):
        request = Running(server, 240)
        if pause is None:
            requests.post(f"{server.url}/pause", params={"mode": "keep"}, timeout=30).raise_for_status()
        else:
            pause()
        request.thread.join(0.5)
        if request.thread.is_alive():
            return request
        requests.post(f"{server.url}/resume", timeout=30).raise_for_status()
    raise AssertionError("every request was over before the pause came")


def refused_while_a_request_runs(server: Server, trainer: Any) -> tuple[str, Running]:
    """Return the refusal of an update, and the request that runs.

    A busy machine may finish a request before the update comes. Then another is tried.
    """
    for _ in range(20):
        request = Running(server, 240)
        try:
            trainer.client.start_weight_update()
        except requests.HTTPError as error:
            return said(error.response), request
        assert request.joined().ok
        send(trainer, weights("dense", "a"))  # the update that has begun
    raise AssertionError("no update was refused")


def figures(server: Server) -> tuple[float, float]:
    """The numbers of requests that ran in the engine's last step, and of prompt tokens filled since its start."""
    lines = requests.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    names = "vllm:num_requests_running{", "vllm:prompt_tokens_total{"
    runs, filled = (sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names)
    return runs, filled


def running(server: Server) -> float:
    return figures(server)[0]


def test_running_requests_are_not_given_a_mixture_of_weights(server: Server, trainer: Any) -> None:
    text, request = refused_while_a_request_runs(server, trainer)
    assert "1 requests are running" in text
    assert "POST /pause?mode=keep" in text
    assert request.joined().ok


@pytest.mark.slow
def test_requests_that_a_pause_keeps_go_on_with_the_new_weights_and_the_scales_of_their_cache(
    server: Server, trainer: Any
) -> None:
    """As TRL's AsyncGRPO and prime-rl update."""
    before = server.get(STATUS)["kv_scales"]
    request = kept_by_a_pause(server)
    trainer.client.start_weight_update()
    late: list[requests.Response] = []
    waits = threading.Thread(target=lambda: late.append(server.completion([4, 5, 6])))
    waits.start()
    send_in_parts(SkipStart(trainer), [weights("dense", "b")])
    trainer.client.finish_weight_update()
    assert not late
    requests.post(f"{server.url}/resume", timeout=30).raise_for_status()
    answer = request.joined()
    waits.join(60)
    assert late[0].ok
    assert len(answer.json()["choices"][0]["token_ids"]) == 240
    after = server.get(STATUS)["kv_scales"]
    assert after["scales"] == before["scales"]
    assert after["source"].endswith("kept while requests wait")
    send(trainer, weights("dense", "b"))  # nothing waits: they are measured again
    assert server.get(STATUS)["kv_scales"]["source"] == "the last sequences that were generated"


def test_scales_are_measured_in_a_pause_that_keeps_nothing(server: Server, trainer: Any) -> None:
    requests.post(f"{server.url}/pause", params={"mode": "abort"}, timeout=30).raise_for_status()
    send(trainer, weights("dense", "a"))
    assert server.get("/is_paused") == {"is_paused": True}
    requests.post(f"{server.url}/resume", timeout=30).raise_for_status()
    assert server.get(STATUS)["kv_scales"]["source"] == "the last sequences that were generated"
    with started("dense", "a", "fp8_block+fp8_kv") as engine:
        assert server.rpc("fp8plan_digests") == [engine.llm.collective_rpc("fp8plan_digests")[0]["ok"]]


def test_another_backend_is_answered_with_what_to_type() -> None:
    """Asked of the route itself: another server would take as long to start as this one."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from fp8plan.runtime.apply.server.routes import Routes

    app = FastAPI()
    Routes().attach_router(app)
    answer = TestClient(app).get(STATUS)
    assert answer.status_code == 404
    assert """--weight-transfer-config '{"backend": "fp8plan"}'""" in answer.json()["error"]


def digests_of_b(server: Server) -> tuple[Any, Any]:
    """The server's parameters, and those of a fresh engine."""
    with started("dense", "b", "fp8_block+fp8_kv") as engine:
        return server.rpc("fp8plan_digests"), [engine.llm.collective_rpc("fp8plan_digests")[0]["ok"]]


@pytest.mark.trl
def test_trls_own_client_syncs(server: Server, trainer: Any) -> None:
    """Its code to the last line, but for the check of the device before the rendezvous."""
    from concurrent.futures import ThreadPoolExecutor

    from trl.generation.vllm_client import VLLMClient, open_trainer_endpoint

    client, sent = VLLMClient(server.url), weights("dense", "b")
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as thread:
        url = f"{server.url}/init_weight_transfer_engine"
        joined = thread.submit(client._post, url, json={"init_info": info | {"packed": True}})
        client.communicator = open_trainer_endpoint(info)
        joined.result()
    metadata = [(name, "bfloat16", list(tensor.shape)) for name, tensor in sent.items()]
    for number in range(2):
        client.update_named_params(metadata, iter(sent.items()))
        client.reset_prefix_cache()
        found = server.get(STATUS)
        assert found["serving"], number
    with client.weight_update():  # a tensor at a time
        for name, tensor in sent.items():
            client.update_named_param(name, tensor)
    found, expected = digests_of_b(server)
    assert found == expected
    with pytest.raises(Exception, match=r"Request failed: 400.*missing: .*the old weights serve"):
        client.update_named_params(metadata[1:], iter(list(sent.items())[1:]))
    client.close_communicator()


@pytest.mark.slow
@pytest.mark.trl
def test_the_client_of_trls_async_grpo_syncs_in_a_pause(server: Server, trainer: Any) -> None:
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    PartialState(cpu=True)  # its logger asks for it
    sent = weights("dense", "b")
    send(trainer_of(trainer.client), weights("dense", "a"))  # the server listens to who has met it last
    info = {"names": list(sent), "dtype_names": ["bfloat16"] * len(sent)}
    info["shapes"] = [list(tensor.shape) for tensor in sent.values()]
    client = WeightTransferClient(VLLMClient(server.url), info)
    client.init_weight_transfer()
    request = kept_by_a_pause(server, client.pause)
    client.send_weights(iter(sent.items()))
    client.resume()
    assert request.joined().ok
    assert server.get(STATUS)["kv_scales"]["source"].endswith("kept while requests wait")
    found, expected = digests_of_b(server)
    assert found == expected
    client.destroy()
