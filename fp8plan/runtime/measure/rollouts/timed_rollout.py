"""One `generate()` of random prompts: its time, what vLLM's counters gained, or the kernels that it ran."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8plan.errors import Fp8PlanError
from fp8plan.runtime.engine.warm_up import until_reset

# vLLM's counters (v1/metrics/loggers.py), as the record calls what they gained during a run.
COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generation_tokens",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}
# One observation for each engine step that gave at least one token; a step that only fills prompts is not counted.
STEPS = "vllm:iteration_tokens_total"
DECODE_STEPS, FILLING_STEPS = 16, 20  # whose kernels are timed; at most so many fill prompts before
PREFILL_STEPS, PREFILL_TOKENS, PROMPT = 2, 8000, 2000  # whose kernels are timed, of so many tokens and more


def token_prompts(work: Mapping[str, Any], vocabulary: int) -> list[dict[str, list[int]]]:
    """Random tokens: one prompt per prompt id, equal between its samples."""
    rng = np.random.default_rng(work["seed"])
    lengths = dict(zip(work["prompt_ids"], work["prompt_lengths"], strict=True))
    tokens = {name: rng.integers(0, vocabulary, (length,)).tolist() for name, length in lengths.items()}
    return [{"prompt_token_ids": tokens[name]} for name in work["prompt_ids"]]


def timed(
    llm: Any, prompts: Sequence[Any], responses: Sequence[int], starting: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Time one `generate()` from an empty prefix cache, and what vLLM's counters gained meanwhile."""
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0, temperature=1.0)
        for tokens in responses
    ]
    empty_prefix_cache(llm)
    gc.collect()
    before = counters(llm)
    starting()
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    given = [len(output.outputs[0].token_ids) for output in outputs]
    if given != list(responses):
        raise Fp8PlanError("vLLM gave responses of other lengths than were asked for; this run cannot be a record")
    return {"seconds": seconds} | {name: value - before[name] for name, value in counters(llm).items()}


def decode_kernels(llm: Any, batch: int, context: int) -> dict[str, Any]:
    """Kernels of a decode step of `batch` requests after `context` tokens, a mean of DECODE_STEPS.

    kernels: [name, launches, microseconds] of a step of the first GPU; kernels_us: microseconds of all
    span_us: as in worker.Recorded, of each GPU; other_gpus: kernels of the others, with tensor parallelism
    """
    tokens = 3 * DECODE_STEPS + FILLING_STEPS  # the first requests decode while prompts of the others are filled
    return _kernels(llm, batch, context, tokens, {"steps": DECODE_STEPS, "requests": batch})


def prefill_kernels(llm: Any) -> dict[str, Any]:
    """Kernels of a step that fills prompts, a mean of PREFILL_STEPS, as `decode_kernels`.

    prefill_tokens: of a step, at least PREFILL_TOKENS
    """
    room = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompts = (PREFILL_STEPS + 3) * room // PROMPT
    return _kernels(llm, prompts, PROMPT, 1, {"steps": PREFILL_STEPS, "tokens": PREFILL_TOKENS})


def _kernels(llm: Any, prompts: int, context: int, response: int, recorded: Mapping[str, int]) -> dict[str, Any]:
    from vllm import SamplingParams

    work = {"seed": 0, "prompt_ids": range(prompts), "prompt_lengths": [context] * prompts}
    params = SamplingParams(max_tokens=response, ignore_eos=True, detokenize=False, logprobs=0, temperature=1.0)
    empty_prefix_cache(llm)
    llm.collective_rpc("fp8plan_kernels_begin", kwargs=dict(recorded))
    llm.generate(token_prompts(work, llm.llm_engine.model_config.get_vocab_size()), params, use_tqdm=False)
    (found, tokens, _), *others = answers = llm.collective_rpc("fp8plan_kernels_end")
    facts = {"kernels": found, "kernels_us": round(sum(us for *_, us in found), 1), "span_us": [x[2] for x in answers]}
    facts |= {"prefill_tokens": tokens} if "tokens" in recorded else {}
    return facts | ({"other_gpus": [x[0] for x in others]} if others else {})


def empty_prefix_cache(llm: Any) -> None:
    """Empty the prefix cache. Raises SyncError if vLLM does not within some seconds."""
    for pause_s in until_reset():
        if llm.reset_prefix_cache():
            return
        time.sleep(pause_s)


def counters(llm: Any) -> dict[str, int]:
    """COUNTERS and the number of steps so far, summed over engines."""
    totals = dict.fromkeys((*COUNTERS.values(), "steps_with_output"), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            totals[COUNTERS[metric.name]] += int(metric.value)
        elif metric.name == STEPS:
            totals["steps_with_output"] += int(metric.count)
    return totals
