"""A rollout in one request, with a stand-in for an AsyncLLM."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.server.rollout import (
    ResponseError,
    most_tokens,
    rolled_out,
    sampled_logprobs,
    sampling_params,
)


class Engine:
    """It answers each prompt with its tokens doubled, the shortest first.

    fails:  a prompt that it refuses
    broken: what is unlike other responses in those to [4]
    """

    def __init__(self, fails: list[int] | None = None, **broken: Any) -> None:
        self.fails, self.broken, self.asked, self.ended = fails, broken, list[Any](), list[list[int]]()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        tokens = prompt["prompt_token_ids"]
        self.asked.append((params, request_id))
        try:
            await asyncio.sleep(0.01 * len(tokens))
            if tokens == self.fails:
                raise ValueError("this prompt is refused")
            doubled = [2 * token for token in tokens]
            logprobs = SimpleNamespace(logprobs=[-float(token) for token in doubled])
            response = {"token_ids": doubled, "logprobs": logprobs, "finish_reason": "length"}
            response |= {"cumulative_logprob": -float(sum(doubled))} | (self.broken if tokens == [4] else {})
            yield SimpleNamespace(outputs=[SimpleNamespace(**response)] * params.n)
        finally:
            self.ended.append(tokens)


CONFIG = SimpleNamespace(max_model_len=200, generation_config="auto", override_generation_config={})


def test_responses_come_in_the_order_of_the_prompts() -> None:
    engine = Engine()
    found = asyncio.run(rolled_out(engine.generate, CONFIG, [[1, 2, 3], [4]], {"n": 2, "max_tokens": 3}))
    assert found["token_ids"] == [[2, 4, 6], [2, 4, 6], [8], [8]]
    assert found["logprobs"] == [[-2.0, -4.0, -6.0]] * 2 + [[-8.0]] * 2
    assert engine.ended == [[4], [1, 2, 3]]
    assert len({request_id for _, request_id in engine.asked}) == 2
    params = engine.asked[0][0]
    assert (params.output_kind.name, params.detokenize, params.logprobs) == ("FINAL_ONLY", False, 0)


def test_one_that_fails_ends_all_with_its_own_error() -> None:
    engine = Engine(fails=[4])
    with pytest.raises(ValueError, match="this prompt is refused"):
        asyncio.run(rolled_out(engine.generate, CONFIG, [[1] * 100, [4]], {}))
    assert engine.ended == [[4], [1] * 100]


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ({"finish_reason": "error"}, r"a response to prompts\[1\] ended by 'error'"),
        ({"finish_reason": "abort"}, r"prompts\[1\] ended by 'abort'.*POST /pause .*send the prompts again"),
        ({"cumulative_logprob": float("nan")}, r"prompts\[1\] has NaN among its log-probs; update the weights"),
    ],
    ids=["error", "abort", "nan"],
)
def test_what_nobody_must_train_on_is_refused_with_the_prompts_number(broken: dict[str, Any], match: str) -> None:
    engine = Engine(**broken)
    with pytest.raises(ResponseError, match=match):
        asyncio.run(rolled_out(engine.generate, CONFIG, [[1] * 100, [4]], {}))
    assert engine.ended == [[4], [1] * 100]  # no other runs on
    answer = asked_over_http(engine, [[1], [4]])
    assert answer.status_code == 400
    assert re.search(match, answer.json()["error"])


def test_the_route_answers_each_number_as_it_is() -> None:
    answer = asked_over_http(Engine(), [[1, 2]])
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"token_ids": [[2, 4]], "logprobs": [[-2.0, -4.0]], "finish_reasons": ["length"]}


@pytest.mark.parametrize("token", [True, False, 1.0, "1", None])
def test_only_a_whole_number_of_json_is_a_token(token: Any) -> None:
    answer = asked_over_http(engine := Engine(), [[1], [2, token]])
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "prompts", 1, 1]
    assert not engine.asked


def asked_over_http(engine: Engine, prompts: list[list[Any]]) -> Any:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from fp8plan.runtime.apply.plugin import ROLLOUT
    from fp8plan.runtime.apply.server.routes import Routes

    Routes().attach_router(app := FastAPI())
    vllm_config = SimpleNamespace(model_config=CONFIG)
    app.state.fp8plan = SimpleNamespace(generate=engine.generate, engine=SimpleNamespace(vllm_config=vllm_config))
    return TestClient(app).post(ROLLOUT, json={"prompts": prompts})


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ({"colour": 1, "logprobs": 5}, "sampling has colour, logprobs; allowed: n, repetition_penalty"),
        ({"seed": "x"}, r"sampling is \{'seed': 'x'\}: .*int.*as vllm.SamplingParams takes them"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens is None; allowed: a number"),
        ({"max_tokens": "null"}, "max_tokens is 'null'; allowed: a number"),
        ({"top_p": None}, "float.*null.*top_p"),
        ({"max_tokens": 200}, "a prompt has 1 tokens and max_tokens is 200; allowed: 200 of both"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_runs(sampling: dict[str, Any], match: str) -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match=match):
        asyncio.run(rolled_out(engine.generate, CONFIG, [[1]], sampling))
    assert not engine.asked


def test_types_are_converted_before_the_engines_process_sees_them() -> None:
    told = {"seed": 5.0, "ignore_eos": 1, "max_tokens": "8", "top_p": 1, "stop_token_ids": None, "stop": "a"}
    found = sampling_params(told, None)
    kinds = (found.seed, found.ignore_eos, found.max_tokens, found.stop_token_ids, found.stop)
    assert kinds == (5, True, 8, [], ["a"])
    assert list(map(type, kinds[:3])) == [int, bool, int]
    assert found.detokenize  # for the stop string
    assert not sampling_params({}, None).detokenize


@pytest.mark.parametrize(
    ("generation_config", "overridden", "most"),
    [("auto", {}, 16), ("auto", {"max_new_tokens": 4}, 4), ("a-folder", {}, 7)],
)
def test_a_servers_own_limit_of_new_tokens_holds(generation_config: str, overridden: dict[str, int], most: int) -> None:
    config = SimpleNamespace(
        generation_config=generation_config,
        override_generation_config=overridden,
        get_diff_sampling_param=lambda: {"max_tokens": 7},
    )
    assert sampling_params({"max_tokens": 16}, most_tokens(config)).max_tokens == most


def test_log_probs_are_those_of_the_sampled_tokens_where_vllm_gives_others_too() -> None:
    class Others(list[Any]):
        logprobs = (-0.1, -0.2, -0.3, -0.4)

    at = [{7: SimpleNamespace(logprob=-0.1), 1: SimpleNamespace(logprob=-0.2)}, {8: SimpleNamespace(logprob=-0.3)}]
    assert sampled_logprobs(SimpleNamespace(token_ids=[7, 8], logprobs=Others(at))) == [-0.1, -0.3]
