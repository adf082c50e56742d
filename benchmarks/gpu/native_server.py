"""vLLM's own NCCL trainer on the first GPU, against `vllm serve` with fp8plan's backend on the second.

    python -m benchmarks.gpu.native_server --model Qwen/Qwen3-1.7B --output native_server.jsonl      # needs two GPUs

The server starts from a checkpoint, so that its first bits are those of a fresh engine. The trainer then sends other
weights and the checkpoint's in turn, over vLLM's HTTP client. Rows, by "what":
    server   how it was started, and how long that took
    round    seconds of a round for the trainer, the server's report, and live tensors that differ from a fresh engine's
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.random_weights import checkpoint_entries, random_weights
from benchmarks.gpu.source import source_hash
from benchmarks.gpu.trl_server import free_port, serving, write_tokenizer
from benchmarks.gpu.weight_sync import save
from fp8plan.jsonl import write
from fp8plan.model.configs import find_config
from fp8plan.model.emit.trl import server_command
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

ROUNDS = 5


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.native_server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--utilization", type=float, default=0.3, help="of the server's GPU")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more words for `vllm serve`")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for the server's start")
    args = parser.parse_args(words)
    facts = {"model": args.model, "precision": args.precision, "source": source_hash()}
    facts |= machine_facts() | engine_facts()
    config = {key: value for key, value in find_config(args.model)[0].items() if not key.startswith("_")}
    manifest = checkpoint_entries(config)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        sets = [random_weights(manifest, "cuda:0", seed) for seed in (0, 1)]
        save(sets[0], folder)
        write_tokenizer(config["vocab_size"], folder)
        command = [*shlex.split(server_command(setup(args, folder))), *args.server_args]
        begun = time.perf_counter()
        with serving(command, args.output.with_suffix(".log"), args.deadline) as url:
            start_s = time.perf_counter() - begun
            write(args.output, {"what": "server", "start_s": start_s, "command": shlex.join(command)} | facts)
            if rounds(url, sets, args.output, facts):
                sys.exit("a round of the checkpoint's weights left other bits than a fresh engine has")


def setup(args: argparse.Namespace, folder: str) -> EngineSetup:
    limits = EngineLimits(
        gpu_memory_utilization=args.utilization, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048
    )
    return EngineSetup(folder, find_gpu("auto"), args.precision, limits)


def rounds(url: str, sets: list[Mapping[str, Any]], output: Path, facts: Mapping[str, Any]) -> int:
    """Send the second set, the first, and so on. Return how many rounds of the first left other bits."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    fresh = digests(url)
    client = HTTPVLLMWeightSyncClient(url, timeout=120)
    info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=free_port(), world_size=2, rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source_of(sets[0]))
    wrong = 0
    for number in range(ROUNDS):
        which = (number + 1) % 2
        trainer.source = source_of(sets[which])
        begun = time.perf_counter()
        trainer.send_weights()
        seconds = time.perf_counter() - begun
        live = digests(url)
        differ = [name for name in fresh if fresh[name] != live.get(name)]
        status = asked(f"{url}/fp8plan/status")
        wrong += bool(differ) and which == 0
        row = {"what": "round", "round": number, "weights": which, "seconds": seconds, "tensors": len(fresh)}
        row |= {"differ": len(differ), "last_update": status["last_update"], "version": status["weights"]["version"]}
        row |= {"kv_scales": status["kv_scales"]["source"], "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write(output, row | dict(facts))
        print(json.dumps(row)[:500], flush=True)
    return wrong


def source_of(tensors: Mapping[str, Any]) -> Any:
    """The tensors as the WeightSource of this version."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Tensors(WeightSource):
        @cached_property
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            return iter(tensors.items())

    return Tensors()


def digests(url: str) -> dict[str, int]:
    """A number for each live parameter that depends on every bit of it."""
    body = json.dumps({"method": "fp8plan_digests", "args": []}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    (answer,) = asked(request)["results"]
    numbers: dict[str, int] = answer["ok"]
    return numbers


def asked(request: urllib.request.Request | str) -> Any:
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
