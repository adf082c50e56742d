"""One rollout of random prompts: its time, the gain of vLLM's counters, and every engine step."""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.runtime.apply.engine.base import until_reset
from fp8plan.runtime.apply.engine.counters import COUNTERS, counts, gains

# vLLM's counters (v1/metrics/loggers.py) -> the record's names of their gain in a run.
COUNTED = {
    **COUNTERS,
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    # Engine steps that gave at least one token, and not those that only fill prompts.
    "vllm:iteration_tokens_total_count": "steps_with_output",
}

Turns: TypeAlias = Sequence[tuple[int, int, float]]  # of a trajectory, as fp8plan.model.turn_table.Turn
Row: TypeAlias = tuple[float, ...]
COLUMNS = ("t_s", "core_s", "running", "waiting", "kv_usage", "generation_tokens", "prompt_tokens", "preempted")


class Requests(NamedTuple):
    """The requests of a rollout.

    prompts:    vLLM's, with token ids
    responses:  tokens that each generates, in all its turns
    turns:      of each request, which is a trajectory then; None: one turn each
    concurrent: trajectories that run at once; None: all
    """

    prompts: Sequence[Any]
    responses: Sequence[int]
    turns: Sequence[Turns] | None = None
    concurrent: int | None = None


def token_prompts(work: Mapping[str, Any], vocabulary: int) -> list[dict[str, list[int]]]:
    """Random tokens: one prompt for each prompt id. The samples of an id share it."""
    rng = np.random.default_rng(work["seed"])
    lengths = dict(zip(work["prompt_ids"], work["prompt_lengths"], strict=True))
    tokens = {name: rng.integers(0, vocabulary, (length,)).tolist() for name, length in lengths.items()}
    return [{"prompt_token_ids": tokens[name]} for name in work["prompt_ids"]]


def timed(llm: Any, requests: Requests, starting: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Time one rollout from an empty prefix cache, with the gain of vLLM's counters.

    llm: `vllm.LLM`, or an AgentLoop, which turns need

    Raises Fp8PlanError if responses have other lengths.
    """
    prompts, responses, turns, concurrent = requests
    params = [sampling(tokens) for tokens in responses]
    empty_prefix_cache(llm)
    gc.collect()
    before = counts(COUNTED)
    starting()
    begun = time.perf_counter()
    if turns is None:
        outputs = [[output] for output in llm.generate(prompts, params, use_tqdm=False)]
    else:
        outputs = llm.rollout(prompts, turns, concurrent)
    facts: dict[str, Any] = {"seconds": time.perf_counter() - begun}
    expected = [[tokens] for tokens in responses] if turns is None else [[turn[0] for turn in each] for each in turns]
    if [[len(output.outputs[0].token_ids) for output in each] for each in outputs] != expected:
        raise Fp8PlanError("vLLM's responses have other lengths than requested; this run cannot be a record")
    if turns is not None:
        facts["turn_lag_s"] = turn_lag_s(outputs, turns)
    return facts | gains(before, counts(COUNTED))


def turn_lag_s(outputs: Sequence[Sequence[Any]], turns: Sequence[Turns]) -> float | None:
    """Mean seconds from a turn's last token to the next request's arrival at the scheduler, beyond the tool's.

    None without a second turn. The engine's process takes both times.
    """
    lags = [
        after.metrics.queued_ts - before.metrics.last_token_ts - wait_s
        for trajectory, each in zip(outputs, turns, strict=True)
        for (before, after), (_, _, wait_s) in zip(pairwise(trajectory), each, strict=False)
    ]
    return mean(lags) if lags else None


def sampling(tokens: int) -> Any:
    """vLLM's SamplingParams of a response of so many tokens, with one output at its end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        temperature=1.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def empty_prefix_cache(llm: Any) -> None:
    """Empty the prefix cache. Raises SyncError if vLLM needs more than some seconds."""
    for pause_s in until_reset():
        if llm.reset_prefix_cache():
            return
        time.sleep(pause_s)


class Trace:
    """vLLM's report of each engine step, with its time in the engine (core_s) and in the front end (t_s).

    Raises ConfigError for an engine without statistics.
    """

    def __init__(self, llm: Any) -> None:
        manager = llm.llm_engine.logger_manager
        if manager is None:
            raise ConfigError("step times need disable_log_stats=False")
        self.rows: list[Row] = []
        self.begun = 0.0
        report, processor = manager.record, llm.llm_engine.output_processor
        process, last = processor.process_outputs, [0.0]

        def remembered(outputs: Any, engine_core_timestamp: float, *rest: Any, **more: Any) -> Any:
            last[0] = engine_core_timestamp  # the engine's time.monotonic(), which perf_counter() equals on Linux
            return process(outputs, engine_core_timestamp, *rest, **more)

        def record(scheduler_stats: Any = None, iteration_stats: Any = None, **rest: Any) -> None:
            if scheduler_stats is not None and iteration_stats is not None:
                self.rows.append(
                    (
                        round(time.perf_counter() - self.begun, 6),
                        round(last[0] - self.begun, 6),
                        scheduler_stats.num_running_reqs,
                        scheduler_stats.num_waiting_reqs,
                        round(scheduler_stats.kv_cache_usage, 4),
                        iteration_stats.num_generation_tokens,
                        iteration_stats.num_prompt_tokens,
                        iteration_stats.num_preempted_reqs,
                    )
                )
            report(scheduler_stats=scheduler_stats, iteration_stats=iteration_stats, **rest)

        processor.process_outputs, manager.record = remembered, record

    def start(self) -> None:
        self.rows.clear()
        self.begun = time.perf_counter()

    def slowest(self) -> dict[str, float]:
        """The seconds of the first step, with the requests' arrival, and of the longest step."""
        times = [row[0] for row in self.rows]
        steps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        return {"first_step_s": round(steps[0], 6), "longest_step_s": round(max(steps), 6)}


def write_trace(path: str, key: str, rows: Sequence[Row]) -> None:
    """One JSON line: the record's key, and a column per COLUMNS."""
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=False))
    with gzip.open(path, "at", encoding="utf-8") as file:
        file.write(json.dumps({"key": key} | columns) + "\n")
