"""Time and check weight syncs of a live engine, against vLLM's own reload and by patches.

    python -m benchmarks.gpu.weight_sync --model Qwen/Qwen3-1.7B --output weight_sync.jsonl --tensor-parallel 2
    python -m benchmarks.gpu.weight_sync --model Qwen/Qwen3-8B --output patches.jsonl --parts patches
        --precision fp8_block --trainer cuda:1 --mode multiprocess --nccl

Random weights stand for the trainer's, in BF16. Rows, by "what":
    engine    what runs, and how long it took to start
    fresh     live tensors that differ between a sync and a fresh engine on a checkpoint of the same weights
    step      a sync of weights that change a little, with its SyncReport, a rollout, and memory in use after it
    native    syncs that leave every module to vLLM's layerwise reload
    stock     vLLM's reload_weights itself
    equal     live tensors that differ between the last sync and another way of the same weights
and of the part "patches", in which a step adds a normal number of the rate's size:
    bf16      syncs of all BF16 tensors
    fp8       syncs of all tensors in E4M3, and the seconds to quantise them
    delta     syncs by patches; encode_s is the search for changes and their packing alone, with the last sync as base
"""

from __future__ import annotations

import argparse
import atexit
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.gpu.random_weights import checkpoint_entries, random_weights
from benchmarks.gpu.source import source_hash
from fp8plan.jsonl import write
from fp8plan.model.configs import find_config
from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import default_limits
from fp8plan.model.workload import Workload
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.quantize.targets import quantized
from fp8plan.runtime.apply.weight_sync.calls import rpc
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX
from fp8plan.runtime.apply.weight_sync.nccl import connect
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

REPEATS = 5
FRESH = "fresh"  # the engine of all parts then starts from a checkpoint
PARTS = ("steps", "equal", "patches")
PROMPT, RESPONSE, REQUESTS = 64, 32, 16
REPORTED = ("seconds", "bytes", "tensors", "chunks", "patched", "healed", "compared", "in_place", "reloaded")
Weights = dict[str, torch.Tensor]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.weight_sync", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-8, 3e-7], help="of the steps of patches")
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--mode", default="inprocess")
    parser.add_argument("--trainer", default="cuda:0", help="GPU of the trainer's weights; the engine's is the first")
    parser.add_argument("--nccl", action="store_true", help="needs --trainer cuda:1 --mode multiprocess")
    parser.add_argument("--utilization", type=float, default=0.5, help="of the GPU's memory, by the engine")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the engine; the trainer's is the first")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each of the engine's GPUs")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--parts", nargs="+", default=PARTS[:2], choices=(FRESH, *PARTS))
    measure(parser.parse_args(words))


def measure(args: argparse.Namespace) -> None:
    config, folder = model_folder(args.model)
    names = ("model", "precision", "mode", "trainer", "nccl", "tensor_parallel", "expert_parallel")
    facts = {name: getattr(args, name) for name in names} | {"source": source_hash()}
    facts |= machine_facts() | engine_facts()

    def note(what: str, **figures: Any) -> None:
        free, total = torch.cuda.mem_get_info()
        now = {"used_bytes": total - free, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write(args.output, {"what": what} | facts | now | figures)
        print(f"[{time.strftime('%H:%M:%S')}] {what} {json.dumps(figures)[:600]}", flush=True)

    manifest = checkpoint_entries(config)
    if FRESH in args.parts:
        save(random_weights(manifest, args.trainer), folder)
    begun = time.perf_counter()
    engine = start(args, folder)
    note("engine", engine=engine.facts, start_s=time.perf_counter() - begun)
    weights = random_weights(manifest, args.trainer)
    parts: Mapping[str, Callable[[], None]] = {
        FRESH: lambda: fresh(engine, weights, manifest, args.trainer, note),
        "steps": lambda: steps(engine, weights, args.steps, note),
        "equal": lambda: equal(engine, weights, note),
        "patches": lambda: patches(engine, weights, manifest, args, note),
    }
    for name in args.parts:
        try:
            parts[name]()
        except Exception as error:  # one part that fails must not lose the others
            note("failed", part=name, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-3000:])
    engine.shutdown()


def model_folder(name: str) -> tuple[dict[str, Any], str]:
    """A folder with nothing but the model's config.json, for load_format="dummy". It is removed when Python ends."""
    config = {key: value for key, value in find_config(name)[0].items() if not key.startswith("_")}
    folder = mkdtemp()
    atexit.register(rmtree, folder, ignore_errors=True)
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config, folder


def start(args: argparse.Namespace, folder: str) -> RolloutEngine:
    """The engine of a plan for this model, as a trainer would start it, with random weights."""
    card = find_gpu("auto")
    limits = replace(
        default_limits(card, args.model),
        gpu_memory_utilization=args.utilization, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192
    )  # fmt: skip
    workload = Workload(prompts=4, samples_per_prompt=4, prompt_lengths=Fixed(PROMPT), response_lengths=Fixed(RESPONSE))
    made = plan(args.model, card, workload, limits=limits, gpus=args.tensor_parallel)
    wanted = (args.precision, args.tensor_parallel, args.expert_parallel)
    layouts = [(c.precision, c.tensor_parallel, c.expert_parallel) for c in made.choices]
    choice = layouts.index(wanted)
    more = {} if FRESH in args.parts else {"load_format": "dummy"}
    more |= args.engine_args
    return RolloutEngine.from_plan(made, folder, choice=choice, mode=args.mode, skip_tokenizer_init=True, **more)


def save(weights: Mapping[str, torch.Tensor], folder: str) -> None:
    """Write a checkpoint beside the folder's config.json."""
    from safetensors.torch import save_file

    save_file({name: tensor.cpu() for name, tensor in weights.items()}, f"{folder}/model.safetensors")


def fresh(engine: RolloutEngine, weights: Weights, manifest: Any, trainer: str, note: Callable[..., None]) -> None:
    """Compare the engine's first bits with those after a sync of other weights, and after one of its own again."""
    started = digests(engine)
    other = engine.sync_weights(random_weights(manifest, trainer, seed=1))
    changed = digests(engine)
    report = engine.sync_weights(weights)
    back = digests(engine)
    note(
        "fresh",
        tensors=len(started),
        differ=[name for name in started if started[name] != back.get(name)],
        changed=sum(started[name] != changed.get(name) for name in started),
        reports=[asdict(each) | {"kv_scales": None} for each in (other, report)],
    )


def steps(engine: RolloutEngine, weights: Weights, count: int, note: Callable[..., None]) -> None:
    """RL steps: the weights move, are synced, and serve."""
    for step in range(count):
        for tensor in weights.values():
            tensor.mul_(1 + 1e-3 * (step % 3 - 1))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        report = engine.sync_weights(weights)
        peak = torch.cuda.max_memory_allocated() - before
        begun = time.perf_counter()
        tokens = decode(engine)
        note(
            "step",
            step=step,
            report=asdict(report) | {"kv_scales": None},
            peak_bytes=peak,
            allocated_bytes=torch.cuda.memory_allocated(),
            rollout_s=time.perf_counter() - begun,
            finite=all(x == x and x > -1e30 for _, row in tokens for x in row),
        )


def patches(engine: Any, weights: Weights, manifest: Any, args: argparse.Namespace, note: Callable[..., None]) -> None:
    """Sync in each mode, and compare the bits in the end."""
    engine.state.expected = manifest
    source: Callable[[Weights], Any] = dict
    if args.nccl:
        source = connect(engine.join_transfer, device=args.trainer).source

    def timed(tensors: Weights) -> dict[str, Any]:
        begun = waited()
        report = asdict(engine.sync_weights(source(tensors)))
        return {"wall_s": waited() - begun} | {name: report[name] for name in REPORTED}

    plain = engine.state.settings
    for repeat in range(REPEATS):
        note("bf16", repeat=repeat, **timed(weights))
    engine.ask(learn_quantised(engine.state))
    names = list(engine.state.quantised or ())
    engine.state.settings = replace(plain, weights_in="fp8_block")
    for repeat in range(REPEATS):
        begun = waited()
        parts = dict(zip(names, quantized([weights[name] for name in names]), strict=True))
        quantise_s = waited() - begun
        sent: Weights = {}
        for name, tensor in weights.items():
            sent |= {name: parts[name][0], name + SCALE_SUFFIX: parts[name][1]} if name in parts else {name: tensor}
        note("fp8", repeat=repeat, quantise_s=quantise_s, **timed(sent))
    del sent, parts
    engine.state.settings, engine.state.base = replace(plain, delta="cuda"), None
    note("delta", rate=None, repeat=0, **timed(weights))
    for rate in args.rates:
        for repeat in range(REPEATS):
            weights = moved_weights(weights, rate)
            base = engine.state.base
            begun = waited()
            encoded = sum(patch.numel() for _, patch in base.patches(weights.items(), {}))
            encode_s = waited() - begun
            base.drop()
            note("delta", rate=rate, repeat=repeat, encode_s=encode_s, encoded=encoded, **timed(weights))
    patched = digests(engine)
    engine.state.settings, engine.state.base = plain, None
    engine.sync_weights(source(weights))
    dense = digests(engine)
    note("equal", tensors=len(dense), differ=[x for x in dense if dense[x] != patched.get(x)], other="patches")


def moved_weights(weights: Weights, rate: float) -> Weights:
    """The weights after a step, rounded as FP32 ones at random places between two BF16 values."""
    after = {}
    for name, tensor in weights.items():
        exact = tensor.float()
        spacing = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-30))) - 7)
        between = (torch.rand_like(exact) - 0.5) * spacing
        after[name] = (exact + between + rate * torch.randn_like(exact)).to(tensor.dtype)
    return after


def waited() -> float:
    """The time when all GPUs have done what they were given."""
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    return time.perf_counter()


def equal(engine: RolloutEngine, weights: Weights, note: Callable[..., None]) -> None:
    """A sync in place leaves the very bits that vLLM's reload leaves; and what each takes."""
    engine.sync_weights(weights)
    ours = digests(engine)
    in_place = engine.state.settings
    engine.state.settings = replace(in_place, in_place=False)
    for repeat in range(REPEATS):
        report = engine.sync_weights(weights)
        note("native", repeat=repeat, report=asdict(report) | {"kv_scales": None})
    engine.state.settings = in_place
    theirs = digests(engine)
    note("equal", tensors=len(ours), differ=[name for name in ours if ours[name] != theirs.get(name)], other="native")
    for repeat in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        try:
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            torch.cuda.synchronize()
            note("stock", repeat=repeat, seconds=time.perf_counter() - begun)
        except Exception as error:
            note("failed", part="stock", error=f"{type(error).__name__}: {error}")
            return
    stock = digests(engine)
    note("equal", tensors=len(ours), differ=[name for name in ours if ours[name] != stock.get(name)], other="stock")


def digests(engine: RolloutEngine) -> dict[str, int]:
    """rank/parameter -> a number that depends on every bit of it."""
    ranks = engine.drive(rpc("fp8plan_digests"))
    return {f"{rank}/{name}": number for rank, numbers in enumerate(ranks) for name, number in numbers.items()}


def decode(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of a few greedy responses."""
    responses = [output.outputs[0] for output in engine.generate(prompts(), sampling())]
    return [
        (list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]) for o in responses
    ]


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(7 * i + j) % 1000 + 5 for j in range(PROMPT)]} for i in range(REQUESTS)]


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=RESPONSE, ignore_eos=True, logprobs=0, detokenize=False)


if __name__ == "__main__":
    main()
