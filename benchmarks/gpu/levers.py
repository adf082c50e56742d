"""Measure levers of `fp8plan tune` with a real vLLM engine of random weights (the cases of benchmarks/levers.py).

    python -m benchmarks.gpu.levers ENGINE --output runs.jsonl

ENGINE: plain, ngram or eagle3; one start each. The ways of running a case take turns, so that a host that becomes
slower disturbs all alike. The first round only compiles and warms up (repeat 0). Each run is a row, written at once;
rows that the output has are not measured again. The head of eagle3 has random weights: no draft is accepted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.levers import CASES, DRAFTS, LIMITS, MODEL, PLAIN, PRECISION, Arm, Case, arms
from fp8plan.jsonl import now, rows, write
from fp8plan.model.configs import find_config
from fp8plan.model.emit.vllm import vllm_env, vllm_kwargs
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.setup import EngineSetup
from fp8plan.model.tune.speculation import METHODS, Speculation
from fp8plan.model.workload import Batch
from fp8plan.runtime.apply.engine.warm_up import compiled_files, freeze_garbage
from fp8plan.runtime.measure.machine import machine_facts
from fp8plan.runtime.measure.rollouts.host import Host, Watch
from fp8plan.runtime.measure.rollouts.jobs import ENV, KWARGS, engine_version
from fp8plan.runtime.measure.rollouts.timed import counters, empty_prefix_cache, token_prompts

SMALL: Final = 8  # on a CPU, so many times fewer requests with shorter lengths
CPU_MODEL, CPU_LIMITS = "fp8plan/dense-9m", EngineLimits(max_num_seqs=32, max_model_len=1024, num_gpu_blocks=100)
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_per_pos"  # a number for each draft of a request
DRAFTED: Final = "vllm:spec_decode_num_drafts"
OF_A_LAYER: Final = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rope_theta", "rms_norm_eps"),
)  # fields of a model's config that its head has, too


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.levers")
    parser.add_argument("engine", choices=[PLAIN, *METHODS])
    parser.add_argument("--gpu", default="h200_sxm", help="or cpu, to try it with a tiny model and short cases")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(words)
    drafts = None if given.engine == PLAIN else Speculation(0.0, DRAFTS, given.engine)
    cases = [case for case in CASES if given.engine in case.engines]
    done = {(row["case"], row["arm"], row["repeat"]) for row in rows(given.output)}
    todo = [(case, repeat) for case in cases for repeat in range(given.repeats + 1)]
    if all((case.name, given.engine, repeat) in done for case, repeat in todo):
        return
    setup = setup_of(given.gpu, drafts)
    llm = started(setup, drafts, given.output.with_suffix(".configs"))
    host = None if setup.gpu.is_cpu else Host()
    facts = facts_of(llm, setup) | {"engine": given.engine}
    for case, repeat in todo:
        batch = case.workload.batch()
        for arm in arms(case, small(batch) if setup.gpu.is_cpu else batch, given.engine):
            if (case.name, arm.name, repeat) not in done:
                run = measured(llm, case, arm, host)
                write(given.output, facts | {"case": case.name, "arm": arm.name, "repeat": repeat} | run)
                print(f"{case.name}, {arm.name}, {repeat}: {run['seconds']:.2f} s", flush=True)


def small(batch: Batch) -> Batch:
    """The first requests of a batch, with shorter prompts and responses."""
    few = batch.take(slice(max(2, len(batch.prompts) // SMALL)))
    return few._replace(prompts=np.maximum(few.prompts // SMALL, 1), responses=np.maximum(few.responses // SMALL, 1))


def setup_of(gpu: str, drafts: Speculation | None) -> EngineSetup:
    """The engine's setup, with room for the drafts as `tune` makes it."""
    card = find_gpu(gpu)
    model, limits = (CPU_MODEL, CPU_LIMITS) if card.is_cpu else (MODEL, LIMITS)
    setup = EngineSetup(model, card, PRECISION, limits, engine_version=engine_version())
    return setup if drafts is None else replace(setup, limits=drafts.limits(setup))


def started(setup: EngineSetup, drafts: Speculation | None, folder: Path) -> Any:
    """A `vllm.LLM` with random weights."""
    os.environ.update(vllm_env(setup) | ENV)
    from vllm import LLM

    config = {name: value for name, value in find_config(setup.path)[0].items() if not name.startswith("_")}
    arguments = vllm_kwargs(setup) | KWARGS | {"model": _saved(folder / "model", config)}
    if drafts is not None:
        head = {"model": _saved(folder / "head", head_config(config))} if drafts.source.head else {}
        arguments["speculative_config"] = drafts.config | head
    llm = LLM(**arguments)
    freeze_garbage()
    return llm


def _saved(folder: Path, config: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder.resolve())


def head_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of an EAGLE 3 head for a model: one layer of the model's shape, with the model's whole vocabulary.

    Published heads have about a fifth of the vocabulary, which is not modelled. The head reads three of the model's
    layers; vLLM's own choice of them is two of a model with six.
    """
    layers = config["num_hidden_layers"]
    reads = {"eagle_aux_hidden_state_layer_ids": [layers // 6, layers // 2, layers - layers // 6]}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    rest = {"tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    return own | rest | reads | {name: config[name] for name in OF_A_LAYER if name in config}


def facts_of(llm: Any, setup: EngineSetup) -> dict[str, Any]:
    """What stays the same in all rows of an engine."""
    config = llm.llm_engine.vllm_config
    return {
        "model": setup.path,
        "gpu": setup.gpu.name,
        "precision": setup.precision.name,
        "weights": "random",
        "engine_version": setup.engine_version,
        "limits": asdict(setup.limits),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "measured_kv_cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "cudagraph_largest_batch": max(config.compilation_config.cudagraph_capture_sizes or [0]),
    } | machine_facts()


def measured(llm: Any, case: Case, arm: Arm, host: Host | None) -> dict[str, Any]:
    """One run of a case."""
    batch = arm.batch
    work = {
        "seed": case.workload.seed,
        "prompt_ids": batch.prompt_ids.tolist(),
        "prompt_lengths": batch.prompts.tolist(),
    }
    prompts = token_prompts(work, llm.llm_engine.model_config.get_vocab_size())
    if host is not None:
        host.settle()
    files, before, so_far = compiled_files(), counters(llm), accepted(llm)
    with Watch(host) as watch:
        facts = generated(llm, prompts, batch.responses.tolist(), arm.enough, case.text)
    gained = {name: value - before[name] for name, value in counters(llm).items()}
    drafts, tokens, first = (value - so_far[name] for name, value in accepted(llm).items())
    acceptance = {"drafts": drafts, "accepted_tokens": tokens, "acceptance": first / drafts} if drafts else {}
    disturbed = {"compiled_files": compiled_files() - files}
    return facts | {"date": now()} | gained | acceptance | disturbed | watch.facts


def accepted(llm: Any) -> dict[str, int]:
    """Drafts so far, drafted tokens that were accepted, and first ones of a draft that were."""
    totals = {"drafts": 0, "accepted": 0, "accepted first": 0}
    for metric in llm.get_metrics():
        if metric.name == DRAFTED:
            totals["drafts"] += int(metric.value)
        elif metric.name == ACCEPTED:
            totals["accepted"] += sum(metric.values)
            totals["accepted first"] += metric.values[0]
    return totals


def generated(
    llm: Any, prompts: Sequence[Any], responses: Sequence[int], enough: int | None, text: int
) -> dict[str, Any]:
    """The seconds of one `generate` from an empty prefix cache.

    ended:            responses that have ended by themselves
    different_tokens: number of different ones among all that were sampled, which `text` bounds
    """
    from vllm import SamplingParams

    only = list(range(1, text + 1)) or None
    params = [
        SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0, temperature=1.0, allowed_token_ids=only
        )
        for tokens in responses
    ]
    empty_prefix_cache(llm)
    gc.collect()
    with stopped_after(llm.llm_engine, enough):
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
    sampled = {token for output in outputs for token in output.outputs[0].token_ids}
    return {"seconds": seconds, "ended": len(outputs), "different_tokens": len(sampled)}


@contextmanager
def stopped_after(engine: Any, enough: int | None) -> Iterator[None]:
    """Abort the other requests of `generate` once `enough` have ended; None: all end."""
    if enough is None:
        yield
        return
    step, ended = engine.step, 0

    def counted() -> Any:
        nonlocal ended
        outputs = step()
        ended += sum(output.finished for output in outputs)
        if ended >= enough:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
        return outputs

    engine.step = counted
    try:
        yield
    finally:
        del engine.step


if __name__ == "__main__":
    main()
