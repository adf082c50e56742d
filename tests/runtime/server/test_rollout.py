"""A rollout in one request, with a stand-in for an AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.runtime.server.rollout import rolled_out, sampled_logprobs


class Engine:
    """It answers each prompt with its tokens doubled, the shortest first; `fails` is a prompt that it refuses."""

    def __init__(self, fails: list[int] | None = None) -> None:
        self.fails, self.asked, self.ended = fails, list[Any](), list[list[int]]()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        tokens = prompt["prompt_token_ids"]
        self.asked.append((params, request_id))
        try:
            await asyncio.sleep(0.01 * len(tokens))
            if tokens == self.fails:
                raise ValueError("this prompt is refused")
            doubled = [2 * token for token in tokens]
            logprobs = SimpleNamespace(logprobs=[-float(token) for token in doubled])
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=doubled, logprobs=logprobs)] * params.n)
        finally:
            self.ended.append(tokens)


def test_responses_come_in_the_order_of_the_prompts() -> None:
    engine = Engine()
    found = asyncio.run(rolled_out(engine.generate, [[1, 2, 3], [4]], {"n": 2, "max_tokens": 3}))
    assert found["token_ids"] == [[2, 4, 6], [2, 4, 6], [8], [8]]
    assert found["logprobs"] == [[-2.0, -4.0, -6.0]] * 2 + [[-8.0]] * 2
    assert engine.ended == [[4], [1, 2, 3]]
    assert len({request_id for _, request_id in engine.asked}) == 2
    params = engine.asked[0][0]
    assert (params.output_kind.name, params.detokenize, params.logprobs) == ("FINAL_ONLY", False, 0)


def test_one_that_fails_ends_all_with_its_own_error() -> None:
    engine = Engine(fails=[4])
    with pytest.raises(ValueError, match="this prompt is refused"):
        asyncio.run(rolled_out(engine.generate, [[1] * 100, [4]], {}))
    assert engine.ended == [[4], [1] * 100]


def test_sampling_that_vllm_does_not_know_is_refused_before_anything_runs() -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match=r"sampling is \{'colour': 1\}: .*allowed: arguments of vllm.SamplingParams"):
        asyncio.run(rolled_out(engine.generate, [[1]], {"colour": 1}))
    assert not engine.asked


def test_log_probs_are_those_of_the_sampled_tokens_where_vllm_gives_others_too() -> None:
    class Others(list[Any]):
        logprobs = (-0.1, -0.2, -0.3, -0.4)

    at = [{7: SimpleNamespace(logprob=-0.1), 1: SimpleNamespace(logprob=-0.2)}, {8: SimpleNamespace(logprob=-0.3)}]
    assert sampled_logprobs(SimpleNamespace(token_ids=[7, 8], logprobs=Others(at))) == [-0.1, -0.3]
