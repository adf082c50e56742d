"""Time and check syncs over NCCL: a trainer on one GPU in this process, the engine on another GPU in its own.

    python -m benchmarks.gpu.transfer --model Qwen/Qwen3-8B --output transfer.jsonl      # needs two GPUs

Two sets of random weights stand for the trainer's and are sent in turn. Rows, by "what":
    engine    what runs, where, and how long it took to start
    connect   seconds until trainer and engine have met
    copy      bytes per second of torch's copy from one GPU to the other: the most that a transfer can reach
    sync      a sync, by format ("bf16", "fp8_block") and bytes of a broadcast, with its SyncReport
    quantise  seconds that the trainer takes to quantise all weights, for a sync in fp8_block
    check     after the syncs of a part: whether log-probs are finite
    broken    a trainer that stalls: how long until the engine refuses, and whether it serves after the next sync
    equal     live tensors that differ between a sync over NCCL and one in the process of the trainer
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.random_weights import checkpoint_entries, random_weights
from benchmarks.gpu.source import source_hash
from benchmarks.gpu.weight_sync import decode, model_folder
from fp8plan.errors import SyncError
from fp8plan.jsonl import write
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import plan
from fp8plan.model.workload import Fixed, Workload
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.quantize.block_fp8 import scale_shape
from fp8plan.runtime.apply.weight_sync.calls import rpc
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX, quantised_manifest
from fp8plan.runtime.apply.weight_sync.nccl import TrainerTransfer, connect
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

REPEATS = 5  # odd: the first and the last send the same set
TRAINER, ENGINE = 0, 1  # GPUs
PARTS = ("copy", "bf16", "bf16_large", "fp8_block", "broken", "equal")
LARGE = 1 << 30  # bytes of a broadcast: vLLM's own default
STALL_S, LIMIT_S = 30.0, 10.0


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.transfer", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--utilization", type=float, default=0.4, help="of the GPU's memory, by the engine")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--deadline", type=float, default=570, help="seconds after which everything is given up")
    args = parser.parse_args(words)
    faulthandler.dump_traceback_later(args.deadline, exit=True)  # a collective that hangs cannot be interrupted
    Measurement(args).run()
    faulthandler.cancel_dump_traceback_later()


class Measurement:
    """args: of the command line. The engine is started once for all parts but "equal"."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        torch.cuda.set_device(TRAINER)
        self.args = args
        self.config, self.folder = model_folder(args.model)
        self.facts = {"model": args.model, "precision": args.precision, "source": source_hash()}
        self.facts |= machine_facts() | engine_facts()
        self.manifest = checkpoint_entries(self.config)
        # CUDA begins here, with both GPUs in sight: vLLM then spawns the engine's process instead of forking it.
        self.sets = [random_weights(self.manifest, f"cuda:{TRAINER}", seed) for seed in (0, 1)]
        self.digests: dict[str, dict[str, int]] = {}
        self.engine: Any = None

    def run(self) -> None:
        parts: Mapping[str, Callable[[], None]] = {
            "copy": self.copy,
            "bf16": lambda: self.syncs("bf16"),
            "bf16_large": lambda: self.syncs("bf16_large", buffer_bytes=LARGE),
            "fp8_block": self.fp8_block,
            "broken": self.broken,
            "equal": self.equal,
        }
        with self.noted("engine"):
            self.start_beside()
        for name in parts if self.engine else ():
            if name in self.args.parts:
                with self.noted(name):
                    parts[name]()
        if self.engine:
            self.engine.shutdown()

    def note(self, what: str, **found: Any) -> None:
        import torch

        used = {}
        for name, device in (("trainer", TRAINER), ("engine", ENGINE)):
            free, total = torch.cuda.mem_get_info(device)
            used[f"{name}_gpu_used_bytes"] = total - free
        date = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write(self.args.output, {"what": what} | self.facts | used | date | found)
        print(f"[{time.strftime('%H:%M:%S')}] {what} {json.dumps(found)[:600]}", flush=True)

    @contextmanager
    def noted(self, part: str) -> Iterator[None]:
        """Run a part and note its failure, so that the others are not lost."""
        try:
            yield
        except Exception as error:
            trace = traceback.format_exc()[-3000:]
            self.note("failed", part=part, error=f"{type(error).__name__}: {error}", trace=trace)

    def start_beside(self) -> None:
        """The engine on the other GPU: by vLLM's device_ids, or, should that fail, by what its process can see."""
        begun = time.perf_counter()
        try:
            self.engine, how = self.started("multiprocess", device_ids=[ENGINE]), "device_ids"
        except Exception as error:
            self.note("failed", part="device_ids", error=f"{type(error).__name__}: {error}")
            with visible(str(ENGINE)):
                self.engine, how = self.started("multiprocess"), "CUDA_VISIBLE_DEVICES"
        self.note("engine", engine=self.engine.facts, start_s=time.perf_counter() - begun, placed_by=how)
        self.engine.state.expected = self.manifest

    def started(self, mode: Any, **more: Any) -> RolloutEngine:
        limits = EngineLimits(
            gpu_memory_utilization=self.args.utilization,
            max_model_len=2048,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
        )
        workload = Workload(prompts=4, samples_per_prompt=4, prompt_lengths=Fixed(64), response_lengths=Fixed(32))
        made = plan(self.args.model, "h200_sxm", workload, limits=limits)
        choice = next(i for i, c in enumerate(made.choices) if c.precision == self.args.precision)
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
        return RolloutEngine.from_plan(made, self.folder, choice=choice, mode=mode, **(settings | more))

    def connected(self, **settings: Any) -> TrainerTransfer:
        begun = time.perf_counter()
        transfer = connect(self.engine.join_transfer, device=f"cuda:{TRAINER}", **settings)
        self.note("connect", seconds=time.perf_counter() - begun, **settings)
        return transfer

    def copy(self) -> None:
        import torch

        source = torch.empty(LARGE, dtype=torch.uint8, device=f"cuda:{TRAINER}")
        target = torch.empty_like(source, device=f"cuda:{ENGINE}")
        seconds = []
        for _ in range(REPEATS):
            torch.cuda.synchronize(TRAINER)
            begun = time.perf_counter()
            for _ in range(8):
                target.copy_(source)
            torch.cuda.synchronize(TRAINER)
            torch.cuda.synchronize(ENGINE)
            seconds.append(time.perf_counter() - begun)
        peer = torch.cuda.can_device_access_peer(TRAINER, ENGINE)
        self.note("copy", seconds=seconds, gb_per_s=8 * LARGE / min(seconds) / 1e9, peer_access=peer)
        del source, target
        torch.cuda.empty_cache()

    def syncs(self, part: str, **settings: Any) -> None:
        """Sync BF16 weights, which the engine quantises."""
        transfer = self.connected(**settings)
        for repeat in range(REPEATS):
            self.sync(transfer, self.sets[repeat % 2], part, repeat, **settings)
        self.check(part)

    def fp8_block(self) -> None:
        """Sync weights that the trainer quantised: half the bytes."""
        self.engine.state.settings = replace(self.engine.state.settings, weights_in="fp8_block")
        try:
            self.engine.ask(learn_quantised(self.engine.state))
            quantise, sent = quantiser(self.sets[0], self.engine.state.quantised or (), self.manifest)
            transfer = self.connected()
            for repeat in range(REPEATS):
                self.note("quantise", repeat=repeat, seconds=quantise(self.sets[repeat % 2]))
                self.sync(transfer, sent, "fp8_block", repeat)
            self.check("fp8_block")
        finally:
            self.engine.state.settings = replace(self.engine.state.settings, weights_in="bf16")

    def sync(self, transfer: TrainerTransfer, sent: Mapping[str, Any], part: str, repeat: int, **settings: Any) -> None:
        report = self.engine.sync_weights(transfer.source(sent))
        speed = report.bytes / report.seconds["load"] / 1e9
        found = asdict(report) | {"kv_scales": None}
        self.note("sync", format=part, repeat=repeat, load_gb_per_s=speed, report=found, **settings)

    def check(self, part: str) -> None:
        tokens = decode(self.engine)
        finite = all(x == x and x > -1e30 for _, row in tokens for x in row)
        (self.digests[part],) = self.engine.drive(rpc("fp8plan_digests"))
        self.note("check", format=part, finite=finite, logprobs=sum(len(row) for _, row in tokens))

    def broken(self) -> None:
        """A trainer that stops in the middle, and the sync that heals the engine."""
        transfer = self.connected(limit_s=LIMIT_S)
        pairs = list(self.sets[1].items())

        def stalling() -> Iterator[tuple[str, Any]]:
            yield from pairs[: len(pairs) // 2]
            time.sleep(STALL_S)
            yield from pairs[len(pairs) // 2 :]

        begun, error = time.perf_counter(), ""
        try:
            self.engine.sync_weights(transfer.source(stalling(), self.manifest))
        except SyncError as failure:
            error = str(failure)
        seconds, refuses = time.perf_counter() - begun, not self.engine.serving
        self.engine.sync_weights(self.connected().source(self.sets[0]))
        self.note("broken", seconds=seconds, error=error, refuses=refuses, healed=self.engine.serving)
        self.check("healed")

    def equal(self) -> None:
        """An engine in this process, on this GPU, synced from the very tensors."""
        self.engine.shutdown()
        self.engine = self.started("inprocess")
        report = self.engine.sync_weights(self.sets[0])
        self.note("in_process", report=asdict(report) | {"kv_scales": None})
        (ours,) = self.engine.drive(rpc("fp8plan_digests"))
        for part, theirs in self.digests.items():
            differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            self.note("equal", other=part, tensors=len(ours), differ=differ[:20], differing=len(differ))


def quantiser(
    weights: Mapping[str, Any], names: Any, manifest: Any
) -> tuple[Callable[[Mapping[str, Any]], float], dict[str, Any]]:
    """A function that quantises a set of weights and returns the seconds, and the tensors it fills, in sync order."""
    import torch

    from fp8plan.runtime.apply.quantize.targets import QuantizeTargets

    names, sent = list(names), dict(weights)
    for name in names:
        tensor = weights[name]
        sent[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
        sent[name + SCALE_SUFFIX] = torch.empty(scale_shape(*tensor.shape), dtype=torch.float32, device=tensor.device)
    targets = QuantizeTargets([sent[name] for name in names], [sent[name + SCALE_SUFFIX] for name in names])
    flags = torch.zeros(len(names), dtype=torch.int32, device=next(iter(weights.values())).device)
    sent = {name: sent[name] for name, _, _ in quantised_manifest(manifest, names)}

    def quantise(chosen: Mapping[str, Any]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        targets.run([chosen[name] for name in names], flags)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        sent.update((name, chosen[name]) for name in sent if name in chosen and name not in names)
        return seconds

    return quantise, sent


@contextmanager
def visible(devices: str) -> Iterator[None]:
    """Limit the GPUs that processes started inside see. CUDA in this process is initialised and sees what it saw."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


if __name__ == "__main__":
    main()
