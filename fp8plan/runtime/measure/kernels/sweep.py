"""A sweep: time many points, one JSON line each, resumable; and the command line of every script that makes one.

FOLDER/<name>.jsonl         {"kernel": ..., the shape, "seconds", "spread", "replays", "sm_mhz", "key", "run"}
FOLDER/<name>.failed.jsonl  {"kernel": ..., the shape, "error", "refused", "key", "run"}; tried again, after all others.
                            refused: this GPU lacks the memory or the kernel
FOLDER/machines.jsonl       the machine of each run, by "run"
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import numpy as np
from tqdm import tqdm

from fp8plan import jsonl
from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.runtime.measure.calibrate import add_compile, compilers, note
from fp8plan.runtime.measure.kernels.timing import Call, Timing, graph_seconds
from fp8plan.runtime.measure.machine import engine_facts, gpu_facts, machine_facts


@dataclass(frozen=True)
class Point:
    """A kernel ("gemm.bf16") and the sizes of one call of it, JSON scalars."""

    kernel: str
    shape: dict[str, Any]

    @property
    def row(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **self.shape}

    @property
    def key(self) -> str:
        """A key that is the same for the same kernel and sizes, in whatever order they are named."""
        return sha256(json.dumps(self.row, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Work:
    """The timed work of a point. calls: the same work on different data; columns: more columns of its row"""

    calls: Sequence[Call]
    columns: Mapping[str, Any] = field(default_factory=dict)
    timer: Callable[[Sequence[Call]], Timing] = graph_seconds


Prepare = Callable[[Point], Work]


def shuffled(points: Iterable[Point]) -> list[Point]:
    """Each point once, in an order that can be cut anywhere: neighbours are unrelated."""
    ordered = list({point.key: point for point in points}.values())
    return [ordered[i] for i in np.random.default_rng(0).permutation(len(ordered))]


def sweep(points: Sequence[Point], prepare: Prepare, output: Path, *, seconds: float | None = None) -> list[str]:
    """Time the points that `output` lacks, in their order, for as long as `seconds` allow. Return the failures.

    A point that fails is noted and passed over. One that this GPU cannot have is no failure. Raises Fp8PlanError if a
    failure has broken this process's GPU context.
    """
    begun, run, noted = time.monotonic(), uuid4().hex[:8], set()
    output.parent.mkdir(parents=True, exist_ok=True)
    todo = remaining(points, output)
    if todo:
        date = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        jsonl.write(output.with_name("machines.jsonl"), {"run": run} | date | machine_facts() | engine_facts())
    failures = []
    for number, point in enumerate(tqdm(todo, desc=output.stem, unit="point", file=sys.stderr)):
        if seconds is not None and time.monotonic() - begun > seconds:
            note(f"{output.stem}: time is up, {len(todo) - number} points are left for another time")
            break
        row = point.row | _attempt(point, prepare) | {"key": point.key, "run": run}
        jsonl.write(failed_file(output) if "error" in row else output, row)
        if "error" in row:
            text = f"{point.kernel} {point.shape}: {row['error']}"
            if not row["refused"]:
                failures.append(text)
            alike = point.kernel, row["error"].partition(":")[0]
            if alike not in noted:  # a kernel that this GPU lacks would fail at a hundred points
                noted.add(alike)
                note(f"{text}; more of the kind would be in {failed_file(output)} alone")
            _clean_up()
    return failures


def remaining(points: Sequence[Point], output: Path) -> list[Point]:
    """The points that `output` lacks, earlier failures last. A torn last line is cut off."""
    for file in (output, failed_file(output)):
        if lost := file.exists() and jsonl.append(file, b"").cut:
            note(f"{file}: the last line was torn ({lost} bytes) and is cut off")
    done, failed = ({row["key"] for row in jsonl.rows(file)} for file in (output, failed_file(output)))
    return sorted((point for point in points if point.key not in done), key=lambda point: point.key in failed)


def failed_file(output: Path) -> Path:
    return output.with_suffix(".failed.jsonl")


def _attempt(point: Point, prepare: Prepare) -> dict[str, Any]:
    """Columns of the timing or of the error. The clean-up follows later, so that no traceback holds on to tensors."""
    try:
        work = prepare(point)
        return asdict(work.timer(work.calls)) | dict(work.columns)
    except Exception as error:
        return _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    """Columns of the first error of a chain. A failed call in a graph's capture makes its end fail, too."""
    before = None if error.__suppress_context__ else error.__context__
    if before:
        return _failure(before)
    text = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return {"error": text, "refused": isinstance(error, ConfigError)}


def _clean_up() -> None:
    """Free memory after a failure. Raises Fp8PlanError if it broke the GPU context or the generator of random numbers,
    as a failed graph capture can."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    gc.collect()
    try:
        torch.rand(1, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        raise Fp8PlanError(f"the GPU context is broken; type the same command to go on ({error})") from None


# ------------------------------------------------------------------------------------------------ command line


def arguments(name: str, doc: str | None, words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.{name}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help=f"folder of {name}.jsonl, which is appended to")
    parser.add_argument("--grid", choices=("quick", "full"), default="full", help="quick: about two minutes")
    parser.add_argument("--seconds", type=float, help="stop after so many; the same command goes on")
    parser.add_argument("--gpu", default="auto", help="refuse to measure another one than this")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="kernels as the rows name them")
    part = "every N-th point from the I-th, to share the work"
    parser.add_argument("--part", default="1/1", metavar="I/N", help=part)
    add_compile(parser)
    parser.add_argument("--compile-only", action="store_true", help="run every point once, time and write nothing")
    parser.add_argument("--list", action="store_true", help="print the points that are left, and stop")
    return parser.parse_args(words)


def select(points: Sequence[Point], only: Sequence[str], part: str) -> list[Point]:
    """The part "I/N" of the points of the named kernels (none: all). Raises ConfigError for unknown ones."""
    known = sorted({point.kernel for point in points})
    if unknown := sorted(set(only) - set(known)):
        raise ConfigError(f"--only is {unknown[0]!r}; allowed: {', '.join(known)}")
    first, step = _part(part)
    return [point for point in points if not only or point.kernel in only][first - 1 :: step]


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    first, step = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= step:
        raise ConfigError(f"--part is {text!r}; allowed: I/N with I from 1 to N, as in 2/4")
    return first, step


def check_gpu(name: str) -> None:
    """Raise ConfigError if `name` is not this machine's GPU, or if there is none."""
    product = gpu_facts()["gpu_product"]
    if product is None:
        raise ConfigError("no NVIDIA GPU here, or none visible; measure on a machine that has one")
    if name != "auto" and not find_gpu(name).is_of(product):
        raise ConfigError(f"--gpu is {name} ({find_gpu(name).product}), this machine has {product}; type --gpu auto")


def run_shares(
    command: Sequence[str], processes: int, part: str = "1/1", log: IO[bytes] | None = None, until: float = math.inf
) -> bool:
    """Run `command` in `processes` processes, each on a share of the part of its points. Return True if none failed.

    Each takes the memory of a CUDA context, the pools and one point. They write to `log`, or where this process writes,
    and are ended at `until` of time.monotonic().
    """
    parts = shares(part, processes)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for share in parts:
            children.append(subprocess.Popen([*command, "--part", share], stdout=log, stderr=log))
        while any(child.poll() is None for child in children) and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return not any(child.returncode for child in children)


def shares(part: str, number: int) -> list[str]:
    """A part "I/N" split into `number` parts."""
    first, step = _part(part)
    return [f"{first + i * step}/{step * number}" for i in range(number)]


def compile_first(name: str, options: argparse.Namespace) -> None:
    """Run this command with --compile-only, for half of --seconds at most. The timing finds its kernels on the disk."""
    same = [sys.executable, "-m", f"{__package__}.{name}", "--compile-only"]
    same += ["--output", str(options.output), "--grid", options.grid]
    same += ["--only", *options.only] if options.only else []
    until = time.monotonic() + (options.seconds or math.inf) / 2  # the rest is for timing
    processes = options.compile or compilers(find_gpu(options.gpu))
    with open(options.output / f"{name}.compile.log", "ab") as log:
        run_shares(same, processes, options.part, log, until)


def command(
    name: str,
    doc: str | None,
    points: Callable[[str], list[Point]],
    bench: Callable[[], Prepare],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compiled: Container[str] | None = None,
    words: Sequence[str] | None = None,
) -> int:
    """Run a script. Return its exit status: 0, 1 if a point failed, 2 if it could not go on.

    points:   "quick" or "full" -> points
    bench:    made within `context`, and only if there is something to measure
    compiled: kernels that are compiled at first use; None for all
    """
    options, begun = arguments(name, doc, words), time.monotonic()
    output = options.output / f"{name}.jsonl"
    try:
        todo = remaining(select(points(options.grid), options.only, options.part), output)
        if options.list:
            sys.stdout.writelines(f"{json.dumps(point.row)}\n" for point in todo)
        note(f"{output}: {len(todo)} points are left")
        if options.list or not todo:
            return 0
        check_gpu(options.gpu)
        options.output.mkdir(parents=True, exist_ok=True)
        new = [point for point in todo if compiled is None or point.kernel in compiled]
        if options.compile is not None and new:
            compile_first(name, options)
        with context():
            prepare = bench()
            if options.compile_only:
                return compile_here(new, prepare)
            left = None if options.seconds is None else options.seconds - (time.monotonic() - begun)
            return 1 if sweep(todo, prepare, output, seconds=left) else 0
    except Fp8PlanError as error:
        note(f"{name}: {error}")
        return 2


def compile_here(points: Sequence[Point], prepare: Prepare) -> int:
    """Call every point once. Return 1 if one failed, which a note says, else 0."""
    failed = 0
    for point in points:
        try:
            prepare(point).calls[0]()
            sys.modules["torch"].cuda.synchronize()
        except Exception as error:
            failure = _failure(error)
            failed |= not failure["refused"]
            note(f"{point.kernel} {point.shape} did not run: {failure['error']}")
        with suppress(Exception):
            sys.modules["torch"].cuda.empty_cache()  # which other processes need
    return failed
