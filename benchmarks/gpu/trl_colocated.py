"""Run TRL's GRPO with fp8plan's engine in the trainer's process, on one GPU, in one precision after the other.

    python -m benchmarks.gpu.trl_colocated --output trl_colocated.jsonl

Each precision has its own process, and the same random weights, prompts and seeds. Almost every answer has the full
length, as random weights seldom end one; with `--lengths planned` answers end at the lengths that plan="auto" draws.
Rows, by "what":
    plan    the precision that plan="auto" would choose, and the makespans that it predicts: with a host that is not
            known (host_loop_s is null), and with this one, by which the trainer goes on
    engine  seconds until the trainer and its engine are there; TRL's settings, and the engine's limits
    sync    seconds of one sync, and fp8plan's report of it
    step    what TRL logged for a step, once it has ended
    done    seconds of the whole training, the syncs' median, and the most memory that torch held
    failed  why a precision has ended, and the end of its log

Beside the output, PRECISION.run.jsonl is the Monitor's run file. It has the lengths and seconds of each rollout, which
`fp8plan plan --observed` reads.

`--gpu cpu --precisions fp8_kv bf16 --model FOLDER --completion 16 --batch 16` shows on a CPU that it works.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu import process
from benchmarks.gpu.run_file import name_model
from benchmarks.gpu.trl_server import GENERATIONS, PROMPT, checkpoint, common, followed, note, prompts, share_of_even
from fp8plan.model.distributions import LogNormal
from fp8plan.model.workload import Workload

PART = "fp8plan"
GRACE_S = 30.0  # for the engine's end, beyond the deadline
LENGTHS = ("longest", "planned")
PASSED_ON = (
    *("model", "folder", "output", "steps", "gpu", "utilization"),
    *("completion", "batch", "micro_batch", "lengths", "deadline"),
)  # options that the process of a precision gets, too


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.trl_colocated", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", default="Qwen/Qwen3-1.7B", help="whose config.json gets random weights; or a folder")
    parser.add_argument(
        "--folder", help="with the model's weights and a tokenizer of numbered words; made unless given"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--precisions", nargs="+", default=["fp8_block+fp8_kv", "bf16"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--utilization", type=float, default=0.3, help="of the GPU, for the engine; TRL's default")
    parser.add_argument("--completion", type=int, default=2048, help="tokens at most")
    parser.add_argument("--batch", type=int, default=128, help="completions of a step")
    parser.add_argument("--micro-batch", type=int, default=2, help="completions that are trained at once")
    parser.add_argument("--lengths", choices=LENGTHS, default="longest", help="of the answers")
    parser.add_argument("--deadline", type=float, default=400, help="seconds for one precision")
    parser.add_argument("--train", metavar="PRECISION", dest="precision", help=argparse.SUPPRESS)  # in its own process
    args = parser.parse_args(words)
    if args.precision:
        faulthandler.dump_traceback_later(args.deadline + GRACE_S, exit=True)  # also where nothing can be interrupted
        with TemporaryDirectory() as folder:
            train(args, folder)
        return
    with checkpoint(args.folder or args.model) as args.folder:
        for precision in args.precisions:
            args.precision = precision
            run(args)


def run(args: argparse.Namespace) -> None:
    """Train in args.precision, in a process of its own."""
    log = args.output.with_suffix(f".{args.precision}.log")
    words = [sys.executable, "-m", f"{__package__}.trl_colocated", "--train", args.precision]
    for name in PASSED_ON:
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    failed = process.run(words, log, args.deadline + 2 * GRACE_S)  # the process ends before, and says where it was
    name_model(run_file(args), args.folder, args.model)
    if failed:
        text = log.read_text(errors="replace")
        note(args, PART, "failed", error=f"the trainer {failed}", log=text[-6000:])


def run_file(args: argparse.Namespace) -> Path:
    output: Path = args.output
    return output.with_suffix(f".{args.precision}.run.jsonl")


def train(args: argparse.Namespace, folder: str) -> None:
    """Run GRPO with a colocated engine. folder: for what the trainer writes"""
    import trl

    from fp8plan.integrations.trl import GRPOTrainer
    from fp8plan.runtime.watch.monitor.sinks import JsonLines

    begun = time.perf_counter()
    colocated = {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.utilization,
        "vllm_max_model_length": PROMPT + args.completion,
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": args.batch // args.micro_batch,
        "num_generations": GENERATIONS,
        "max_completion_length": args.completion,
    }
    config = trl.GRPOConfig(**common(args, folder), **colocated)
    choice = {"plan": "auto", "choice": args.precision, "sinks": [JsonLines(run_file(args))]}

    class Noted(GRPOTrainer):
        """A trainer that notes each plan that it makes."""

        def _plan_for(self, *request: Any) -> None:
            *same, loop_s = request
            for host_loop_s in dict.fromkeys((None, loop_s)):  # the trainer goes on with the last
                super()._plan_for(*same, host_loop_s)
                note(args, PART, "plan", host_loop_s=host_loop_s, **predicted(self.plan))

    trainer: Any = Noted(args.folder, share_of_even, config, prompts(), **choice)
    try:
        if args.lengths == "planned":
            end_as_planned(args, trainer)
        seconds = time.perf_counter() - begun
        limits = trainer.rollout_engine.launch.limits
        note(args, PART, "engine", start_s=seconds, settings=colocated, limits=limits.vllm_arguments())
        followed(PART, args, trainer)
    finally:
        trainer.monitor.close()
        trainer.rollout_engine.shutdown()


def predicted(plan: Any) -> dict[str, Any]:
    """The precision that a plan chooses, and the makespan of each with its 90% interval, in seconds."""
    makespans = {x.precision: [x.makespan_s, x.makespan_low_s, x.makespan_high_s] for x in plan.choices}
    return {"chosen": plan.select(None).precision, "makespans_s": makespans, "reasons": plan.reasons}


def end_as_planned(args: argparse.Namespace, trainer: Any) -> None:
    """Let each answer of a rollout end at a length of its own. Together they are those of the plan's workload."""
    from fp8plan.integrations.request import MEAN_SHARE, SIGMA

    lengths = LogNormal(MEAN_SHARE * args.completion, SIGMA, args.completion)
    workload = Workload(args.batch // GENERATIONS, GENERATIONS, trainer._prompt_lengths(), lengths)
    tokens = workload.batch().responses.tolist()
    generate = trainer.rollout_engine.generate

    def ended(prompts: Any, sampling_params: Any, **more: Any) -> Any:
        each = [sampling_params.clone() for _ in prompts]
        for params, most in zip(each, tokens, strict=True):
            params.max_tokens = most
        return generate(prompts, each, **more)

    trainer.rollout_engine.generate = ended


if __name__ == "__main__":
    main()
