"""Rollouts of turns: a task for each trajectory asks vLLM's AsyncLLM, and sleeps where its tools work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from fp8plan.runtime.apply.engine.async_engine import finished
from fp8plan.runtime.measure.rollouts.timed import Turns, sampling

Answer = TypeVar("Answer")


class AgentLoop:
    """An AsyncLLM on an event loop of its own, with the calls of `vllm.LLM` that a measurement makes.

    llm_engine: the AsyncLLM, whose name here is as in `vllm.LLM`
    """

    def __init__(self, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.llm_engine = self._wait_for(_started(kwargs))

    def collective_rpc(self, method: str) -> list[Any]:
        return self._wait_for(self.llm_engine.collective_rpc(method))

    def reset_prefix_cache(self) -> bool:
        return bool(self._wait_for(self.llm_engine.reset_prefix_cache()))

    def generate(self, prompts: Sequence[Any], params: Any, use_tqdm: bool = False) -> list[Any]:
        """Return the output of each prompt. params: SamplingParams for all, or a list with those of each"""
        settings = params if isinstance(params, list) else [params] * len(prompts)
        pairs = zip(prompts, settings, strict=True)
        return self._wait_for(_all([self._answer(prompt["prompt_token_ids"], setting) for prompt, setting in pairs]))

    def rollout(self, prompts: Sequence[Any], turns: Sequence[Turns], concurrent: int | None) -> list[list[Any]]:
        """Run trajectories, and return the outputs of each one's turns.

        turns:      of each prompt
        concurrent: trajectories that run at once, begun in order; None: all
        """
        return self._wait_for(self._trajectories(prompts, turns, concurrent))

    async def _trajectories(
        self, prompts: Sequence[Any], turns: Sequence[Turns], concurrent: int | None
    ) -> list[list[Any]]:
        places = asyncio.Semaphore(concurrent or len(prompts))

        async def placed(number: int) -> list[Any]:
            async with places:
                return await self._trajectory(prompts[number]["prompt_token_ids"], turns[number], number)

        return await _all([placed(number) for number in range(len(prompts))])

    async def _trajectory(self, prompt: Sequence[int], turns: Turns, seed: int) -> list[Any]:
        """Run one trajectory. The prompt of each turn is all tokens so far. Tools add random ones."""
        rng, vocabulary = np.random.default_rng(seed), self.llm_engine.model_config.get_vocab_size()
        tokens, outputs = list(prompt), list[Any]()
        for number, (generated, tool, wait_s) in enumerate(turns, 1):
            output = await self._answer(tokens, sampling(generated))
            outputs.append(output)
            if number < len(turns):
                tokens = [*tokens, *output.outputs[0].token_ids, *rng.integers(0, vocabulary, tool).tolist()]
                await asyncio.sleep(wait_s)
        return outputs

    async def _answer(self, tokens: Sequence[int], params: Any) -> Any:
        return await finished(self.llm_engine.generate, {"prompt_token_ids": tokens}, params)

    def _wait_for(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self._loop.run_until_complete(work)


async def _started(kwargs: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**kwargs))


async def _all(work: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    return await asyncio.gather(*work)
