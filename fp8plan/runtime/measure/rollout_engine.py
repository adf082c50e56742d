"""One engine, all its workloads: the child process of `fp8plan.runtime.measure.rollouts`.

It reads a job (JSON, made by `rollouts.jobs`), starts `vllm.LLM` with random weights, and appends one rollout record
per timed run to the job's output, as soon as the run need not be repeated: if the machine goes away, that run is lost.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.deep_gemm import rows_of_every_kernel
from fp8plan.model.hardware import gpu
from fp8plan.model.precision import precision
from fp8plan.runtime.measure.engine_log import engine_numbers, kernel_backends, model_runner, uses_e8m0
from fp8plan.runtime.measure.host import QUIET, Host
from fp8plan.runtime.measure.jsonl import append
from fp8plan.runtime.measure.machine import machine_facts
from fp8plan.runtime.measure.watch import Watch

# A short warm-up clips responses here: long enough to fill the batch, short enough to cost a few seconds.
SHORT_RESPONSE, RAMP_STEPS = 64, 128

# Longer ones are taken for stalls, in which a kernel was compiled, and noted. Seen on an H200 (first look of its
# profile): first steps of 0.9 to 11.5 s with and at most 0.15 s without; later ones of 3.5 s and more, against pauses
# of up to 0.8 s that are the front end's own.
FIRST_STALL_S, STALL_S = 0.5, 1.0

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

TRACE_COLUMNS = ("t_s", "core_s", "running", "waiting", "kv_usage", "generation_tokens", "prompt_tokens", "preempted")


# A run that was disturbed is repeated: so many attempts, and none once the first have taken so long.
TRIES, AGAIN_S = 4, 8.0


class Attempt(NamedTuple):
    """One timed run: what its record says of it, the rows of its trace, and when it ended."""

    facts: dict[str, Any]
    steps: list[tuple[float, ...]]
    date: str


class MemoryFacts:
    """Mixed into vLLM's worker (worker_extension_cls): the exact bytes behind its log lines."""

    def fp8plan_memory_facts(self) -> dict[str, int | None]:
        """Bytes; None where this worker does not know, as on a CPU."""
        snapshot, runner = getattr(self, "init_snapshot", None), getattr(self, "model_runner", None)
        facts = {
            "total_bytes": getattr(snapshot, "total_memory", None),
            "free_at_start_bytes": getattr(snapshot, "free_memory", None),
            "requested_bytes": getattr(self, "requested_memory", None),
            "weights_bytes": getattr(runner, "model_memory_usage", None),
            "peak_activation_bytes": getattr(self, "peak_activation_memory", None),
            "non_torch_bytes": getattr(self, "non_torch_memory", None),
            "cuda_graphs_estimated_bytes": getattr(self, "cudagraph_memory_estimate", None),
            "available_kv_cache_bytes": getattr(self, "available_kv_cache_memory_bytes", None),
        }
        return {name: None if value is None else int(value) for name, value in facts.items()}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(job["notes_fd"], "w", encoding="utf-8") as notes:
        measure(
            job, lambda text: print(f"[{time.strftime('%H:%M:%S')}] {job['label']}: {text}", file=notes, flush=True)
        )


def measure(job: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Start the engine and append a record for every run of the job. Raises Fp8PlanError if vLLM does otherwise."""
    from vllm import LLM

    begun = time.perf_counter()
    llm = LLM(**job["kwargs"])
    start_s = time.perf_counter() - begun
    freeze_garbage()
    facts = job["fields"] | engine_facts(llm, job) | machine_facts() | {"engine_start_s": start_s}
    memory = facts["measured_kv_cache_tokens"]
    note(f"engine ready in {start_s:.0f} s, KV cache {memory} tokens, kernels {facts['kernel_backends']}")
    trace, host = Trace(llm), None if gpu(job["fields"]["gpu"]).is_cpu else Host()
    ladder = prefill_ladder(llm, deep_gemm_rows(job["fields"], llm.llm_engine.model_config.max_model_len))
    note(f"prompts of {', '.join(map(str, ladder))} tokens ran, so that their kernels are compiled")
    for work in job["work"]:
        prompts = token_prompts(work, llm.llm_engine.model_config.get_vocab_size())
        warmed = warm_up(llm, prompts, work["response_lengths"], work["warmup"])
        note(f"{work['workload']}: warmed up ({work['warmup']}) in {warmed:.1f} s")
        cell = facts | {name: value for name, value in work.items() if name != "runs"} | {"warmup_s": warmed}
        for run in work["runs"]:
            tries = attempts(llm, prompts, work["response_lengths"], trace, host)
            best = min(tries, key=disturbance)
            for number, result in enumerate(tries):
                record = cell | run | {"attempt": number} | result.facts | {"date": result.date}
                append(job["output"] if result is best else job["set_aside"], record)
            what = f"{work['workload']} run {run['repeat']}"
            found = best.facts
            note(f"{what}: {found['seconds']:.2f} s, {found['preemptions']} preemptions{_of(tries)}")
            if found["first_step_s"] > FIRST_STALL_S or found["longest_step_s"] > STALL_S:
                note(f"{what}: a step took {found['longest_step_s']:.1f} s, as if a kernel was compiled in it")
            if job["trace"]:
                trace.write(job["trace"], run["key"], best.steps)


def attempts(
    llm: Any, prompts: Sequence[Any], responses: Sequence[int], trace: Trace, host: Host | None
) -> list[Attempt]:
    """Time the run, and again as long as the last was disturbed, TRIES times and AGAIN_S seconds at most."""
    tries: list[Attempt] = []
    begun = time.perf_counter()
    while not tries or (any(disturbance(tries[-1])) and len(tries) < TRIES and time.perf_counter() - begun < AGAIN_S):
        if host is not None:
            host.settle()
        before = compiled_files()
        with Watch(host) as watch:
            result = timed(llm, prompts, responses, trace.start) | trace.slowest()
        result |= watch.facts | {"compiled_files": compiled_files() - before}
        tries.append(Attempt(result, list(trace.rows), datetime.now(UTC).isoformat()))
    return tries


def disturbance(attempt: Attempt) -> tuple[int, float]:
    """What happened in a run that is not the engine's: (files compiled, excess of the host's slowdown); (0, 0) is
    clean. It decides what is repeated and which attempt is kept, and knows nothing of how long the run took."""
    slowdown = attempt.facts["host_slowdown"] or 1.0
    return attempt.facts["compiled_files"], max(slowdown - QUIET, 0.0)


def _of(tries: Sequence[Attempt]) -> str:
    times = ", ".join(f"{x.facts['seconds']:.2f} s (host {x.facts['host_slowdown'] or 1:.2f})" for x in tries)
    return f"; of {len(tries)} attempts: {times}" if len(tries) > 1 else ""


def token_prompts(work: Mapping[str, Any], vocabulary: int) -> list[dict[str, list[int]]]:
    """Random tokens: one prompt per prompt id, equal between its samples."""
    rng = np.random.default_rng(work["seed"])
    lengths = dict(zip(work["prompt_ids"], work["prompt_lengths"], strict=True))
    tokens: dict[int, list[int]] = {}
    for name, length in lengths.items():
        tokens[name] = rng.integers(0, vocabulary, length).tolist()
    return [{"prompt_token_ids": tokens[name]} for name in work["prompt_ids"]]


def warm_up(llm: Any, prompts: Sequence[Any], responses: Sequence[int], kind: str) -> float:
    """Run what the timed run will run, so that no kernel is compiled inside it; seconds it took.

    full:  the whole workload
    short: its prompts with clipped responses, then a decode ramp through every batch size down to 1
    """
    if kind == "full":
        return float(timed(llm, prompts, responses)["seconds"])
    clipped = [min(tokens, SHORT_RESPONSE) for tokens in responses]
    ramp = [1 + RAMP_STEPS * i // len(responses) for i in range(len(responses))]
    lengths = (clipped, [min(pair) for pair in zip(ramp, responses, strict=True)])
    return sum(float(timed(llm, prompts, some)["seconds"]) for some in lengths)


def freeze_garbage() -> None:
    """Spare Python's garbage collector the objects that stay, as vLLM does in its server, engine and worker processes.

    It does not in the process that holds an `LLM`, where each full collection stops the front end for 0.35 to 0.6 s,
    about every 20,000 to 60,000 tokens (measured: steps/ of the H200's profile). Long tails hide that; when a large
    batch ends all at once the last tokens wait for it, 0.1 to 0.9 s.
    """
    gc.collect()
    gc.freeze()


def deep_gemm_rows(fields: Mapping[str, Any], most: int) -> list[int]:
    """Numbers of tokens that together need every DeepGEMM kernel of a model; none without blockwise FP8 weights."""
    if precision(fields["precision"]).weights != "fp8_block":
        return []
    shapes = [(x.n, x.k) for x in ModelShape.from_hf(fields["model"]).linears() if x.quantised]
    return rows_of_every_kernel(shapes, most, gpu(fields["gpu"]).sm_count)


def prefill_ladder(llm: Any, more: Sequence[int]) -> list[int]:
    """Run single prompts of the token counts at which vLLM's MoE kernel changes its tiles, odd and even, and of `more`
    counts; which ones.

    Requests reach the engine one by one, so the first step of a rollout holds any number of tokens: a warm-up run does
    not meet the kernels of every one (vllm/model_executor/layers/fused_moe: tiles by the nearest of these counts).
    """
    from vllm import SamplingParams

    longest = llm.llm_engine.model_config.max_model_len - 1
    steps = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
    lengths = sorted(
        {min(tokens + odd, longest) for tokens in steps for odd in (0, 1)} | {x for x in more if x <= longest}
    )
    for token, length in enumerate(lengths):  # a token of its own, so that no prompt finds a shorter one in the cache
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)
        llm.generate([{"prompt_token_ids": [token] * length}], params, use_tqdm=False)
    return lengths


def compiled_files() -> int:
    """Files in the caches of Triton, DeepGEMM and FlashInfer's own DeepGEMM: what a run adds was compiled inside it."""
    home = Path.home()
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", home / ".cache" / "vllm"))
    flashinfer = Path(os.environ.get("TRTLLM_DG_CACHE_DIR", home / ".tensorrt_llm"))
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    folders = [vllm / "deep_gemm", flashinfer / "cache", triton]
    return sum(len(files) for folder in folders for _, _, files in os.walk(folder))


def timed(
    llm: Any, prompts: Sequence[Any], responses: Sequence[int], starting: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Wall time of one `generate()` from an empty prefix cache, and what vLLM's counters gained meanwhile."""
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


def empty_prefix_cache(llm: Any) -> None:
    """Async scheduling frees the last blocks a moment after the last token is out, hence the tries."""
    for _ in range(50):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.1)
    raise Fp8PlanError("vLLM did not empty its prefix cache within 5 s of the last request")


def counters(llm: Any) -> dict[str, int]:
    """COUNTERS and the number of steps so far, summed over engines."""
    totals = dict.fromkeys((*COUNTERS.values(), "steps_with_output"), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            totals[COUNTERS[metric.name]] += int(metric.value)
        elif metric.name == STEPS:
            totals["steps_with_output"] += int(metric.count)
    return totals


def engine_facts(llm: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """The limits the engine really runs with, its KV pool, kernels and memory, under the record's names."""
    config = llm.llm_engine.vllm_config
    cache, scheduler, compilation = config.cache_config, config.scheduler_config, config.compilation_config
    with open(job["log"], encoding="utf-8", errors="replace") as file:
        file.seek(job["log_start"])
        log = file.read()
    preset = precision(job["fields"]["precision"])
    return {
        "block_size": cache.block_size,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "num_gpu_blocks": cache.num_gpu_blocks,
        "measured_kv_cache_tokens": cache.num_gpu_blocks * cache.block_size,
        "vllm_kv_cache_size_tokens": getattr(cache, "kv_cache_size_tokens", None),
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
        "cudagraph_largest_batch": max(compilation.cudagraph_capture_sizes or [0]),
        "multiprocessing": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0",
        "e8m0": uses_e8m0(log, preset),
        "kernel_backends": kernel_backends(log, preset),
        "model_runner": model_runner(log),
        "garbage_frozen": gc.get_freeze_count() > 0,
        "engine_log": engine_numbers(log),
        "memory": llm.collective_rpc("fp8plan_memory_facts")[0],
    }


class Trace:
    """What vLLM reports after each engine step, when the engine had it (core_s) and when the front end got it (t_s)."""

    def __init__(self, llm: Any) -> None:
        manager = llm.llm_engine.logger_manager
        if manager is None:
            raise ConfigError("step times need disable_log_stats=False")
        self.rows: list[tuple[float, ...]] = []
        self.begun = 0.0
        report, core = manager.record, llm.llm_engine.engine_core
        get_output, last = core.get_output, [0.0]

        def remembered() -> Any:
            outputs = get_output()
            last[0] = outputs.timestamp  # the engine's time.monotonic(), which perf_counter() equals on Linux
            return outputs

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

        core.get_output, manager.record = remembered, record

    def start(self) -> None:
        self.rows.clear()
        self.begun = time.perf_counter()

    def slowest(self) -> dict[str, float]:
        """Seconds of the first step, the requests' arrival included, and of the longest."""
        times = [row[0] for row in self.rows]
        steps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        return {"first_step_s": round(steps[0], 6), "longest_step_s": round(max(steps), 6)}

    @staticmethod
    def write(path: str, key: str, rows: Sequence[tuple[float, ...]]) -> None:
        """One JSON line: the record's key, and a column per TRACE_COLUMNS."""
        columns = dict(zip(TRACE_COLUMNS, map(list, zip(*rows, strict=True)), strict=False))
        with gzip.open(path, "at", encoding="utf-8") as file:
            file.write(json.dumps({"key": key} | columns) + "\n")


if __name__ == "__main__":
    main()
