"""A rollout of many prompts in one request: tokens and their log-probs, and nothing else.

A trainer needs no text, no top log-probs and no object for each token. vLLM's route for completions makes them all, in
the server's one Python thread, and those of a whole batch at its end (docs/evidence/speed.md, "Outputs of a server").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fp8plan.errors import ConfigError

Generate = Callable[[Any, Any, str], AsyncGenerator[Any, None]]  # an AsyncLLM's, or what stands before it


async def rolled_out(generate: Generate, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    """Generate for all prompts; return "token_ids" and "logprobs" of each response, those of a prompt together.

    prompts:  token ids
    sampling: arguments of vllm.SamplingParams; "n" is the number of responses to each prompt

    Raises ConfigError for arguments that vLLM does not know, and what `generate` raises for the first prompt that
    fails, after which no other runs on.
    """
    from vllm import SamplingParams

    try:
        params = enough(SamplingParams(**{**sampling, "logprobs": 0}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampling is {sampling}: {error}; allowed: arguments of vllm.SamplingParams") from error
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_finished(generate, tokens, params)) for tokens in prompts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    responses = [response for task in tasks for response in task.result().outputs]
    return {
        "token_ids": [list(response.token_ids) for response in responses],
        "logprobs": [sampled_logprobs(response) for response in responses],
    }


async def _finished(generate: Generate, tokens: list[int], params: Any) -> Any:
    """The finished output of a prompt."""
    output = None
    async with aclosing(generate({"prompt_token_ids": tokens}, params, f"fp8plan-rollout-{uuid4().hex}")) as outputs:
        async for output in outputs:  # noqa: B007
            pass
    return output


def enough(sampling_params: Any) -> Any:
    """The same vllm.SamplingParams, but for the finished output alone, text only where stop strings are looked for in
    it, and log-probs in lists instead of an object for each, which Python's garbage collector would visit.
    """
    from vllm.sampling_params import RequestOutputKind

    found = sampling_params.clone()
    found.output_kind = RequestOutputKind.FINAL_ONLY
    found.detokenize = bool(found.stop)
    found.flat_logprobs = found.prompt_logprobs is None  # vLLM 0.26 has no slice of flat ones for a prompt of one token
    return found


def sampled_logprobs(response: Any) -> list[float]:
    """The log-probs of a response's own tokens. response: a CompletionOutput of `enough` with log-probs of 0 others"""
    found = response.logprobs
    if len(found.logprobs) == len(response.token_ids):
        return list(found.logprobs)
    return [found[at][token].logprob for at, token in enumerate(response.token_ids)]
