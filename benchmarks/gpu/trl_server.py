"""Time weight syncs of TRL's server mode: fp8plan's backend, and vLLM's own reload beside it.

    python -m benchmarks.gpu.trl_server --model Qwen/Qwen3-0.6B --output trl_server.jsonl      # needs two GPUs

The first GPU trains and the second serves. Both parts run GRPO with the same random weights, prompts and seeds, and a
server in the same precision: "fp8plan" with fp8plan's trainer and backend, "stock" with TRL's own trainer and vLLM's
"nccl" backend, which requantises by layerwise reload and leaves KV scales at 1.0. Rows, by "what":
    server  what was started, and how long it took
    sync    seconds of one sync, as the trainer waits for it; for fp8plan also the server's phases and its check
    step    what TRL logged for a step
    done    seconds of the whole training, and the sync seconds' median
    failed  why a part has ended, and the end of its log

`--gpu cpu --parts fp8plan --precision fp8_kv --model FOLDER` runs the same on a CPU, which shows that it works.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.process import end
from benchmarks.gpu.source import source_hash
from fp8plan.jsonl import now, write
from fp8plan.model.configs import find_config
from fp8plan.model.emit.trl import server_command
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.measure.machine import engine_facts, machine_facts

TRAINER, SERVER = "0", "1"  # GPUs
PARTS = ("fp8plan", "stock")
PROMPT, COMPLETION, BATCH, GENERATIONS = 64, 256, 64, 8
BEGUN = time.perf_counter()  # when this process was
ACCUMULATED = 4  # parts of a batch that the trainer takes one after the other: the logits of all at once fill an H100


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.trl_server", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="whose config.json gets random weights; or a folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--precision", default="fp8_block+fp8_kv")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpu", default="h200_sxm")
    parser.add_argument("--utilization", type=float, default=0.5, help="of the server's GPU")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--deadline", type=float, default=560, help="seconds for one part")
    parser.add_argument("--train", metavar="URL", help=argparse.SUPPRESS)  # this very file, as the trainer of a part
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the trainer's model
    args = parser.parse_args(words)
    if args.train:
        faulthandler.dump_traceback_later(args.deadline, exit=True)  # a collective that hangs cannot be interrupted
        with TemporaryDirectory() as folder:
            train(args, folder)
        return
    with checkpoint(args.model) as args.folder:
        for part in args.parts:
            try:
                run(part, args)
            except Exception as error:  # one part that fails must not lose the other
                text = f"{type(error).__name__}: {error}"
                note(args, part, "failed", error=text, trace=traceback.format_exc()[-3000:])


def note(args: argparse.Namespace, part: str, what: str, **figures: Any) -> None:
    facts = {"part": part, "precision": args.precision, "date": now()}
    if what in ("server", "engine", "failed"):  # not with a sync: asking the GPU takes time
        facts |= {f"{name}_version": version(name) for name in ("trl", "transformers")} | {"source": source_hash()}
        facts |= {"model": args.model} | machine_facts() | engine_facts()
    write(args.output, {"what": what} | facts | figures)
    print(f"[{time.strftime('%H:%M:%S')}] {part} {what} {json.dumps(figures)[:600]}", flush=True)


@contextmanager
def checkpoint(name: str) -> Iterator[str]:
    """The folder `name`; of a model the folder that `randomise` fills, until the end."""
    if Path(name).is_dir():
        yield name
        return
    with TemporaryDirectory() as folder:
        randomise(name, folder)
        yield folder


def randomise(name: str, folder: str) -> None:
    """Write random BF16 weights for a model's config.json, and a tokenizer in which word "w7" is token 7."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = {key: value for key, value in find_config(name)[0].items() if not key.startswith("_")}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(folder)
    size = config["vocab_size"]
    words = {f"w{number}": number for number in range(size - 2)} | {"<pad>": size - 2, "<eos>": size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def run(part: str, args: argparse.Namespace) -> None:
    """Start the server of a part, and train beside it. The trainer gets what is left of the deadline."""
    log = args.output.with_suffix(f".{part}.log")
    begun = time.perf_counter()
    with serving(command_of(part, args), log, args.deadline) as url:
        note(args, part, "server", start_s=time.perf_counter() - begun, command=shlex.join(command_of(part, args)))
        words = [sys.executable, "-m", f"{__package__}.trl_server", "--train", url, "--parts", part]
        for name in ("model", "folder", "output", "precision", "steps", "gpu"):
            words += [f"--{name}", str(getattr(args, name))]
        words += ["--deadline", str(args.deadline - (time.perf_counter() - begun))]
        with log.open("ab") as out:
            env = os.environ | {"CUDA_VISIBLE_DEVICES": TRAINER}
            done = subprocess.run(words, env=env, stdout=out, stderr=out, check=False)
        if done.returncode:
            text = log.read_text(errors="replace")
            note(args, part, "failed", error=f"the trainer ended with {done.returncode}", log=text[-6000:])


def command_of(part: str, args: argparse.Namespace) -> list[str]:
    """The command that an error of fp8plan's would say; for the other part, with vLLM's own backend."""
    gpu = find_gpu(args.gpu)
    # All responses of a step at once; a budget of tokens that a real server has.
    limits = replace(
        EngineLimits.for_gpu(gpu),
        max_model_len=2 * (PROMPT + COMPLETION),
        max_num_seqs=BATCH,
        max_num_batched_tokens=8192,
    )
    if not gpu.is_cpu:
        limits = replace(limits, gpu_memory_utilization=args.utilization)
    line = server_command(EngineSetup(args.folder, gpu, args.precision, limits))
    return shlex.split(line if part == "fp8plan" else line.replace('"fp8plan"', '"nccl"'))


@contextmanager
def serving(words: list[str], log: Path, patience_s: float) -> Iterator[str]:
    """The URL of a server on the second GPU, which is ended at the end."""
    start = words.index("vllm")
    variables = dict(word.split("=", 1) for word in words[:start])
    if more := os.environ.get("VLLM_PLUGINS"):
        variables["VLLM_PLUGINS"] += f",{more}"
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words[start + 1 :], "--port", str(port)]
    env = os.environ | variables | {"CUDA_VISIBLE_DEVICES": SERVER}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for(url, process, log, patience_s)
        yield url
    finally:
        end(process)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, patience_s: float) -> None:
    """Wait until a server answers. Raises RuntimeError with the end of its log if it does not."""
    until = time.monotonic() + patience_s
    while not answers(f"{url}/health"):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def train(args: argparse.Namespace, folder: str) -> None:
    """Run GRPO against the server, and time its syncs. folder: for what the trainer writes"""
    import trl

    (part,) = args.parts
    config = trl.GRPOConfig(
        **common(args, folder),
        vllm_mode="server",
        vllm_server_base_url=args.train,
        vllm_group_port=free_port(),
        per_device_train_batch_size=BATCH // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        num_generations=GENERATIONS,
        max_completion_length=COMPLETION,
    )
    followed(part, args, made(part, args, config, prompts()))


def common(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Settings of GRPOConfig that each mode of TRL gets. folder: for what the trainer writes"""
    on_cpu = find_gpu(args.gpu).is_cpu
    return {
        "output_dir": folder,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "use_vllm": True,
        "learning_rate": 1e-5,
        "max_steps": args.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 0,
        "model_init_kwargs": {"dtype": "bfloat16"},
    }


def prompts() -> Any:
    """A dataset of prompts of PROMPT tokens."""
    from datasets import Dataset

    rows = [" ".join(f"w{(7 * row + word) % 1000}" for word in range(PROMPT)) for row in range(256)]
    return Dataset.from_dict({"prompt": rows})


def followed(part: str, args: argparse.Namespace, trainer: Any) -> None:
    """Train, and write a row of each sync, of each step as it ends, and of the end.

    Training stops before a step that would probably last beyond args.deadline.
    """
    import torch
    from transformers import TrainerCallback

    class Rows(TrainerCallback):  # type: ignore[misc]
        ended = time.perf_counter()

        def on_log(self, _: Any, state: Any, control: Any, logs: Mapping[str, Any], **more: Any) -> None:
            figures = {name.replace("/", "."): value for name, value in logs.items()}
            note(args, part, "step", **figures | {"step": state.global_step})

        def on_step_end(self, _: Any, state: Any, control: Any, **more: Any) -> None:
            before, self.ended = self.ended, time.perf_counter()
            if 2 * self.ended - before - BEGUN > args.deadline:
                control.should_training_stop = True

    seconds = timed(part, args, trainer)
    begun = time.perf_counter()
    trainer.add_callback(Rows())
    trainer.train()
    total = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    figures = {"train_s": total, "syncs": len(seconds), "median_sync_s": statistics.median(seconds)}
    note(args, part, "done", **figures, peak_memory_bytes=peak)


def made(part: str, args: argparse.Namespace, config: Any, prompts: Any) -> Any:
    if part == "stock":
        from trl import GRPOTrainer as Stock

        return Stock(args.folder, share_of_even, config, prompts)
    from fp8plan.integrations.trl import GRPOTrainer

    return GRPOTrainer(args.folder, share_of_even, config, prompts, plan="auto", choice=args.precision)


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def timed(part: str, args: argparse.Namespace, trainer: Any) -> list[float]:
    """Time each sync from now on; return the list that its seconds go to."""
    import torch

    seconds: list[float] = []
    generation = trainer.vllm_generation
    sync = generation.sync_weights

    def watched() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun = time.perf_counter()
        sync()
        seconds.append(time.perf_counter() - begun)
        report: Mapping[str, Any] | None = None
        if (made := getattr(generation, "report", None)) is not None:
            report = asdict(made) | {"kv_scales": None}
        note(args, part, "sync", number=len(seconds), seconds=seconds[-1], report=report)

    generation.sync_weights = watched
    return seconds


if __name__ == "__main__":
    main()
