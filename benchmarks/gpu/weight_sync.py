"""Time and check weight syncs of a live engine on one GPU: sync -> generate steps, against vLLM's own reload.

    python -m benchmarks.gpu.weight_sync --model Qwen/Qwen3-8B --output weight_sync.jsonl

Random weights stand for the trainer's, in BF16 on the same GPU; they change a little every step. Rows, by "what":
    engine    what runs, and how long it took to start
    step      a sync with its SyncReport's seconds, a rollout, and memory in use after it
    checked   the same sync again and again, and
    bare      the same without samples to compare, in turns: what the self-check costs
    guard     seconds that a rollout's caller loses to the guard, those until its verdict is there, and the verdict
    scales    decodes under CUDA graphs with calibrated scales, with scales that clip, and with the first ones again
    fp8_in    syncs of E4M3 weights and scales instead of BF16
    native    syncs that leave every module to vLLM's layerwise reload
    stock     vLLM's reload_weights itself
    equal     live tensors that differ between a sync in place and vLLM's reload of the same weights
    sleep     scales and decodes after sleep and wake-up
    rollouts  seconds of repeated rollouts of each of ROLLOUTS
    clip      a sync whose keys are CLIP times as large: layers that fixed KV scales clip, and the guard's verdicts
    rollback  whether a sync that fails leaves every bit of the weights of before, and the same decodes
    fresh     live tensors that differ between a sync and a fresh engine on a checkpoint of the same weights
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

from benchmarks.gpu.random_weights import checkpoint_entries, random_weights
from benchmarks.gpu.source import source_hash
from fp8plan.errors import SyncError
from fp8plan.jsonl import write
from fp8plan.model.configs import find_config
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import default_limits
from fp8plan.model.workload import Fixed, Workload
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import Reset, rpc
from fp8plan.runtime.apply.weight_sync.manifest import quantised_manifest
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

REPEATS = 4
ROUNDS, PER_ROUND = 4, 10  # of syncs with and without samples: the difference is a fraction of what a host varies by
FRESH = "fresh"  # the engine of all parts then starts from a checkpoint
ROLLOUTS = ((256, 512, 4), (64, 2048, 3))  # requests, tokens of a prompt and of a response, and rollouts
CLIP = 200.0
OF_ATTENTION = ("rollouts", "clip")  # parts that compare attention kernels
PARTS = ("steps", "bare", "guard", "scales", "sleep", "fp8_in", "equal", "rollback")
PROMPT, RESPONSE, REQUESTS = 64, 32, 16


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.weight_sync", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--mode", default="inprocess")
    parser.add_argument("--utilization", type=float, default=0.5, help="of the GPU's memory, by the engine")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the engine; the trainer's is the first")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each of the engine's GPUs")
    parser.add_argument("--sleep", action="store_true", help="also put the engine to sleep and wake it up")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=(FRESH, *PARTS, *OF_ATTENTION))
    measure(parser.parse_args(words))


def measure(args: argparse.Namespace) -> None:
    import torch

    config, folder = model_folder(args.model)
    facts = {"model": args.model, "precision": args.precision, "mode": args.mode, "source": source_hash()}
    facts |= {"tensor_parallel": args.tensor_parallel, "expert_parallel": args.expert_parallel}
    facts |= machine_facts() | engine_facts()

    def note(what: str, **found: Any) -> None:
        free, total = torch.cuda.mem_get_info()
        row = (
            {"what": what}
            | facts
            | {"used_bytes": total - free, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        )
        write(args.output, row | found)
        print(f"[{time.strftime('%H:%M:%S')}] {what} {json.dumps(found)[:600]}", flush=True)

    manifest = checkpoint_entries(config)
    if FRESH in args.parts:
        save(random_weights(manifest, "cuda"), folder)
    begun = time.perf_counter()
    engine = start(args, folder)
    note("engine", engine=engine.facts, start_s=time.perf_counter() - begun)
    weights = random_weights(manifest, "cuda")
    parts: Mapping[str, Callable[[], None]] = {
        FRESH: lambda: fresh(engine, weights, manifest, note),
        "steps": lambda: steps(engine, weights, args.steps, note),
        "bare": lambda: checked_and_bare(engine, weights, note),
        "guard": lambda: guard(engine, note),
        "scales": lambda: scales(engine, note) if engine.state.fp8_kv else None,
        "sleep": lambda: sleep(engine, note) if args.sleep else None,
        "fp8_in": lambda: fp8_in(engine, weights, manifest, note) if engine.launch.fp8_weights else None,
        "equal": lambda: equal(engine, weights, note),
        "rollouts": lambda: rollouts(engine, note),
        "clip": lambda: clip(engine, weights, note),
        "rollback": lambda: rollback(engine, weights, note),
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
    more: dict[str, Any] = {"enable_sleep_mode": True} if args.sleep else {}
    more |= {} if FRESH in args.parts else {"load_format": "dummy"}
    more |= args.engine_args
    return RolloutEngine.from_plan(made, folder, choice=choice, mode=args.mode, skip_tokenizer_init=True, **more)


def rollouts(engine: RolloutEngine, note: Callable[..., None]) -> None:
    """Time rollouts of random prompts. The first of each size warms up."""
    import numpy as np
    from vllm import SamplingParams

    for requests, tokens, repeats in ROLLOUTS:
        prompts = np.random.default_rng(0).integers(0, 1000, (requests, tokens)).tolist()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0)
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            seconds.append(time.perf_counter() - begun)
        note(
            "rollouts",
            requests=requests,
            tokens=tokens,
            seconds=seconds,
            attention=", ".join(engine.facts["attention"]),
        )


def clip(engine: RolloutEngine, weights: dict[str, Any], note: Callable[..., None]) -> None:
    """Sync weights whose keys are too large for scales of 1.0 in one layer, roll out four times, and sync back."""
    from vllm import SamplingParams

    name = next(name for name in weights if name.endswith("k_norm.weight"))
    report = engine.sync_weights(weights | {name: weights[name] * CLIP})
    params = SamplingParams(max_tokens=RESPONSE, ignore_eos=True, logprobs=0)
    verdicts = []
    for _ in range(REPEATS):
        engine.generate([{"prompt_token_ids": list(range(1, PROMPT))}] * REQUESTS, params)
        verdicts.append(engine.verdict and (engine.verdict.action.value, engine.verdict.reason))
    healed = engine.sync_weights(weights)
    note(
        "clip", tensor=name, times=CLIP, kv_source=report.kv_source, clipped=report.kv_clipped, verdicts=verdicts,
        guard_off=engine.guard_off, after=healed.kv_clipped,
    )  # fmt: skip


def save(weights: Mapping[str, Any], folder: str) -> None:
    """Write a checkpoint beside the folder's config.json."""
    from safetensors.torch import save_file

    save_file({name: tensor.cpu() for name, tensor in weights.items()}, f"{folder}/model.safetensors")


def fresh(engine: RolloutEngine, weights: Mapping[str, Any], manifest: Any, note: Callable[..., None]) -> None:
    """Compare the engine's first bits with those after a sync of other weights, and after one of its own again."""
    started = digests(engine)
    other = engine.sync_weights(random_weights(manifest, "cuda", seed=1))
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


def steps(engine: RolloutEngine, weights: dict[str, Any], count: int, note: Callable[..., None]) -> None:
    """RL steps: the weights move, are synced, and serve."""
    import torch

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
        found = asdict(report) | {"kv_scales": _summary(report.kv_scales)}
        allocated = torch.cuda.memory_allocated()
        note(
            "step",
            step=step,
            report=found,
            peak_bytes=peak,
            allocated_bytes=allocated,
            rollout_s=time.perf_counter() - begun,
            finite=all(x == x and x > -1e30 for _, row in tokens for x in row),
        )


def checked_and_bare(engine: RolloutEngine, weights: Any, note: Callable[..., None]) -> None:
    """Measure both alternately, as a host's speed drifts."""
    for _ in range(ROUNDS):
        repeated(engine, weights, "checked", note, PER_ROUND)
        repeated(engine, weights, "bare", note, PER_ROUND, samples=0)


def repeated(
    engine: RolloutEngine, weights: Any, what: str, note: Callable[..., None], repeats: int = REPEATS, **settings: Any
) -> None:
    """The same sync again and again, with other settings."""
    before = engine.state.settings
    engine.state.settings = replace(before, **settings)
    try:
        for repeat in range(repeats):
            report = engine.sync_weights(weights)
            note(what, repeat=repeat, report=asdict(report) | {"kv_scales": None})
    finally:
        engine.state.settings = before


def guard(engine: RolloutEngine, note: Callable[..., None]) -> None:
    """Time the comparison of rollouts with their predictions. The first warms up: it imports and predicts anew."""
    for repeat in range(1 + REPEATS):
        observe_s = judged_rollout(engine)
        begun = time.perf_counter()
        verdict = engine.verdict
        found = {"observe_s": observe_s, "judge_s": time.perf_counter() - begun, "warm": repeat > 0}
        note("guard", repeat=repeat, off=engine.guard_off, verdict=verdict and verdict.to_dict(), **found)


def judged_rollout(engine: RolloutEngine) -> float:
    """Seconds that the guard takes from its caller before and after a rollout, as in RolloutEngine.generate.

    These are two looks at the counters, and giving the outputs to the thread that judges them. The work of that thread
    is not counted.
    """
    times = [time.perf_counter()]
    ended = engine._judge.begin(engine.llm, sampling())
    times.append(time.perf_counter())
    outputs = engine.llm.generate(prompts(), sampling(), use_tqdm=False)
    times.append(time.perf_counter())
    ended(outputs)
    times.append(time.perf_counter())
    return times[1] - times[0] + times[3] - times[2]


def scales(engine: RolloutEngine, note: Callable[..., None]) -> None:
    """Scales written in place are what captured graphs use: clipping ones change the log-probs, the first ones bring
    them back."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        engine.recalibrate_kv()
        seconds.append(time.perf_counter() - begun)
    good = {layer: list(parts) for layer, parts in (engine.state.kv_scales or {}).items()}
    first = decode(engine)
    again = decode(engine)
    _set(engine, {layer: [part / 64 for part in parts] for layer, parts in good.items()})
    clipping = decode(engine)
    _set(engine, good)
    back = decode(engine)
    ones = {layer: [1.0] * 3 for layer in good}
    _set(engine, ones)
    unit = decode(engine)
    _set(engine, good)
    note(
        "scales",
        recalibrate_s=seconds,
        again_equal=first == again,
        back_equal=first == back,
        clipping=_distance(first, clipping),
        unit=_distance(first, unit),
        scales=_summary(good),
    )


def _set(engine: RolloutEngine, scales: dict[str, list[float]]) -> None:
    def procedure() -> Any:
        yield from rpc("fp8plan_set_kv_scales", scales)
        yield Reset()

    engine.drive(procedure())


def fp8_in(engine: RolloutEngine, weights: Mapping[str, Any], manifest: Any, note: Callable[..., None]) -> None:
    """The other path: quantised by the trainer, half the bytes."""
    import torch

    from fp8plan.runtime.apply.quantize.block_fp8 import scale_shape
    from fp8plan.runtime.apply.quantize.targets import QuantizeTargets

    engine.state.expected = manifest
    engine.ask(learn_quantised(engine.state))
    quantised = list(engine.state.quantised)
    sent = {}
    for name, tensor in weights.items():
        sent[name] = tensor
        if name in quantised:
            sent[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
            sent[name + "_scale_inv"] = torch.empty(scale_shape(*tensor.shape), dtype=torch.float32, device="cuda")
    targets = QuantizeTargets([sent[name] for name in quantised], [sent[name + "_scale_inv"] for name in quantised])
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        targets.run(
            [weights[name] for name in quantised], torch.zeros(len(quantised), dtype=torch.int32, device="cuda")
        )
        torch.cuda.synchronize()
        note("quantise_all", seconds=time.perf_counter() - begun, tensors=len(quantised))
    ordered = {name: sent[name] for name, _, _ in quantised_manifest(manifest, quantised)}
    repeated(engine, ordered, "fp8_in", note, weights_in="fp8_block")


def equal(engine: RolloutEngine, weights: dict[str, Any], note: Callable[..., None]) -> None:
    """A sync in place leaves the very bits that vLLM's reload leaves; and what each takes."""
    import torch

    engine.sync_weights(weights)
    ours = digests(engine)
    repeated(engine, weights, "native", note, in_place=False)
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


def rollback(engine: RolloutEngine, weights: dict[str, Any], note: Callable[..., None]) -> None:
    """A sync whose last tensor is NaN, with a copy of the weights kept on the GPU, written in place and reloaded."""
    last = next(reversed(weights))
    spoilt = {**weights, last: weights[last] * float("nan")}
    for in_place in (True, False):
        engine.sync_weights(weights)
        tokens, bits, before = decode(engine), digests(engine), engine.state.settings
        engine.state.settings = replace(before, rollback="cuda", in_place=in_place)
        try:
            begun = time.perf_counter()
            engine.sync_weights(spoilt)
        except SyncError as error:
            seconds = time.perf_counter() - begun
            same = {"equal": digests(engine) == bits, "tokens_equal": decode(engine) == tokens}
            note("rollback", in_place=in_place, said=str(error), serving=engine.serving, seconds=seconds, **same)
        finally:
            engine.state.settings = before
    begun = time.perf_counter()
    (nbytes,) = engine.drive(rpc("fp8plan_zero_kv"))
    note("zero_kv", bytes=nbytes, seconds=time.perf_counter() - begun)


def digests(engine: RolloutEngine) -> dict[str, int]:
    """rank/parameter -> a number that depends on every bit of it."""
    ranks = engine.drive(rpc("fp8plan_digests"))
    return {f"{rank}/{name}": number for rank, found in enumerate(ranks) for name, number in found.items()}


def sleep(engine: RolloutEngine, note: Callable[..., None]) -> None:
    first, before = decode(engine), engine.kv_scales()
    for level in (1,):
        begun = time.perf_counter()
        engine.sleep(level)
        engine.wake_up()
        seconds = time.perf_counter() - begun
        note(
            "sleep",
            level=level,
            seconds=seconds,
            scales_equal=engine.kv_scales() == before,
            equal=decode(engine) == first,
        )


def decode(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of a few greedy responses."""
    found = [output.outputs[0] for output in engine.generate(prompts(), sampling())]
    return [(list(o.token_ids), [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)]) for o in found]


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(7 * i + j) % 1000 + 5 for j in range(PROMPT)]} for i in range(REQUESTS)]


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=RESPONSE, ignore_eos=True, logprobs=0, detokenize=False)


def _distance(first: Any, second: Any) -> dict[str, float]:
    """Mean and largest change of the first token's log-prob, whose context is the same, and share of equal tokens."""
    gaps = [abs(a[1][0] - b[1][0]) for a, b in zip(first, second, strict=True)]
    pairs = [x == y for a, b in zip(first, second, strict=True) for x, y in zip(a[0], b[0], strict=True)]
    return {"first_token": sum(gaps) / len(gaps), "largest": max(gaps), "equal_tokens": sum(pairs) / len(pairs)}


def _summary(scales: Any) -> Any:
    if not scales:
        return None
    columns = list(zip(*scales.values(), strict=True))
    return {part: [min(c), max(c)] for part, c in zip("qkv", columns, strict=True)}


if __name__ == "__main__":
    main()
