"""Time patches of weights on GPUs: the kernels, and syncs of a live engine, dense and by patches.

    python -m benchmarks.gpu.slow_links --model Qwen/Qwen3-8B --output OUT.jsonl [--trainer cuda:1 --mode multiprocess]

With --nccl tensors and patches go over NCCL between the trainer's GPU and the engine's, and no kernel is timed.

Random weights stand for the trainer's. A step adds a normal number of the rate's size. Weights are rounded as FP32 ones
at random places between two BF16 values. Rows, by "what":

    kernel    seconds of a kernel over one matrix, and the bytes that it has to read and write; "copy" is torch's own
    bf16      syncs of all BF16 tensors
    fp8       syncs of all tensors in E4M3, and the seconds to quantise them
    delta     syncs by patches; encode_s is the search for changes and their packing alone, with the last sync as base
    equal     live tensors that differ between the last patched sync and a dense one of the same weights
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_weights import checkpoint_entries, random_weights
from benchmarks.gpu.weight_sync import digests, model_folder, start
from fp8plan.jsonl import write
from fp8plan.runtime.apply.quantize.targets import QuantizeTargets, quantized
from fp8plan.runtime.apply.weight_sync.delta import tiles, triton_kernels
from fp8plan.runtime.apply.weight_sync.delta.base import COMPARED_BYTES
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX
from fp8plan.runtime.apply.weight_sync.nccl import connect
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

GROUPS = (((4096, 4096), 8), ((4096, 4096), 64), ((12288, 4096), 32), ((151936, 4096), 1))
REPEATS = 5
Weights = dict[str, torch.Tensor]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trainer", default="cuda:0", help="GPU of the trainer's weights; the engine's is the first")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 1e-4])
    parser.add_argument("--nccl", action="store_true", help="needs --trainer cuda:1 --mode multiprocess")
    parser.add_argument("--profile", action="store_true", help="profile the last sync of each rate, which slows it")
    parser.add_argument("--precision", default="fp8_block")
    parser.add_argument("--mode", default="inprocess")
    parser.add_argument("--utilization", type=float, default=0.3, help="of the GPU's memory, by the engine")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    options = parser.parse_args(
        words, argparse.Namespace(tensor_parallel=1, expert_parallel=False, sleep=False, parts=())
    )
    names = ("model", "precision", "mode", "trainer", "nccl")
    facts: dict[str, Any] = {name: getattr(options, name) for name in names} | {"compared_bytes": COMPARED_BYTES}
    facts |= machine_facts() | engine_facts()

    def note(what: str, **values: Any) -> None:
        write(options.output, {"what": what} | facts | {"date": time.strftime("%Y-%m-%d", time.gmtime())} | values)
        print(what, json.dumps(values)[:400], flush=True)

    if not options.nccl:
        kernels(note)
    config, folder = model_folder(options.model)
    engine = start(options, folder)
    engine.state.expected = checkpoint_entries(config)
    source: Callable[[Weights], Any] = dict
    if options.nccl:
        source = connect(engine.join_transfer, device=options.trainer).source
    weights = random_weights(engine.state.expected, options.trainer)
    syncs(engine, weights, source, options.rates, note, options.profile)
    engine.shutdown()


def kernels(note: Callable[..., None]) -> None:
    """Time each kernel over groups of matrices: of one batch of a sync, and larger ones."""
    constants = tiles.constants(torch.device("cuda", 0))
    for shape, count in GROUPS:
        bases = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        news = [moved_weights({"": base}, 3e-6)[""] for base in bases]
        old, new = quantized(bases), quantized(news)
        targets, flags = QuantizeTargets(*zip(*new, strict=True)), torch.zeros(count, dtype=torch.int32, device="cuda")
        read = sum(each.nbytes for each in news)
        row = {"shape": shape, "count": count}
        seconds = best(targets.run, news, flags)
        note("kernel", kernel="quantise", **row, dtype="bfloat16", nbytes=read * 3 // 2, seconds=seconds)
        groups = {"bfloat16": (news, bases), "float8_e4m3fn": ([q for q, _ in new], [q for q, _ in old])}
        for dtype, (after, before) in groups.items():
            pairs = [(tiles.bits(a), tiles.bits(b)) for a, b in zip(after, before, strict=True)]
            mine = [a for a, _ in pairs]
            nbytes = sum(each.nbytes for each in mine)
            marked_bytes = sum(each.numel() for each in mine) // 8
            work: dict[str, tuple[int, Callable[[], Any]]] = {
                "compare": (2 * nbytes + marked_bytes, partial(triton_kernels.marked, pairs, constants)),
                "compare and find": (2 * nbytes, partial(triton_kernels.compared, pairs, constants)),
                "digest": (nbytes, partial(triton_kernels.digests, mine, constants)),
                "copy": (2 * nbytes, partial(torch._foreach_copy_, [b for _, b in pairs], mine)),  # the last one
            }
            for name, (moved, do) in work.items():
                seconds = best(lambda do: list(do() or ()), do)
                note("kernel", kernel=name, **row, dtype=dtype, nbytes=moved, seconds=seconds)


def best(do: Callable[..., Any], *arguments: Any) -> float:
    """Least seconds of a run, in groups of ten runs one after the other, as a sync makes them batch after batch."""
    times = []
    for _ in range(6):
        begun = waited()
        for _ in range(10):
            do(*arguments)
        times.append((waited() - begun) / 10)
    return min(times[1:])


def moved_weights(weights: Mapping[str, torch.Tensor], rate: float) -> Weights:
    """Return the weights after a step."""
    after = {}
    for name, tensor in weights.items():
        exact = tensor.float()
        spacing = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-30))) - 7)
        between = (torch.rand_like(exact) - 0.5) * spacing
        after[name] = (exact + between + rate * torch.randn_like(exact)).to(tensor.dtype)
    return after


def waited() -> float:
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    return time.perf_counter()


def syncs(
    engine: Any,
    weights: Weights,
    source: Callable[[Weights], Any],
    rates: list[float],
    note: Callable[..., None],
    profiled: bool,
) -> None:
    """Sync in each mode, and compare the bits in the end.

    source:   makes of tensors what `sync_weights` takes
    profiled: print the calls of the last sync of each rate
    """

    def timed(pairs: Weights) -> dict[str, Any]:
        begun = waited()
        report = asdict(engine.sync_weights(source(pairs)))
        kept = ("seconds", "bytes", "tensors", "chunks", "patched", "healed", "compared", "in_place", "reloaded")
        return {"wall_s": waited() - begun} | {name: report[name] for name in kept}

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
    for rate in rates:
        for repeat in range(REPEATS):
            weights = moved_weights(weights, rate)
            base = engine.state.base
            begun = waited()
            encoded = sum(patch.numel() for _, patch in base.patches(weights.items(), {}))
            encode_s = waited() - begun
            base.drop()
            with cProfile.Profile(builtins=True) if profiled and repeat == REPEATS - 1 else nullcontext() as profile:
                note("delta", rate=rate, repeat=repeat, encode_s=encode_s, encoded=encoded, **timed(weights))
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    patched = digests(engine)
    engine.state.settings, engine.state.base = plain, None
    engine.sync_weights(source(weights))
    dense = digests(engine)
    note("equal", tensors=len(dense), differ=[name for name in dense if dense[name] != patched.get(name)])


if __name__ == "__main__":
    main()
