"""The warm-up before an engine is timed: no kernel is compiled inside a timed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import recorded_limits
from fp8plan.runtime.engine.warm_up import warm_up_batches
from fp8plan.runtime.measure.rollouts.timed_rollout import timed

# A short warm-up clips responses here: long enough to fill the batch, short enough to cost a few seconds.
SHORT_RESPONSE, RAMP_STEPS = 64, 128


def warm_up(llm: Any, prompts: Sequence[Any], responses: Sequence[int], kind: str) -> float:
    """Run what the timed run will run, so that no kernel is compiled inside it. Return the seconds that it took.

    full:  the whole workload
    short: its prompts with clipped responses, then a decode ramp through every batch size down to 1
    """
    if kind == "full":
        return float(timed(llm, prompts, responses)["seconds"])
    clipped = [min(tokens, SHORT_RESPONSE) for tokens in responses]
    ramp = [1 + RAMP_STEPS * i // len(responses) for i in range(len(responses))]
    lengths = (clipped, [min(pair) for pair in zip(ramp, responses, strict=True)])
    return sum(float(timed(llm, prompts, some)["seconds"]) for some in lengths)


def prefill_ladder(llm: Any, fields: Mapping[str, Any]) -> list[int]:
    """Run the batches of prompts that meet every kernel of the model in a record's fields. Return their tokens."""
    from vllm import SamplingParams

    setup = EngineSetup(fields["model"], fields["gpu"], fields["precision"], recorded_limits(fields))
    batches = warm_up_batches(setup, llm.llm_engine.model_config.max_model_len)
    for prompts in batches:
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [sum(map(len, prompts)) for prompts in batches]
