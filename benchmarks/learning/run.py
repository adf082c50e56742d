"""The experiment: every arm and seed that is asked for, one process each, as many at once as there are GPUs.

    python -m benchmarks.learning.run FOLDER --policy qk-norm --arms main control    # on a GPU machine: all its GPUs
    python -m benchmarks.learning.run FOLDER --policy tiny-qk-norm --device cpu      # one after the other

It can be broken off at any time: what is done stays, and the rest goes on from its checkpoints with the same command.
FOLDER/POLICY/model has the policy; FOLDER/POLICY/ARM/SEED a run (benchmarks/learning/state.py says what).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from benchmarks.learning.arms import ARMS, GROUPS, arm_named, chosen
from benchmarks.learning.policies.table import POLICIES
from benchmarks.learning.state import RunFolder
from fp8plan import jsonl
from fp8plan.errors import ConfigError

# Of a rollout and of a run, by device. AdamW's rates are where the tiny policies learn in some tens of steps.
SIZES: Final[dict[str, dict[str, Any]]] = {
    "cpu": {"steps": 60, "prompts": 64, "samples": 8, "learning_rate": 2e-3, "save_every": 10},
    "cuda": {"steps": 50, "prompts": 32, "samples": 8, "learning_rate": 1e-4, "save_every": 25},
}
OWN: Final[dict[str, dict[str, Any]]] = {
    "smollm2": {"learning_rate": 3e-6, "micro_tokens": 4096},  # pretrained; its logits have 49,152 columns
    "gemma": {"learning_rate": 3e-6, "micro_tokens": 1024},  # 262,144 columns
}

SEEDS: Final = 3  # of an arm

# Environment of each run, unless it is set: no hub; no compiler for vLLM's sampler. On a CPU one thread: those of a
# trainer and an engine that share two cores wait for each other.
ENV: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
ENV_OF: Final = {
    "cpu": {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "cuda": {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
}


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    if options.one:
        return run_one(options)
    # In a process of its own, which leaves nothing on the GPU.
    model = str(options.folder / options.policy / "model")
    words = [options.policy, model, "--device", options.device, "--seed", str(options.seed)]
    subprocess.run([sys.executable, "-m", f"{__package__}.policies", *words], check=True)
    lines = (row for path in options.kept for row in jsonl.rows(path))
    kept = {(row["arm"], row["seed"]) for row in lines if row["policy"] == options.policy}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [run for arms in options.arms for run in jobs(arms, seeds) if run not in kept]
    failed = side_by_side(options, list(dict.fromkeys(runs)))
    if failed:
        print(f"failed, see their log.txt: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", choices=POLICIES, default="tiny-qk-norm")
    parser.add_argument(
        "--arms", nargs="+", action="append",
        help=f"{', '.join([*GROUPS, *ARMS])}; given twice: the second after all seeds of the first; default: main",
    )  # fmt: skip
    parser.add_argument(
        "--kept", type=Path, nargs="*", default=[], help="tables of benchmarks.learning.keep: runs in them are done"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of every arm; default: {SEEDS}")
    parser.add_argument("--first-seed", type=int, default=0, help="of every arm; default: 0")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--seed", type=int, default=0, help="of the policy's own training")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share a GPU: their seconds say nothing then")
    for name in ("steps", "prompts", "samples", "save-every", "micro-tokens"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("learning-rate", "memory"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--one", metavar="ARM/SEED", help="this run alone, in this process")
    options = parser.parse_args(words)
    options.arms = [chosen(names) for names in options.arms or [["main"]]]
    options.words = list(sys.argv[1:] if words is None else words)
    for path in options.kept:
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; allowed: tables that benchmarks.learning.keep wrote")
    if options.at_once < 1:
        raise ConfigError(f"--at-once is {options.at_once}; allowed: 1 and more")
    if options.device is None:
        options.device = "cuda" if gpus() else "cpu"
    return options


def jobs(arms: Sequence[str], seeds: Iterable[int]) -> list[tuple[str, int]]:
    """(arm, seed) of every run: the first seed of every arm first, so that a short lease compares arms."""
    return [(arm, seed) for seed, arm in product(seeds, arms)]


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [x for x in visible.split(",") if x]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def side_by_side(options: argparse.Namespace, runs: Sequence[tuple[str, int]]) -> list[str]:
    """Do all runs, --at-once on each GPU or on the CPU. Returns those that failed."""
    places = options.at_once * (gpus() if options.device == "cuda" else [""])
    free: SimpleQueue[str] = SimpleQueue()
    for place in places:
        free.put(place)

    def do(run: tuple[str, int]) -> str | None:
        name, place = f"{run[0]}/{run[1]}", free.get()
        target = options.folder / options.policy / name
        try:
            if (target / "done.json").is_file():
                return None
            target.mkdir(parents=True, exist_ok=True)
            print(f"{name}: begins{f' on GPU {place}' if place else ''}", flush=True)
            words = [
                sys.executable,
                "-m",
                f"{__package__}.run",
                *options.words,
                "--device",
                options.device,
                "--one",
                name,
            ]
            env = ENV | ENV_OF[options.device] | os.environ | ({"CUDA_VISIBLE_DEVICES": place} if place else {})
            with (target / "log.txt").open("a") as log:
                code = subprocess.run(words, env=env, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
            print(f"{name}: {'done' if code == 0 else f'failed ({code})'}", flush=True)
            return name if code else None
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        return [name for name in pool.map(do, runs) if name is not None]


def run_one(options: argparse.Namespace) -> int:
    """Do one run to its end, or go on with it."""
    from benchmarks.learning.loop import Loop, Settings

    arm, _, seed = options.one.rpartition("/")
    folder = options.folder / options.policy
    sizes = SIZES[options.device] | OWN.get(options.policy, {})
    names = ("steps", "prompts", "samples", "learning_rate", "save_every", "micro_tokens", "memory")
    sizes |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sizes |= {"at_once": options.at_once}
    settings = Settings(options.policy, folder / "model", options.device, **sizes)
    target = RunFolder(folder / options.one)
    with target.locked():
        loop = Loop(settings, arm_named(arm), int(seed), target, lambda x: print(x, flush=True))
        try:
            loop.run()
        finally:
            loop.close()
    return 0


def begun_runs(folder: Path) -> dict[tuple[str, int], RunFolder]:
    """(arm, seed) -> the runs that have begun to train, in the order of the table of arms."""
    begun = {}
    for arm in ARMS:
        for path in sorted((folder / arm).glob("[0-9]*"), key=lambda x: int(x.name)):
            if (path / "predicted.json").is_file() and (path / "steps.jsonl").is_file():
                begun[arm, int(path.name)] = RunFolder(path)
    return begun


if __name__ == "__main__":
    sys.exit(main())
