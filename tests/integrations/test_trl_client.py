"""Which of TRL's requests go by fp8plan's route for rollouts, and what becomes of the others."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.engine.rollout_log import Response
from fp8plan.runtime.watch.mismatch.sampling import Sampling

pytestmark = pytest.mark.trl

PROMPTS = [[1, 2], [3]]


class Session:
    """A stand-in for a Session of requests that keeps what was posted to where.

    status: the answer of fp8plan's route; 404 is that of a server without it
    """

    def __init__(self, status: int = 200) -> None:
        self.status, self.posted = status, list[tuple[str, Any]]()

    def post(self, url: str, json: Any) -> Any:
        self.posted.append((url, json))
        if url.endswith("/v1/completions"):
            logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-0.25], "top_logprobs": [{"token_id:7": -0.25}]}
            choice = {"token_ids": [7], "logprobs": logprobs}
            return answer(200, {"choices": [choice | {"prompt_token_ids": prompt} for prompt in json["prompt"]]})
        found = {"token_ids": [[7], [7]], "logprobs": [[-0.25], [-0.25]], "finish_reasons": ["length"] * 2}
        return answer(self.status, found if self.status == 200 else {"error": "not that"})

    def get(self, url: str, timeout: float) -> Any:
        return answer(200, "")


def answer(status: int, told: Any) -> Any:
    text = told if isinstance(told, str) else json.dumps(told)
    return SimpleNamespace(status_code=status, text=text, content=text.encode(), json=lambda: json.loads(text))


def client_of(session: Session) -> Any:
    from fp8plan.integrations.trl.client import PlannedClient

    client = PlannedClient.__new__(PlannedClient)
    client.base_url, client.session, client.model = "http://server", session, "a-model"
    return client


def routes(session: Session) -> list[str]:
    return [url.removeprefix("http://server") for url, _ in session.posted]


def test_token_prompts_go_by_the_route_with_all_that_is_told_of_sampling() -> None:
    client, heard = client_of(session := Session()), list[Any]()
    client.heard = heard.append
    found = client.generate(PROMPTS, temperature=0.7, max_tokens=1, generation_kwargs={"seed": 5})
    sampling = {"n": 1, "repetition_penalty": 1.0, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert session.posted == [
        ("http://server/v1/fp8plan/rollout", {"prompts": PROMPTS, "sampling": sampling | {"max_tokens": 1, "seed": 5}})
    ]
    assert (found["prompt_ids"], found["completion_ids"]) == (PROMPTS, [[7], [7]])
    assert (found["logprobs"], found["logprob_token_ids"]) == ([[[-0.25]]] * 2, [[[7]]] * 2)
    (call,) = heard
    assert call.responses == [Response([1, 2], [7]), Response([3], [7])]
    assert call.sampling == Sampling(temperature=0.7)


def test_a_rollout_by_either_way_has_its_sampling() -> None:
    for how in ({"top_p": 0.9}, {"generation_kwargs": {"top_p": 0.9}}, {"top_p": 0.9, "logprobs": 1}):
        client, heard = client_of(Session()), list[Any]()
        client.heard = heard.append
        client.generate(PROMPTS, max_tokens=1, **how)
        assert heard[0].sampling == Sampling(top_p=0.9)
    client.generate(PROMPTS, max_tokens=1, top_p=None)  # what the server's generation config says
    assert heard[1].sampling is None


def test_a_none_that_something_else_overrides_is_none_no_more() -> None:
    client = client_of(session := Session())
    client.generate(PROMPTS, max_tokens=None, generation_kwargs={"max_tokens": 1})
    assert routes(session) == ["/v1/fp8plan/rollout"]


@pytest.mark.parametrize(
    "how",
    [
        {"logprobs": 2},
        {"structured_outputs_regex": "a"},
        {"generation_kwargs": {"bad_words": ["a"]}},
        {"generation_kwargs": {"max_tokens": None}},  # as many as there is room for
        {"top_p": None},  # what the server's generation config says
        {"generation_kwargs": {"top_p": None}},
    ],
    ids=str,
)
def test_what_needs_more_than_tokens_goes_trls_way(how: dict[str, Any]) -> None:
    client = client_of(session := Session())
    client.generate(PROMPTS, **{"max_tokens": 1} | how)
    assert routes(session) == ["/v1/completions"]


def test_text_prompts_go_trls_way() -> None:
    client = client_of(session := Session())
    client.generate(["w1 w2"], max_tokens=1)
    assert routes(session) == ["/v1/completions"]


def test_a_server_without_the_route_is_asked_trls_way_and_answers_the_same() -> None:
    client = client_of(session := Session(status=404))
    assert client.generate(PROMPTS, max_tokens=1) == client_of(Session()).generate(PROMPTS, max_tokens=1)
    client.generate(PROMPTS, max_tokens=1)
    assert routes(session) == ["/v1/fp8plan/rollout", "/v1/completions", "/v1/completions"]


ODD = (
    "<html>", "5", "[]", "{}", '{"token_ids": [[7]], "logprobs": [[-0.25]]}',
    '{"token_ids": [[7], [true]], "logprobs": [[-0.25], [-0.25]]}',
    '{"token_ids": [[7], [7]], "logprobs": [[-0.25], [null]]}',
    '{"token_ids": [[7], [7, 8]], "logprobs": [[-0.25], [-0.25]]}',
)  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_responses_of_another_shape_are_one_error_with_the_address(text: str) -> None:
    client = client_of(session := Session())
    session.post = lambda url, json: answer(200, text)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"^http://server/v1/fp8plan/rollout answers what no vLLM server does: "):
        client.generate(PROMPTS, max_tokens=1)


@pytest.mark.parametrize("text", [*ODD, '{"data": []}', '{"vllm_config": 5}', '{"vllm_config": {}}'])
@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/v1/models", lambda client: client._get("http://server/v1/models")),
        ("/get_world_size", lambda client: client.get_world_size()),
        ("/server_info", lambda client: client.seen()),
        ("/fp8plan/status", lambda client: client.status()),
    ],
)
def test_pages_of_another_shape_are_one_error_with_the_address(path: str, read: Any, text: str) -> None:
    client = client_of(session := Session())
    session.get = lambda url, **how: answer(200, text)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"^http://server{path} answers what no vLLM server does: "):
        read(client)


@pytest.mark.parametrize(("code", "says"), [(404, None), (401, "answers 401: no key"), (503, "answers 503: no key")])
def test_a_status_that_is_refused_is_not_taken_for_a_server_without_one(code: int, says: str | None) -> None:
    client = client_of(session := Session())
    session.get = lambda url, **how: answer(code, "no key")  # type: ignore[method-assign]
    if says is None:
        assert client.status() is None
        return
    with pytest.raises(ConfigError, match=f"^http://server/fp8plan/status {says}"):
        client.status()


@pytest.mark.parametrize("line", ["vllm:num_preemptions_total", "vllm:num_preemptions_total many"])
def test_metrics_that_cannot_be_read_cost_no_rollout(line: str) -> None:
    client = client_of(session := Session())
    session.get = lambda url, **how: answer(200, line)  # type: ignore[method-assign]
    calls = list[Any]()
    client.heard = calls.append
    client.generate(PROMPTS, max_tokens=1)
    assert [call.counted for call in calls] == [{}]


def test_a_call_has_the_growth_of_the_servers_counters() -> None:
    client, heard = client_of(session := Session()), list[Any]()
    client.heard = heard.append
    page = 'vllm:num_preemptions_total{engine="%d"} 2.0\nvllm:prefix_cache_hits_total{engine="0"} %d\n'
    pages = [page % (0, 100), page % (0, 356) + page.splitlines()[0] % 1]
    session.get = lambda url, **how: answer(200, pages.pop(0))  # type: ignore[method-assign]
    client.generate(PROMPTS, max_tokens=1)
    assert heard[0].counted == {"preemptions": 2, "prefix_cache_hits": 256}


def test_a_sync_that_fails_names_the_server() -> None:
    client = client_of(session := Session())
    client.communicator, client._updating_weights = None, False
    session.post = lambda url, json: answer(500, "on fire")  # type: ignore[method-assign]
    with pytest.raises(SyncError, match=r"^http://server: the server did not take the weights: .*500, on fire"):
        client.update_named_params([("a", "bfloat16", [1])], iter(()))


def test_what_the_server_refuses_is_trls_error() -> None:
    with pytest.raises(Exception, match=r"Request failed: 400, .*not that"):
        client_of(Session(status=400)).generate(PROMPTS, max_tokens=1)
