"""Time a rollout with the engine in this process and in one of its own, and with log-probs asked for in three ways.

    python -m benchmarks.gpu.engine_modes MODEL --precisions bf16 fp8_block+fp8_kv --output engine_modes.jsonl

Lengths are those of the task of benchmarks/learning, whatever the weights say. Ways: "none"; "objects", log-probs as
vLLM gives them, an object for each; "flat", in lists (SamplingParams.flat_logprobs). Rows, by "what":

    rollout  seconds of one rollout, its tokens and steps (the longest response)
    profile  the functions with most time of their own in one more rollout ("objects"), under cProfile; the engine's in
             this process only

Engines start side by side with --together: N processes of one precision and mode each share an empty FOLDER. When the
engines of all are there, one at a time measures; none ends before all have measured.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import os
import pstats
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.source import source_hash
from benchmarks.learning.policies.tasks import TRAIN, Problem, Recurrence
from benchmarks.learning.predicted import limits_of
from fp8plan.jsonl import now, write
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.measure.machine import machine_facts

WAYS: Final[dict[str, dict[str, Any]]] = {
    "none": {"logprobs": None},
    "objects": {"logprobs": 0},
    "flat": {"logprobs": 0, "flat_logprobs": True},
}
MODES: Final = ("inprocess", "multiprocess")
TASK: Final = Recurrence(digits=3, terms=200)
PROMPTS, SAMPLES = 32, 8
FUNCTIONS: Final = 30
PATIENCE_S: Final = 600.0  # for the other processes


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.engine_modes")
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8_block+fp8_kv"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--memory", type=float, default=0.1, help="share of the GPU's memory")
    parser.add_argument("--gpu", default="auto", help="or cpu, to try it")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--together", nargs=2, metavar=("FOLDER", "N"), help="one of N processes that share a folder")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(words)
    if given.together and len(given.precisions) * len(given.modes) > 1:
        parser.error("--together takes one precision and one mode in each process")
    for precision in given.precisions:
        for mode in given.modes:
            measure(given, precision, mode)


def requests(prompts: int = PROMPTS, samples: int = SAMPLES) -> list[Problem]:
    """The requests of a rollout, each with an answer of the length that its response gets."""
    return [one for one in TASK.problems(prompts, (0, TRAIN, 1)) for _ in range(samples)]


def setup_of(model: Path, gpu: Gpu, precision: str, memory: float) -> tuple[EngineSetup, dict[str, int]]:
    """The engine's setup, and vLLM's argument for its KV cache.

    memory: share of the GPU's memory
    """
    limits, pool = limits_of(gpu, TASK, memory)
    return EngineSetup(str(model), gpu, precision, limits), pool


def measure(given: argparse.Namespace, precision: str, mode: Any) -> None:
    """Time all ways in one engine."""
    import vllm

    import fp8plan

    problems = requests(given.prompts, given.samples)
    setup, pool = setup_of(given.model, find_gpu(given.gpu), precision, given.memory)
    engine = fp8plan.RolloutEngine.from_setup(setup, skip_tokenizer_init=True, mode=mode, **pool)
    row = {
        "date": now(),
        "model": "/".join(given.model.parts[-2:]),
        "precision": precision,
        "mode": mode,
        "source": source_hash(),
    }
    row |= {"engine": f"vLLM {vllm.__version__}", "memory": given.memory} | machine_facts()

    def rollout(way: str) -> dict[str, Any]:
        params = [
            vllm.SamplingParams(max_tokens=len(one.key), ignore_eos=True, detokenize=False, **WAYS[way])
            for one in problems
        ]
        prompts = [{"prompt_token_ids": one.prompt} for one in problems]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, params)
        seconds, lengths = time.perf_counter() - begun, [len(one.outputs[0].token_ids) for one in outputs]
        return {"logprobs": way, "seconds": seconds, "tokens": sum(lengths), "steps": max(lengths)}

    with turn(given.together):
        rollout("none")  # it warms up
        for _ in range(given.repeats):
            for way in WAYS:
                write(given.output, row | {"what": "rollout"} | rollout(way))
        if mode == "inprocess":
            seen = cProfile.Profile()
            facts = seen.runcall(rollout, "objects")
            write(given.output, row | {"what": "profile"} | facts | {"functions": functions(seen)})
    engine.shutdown()


@contextmanager
def turn(together: Sequence[str] | None) -> Iterator[None]:
    """Wait for the engines of all processes, then for this one's turn, and afterwards until all have measured.

    together: their folder and their number; None: there is but this process. Raises TimeoutError if some do not come
    """
    if together is None:
        yield
        return
    folder, processes = Path(together[0]), int(together[1])
    folder.mkdir(parents=True, exist_ok=True)
    meet(folder, "ready", processes)
    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    meet(folder, "measured", processes)


def meet(folder: Path, what: str, processes: int) -> None:
    """Say that this process has come so far, and wait for the others."""
    (folder / f"{os.getpid()}.{what}").touch()
    begun = time.monotonic()
    while (here := len(list(folder.glob(f"*.{what}")))) < processes:
        if time.monotonic() - begun > PATIENCE_S:
            raise TimeoutError(f"{here} of {processes} processes are {what} after {PATIENCE_S:.0f} s")
        time.sleep(0.2)


def functions(seen: cProfile.Profile) -> list[dict[str, Any]]:
    """The functions with most time of their own."""
    stats: Any = pstats.Stats(seen)
    found = sorted(stats.stats.items(), key=lambda one: -one[1][2])[:FUNCTIONS]
    return [
        {"name": f"{'/'.join(file.split(os.sep)[-2:])}:{line} {name}", "calls": calls, "own_s": own, "total_s": total}
        for (file, line, name), (_, calls, own, total, _) in found
    ]


if __name__ == "__main__":
    main()
