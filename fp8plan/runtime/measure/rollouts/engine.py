"""One engine, all its workloads: the child process of `fp8plan.runtime.measure.rollouts.run`.

It reads a job (JSON, made by `rollouts.jobs`), starts `vllm.LLM` with random weights, or AsyncLLM for turns, and warms
up so that timed runs compile no kernel. It appends a rollout record for each timed run to the job's output. A run that
a slow host or a compiled kernel disturbed is timed again.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8plan.jsonl import write
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import LIMITS
from fp8plan.model.precision import Precision, find_precision
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import recorded_limits
from fp8plan.runtime.apply.engine.warm_up import compiled_files, freeze_garbage, warm_up_batches
from fp8plan.runtime.measure.machine import machine_facts
from fp8plan.runtime.measure.rollouts.agents import AgentLoop
from fp8plan.runtime.measure.rollouts.host import Host, Watch
from fp8plan.runtime.measure.rollouts.jobs import AGENTS
from fp8plan.runtime.measure.rollouts.timed import Requests, Row, Trace, timed, token_prompts, write_trace
from fp8plan.schemas import QUIET_HOST, VERSIONS

TRIES, AGAIN_S = 4, 4.0  # most attempts at a run; seconds after which none is added
SHORT_RESPONSE, RAMP_STEPS = 64, 128  # a short warm-up, which fills the batch within seconds
FIRST_STALL_S, STALL_S = 0.5, 1.0  # longer steps are noted: probably a kernel was compiled

# vLLM's lines about its kernels (vllm/platforms/cuda.py, vllm/model_executor/kernels/linear/__init__.py).
LINEAR: Final = r"Selected (\w+) for (?:Fp8|Online|PerBlock)\w*"
ATTENTION: Final = r"Using (\w+) attention backend"
MOE: Final = r"Using (.+?) (?:Fp8 |Unquantized )?MoE backend"
E8M0: Final = r"DeepGEMM E8M0 (enabled|disabled)"


class Attempt(NamedTuple):
    """One timed run: fields of its record, rows of its trace, and the time of its end."""

    facts: dict[str, Any]
    steps: list[Row]
    date: str


def attempts(llm: Any, requests: Requests, trace: Trace, host: Host | None) -> list[Attempt]:
    """Time the run, and repeat it after a disturbed attempt, within TRIES and AGAIN_S."""
    tries: list[Attempt] = []
    begun = time.perf_counter()
    while not tries or (any(disturbance(tries[-1])) and len(tries) < TRIES and time.perf_counter() - begun < AGAIN_S):
        if host is not None:
            host.settle()
        before = compiled_files()
        with Watch(host) as watch:
            result = timed(llm, requests, trace.start) | trace.slowest()
        result |= watch.facts | {"compiled_files": compiled_files() - before}
        tries.append(Attempt(result, list(trace.rows), datetime.now(UTC).isoformat()))
    return tries


def disturbance(attempt: Attempt) -> tuple[int, float]:
    """Disturbances of a run that are not the engine's: (files compiled, excess of the host's slowdown).

    (0, 0) is clean. The pair decides about repetition and the attempt to keep, whatever its seconds.
    """
    slowdown = attempt.facts["host_slowdown"] or 1.0
    return attempt.facts["compiled_files"], max(slowdown - QUIET_HOST, 0.0)


def listed(tries: Sequence[Attempt]) -> str:
    """The words of a note on the attempts; empty for a single one."""
    facts = [attempt.facts for attempt in tries]
    times = ", ".join(f"{fact['seconds']:.2f} s (host {fact['host_slowdown'] or 1:.2f})" for fact in facts)
    return f"; of {len(tries)} attempts: {times}" if len(tries) > 1 else ""


def warm_up(llm: Any, requests: Requests, kind: str) -> float:
    """Run the workload untimed, so that the timed run compiles no kernel. Return the seconds that it took.

    full:  the whole workload
    short: its prompts with one turn of clipped responses, then a decode ramp through every batch size down to 1
    """
    if kind == "full":
        return float(timed(llm, requests)["seconds"])
    prompts, responses = requests.prompts, requests.responses
    clipped = [min(tokens, SHORT_RESPONSE) for tokens in responses]
    ramp = [1 + RAMP_STEPS * i // len(responses) for i in range(len(responses))]
    lengths = (clipped, [min(pair) for pair in zip(ramp, responses, strict=True)])
    return sum(float(timed(llm, Requests(prompts, some))["seconds"]) for some in lengths)


def prefill_ladder(llm: Any, fields: Mapping[str, Any]) -> list[int]:
    """Run batches of prompts that use every kernel of a record's model. Return the tokens of each batch."""
    from vllm import SamplingParams

    limits = recorded_limits(fields)
    setup = EngineSetup(
        fields["model"], fields["gpu"], fields["precision"], limits, engine_version=fields["engine_version"]
    )
    batches = warm_up_batches(setup, llm.llm_engine.model_config.max_model_len)
    for prompts in batches:
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [sum(map(len, prompts)) for prompts in batches]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(job["notes_fd"], "w", encoding="utf-8") as notes:
        measure(
            job, lambda text: print(f"[{time.strftime('%H:%M:%S')}] {job['label']}: {text}", file=notes, flush=True)
        )


def measure(job: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Start the engine, and append a record for every run of the job.

    Raises Fp8PlanError if vLLM's responses have other lengths.
    """
    begun = time.perf_counter()
    llm = started(job)
    start_s = time.perf_counter() - begun
    freeze_garbage()
    facts = {"schema_version": VERSIONS["record"]} | job["fields"] | engine_facts(llm, job) | machine_facts()
    facts["engine_start_s"] = start_s
    facts["even_routers"] = llm.collective_rpc("fp8plan_route_evenly")[0]
    memory = facts["measured_kv_cache_tokens"]
    note(f"engine ready in {start_s:.0f} s, KV cache {memory} tokens, kernels {facts['kernel_backends']}")
    trace, host = Trace(llm), None if find_gpu(job["fields"]["gpu"]).is_cpu else Host()
    begun = time.perf_counter()
    ladder = prefill_ladder(llm, job["fields"] | {"model": job["kwargs"]["model"]})
    facts["compile_s"] = time.perf_counter() - begun
    note(f"prompts of {', '.join(map(str, ladder))} tokens ran, so that their kernels are compiled")
    for work in job["work"]:
        prompts = token_prompts(work, llm.llm_engine.model_config.get_vocab_size())
        requests = Requests(prompts, work["response_lengths"], work.get("turns"), work.get("concurrent"))
        warmed = warm_up(llm, requests, work["warmup"])
        note(f"{work['workload']}: warmed up ({work['warmup']}) in {warmed:.1f} s")
        cell = facts | {name: value for name, value in work.items() if name != "runs"} | {"warmup_s": warmed}
        for run in work["runs"]:
            tries = attempts(llm, requests, trace, host)
            best = min(tries, key=disturbance)
            for number, attempt in enumerate(tries):
                record = cell | run | {"attempt": number} | attempt.facts | {"date": attempt.date}
                write(job["output"] if attempt is best else job["set_aside"], record)
            name, timing = f"{work['workload']} run {run['repeat']}", best.facts
            note(f"{name}: {timing['seconds']:.2f} s, {timing['preemptions']} preemptions{listed(tries)}")
            if timing["first_step_s"] > FIRST_STALL_S or timing["longest_step_s"] > STALL_S:
                note(f"{name}: a step took {timing['longest_step_s']:.1f} s, as if a kernel was compiled in it")
            if job["trace"]:
                write_trace(job["trace"], run["key"], best.steps)


def started(job: Mapping[str, Any]) -> Any:
    """The job's engine: `vllm.LLM`, or an AgentLoop."""
    if job["fields"]["engine_mode"] == AGENTS:
        return AgentLoop(**job["kwargs"])
    from vllm import LLM

    return LLM(**job["kwargs"])


def log_of(job: Mapping[str, Any]) -> str:
    """The engine's log so far."""
    with open(job["log"], encoding="utf-8", errors="replace") as file:
        file.seek(job["log_start"])
        return file.read()


def engine_facts(llm: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """The running engine's limits, KV pool, kernels and memory, under the record's names."""
    config = llm.llm_engine.vllm_config
    cache, compilation = config.cache_config, config.compilation_config
    log = log_of(job)
    preset = find_precision(job["fields"]["precision"])
    return {
        **{
            limit.record: getattr(getattr(config, limit.part), limit.argument)
            for limit in LIMITS
            if limit.record == limit.field
        },
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
        "memory": llm.collective_rpc("fp8plan_memory_facts")[0],
    }


def kernel_backends(log: str, preset: Precision) -> dict[str, str]:
    """Kernel, as a Profile names it -> implementation, as vLLM names it. vLLM does not name its BF16 GEMM."""
    dtype = preset.gemm_dtype
    patterns = {f"gemm.{dtype}": LINEAR, f"attention.{preset.kv}": ATTENTION, f"moe.{dtype}": MOE}
    matches = {kernel: re.findall(pattern, log) for kernel, pattern in patterns.items()}
    return {kernel: names[-1] for kernel, names in matches.items() if names}


def model_runner(log: str) -> str:
    """The model runner, V1 or V2. Only V2 is named in the log (vllm/v1/worker/gpu_worker.py)."""
    return "V2" if "Using V2 Model Runner" in log else "V1"


def uses_e8m0(log: str, preset: Precision) -> bool | None:
    """True if DeepGEMM ran with power-of-two scales; None if the log has no such line or no weight is FP8."""
    states = re.findall(E8M0, log)
    return states[-1] == "enabled" if states and preset.weights != "bf16" else None


if __name__ == "__main__":
    main()
