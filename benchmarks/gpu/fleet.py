"""Time a RolloutFleet: N replicas on N GPUs, the trainer's weights on another one.

    python -m benchmarks.gpu.fleet --model Qwen/Qwen3-8B --replicas 3 --output fleet.jsonl                # four GPUs
    python -m benchmarks.gpu.fleet --model Qwen/Qwen3-8B --replicas 2 --tensor-parallel 2 --trainer cpu --output ...

Bundle, beside vLLM and its dependencies: the wheel of ray (`pip download --no-deps ray`, 79 MB) and, where vLLM has not
brought them, click, filelock, jsonschema, msgpack, packaging, protobuf, pyyaml and requests. The first GPU that
CUDA_VISIBLE_DEVICES shows is the trainer's, in this process, and Ray is started on the others; with `--trainer cpu` the
weights lie on the host, and Ray gets all GPUs. Weights are random, so no checkpoint is needed; /dev/shm must hold them
twice. Tensor parallelism runs without `fuse_allreduce_rms`, which wants NVLink multicast.

Rows, by "what":
    fleet    what runs, how long it took to start, and the plan's prediction for the batch, split statically
    rollout  one rollout of a long-tailed batch (see `lengths`): tokens/s beside the prediction for what ran, and its
             Routing. By "routing": "static" (all expected to be equal), "last" (the mean of the prompt's
             responses in another rollout), "known" (the lengths that came)
    copy     bytes per second of torch's copies: trainer's GPU to host, and to another GPU. What a sync cannot beat
    sync     a sync, by "way": "object_store" or "nccl", with its SyncReport and the floor: bytes / copy speed
    equal    live tensors that differ between the first replica and the others
    replace  seconds until a killed replica's place is filled and serves the same bits
    failed   a part that has ended with an error, which does not cost the others

`--gpu cpu --model FOLDER --precision fp8_kv` runs all but "copy" and "nccl" on a CPU, which shows that it works.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.random_weights import checkpoint_entries, random_weights
from benchmarks.gpu.source import source_hash
from benchmarks.gpu.weight_sync import model_folder
from fp8plan.errors import ConfigError
from fp8plan.jsonl import write
from fp8plan.model.configs import find_config
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.workload import Trace, Workload
from fp8plan.runtime.apply.fleet.fleet import RolloutFleet
from fp8plan.runtime.apply.weight_sync.calls import rpc
from fp8plan.runtime.apply.weight_sync.nccl import connect
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

PARTS = ("rollout", "copy", "sync", "nccl", "replace")
PROMPT = 256  # tokens
REPEATS = 4  # of what takes seconds; the first warms up
ROLLOUTS = 2  # of each routing
COPIED = 1 << 30  # bytes
SAMPLES, SIGMA, SHARE = 16, 0.9, 0.7  # of a prompt; of the lengths' log; of its variance that is the prompt's
MULTICAST = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}


def lengths(
    prompts: int, rng: np.random.Generator, mean: float, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Response lengths of two rollouts of the same prompts, lognormal as in that of DAPO (arXiv 2503.14476)."""
    own = rng.normal(0, SIGMA * SHARE**0.5, prompts).repeat(SAMPLES)
    logs = own + rng.normal(0, SIGMA * (1 - SHARE) ** 0.5, (2, prompts * SAMPLES))
    both = np.clip(np.rint(mean * np.exp(logs - SIGMA**2 / 2)), 1, longest).astype(np.int64)
    return both[0], both[1]


def prompts_means(responses: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean length of each prompt's responses, once for each of them."""
    return responses.reshape(-1, SAMPLES).mean(1).repeat(SAMPLES)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--gpu", default="h200_sxm")
    parser.add_argument("--utilization", type=float, default=0.6, help="of each GPU's memory")
    parser.add_argument("--trainer", default="cuda", choices=("cuda", "cpu"), help="where its weights lie")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--mean", type=float, default=800, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a response")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--deadline", type=float, default=570, help="seconds after which everything is given up")
    args = parser.parse_args(words)
    faulthandler.dump_traceback_later(args.deadline, exit=True)  # a collective that hangs cannot be interrupted
    start_ray(args)
    Measurement(args).run()
    faulthandler.cancel_dump_traceback_later()


def start_ray(args: argparse.Namespace) -> None:
    """Start Ray on the fleet's GPUs, the trainer's left out; this process still sees them all."""
    import ray

    if args.gpu == "cpu":
        ray.init(num_cpus=args.replicas, include_dashboard=False)
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = args.replicas * args.tensor_parallel
    first = 1 if args.trainer == "cuda" else 0
    seen = before.split(",") if before else [str(number) for number in range(first + count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[first : first + count])
    try:
        ray.init(num_gpus=count, num_cpus=args.replicas, include_dashboard=False)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


class Measurement:
    """args: of the command line. One fleet serves all parts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cpu" if "cpu" in (args.gpu, args.trainer) else "cuda:0"
        self.facts = {"model": args.model, "precision": args.precision, "source": source_hash()}
        self.facts |= {"data_parallel": args.replicas, "tensor_parallel": args.tensor_parallel}
        self.facts |= machine_facts() | engine_facts() | {"ray_version": version("ray")}
        folder = Path(args.model).is_dir()
        self.config, self.folder = (find_config(args.model)[0], args.model) if folder else model_folder(args.model)
        rng = np.random.default_rng(0)
        self.responses, self.before = lengths(args.prompts, rng, args.mean, args.longest)
        self.speed = {"object_store": 0.0, "nccl": 0.0}  # bytes per second, of copies

    def run(self) -> None:
        with self.noted("fleet"):
            made, choice = self.planned()
            begun = time.perf_counter()
            with self.started(made, choice) as fleet:
                picked = made.choices[choice]
                predicted = {"makespan_s": picked.makespan_s, "tokens_per_s": picked.output_tokens_per_s}
                self.note("fleet", engine=fleet.facts, start_s=time.perf_counter() - begun, predicted=predicted)
                self.measure(fleet)

    def planned(self) -> tuple[Plan, int]:
        """The plan for the workload on this layout, and the index of the precision that is measured."""
        args = self.args
        limits = EngineLimits(
            gpu_memory_utilization=args.utilization if args.gpu != "cpu" else 0.92,
            max_model_len=PROMPT + args.longest,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
        came = Trace(tuple(self.responses.tolist()), "benchmarks.gpu.fleet")
        workload = Workload(args.prompts, SAMPLES, PROMPT, came)
        if args.gpu == "cpu":
            limits = replace(limits, block_size=128, num_gpu_blocks=256, enforce_eager=True)
            made = plan(args.model, args.gpu, workload, limits=limits)
        else:
            gpus = args.replicas * args.tensor_parallel
            made = plan(args.model, args.gpu, workload, limits=limits, gpus=gpus)
        return made, choice_of(made, args.precision, args.tensor_parallel)

    def started(self, made: Plan, choice: int) -> RolloutFleet:
        more = dict(MULTICAST) if self.args.tensor_parallel > 1 else {}
        more |= {"load_format": "dummy", "skip_tokenizer_init": True} | self.args.engine_args
        return RolloutFleet.from_plan(made, self.folder, choice=choice, replicas=self.args.replicas, **more)

    def measure(self, fleet: RolloutFleet) -> None:
        weights = None
        parts: Mapping[str, Callable[[], None]] = {
            "rollout": lambda: self.rollouts(fleet),
            "copy": self.copy,
            "sync": lambda: self.syncs(fleet, weights, "object_store", weights),
            "nccl": lambda: self.over_nccl(fleet, weights),
            "replace": lambda: self.replaced(fleet, weights),
        }
        off = ("copy", "nccl") if self.device == "cpu" else ()
        for name in (part for part in PARTS if part in self.args.parts and part not in off):
            if name in ("sync", "nccl", "replace") and weights is None:
                weights = random_weights(checkpoint_entries(self.config), self.device)
            with self.noted(name):
                parts[name]()

    def rollouts(self, fleet: RolloutFleet) -> None:
        """Run one batch with nothing known of its lengths, with a guess, and with all; in turns, as hosts drift."""
        known = {"static": np.ones(len(self.responses)), "last": prompts_means(self.before), "known": self.responses}
        for repeat in range(ROLLOUTS):
            for routing, expected in known.items():
                self.rollout(fleet, routing, expected.tolist(), repeat)

    def rollout(self, fleet: RolloutFleet, routing: str, expected: list[float], repeat: int) -> None:
        from vllm import SamplingParams

        rng = np.random.default_rng(repeat)
        heads = rng.integers(1, fleet.sizes()[1], (self.args.prompts, PROMPT)).tolist()
        prompts = [{"prompt_token_ids": head} for head in heads for _ in range(SAMPLES)]
        each = self.responses.tolist()
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in each]
        fleet.generate(prompts, params, expected_lengths=expected)
        found = fleet.routing
        assert found is not None
        tokens = sum(found.tokens)
        kept = found.to_dict() | {"replicas": None, "expected": None, "tokens": tokens}
        speed = tokens / found.observation.seconds
        self.note("rollout", routing=routing, repeat=repeat, warm=repeat > 0, report=kept, tokens_per_s=speed)

    def copy(self) -> None:
        """Measure what carries weights: the copy to the host, and from GPU to GPU."""
        import torch

        source = torch.empty(COPIED, dtype=torch.uint8, device=self.device)
        targets = {"object_store": "cpu", "nccl": "cuda:1"}
        for way, device in targets.items():
            target, seconds = torch.empty(COPIED, dtype=torch.uint8, device=device), []
            for _ in range(REPEATS):
                torch.cuda.synchronize(0)
                begun = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize(0)
                seconds.append(time.perf_counter() - begun)
            self.speed[way] = COPIED / min(seconds)
            self.note("copy", way=way, to=device, seconds=seconds, gb_per_s=self.speed[way] / 1e9)
            del target
            torch.cuda.empty_cache()

    def syncs(self, fleet: RolloutFleet, weights: Any, way: str, source: Any) -> None:
        """Sync again and again; the weights move a little in between. source: tensors, or a function that gives them"""
        for repeat in range(REPEATS):
            for tensor in weights.values():
                tensor.mul_(1 + 1e-3 * (repeat % 3 - 1))
            report = fleet.sync_weights(source() if callable(source) else source)
            floor = report.bytes / self.speed[way] if self.speed[way] else None
            found = asdict(report) | {"kv_scales": None}
            self.note("sync", way=way, repeat=repeat, warm=repeat > 0, floor_s=floor, report=found)
        self.equal(fleet, way)

    def over_nccl(self, fleet: RolloutFleet, weights: Any) -> None:
        begun = time.perf_counter()
        workers = self.args.replicas * self.args.tensor_parallel
        transfer = connect(fleet.join_transfer, workers=workers, device=self.device)
        self.note("connect", seconds=time.perf_counter() - begun, workers=workers)
        self.syncs(fleet, weights, "nccl", lambda: transfer.source(weights))

    def equal(self, fleet: RolloutFleet, way: str) -> None:
        """All replicas hold the same bits and the same KV scales."""
        ranks = fleet.ask(rpc("fp8plan_digests"))
        first, size = ranks[: self.args.tensor_parallel], self.args.tensor_parallel
        differ = [
            f"{at // size}/{name}"
            for at, found in enumerate(ranks)
            for name in found
            if found[name] != first[at % size][name]
        ]
        scales = fleet.kv_scales()
        same = all(found == scales[0] for found in scales)
        self.note("equal", way=way, tensors=len(first[0]), workers=len(ranks), differ=differ[:20], scales_equal=same)

    def replaced(self, fleet: RolloutFleet, weights: Any) -> None:
        """Kill the last replica and fill its place."""
        import ray

        fleet.sync_weights(weights)
        last = self.args.replicas - 1
        ray.kill(fleet._members.living[last])
        begun = time.perf_counter()
        fleet.replace(last)
        self.note("replace", seconds=time.perf_counter() - begun)
        fleet.sync_weights(weights)
        self.equal(fleet, "replace")

    def note(self, what: str, **found: Any) -> None:
        date = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write(self.args.output, {"what": what} | self.facts | date | found)
        print(f"[{time.strftime('%H:%M:%S')}] {what} {json.dumps(found)[:600]}", flush=True)

    @contextmanager
    def noted(self, part: str) -> Iterator[None]:
        """Run a part and note its failure, so that the others are not lost."""
        try:
            yield
        except Exception as error:
            trace = traceback.format_exc()[-3000:]
            self.note("failed", part=part, error=f"{type(error).__name__}: {error}", trace=trace)


def choice_of(made: Plan, precision: str, tensor_parallel: int) -> int:
    """The index of a plan's choice. Raises ConfigError if the plan has none in that precision and layout."""
    layouts = [(choice.precision, choice.tensor_parallel) for choice in made.choices]
    if (precision, tensor_parallel) not in layouts:
        has = ", ".join(f"{name} ({size})" for name, size in layouts)
        raise ConfigError(f"the plan has no {precision} with --tensor-parallel {tensor_parallel}; allowed: {has}")
    return layouts.index((precision, tensor_parallel))


if __name__ == "__main__":
    main()
