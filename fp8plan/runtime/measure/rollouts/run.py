"""Measure real rollouts through `vllm.LLM` or AsyncLLM and write rollout records, as `fp8plan validate` reads them.

    python -m fp8plan.runtime.measure.rollouts.run --cells CELLS.json --output RECORDS.jsonl [--precision bf16 ...]

CELLS.json is a list of engine settings:

    [{"model": "Qwen/Qwen3-8B", "gpu": "h200_sxm", "precisions": ["bf16", "fp8_block"], "repeats": 2,
      "gpu_memory_utilization": 0.5, "max_model_len": 8192,          any field of EngineLimits; left out: vLLM's default
      "workloads": [{"name": "small", "prompts": 8, "samples": 4, "prompt_lengths": "fixed:512",
                     "response_lengths": "lognormal:mean=1000,sigma=0.8,max=6000", "seed": 0, "repeats": 3,
                     "warmup": "short"}]}]

Each precision of a setting is one engine in a process of its own. It has random weights of the model's shape, and the
arguments and environment that a Plan emits. Each record is written at once; runs with a record in the output are
skipped. A run in which a kernel was compiled or the host was slow (rollouts.host) is repeated a few times. The least
disturbed attempt is the record. Beside the output lie

    <stem>.set_aside.jsonl             the other attempts
    <stem>.<model>.<precision>.log     each engine's log
    <stem>.configs                     config folders of the engines
    <stem>.failed.jsonl                the reason why an engine did not start, or ended early
    <stem>.trace.jsonl.gz              with --trace: every engine step

A workload may have "turns" instead of response_lengths, with the fields of fp8plan.Turns:

    "turns": {"turns": "4", "turn_tokens": "fixed:99", "tool_tokens": "fixed:300", "tool_s": "fixed:2", "concurrent": 9}

The engine of such a setting is vLLM's AsyncLLM, and tools sleep.

A model that fp8plan cannot read is measured without a prediction. vLLM then picks the block size and the prefix cache,
unless the setting does. A setting may also have "config", a folder with the model's config.json (relative
to CELLS.json), and "engine_args", further arguments of `vllm.LLM`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fp8plan
from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.jsonl import write
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.runtime.apply.engine.launch import first_error
from fp8plan.runtime.measure.calibrate import add_compile, note
from fp8plan.runtime.measure.machine import gpu_facts, wait_for_memory
from fp8plan.runtime.measure.rollouts.jobs import CHILD, WARMUPS, Options, jobs

COMPILE = "fp8plan.runtime.measure.kernels.compile"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. 0: everything is measured; 1: some engine failed; 2: bad input."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=Path, required=True, help="JSON list of engine settings with their workloads")
    parser.add_argument("--output", type=Path, required=True, help="records, one JSON object per line; appended to")
    parser.add_argument("--precision", action="append", choices=list(PRESETS), default=[], help="only these; repeat")
    parser.add_argument("--model", action="append", default=[], help="only this model of the cells; repeat")
    parser.add_argument("--workload", action="append", default=[], help="only the workload of this name; repeat")
    parser.add_argument("--gpu", help="measure the cells on this GPU, whichever they name")
    warmup = "of workloads that name none; short: responses clipped"
    parser.add_argument("--warmup", choices=WARMUPS, default="full", help=warmup)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds an engine may take")
    parser.add_argument("--trace", action="store_true", help="write every engine step")
    add_compile(parser)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the engines; repeat")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, with its prediction")
    words = parser.parse_args(arguments)
    try:
        precisions, models, workloads = map(tuple, (words.precision, words.model, words.workload))
        options = Options(
            words.output, words.warmup, words.trace, _environment(words.env), precisions, models, workloads, words.gpu,
        )  # fmt: skip
        work = jobs(words.cells, options)
        failures = [] if words.dry_run else run_jobs(work, options, words.timeout, words.compile)
    except Fp8PlanError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        note(f"FAILED {failure}")
    return 1 if failures else 0


def _environment(words: Sequence[str]) -> dict[str, str]:
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise ConfigError(f"--env is {wrong[0]!r}; allowed: NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def compile_kernels(work: Sequence[dict[str, Any]], processes: int) -> None:
    """Compile the FP8 GEMM kernels of the jobs' engines. Else each engine compiles its own at its start."""
    quantised = [job for job in work if find_precision(job["fields"]["precision"]).in_blocks]
    if quantised:
        models = {f"{job['kwargs']['model']}@{job['fields']['tensor_parallel']}" for job in quantised}
        rows = max(job["fields"]["max_num_batched_tokens"] for job in quantised)
        words = ["--processes", str(processes), "--gpu", quantised[0]["fields"]["gpu"], "--rows", str(rows)]
        command = [sys.executable, "-m", COMPILE, "--models", *sorted(models), *words]
        if subprocess.run(command, env=os.environ | quantised[0]["env"]).returncode:
            note("some FP8 kernels were not compiled; their engines compile them")


def run_jobs(
    work: Sequence[dict[str, Any]], options: Options, timeout_s: float, processes: int | None = None
) -> list[str]:
    """Run every job in a process of its own; return a sentence for each failure.

    processes: compile kernels before, in so many; 0: as the machine allows; None: do not
    """
    _check_gpu(work)
    if processes is not None:
        compile_kernels(work, processes)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for job in work:
        note(f"{job['label']}: starting, log {job['log']}")
        failed = _run(job, timeout_s)
        if failed:
            failures.append(f"{job['label']}: {failed}")
            note(failures[-1])
            write(job["failed"], job["fields"] | {"reason": failed})
        wait_for_memory()
    return failures


def _check_gpu(work: Sequence[dict[str, Any]]) -> None:
    product = gpu_facts()["gpu_product"]
    for name in {job["fields"]["gpu"] for job in work}:
        if product is None and not find_gpu(name).is_cpu:
            note(f"no NVIDIA driver here: the records will say {name}, which vouches for nothing but this script")
        elif product is not None and not find_gpu(name).is_of(product):
            raise ConfigError(f"the cells are for {name} ({find_gpu(name).product}), this machine has {product}")


def _run(job: dict[str, Any], timeout_s: float) -> str | None:
    """Run a job in a child process and return the reason of a failure, or None.

    The child's whole process group, with the engine's processes, ends with this call.
    """
    with open(job["log"], "ab") as log, tempfile.TemporaryDirectory() as folder:
        notes, start = os.dup(2), log.tell()
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job | {"notes_fd": notes, "log_start": start}), encoding="utf-8")
        root = str(Path(fp8plan.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | job["env"] | {"PYTHONPATH": path},
            pass_fds=(notes,),
            start_new_session=True,
        )
        os.close(notes)
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"killed after {timeout_s:.0f} s; last line of the log: {_last_line(job['log'])}"
        finally:
            _kill(child)
    return f"exit status {status}; {_cause(job['log'], start)}" if status else None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group that a child leads. Its id names the group even after the child has ended."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(log: str) -> str:
    lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "(empty)")[:300]


def _cause(log: str, start: int) -> str:
    first = first_error(Path(log).read_bytes()[start:].decode(errors="replace"))
    return f"first error in the log: {first}" if first else f"last line of the log: {_last_line(log)}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running engine is ended too
    raise SystemExit(main())
