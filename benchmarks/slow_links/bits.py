"""Fifty steps of GRPO with patched syncs, and the bits that a sync of all weights leaves, for small models on a CPU.

    python -m benchmarks.slow_links.bits OUT.jsonl [SETUP ...]
    python -m benchmarks.slow_links.bits OUT.jsonl --model FOLDER [--precision fp8_block]     # a real model

Each set-up runs in a process of its own. The engine samples, a copy of the model in FP32 learns to sample even tokens,
and every step is patched into the engine. Every tenth step keeps the weights and a digest of all live tensors. In the
end each of these weights is sent whole, and the digests are compared. A real model, such as Gemma 3 270M, is trained as
in benchmarks.slow_links.steps, where transformers samples.

A line has the set-up, the steps and those that were patched, healed or not, bytes of the patches and of a whole sync,
and of the kept steps those whose bits are equal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path += [str(Path(__file__).parents[2] / "tests" / folder) for folder in (".", "model", "runtime")]

from tiny_models import CALIBRATION, checkpoint, cpu_plan, started

from fp8plan.jsonl import append, line
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.engine.engine import RolloutEngine
from fp8plan.runtime.fleet.fleet import RolloutFleet
from fp8plan.runtime.measure.machine import machine_facts
from fp8plan.runtime.weight_sync.delta.store import Follower, Publisher
from fp8plan.runtime.weight_sync.state import SyncSettings, rpc

STEPS, KEPT_EVERY, RATE = 50, 10, 1e-4  # so that scales move, too
REAL_RATE = 3e-6
PROMPTS, SAMPLES, LENGTH = 4, 4, 12

Tensors = dict[str, Any]


class Setup(NamedTuple):
    """A model, a precision, and the way of the weights to it."""

    kind: str
    precision: str
    way: str


SETUPS: Final = {
    "dense": Setup("dense", "fp8_block+fp8_kv", "in process"),
    "moe": Setup("moe", "fp8_block", "in process"),
    "tied": Setup("tied", "fp8_block", "in process"),
    "tp2": Setup("dense", "fp8_block+fp8_kv", "two processes, TP 2"),
    "fleet": Setup("dense", "fp8_kv", "a fleet of two, Ray"),
    "store": Setup("moe", "fp8_block", "a folder, zstd"),
}


@contextmanager
def engine_of(setup: Setup) -> Iterator[Any]:
    if "fleet" in setup.way:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
        sync, folder = SyncSettings(delta="cpu"), str(checkpoint(setup.kind, "a"))
        plan = cpu_plan(setup.precision)
        with RolloutFleet.from_plan(plan, folder, replicas=2, sync=sync, skip_tokenizer_init=True) as fleet:
            yield fleet
        ray.shutdown()
        return
    options: dict[str, Any] = {"weights_in": "fp8_block"} if "folder" in setup.way else {"delta": "cpu"}
    if "TP 2" in setup.way:
        options |= {"mode": "multiprocess", "tensor_parallel_size": 2}
    with started(setup.kind, "a", setup.precision, **options) as engine:
        yield engine


def learn(policy: Any, optimiser: Any, engine: Any, chance: Any) -> float:
    """One step of GRPO on the engine's samples. Returns the mean reward: the share of even tokens."""
    import torch
    from vllm import SamplingParams

    prompts = torch.randint(1024, (PROMPTS, 8), generator=chance).repeat_interleave(SAMPLES, 0)
    sampling = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": row} for row in prompts.tolist()], sampling)
    responses = torch.tensor([list(output.outputs[0].token_ids) for output in outputs])
    rewards = (responses % 2 == 0).float().mean(1).view(PROMPTS, SAMPLES)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    logits = policy(torch.cat([prompts, responses], 1)).logits[:, prompts.shape[1] - 1 : -1]
    chances = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    (-(advantages * chances).mean()).backward()
    optimiser.step()
    optimiser.zero_grad()
    return float(rewards.mean())


def run_real(folder: str, precision: str, output: Path) -> None:
    import torch

    from benchmarks.slow_links import steps

    limits = EngineLimits(
        max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256, gpu_memory_utilization=0.2, enforce_eager=True
    )
    setup = EngineSetup(folder, find_gpu("cpu"), precision, limits)
    options = {"sync": SyncSettings(delta="cpu"), "kv_cache_memory_bytes": 2**28, "skip_tokenizer_init": True}
    engine = RolloutEngine.from_setup(setup, mode="inprocess", **options)
    torch.set_default_dtype(torch.float32)  # vLLM leaves its own
    trainer = steps.trainer_of(folder, REAL_RATE)
    calibrated = {"kv_prompts": trainer.tokenizer(["The sun rises in the east.", "12 + 7 = 19."]).input_ids}

    def synced(tensors: Tensors) -> Any:
        return engine.sync_weights(tensors, **calibrated)

    row = {"setup": "real", "kind": Path(folder).name, "precision": precision, "way": "in process"}
    row |= {"learning_rate": REAL_RATE}
    train(engine, lambda: steps.learn(*trainer), lambda: steps.weights_of(trainer.policy), synced, synced, row, output)
    engine.shutdown()


def train(
    engine: Any,
    learn_once: Callable[[], float],
    sent: Callable[[], Tensors],
    synced: Callable[[Tensors], Any],
    synced_whole: Callable[[Tensors], Any],
    row: dict[str, Any],
    output: Path,
) -> None:
    """Train and patch for STEPS, compare the kept steps with syncs of all weights, and append the line.

    learn_once: a step of training, which returns its reward
    sent:       the weights as they are
    synced, synced_whole: a sync, which returns its report; the second without a base
    row:        what the line begins with
    """

    def digests() -> Any:
        return engine.ask(rpc("fp8plan_digests"))

    first, kept, reports, rewards = synced(sent()), [], [], []
    for step in range(1, STEPS + 1):
        rewards.append(learn_once())
        tensors = sent()
        reports.append(synced(tensors))
        if step % KEPT_EVERY == 0:
            kept.append((tensors, digests()))
    equal = 0
    for tensors, live in kept:
        engine.state.base = None
        assert not synced_whole(tensors).patched
        equal += digests() == live
    row |= {"steps": STEPS, "patched": sum(report.patched for report in reports)}
    row |= {"healed": sum(report.healed is not None for report in reports)}
    row |= {"patch_bytes": [report.bytes for report in reports], "whole_bytes": first.bytes}
    row |= {"kept": len(kept), "equal": equal, "first_reward": rewards[0], "last_reward": rewards[-1]}
    append(output, line(row | machine_facts()))
    print(f"{row['setup']}: {equal} of {len(kept)} kept steps have the bits of a sync of everything", flush=True)


def run(name: str, output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    setup, calibrated = SETUPS[name], {"kv_prompts": CALIBRATION}
    torch.manual_seed(0)
    with engine_of(setup) as engine, tempfile.TemporaryDirectory() as store:
        torch.set_default_dtype(torch.float32)  # vLLM leaves its own
        policy = AutoModelForCausalLM.from_pretrained(checkpoint(setup.kind, "a"), dtype=torch.float32)
        optimiser = torch.optim.AdamW(policy.parameters(), lr=RATE)
        chance = torch.Generator().manual_seed(0)
        follower, publisher = Follower(store), None
        if "folder" in setup.way:
            follower.pull(engine)
            publisher = Publisher(store, codec="zstd")

        def synced(tensors: Tensors) -> Any:
            if publisher is None:
                return engine.sync_weights(tensors, **calibrated)
            publisher.publish(tensors)
            return follower.pull(engine, **calibrated)

        def sent() -> Tensors:
            tensors = revert_weight_conversion(policy, policy.state_dict())  # the checkpoint's names
            return {key: x.detach().bfloat16() for key, x in tensors.items()}

        def synced_whole(tensors: Tensors) -> Any:
            nonlocal publisher
            if publisher is not None:
                publisher = Publisher(store, codec="zstd")  # begins with a whole version
            return synced(tensors)

        row = {"setup": name, **setup._asdict(), "learning_rate": RATE}
        train(engine, lambda: learn(policy, optimiser, engine, chance), sent, synced, synced_whole, row, output)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_links.bits")
    parser.add_argument("output", type=Path)
    parser.add_argument("setups", nargs="*", help=f"of {', '.join(SETUPS)}; default: all")
    parser.add_argument("--model", help="folder of a real model with its tokenizer, instead of set-ups")
    parser.add_argument("--precision", default="fp8_block", help="of the real model's engine")
    options = parser.parse_args()
    if options.model and options.setups:
        parser.error("give either set-ups or --model")
    if options.model:
        run_real(options.model, options.precision, options.output)
        return
    if len(options.setups) == 1:
        run(options.setups[0], options.output)
        return
    for name in options.setups or SETUPS:
        words = [sys.executable, "-m", "benchmarks.slow_links.bits", str(options.output), name]
        subprocess.run(words, check=True, env=os.environ)


if __name__ == "__main__":
    main()
