"""A rollout of many prompts in one request, which returns tokens and their log-probs only.

A trainer needs no text, no top log-probs and no object for each token. vLLM's route for completions makes them all in
the server's one Python thread (docs/evidence/speed.md, "Outputs of TRL's server").
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.runtime.apply.engine.async_engine import Generates, finished
from fp8plan.runtime.apply.engine.base import has_nan

# Sampling parameters with the same meaning in vLLM's engine and in its route for completions.
SAMPLING: Final = (
    "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "frequency_penalty",
    "presence_penalty", "ignore_eos", "min_tokens", "stop", "stop_token_ids",
)  # fmt: skip
BROKEN_OFF: Final = ("abort", "error")  # finish reasons of incomplete responses
LOWEST: Final = -9999.0  # lowest log-prob that vLLM's own routes return


class ResponseError(Fp8PlanError, ValueError):
    """A response that nobody must train on.

    A ValueError, so that the route answers with status 400: TRL's client resends the whole batch after a 500.
    """


async def rolled_out(
    generate: Generates, config: Any, prompts: Sequence[list[int]], sampling: dict[str, Any]
) -> dict[str, Any]:
    """Generate for all prompts; return "token_ids", "logprobs" and "finish_reasons" of each response, in the prompts'
    order.

    config:   vLLM's ModelConfig
    prompts:  token ids
    sampling: names in SAMPLING; "n" is the number of responses to each prompt

    Raises ConfigError, or an error of vLLM's own, for a bad sampling. The first prompt that fails ends all others and
    raises the error of `generate`, or ResponseError if nobody must train on its response.
    """
    from vllm.inputs.engine import tokens_input

    params = sampling_params(sampling, most_tokens(config))
    longest = max(map(len, prompts), default=0)
    if longest + params.max_tokens > config.max_model_len:
        raise ConfigError(
            f"a prompt has {longest} tokens and max_tokens is {params.max_tokens}; allowed: {config.max_model_len} of "
            "both (max_model_len)"
        )

    async def responses_to(number: int, tokens: list[int]) -> list[Any]:
        responses: list[Any] = (await finished(generate, tokens_input(tokens), params)).outputs
        for response in responses:
            refuse_broken(response, number)
        return responses

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(responses_to(number, tokens)) for number, tokens in enumerate(prompts)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    responses = [response for task in tasks for response in task.result()]
    return {
        "token_ids": [list(response.token_ids) for response in responses],
        "logprobs": [sampled_logprobs(response) for response in responses],
        "finish_reasons": [response.finish_reason for response in responses],
    }


def refuse_broken(response: Any, number: int) -> None:
    """Raise ResponseError for a response that nobody must train on. number: that of its prompt"""
    if response.finish_reason in BROKEN_OFF:
        raise ResponseError(
            f"a response to prompts[{number}] ended by {response.finish_reason!r}: it was aborted, as POST /pause does "
            "without mode=keep or mode=wait, or the server's log says what failed; send the prompts again"
        )
    if has_nan(response):
        raise ResponseError(
            f"a response to prompts[{number}] has NaN among its log-probs; update the weights, which also cleans the "
            "KV cache, before the next rollout"
        )


def sampling_params(sampling: dict[str, Any], most: int | None) -> Any:
    """The vllm.SamplingParams of a rollout. most: limit of a response's tokens; None: no limit

    Types are converted as in vLLM's route, 5.0 to 5: a wrong type would end the engine's process.

    Raises ConfigError for a name that is not in SAMPLING, and for a value that vLLM does not take.
    """
    import msgspec
    from vllm import SamplingParams

    allowed = f"allowed: {', '.join(SAMPLING)}"
    if unknown := sorted(sampling.keys() - set(SAMPLING)):
        raise ConfigError(f"sampling has {', '.join(unknown)}; {allowed}")
    try:
        params = msgspec.convert(sampling | {"logprobs": 0}, SamplingParams, strict=False)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"sampling is {sampling}: {error}; {allowed}, as vllm.SamplingParams takes them") from error
    if params.max_tokens is None:  # also from the text "null"
        raise ConfigError(f"max_tokens is {sampling['max_tokens']!r}; allowed: a number")
    if most is not None:
        params.max_tokens = min(params.max_tokens, most)
    return enough(params)


def most_tokens(config: Any) -> int | None:
    """The most tokens of a response by the server's generation config, as vLLM's routes read it; None: no limit."""
    if config.generation_config not in ("auto", "vllm"):
        most: int | None = config.get_diff_sampling_param().get("max_tokens")
        return most
    return (config.override_generation_config or {}).get("max_new_tokens")


def enough(sampling_params: Any) -> Any:
    """A copy of vllm.SamplingParams that asks for the finished output only, and for text only with stop strings.

    Log-probs come in flat lists: Python's garbage collector would visit an object for each.
    """
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.detokenize = bool(params.stop)
    params.flat_logprobs = True
    return params


def sampled_logprobs(response: Any) -> list[float]:
    """The log-probs of a response's own tokens. response: a CompletionOutput by `enough`, with logprobs=0"""
    flat = response.logprobs
    if len(flat.logprobs) == len(response.token_ids):
        return [max(logprob, LOWEST) for logprob in flat.logprobs]
    return [max(flat[position][token].logprob, LOWEST) for position, token in enumerate(response.token_ids)]
