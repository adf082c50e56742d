"""A sweep: time many points, one JSON line each, resumable. And the command line of every script that makes one.

FOLDER/<name>.jsonl         {"kernel": ..., the shape, "seconds", "spread", "replays", "sm_mhz", "key", "run"}
FOLDER/<name>.failed.jsonl  {"kernel": ..., the shape, "error", "key", "run"}; tried again, after all others
FOLDER/machines.jsonl       the machine of each run, by "run"
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from fp8plan import jsonl
from fp8plan.errors import Fp8PlanError
from fp8plan.runtime.measure.command_line import arguments, check_gpu, compile_first, select
from fp8plan.runtime.measure.kernels.timing import Call, Timing, graph_seconds
from fp8plan.runtime.measure.machine import engine_facts, machine_facts
from fp8plan.runtime.measure.notes import note


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
    """The work that times a point. calls: the same work on different data; columns: other columns of its row."""

    calls: Sequence[Call]
    columns: Mapping[str, Any] = field(default_factory=dict)
    timer: Callable[[Sequence[Call]], Timing] = graph_seconds


Prepare = Callable[[Point], Sequence[Call] | Work]


def sweep(points: Sequence[Point], prepare: Prepare, output: Path, *, seconds: float | None = None) -> list[str]:
    """Time the points that `output` has not, in the given order, for as long as `seconds` allow. Returns what failed.

    A point that fails is noted and passed over. Raises Fp8PlanError when a failure has broken the GPU context, with
    which nothing more can be measured in this process.
    """
    begun, run, noted = time.monotonic(), uuid4().hex[:8], set()
    output.parent.mkdir(parents=True, exist_ok=True)
    todo = remaining(points, output)
    if todo:
        jsonl.write(output.with_name("machines.jsonl"), {"run": run} | now() | machine_facts() | engine_facts())
    failures = []
    for number, point in enumerate(tqdm(todo, desc=output.stem, unit="point", file=sys.stderr)):
        if seconds is not None and time.monotonic() - begun > seconds:
            note(f"{output.stem}: time is up, {len(todo) - number} points are left for another time")
            break
        row = point.row | _attempt(point, prepare) | {"key": point.key, "run": run}
        jsonl.write(failed_file(output) if "error" in row else output, row)
        if "error" in row:
            failures.append(f"{point.kernel} {point.shape}: {row['error']}")
            alike = point.kernel, row["error"].partition(":")[0]
            if alike not in noted:  # a kernel that this GPU lacks fails in a hundred points
                noted.add(alike)
                note(f"{failures[-1]}; more of the kind would be in {failed_file(output)} alone")
            _clean_up()
    return failures


def remaining(points: Sequence[Point], output: Path) -> list[Point]:
    """The points that `output` does not have, those last that failed before. A torn last line is cut off."""
    for file in (output, failed_file(output)):
        if lost := file.exists() and jsonl.repair(file).cut:
            note(f"{file}: the last line was torn ({lost} bytes) and is cut off")
    done, failed = ({row["key"] for row in jsonl.rows(file)} for file in (output, failed_file(output)))
    return sorted((point for point in points if point.key not in done), key=lambda point: point.key in failed)


def failed_file(output: Path) -> Path:
    return output.with_suffix(".failed.jsonl")


def now() -> dict[str, str]:
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _attempt(point: Point, prepare: Prepare) -> dict[str, Any]:
    """Columns of the timing, or "error". Returns before cleaning up, so that no traceback holds on to tensors."""
    try:
        work = prepared(point, prepare)
        return asdict(work.timer(work.calls)) | dict(work.columns)
    except Exception as error:
        return {"error": _message(error)}


def _message(error: BaseException) -> str:
    """The first error of a chain: if a call fails while a graph is captured, the end of the capture fails too."""
    before = None if error.__suppress_context__ else error.__context__
    return _message(before) if before else f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def prepared(point: Point, prepare: Prepare) -> Work:
    found = prepare(point)
    return found if isinstance(found, Work) else Work(found)


def _clean_up() -> None:
    """Give memory back after a failure. Raises Fp8PlanError if the GPU context is broken, or the random numbers of
    all later points, as a failed graph capture can leave them."""
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


def command(
    name: str,
    doc: str | None,
    points: Callable[[str], list[Point]],
    bench: Callable[[], Prepare],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compiled: Container[str] | None = None,
    words: Sequence[str] | None = None,
) -> int:
    """The exit status of a script: 0, 1 if a point failed, 2 if it could not go on.

    points: "quick" or "full" -> points; bench: made within `context`, and only if there is something to measure;
    compiled: the kernels that are compiled at first use, None for all."""
    given, begun = arguments(name, doc, words), time.monotonic()
    output = given.output / f"{name}.jsonl"
    try:
        todo = remaining(select(points(given.grid), given.only, given.part), output)
        if given.list:
            sys.stdout.writelines(f"{json.dumps(point.row)}\n" for point in todo)
        note(f"{output}: {len(todo)} points are left")
        if given.list or not todo:
            return 0
        check_gpu(given.gpu)
        given.output.mkdir(parents=True, exist_ok=True)
        new = [point for point in todo if compiled is None or point.kernel in compiled]
        if given.compile_in and new:
            compile_first(name, given)
        with context():
            prepare = bench()
            if given.compile_only:
                return _compile(new, prepare)
            left = None if given.seconds is None else given.seconds - (time.monotonic() - begun)
            return 1 if sweep(todo, prepare, output, seconds=left) else 0
    except Fp8PlanError as error:
        note(f"{name}: {error}")
        return 2


def _compile(points: Sequence[Point], prepare: Prepare) -> int:
    """Call every point once. What fails is left to the timing, which notes it."""
    for point in tqdm(points, unit="point", file=sys.stderr):
        with suppress(Exception):
            prepared(point, prepare).calls[0]()
            sys.modules["torch"].cuda.synchronize()
    return 0
