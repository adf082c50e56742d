"""A rollout in one request, with a stand-in for an AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.runtime.server.rollout import most_tokens, rolled_out, sampled_logprobs, sampling_params


class Engine:
    """It answers each prompt with its tokens doubled, the shortest first; `fails` is a prompt that it refuses."""

    def __init__(self, fails: list[int] | None = None, reason: str = "length") -> None:
        self.fails, self.reason, self.asked, self.ended = fails, reason, list[Any](), list[list[int]]()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        tokens = prompt["prompt_token_ids"]
        self.asked.append((params, request_id))
        try:
            await asyncio.sleep(0.01 * len(tokens))
            if tokens == self.fails:
                raise ValueError("this prompt is refused")
            doubled = [2 * token for token in tokens]
            logprobs = SimpleNamespace(logprobs=[-float(token) for token in doubled])
            response = SimpleNamespace(token_ids=doubled, logprobs=logprobs, finish_reason=self.reason)
            yield SimpleNamespace(outputs=[response] * params.n)
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


def test_a_response_that_vllm_ended_with_an_error_is_no_answer() -> None:
    with pytest.raises(RuntimeError, match="ended a response with an error"):
        asyncio.run(rolled_out(Engine(reason="error").generate, CONFIG, [[1]], {}))


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ({"colour": 1, "logprobs": 5}, "sampling has colour, logprobs; allowed: n, repetition_penalty"),
        ({"seed": "x"}, r"sampling is \{'seed': 'x'\}: .*int.*as vllm.SamplingParams takes them"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 200}, "a prompt has 1 tokens and max_tokens is 200; allowed: 200 of both"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_runs(sampling: dict[str, Any], match: str) -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match=match):
        asyncio.run(rolled_out(engine.generate, CONFIG, [[1]], sampling))
    assert not engine.asked


def test_types_are_converted_before_the_engines_process_sees_them() -> None:
    told = {"seed": 5.0, "ignore_eos": 1, "max_tokens": "8", "top_p": 1, "frequency_penalty": None, "stop": "a"}
    found = sampling_params(told, None)
    kinds = (found.seed, found.ignore_eos, found.max_tokens, found.frequency_penalty, found.stop)
    assert kinds == (5, True, 8, 0.0, ["a"])
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
