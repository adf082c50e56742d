"""The warm-up of an engine, so that nothing is compiled and no garbage collected while it is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.engine.warm_up import deep_gemm_rows, ladder
from fp8plan.runtime.measure.rollouts.timed_rollout import timed

# A short warm-up clips responses here: long enough to fill the batch, short enough to cost a few seconds.
SHORT_RESPONSE, RAMP_STEPS = 64, 128


def warm_up(llm: Any, prompts: Sequence[Any], responses: Sequence[int], kind: str) -> float:
    """Run what the timed run will run, so that no kernel is compiled inside it; return the seconds it took.

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
    """Run single prompts of the lengths that meet every kernel of the model in a record's fields; return them."""
    from vllm import SamplingParams

    longest = llm.llm_engine.model_config.max_model_len
    rows = deep_gemm_rows(EngineSetup(fields["model"], fields["gpu"], fields["precision"]), longest)
    lengths = ladder(longest - 1, rows)
    for token, length in enumerate(lengths):  # a token of its own, so that no prompt finds a shorter one in the cache
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)
        llm.generate([{"prompt_token_ids": [token] * length}], params, use_tqdm=False)
    return lengths
