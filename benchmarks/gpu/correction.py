"""Time and check the mismatch and its correction on one GPU: the fused kernels and torch's operations.

    python -m benchmarks.gpu.correction --output FILE.jsonl [--seconds 80] [--device cpu]

A row of FILE.jsonl each, by "what"; a part that fails has "error" instead, and the others go on:
    machine     date, GPU, driver, versions, hash of the source; `run` is in every row
    copy        1 GiB from one tensor to another, by cudaMemcpy or by an elementwise kernel of torch
    equality    fused kernels, torch's operations on the GPU and on the CPU, two by two, on the whole batch
    pack, measure, correct (token TIS), step (Monitor.step, no sinks): what a caller waits for, by path and form
    kernel      launches of one fused kernel, the GPU's time alone. `form` "identical": without a mismatch, so without
                atomics; `tried`: with a block, warps or copies (of the histogram) that fused.py does not have

form: packed 10.5 million tokens, or the same padded, 1,536 x 20,480, with a mask bool or int64. Batches rotate, and are
larger than L2. moved_bytes is what has to be read and written once, of_copy the share of the faster copy's rate,
of_copy_same_bytes of a copy of as many bytes. extra_bytes: most memory that a call had beyond what it began with.
With --device cpu everything is small, times mean nothing, and fused kernels run if TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import uuid4

import numpy as np

from benchmarks.gpu.source import source_hash
from fp8plan import jsonl
from fp8plan.runtime.correction.correct import correct
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.machine import engine_facts, machine_facts
from fp8plan.runtime.mismatch import backend as dispatch
from fp8plan.runtime.mismatch.measure import measure
from fp8plan.runtime.mismatch.tokens import pack
from fp8plan.runtime.monitor.monitor import Monitor

if TYPE_CHECKING:
    from torch import Tensor

FORMS = "packed", "padded_bool", "padded_int64"
ROWS, LENGTH = 1536, 20480
CPU_ROWS, CPU_LENGTH = 12, 2100
COPIED_BYTES = 2**30
BATCHES = 3  # that rotate
RUNS, BUDGET_S = 40, 0.4  # of a call: at most so many, and so long
# Tried for the two kernels that each step has: block, warps; and COPIES of the histogram.
MEASURE = (128, 1, 64), (256, 1, 64), (512, 2, 64), (512, 4, 64), (1024, 4, 64), (256, 2, 16), (256, 2, 256)
WEIGH = (256, 1), (1024, 1), (1024, 2), (2048, 4)

Call = Callable[[], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """The arguments of `pack`, and their sizes."""

    inputs: dict[str, Any]
    tokens: int
    places: int
    mask_bytes: int  # of a place, 0 without a mask

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that each function has to read and write once."""
        form = 2 * self.mask_bytes * self.places + 4 * self.places if self.mask_bytes else 5 * self.tokens
        found = {
            "pack": self.mask_bytes * self.places + (20 if self.mask_bytes else 12) * self.tokens,
            "measure": 8 * self.tokens,
            "correct": 4 * self.tokens + form,  # log ratios; weights and mask in the form that came in
        }
        return found | {"step": sum(found.values())}

    def kernel_moved(self, name: str) -> int:
        """Bytes of one launch of a fused kernel."""
        of_mask = self.places
        return {
            "measure": 8 * self.tokens,
            "weigh": 8 * self.tokens,
            "count": of_mask,
            "gather": of_mask + 20 * self.tokens,
            "scatter": of_mask + 8 * self.tokens,
        }[name]


class Bench:
    """The batches, and the rate of a copy."""

    def __init__(self, device: str) -> None:
        import torch

        self.device, self.gpu = torch.device(device), device == "cuda"
        rows, length = (ROWS, LENGTH) if self.gpu else (CPU_ROWS, CPU_LENGTH)
        self._padded = [padded(rows, length, seed, self.device) for seed in range(BATCHES)]
        self.paths = ("fused", "torch") if self.gpu or os.environ.get("TRITON_INTERPRET") == "1" else ("torch",)

    def batches(self, form: str) -> list[Batch]:
        return [_formed(form, *some) for some in self._padded]

    def copies(self) -> Iterator[Row]:
        for by in timing.COPIED_BY:
            found = self.timed_copy(COPIED_BYTES if self.gpu else 2**20, by)
            yield {"by": by, "moved_bytes": found[1], "gb_per_s": found[1] / found[0] / 1e9, "seconds": found[0]}

    @cache  # noqa: B019 - one bench a process
    def copy_rate(self, moved: int) -> float:
        """Bytes read and written in a second, by the faster way, when `moved` are."""
        return max(moved / seconds for seconds, moved in (self.timed_copy(moved // 2, by) for by in timing.COPIED_BY))

    def timed_copy(self, nbytes: int, by: str) -> tuple[float, int]:
        """(seconds, bytes read and written)"""
        import torch

        sources = [torch.zeros(nbytes // 4, device=self.device) for _ in range(BATCHES)]
        calls = [timing.copying(by, source) for source in sources]
        return self.kernel_seconds(calls)["seconds"], 2 * sources[0].nbytes

    def kernel_seconds(self, calls: Sequence[Call]) -> Row:
        return asdict(timing.graph_seconds(calls)) if self.gpu else self.seconds(calls)

    def seconds(self, calls: Sequence[Call]) -> Row:
        """Time that a caller waits for: median of one call, (p90 - p10) / median; after a call that compiles."""
        import torch

        took: list[float] = []
        wait = torch.cuda.synchronize if self.gpu else (lambda: None)
        until = time.perf_counter() + BUDGET_S
        for turn in range(RUNS + BATCHES):
            wait()
            begun = time.perf_counter()
            calls[turn % len(calls)]()
            wait()
            if turn >= BATCHES or not self.gpu:
                took.append(time.perf_counter() - begun)
            if time.perf_counter() > until and len(took) >= BATCHES:
                break
        low, median, high = np.percentile(took, (10, 50, 90))
        return {"seconds": float(median), "spread": float((high - low) / median), "replays": len(took)}

    def rates(self, moved: int, seconds: float) -> Row:
        found, whole = moved / seconds, COPIED_BYTES if self.gpu else 2**20
        return {
            "moved_bytes": moved,
            "gb_per_s": found / 1e9,
            "of_copy": found / self.copy_rate(2 * whole),
            "of_copy_same_bytes": found / self.copy_rate(moved),
        }

    def extra_bytes(self, call: Call) -> int | None:
        import torch

        if not self.gpu:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before


def padded(rows: int, length: int, seed: int, device: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(train, rollout, mask bool) [rows, length]: log-normal lengths, a third of the tokens valid."""
    import torch

    torch.manual_seed(seed)
    lengths = torch.empty(rows).log_normal_(0.0, 0.9)
    for _ in range(20):  # what the clamp takes is given to the others
        lengths = (lengths * (rows * length / 3) / lengths.sum()).clamp_(1, length)
    mask = torch.arange(length, device=device) < lengths.to(device)[:, None]
    rollout = torch.empty(rows, length, device=device).exponential_(2.0).neg_()
    return torch.randn(rows, length, device=device).mul_(0.05).add_(rollout), rollout, mask


def _formed(form: str, train: Tensor, rollout: Tensor, mask: Tensor) -> Batch:
    import torch

    tokens, names = int(mask.sum()), ("train_logprobs", "rollout_logprobs", "mask")
    if form == "packed":
        lengths = mask.sum(1).cpu()
        return Batch(
            dict(zip(names, (train[mask], rollout[mask]), strict=False)) | {"lengths": lengths}, tokens, tokens, 0
        )
    given = mask if form == "padded_bool" else mask.to(torch.int64)
    return Batch(dict(zip(names, (train, rollout, given), strict=True)), tokens, mask.numel(), given.itemsize)


@contextmanager
def on_path(name: str) -> Iterator[None]:
    with mock.patch.object(dispatch, "by_triton", return_value=name == "fused"):
        yield


def functions(bench: Bench, form: str, path: str) -> Iterator[Row]:
    """Rows of pack, measure, correct and step."""
    with on_path(path):
        batches = bench.batches(form)
        packed = [pack(**batch.inputs) for batch in batches]
        monitors = [Monitor() for _ in batches]
        calls = {
            "pack": [partial(pack, **batch.inputs) for batch in batches],
            "measure": [partial(measure, tokens) for tokens in packed],
            "correct": [partial(correct, tokens) for tokens in packed],
            "step": [partial(monitor.step, **batch.inputs) for monitor, batch in zip(monitors, batches, strict=True)],
        }
        for what, some in calls.items():
            found = bench.seconds(some)
            moved = batches[0].moved[what]
            yield (
                {"what": what, "form": form, "path": path, "tokens": batches[0].tokens}
                | found | bench.rates(moved, found["seconds"]) | {"extra_bytes": bench.extra_bytes(some[0])}
            )  # fmt: skip


def launches(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """The fused kernels that the calls launch, by name, as calls that launch them again."""
    from fp8plan.runtime.mismatch import fused

    run, found = fused.Tiles.run, {}

    def noted(tiles: Any, kernel: Any, *args: Any, **settings: Any) -> None:
        found.setdefault(kernel.fn.__name__, []).append(partial(run, tiles, kernel, *args, **settings))
        run(tiles, kernel, *args, **settings)

    with mock.patch.object(fused.Tiles, "run", noted):
        for call in calls:
            call()
    return found


def kernels(bench: Bench, form: str) -> Iterator[Row]:
    """Rows of every kernel of a step, as fused.py launches it."""
    from fp8plan.runtime.mismatch import fused

    settings = {"measure": fused.MEASURE, "weigh": fused.WEIGH}
    with on_path("fused"):
        batches = bench.batches("packed" if form == "identical" else form)
        if form == "identical":
            for batch in batches:
                batch.inputs["rollout_logprobs"] = batch.inputs["train_logprobs"]
        for name, calls in launches([partial(_whole, batch) for batch in batches]).items():
            block, warps = settings.get(name, fused.PACK)
            yield _kernel_row(bench, batches[0], name, calls, {"form": form, "block": block, "warps": warps})


def _whole(batch: Batch) -> None:
    tokens = pack(**batch.inputs)
    measure(tokens)
    correct(tokens)


def _kernel_row(bench: Bench, batch: Batch, name: str, calls: Sequence[Call], facts: Row) -> Row:
    found = bench.kernel_seconds(calls)
    moved = batch.kernel_moved(name)
    return {"kernel": name, "tokens": batch.tokens, **facts} | found | bench.rates(moved, found["seconds"])


def tried(bench: Bench) -> Iterator[Row]:
    """Rows of the two kernels with other blocks, warps and copies than fused.py has."""
    from fp8plan.runtime.mismatch import fused

    with on_path("fused"):
        batches = bench.batches("packed")
        tokens = [pack(**batch.inputs) for batch in batches]
        cases = [("measure", measure, MEASURE), ("weigh", correct, WEIGH)]
        for name, function, variants in cases:
            for block, warps, *histogram in variants:
                others = dict(zip(("COPIES",), histogram, strict=False))
                changed = {name.upper(): fused.Launch(block, warps)} | others
                facts = {"form": "packed", "block": block, "warps": warps}
                facts |= {key.lower(): value for key, value in others.items()}
                with mock.patch.multiple(fused, **changed):
                    calls = launches([partial(function, some) for some in tokens])[name]
                    yield _kernel_row(bench, batches[0], name, calls, facts)


def equality(bench: Bench, form: str) -> Iterator[Row]:
    """Rows of how far the paths are from one another, on one batch."""
    batch = bench.batches(form)[0]
    on_cpu = {name: value.cpu() for name, value in batch.inputs.items()}
    results = {path: _results(batch.inputs, path) for path in bench.paths} | {"cpu": _results(on_cpu, "torch")}
    names = list(results)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            yield {"form": form, "of": one, "from": other} | _differences(results[one], results[other])
    for path in bench.paths:
        again = _results(batch.inputs, path)
        same = np.array_equal(again[0].values, results[path][0].values)
        yield {"form": form, "of": path, "from": "itself, again", "same_bits": bool(same)} | _differences(
            again, results[path]
        )


def _results(inputs: Row, path: str) -> tuple[Any, Any]:
    with on_path(path):
        tokens = pack(**inputs)
        return measure(tokens), correct(tokens)


def _differences(ours: tuple[Any, Any], reference: tuple[Any, Any]) -> Row:
    """weights_ulps: the largest difference; *_relative: the largest, of a number against itself and 1e-9 of a token."""
    import torch

    sums, theirs = ours[0].values, reference[0].values
    scale = np.abs(theirs) + 1e-9 * ours[0]["tokens"]
    bits = [some[1].weights.cpu().view(torch.int32) for some in (ours, reference)]
    apart = (bits[0] - bits[1]).abs()
    metrics, others = (some[1].metrics for some in (ours, reference))
    scalars = {f"{name}_relative": abs(ours[0][name] / reference[0][name] - 1) for name in ("k1", "k3", "ratio")}
    return {
        "weights_ulps": int(apart.max()),
        "weights_different": int(apart.count_nonzero()),
        "masks_equal": bool(torch.equal(ours[1].mask.cpu(), reference[1].mask.cpu())),
        "sums_relative": float((np.abs(sums - theirs) / scale).max()),
        "counts_equal": bool(np.array_equal(ours[0]["histogram_tokens"], reference[0]["histogram_tokens"])),
        "metrics_relative": max(abs(metrics[k] - others[k]) / (abs(others[k]) + 1e-9) for k in others),
    } | scalars


def parts(bench: Bench) -> Iterator[tuple[Row, Callable[[], Iterator[Row]]]]:
    """The parts, most wanted first: the columns that all rows of a part share, and a function that gives its rows."""
    yield {"what": "copy"}, bench.copies
    yield {"what": "equality"}, partial(equality, bench, "packed")
    fused = "fused" in bench.paths
    if fused:
        yield {"what": "kernel", "form": "packed"}, partial(kernels, bench, "packed")
    for path in bench.paths:
        yield {"what": "functions", "form": "packed", "path": path}, partial(functions, bench, "packed", path)
    yield {"what": "equality"}, partial(equality, bench, "padded_bool")
    if fused:
        yield {"what": "kernel", "form": "padded_bool"}, partial(kernels, bench, "padded_bool")
        yield {"what": "kernel", "form": "identical"}, partial(kernels, bench, "identical")
    for form in FORMS[1:]:
        for path in bench.paths:
            yield {"what": "functions", "form": form, "path": path}, partial(functions, bench, form, path)
    if fused:
        yield {"what": "kernel", "tried": True}, partial(tried, bench)


def _card(device: str) -> Row:
    """Facts from CUDA about the GPU, beside `machine_facts`."""
    import torch

    if device == "cpu":
        return {}
    card = torch.cuda.get_device_properties(0)
    return {"sms": card.multi_processor_count, "l2_bytes": card.L2_cache_size, "cuda": torch.version.cuda}


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 if a part failed or there was no time for it."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="file of rows, which is appended to")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin no part after so many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given, begun, run, lost = parser.parse_args(words), time.monotonic(), uuid4().hex[:8], 0
    given.output.parent.mkdir(parents=True, exist_ok=True)

    def note(row: Row) -> None:
        row = {"run": run, "at_s": round(time.monotonic() - begun, 2)} | row
        jsonl.write(given.output, row)
        print(row, flush=True)

    note({"what": "machine", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "device": given.device}
         | machine_facts() | engine_facts() | _card(given.device) | {"source": source_hash()})  # fmt: skip
    for facts, rows in parts(Bench(given.device)):
        if time.monotonic() - begun > given.seconds:
            note(facts | {"error": f"no time was left after {given.seconds:.0f} s"})
            lost += 1
            continue
        try:
            for row in rows():
                note(facts | row)
        except Exception as error:  # the others are still worth having
            note(facts | {"error": f"{type(error).__name__}: {error}"[:500]})
            lost += 1
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
