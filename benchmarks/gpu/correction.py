"""Time and check the mismatch and its correction on one GPU.

    python -m benchmarks.gpu.correction --output FILE.jsonl [--seconds 80] [--device cpu]

A row of FILE.jsonl each, by "what"; a part that fails has "error" instead, and the others go on:
    machine     date, GPU, driver, versions, hash of the source; `run` is in every row
    equality    the GPU against the CPU, and against itself once more, on a whole batch
    pack, measure, correct (token TIS), step (Monitor.step, no sinks): what a caller waits for, by form

form: packed 10.5 million tokens, or the same padded, 1,536 x 20,480, with a mask bool or int64. Batches rotate, and are
larger than L2. extra_bytes: most memory that a call had beyond what it began with. With --device cpu everything is
small, and times mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from benchmarks.gpu.source import source_hash
from fp8plan import jsonl
from fp8plan.runtime.measure.machine import engine_facts, machine_facts
from fp8plan.runtime.watch.correction.correct import correct
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.monitor.monitor import Monitor

if TYPE_CHECKING:
    from torch import Tensor

FORMS = "packed", "padded_bool", "padded_int64"
ROWS, LENGTH = 1536, 20480
CPU_ROWS, CPU_LENGTH = 12, 2100
BATCHES = 3  # that rotate
RUNS, BUDGET_S = 40, 0.4  # of a call: at most so many, and so long

Call = Callable[[], Any]
Row = dict[str, Any]


class Bench:
    """The batches, and the clock."""

    def __init__(self, device: str) -> None:
        import torch

        self.device, self.gpu = torch.device(device), device == "cuda"
        rows, length = (ROWS, LENGTH) if self.gpu else (CPU_ROWS, CPU_LENGTH)
        self._padded = [padded(rows, length, seed, self.device) for seed in range(BATCHES)]

    def batches(self, form: str) -> list[Row]:
        """The arguments of `pack`, for each batch."""
        return [_formed(form, *some) for some in self._padded]

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


def _formed(form: str, train: Tensor, rollout: Tensor, mask: Tensor) -> Row:
    import torch

    if form == "packed":
        return {"train_logprobs": train[mask], "rollout_logprobs": rollout[mask], "lengths": mask.sum(1).cpu()}
    as_asked = mask if form == "padded_bool" else mask.to(torch.int64)
    return {"train_logprobs": train, "rollout_logprobs": rollout, "mask": as_asked}


def functions(bench: Bench, form: str) -> Iterator[Row]:
    """Rows of pack, measure, correct and step."""
    batches = bench.batches(form)
    packed = [pack(**batch) for batch in batches]
    monitors = [Monitor() for _ in batches]
    calls = {
        "pack": [partial(pack, **batch) for batch in batches],
        "measure": [partial(measure, tokens) for tokens in packed],
        "correct": [partial(correct, tokens) for tokens in packed],
        "step": [partial(monitor.step, **batch) for monitor, batch in zip(monitors, batches, strict=True)],
    }
    for what, some in calls.items():
        facts = {"what": what, "form": form, "tokens": len(packed[0])}
        yield facts | bench.seconds(some) | {"extra_bytes": bench.extra_bytes(some[0])}


def equality(bench: Bench, form: str) -> Iterator[Row]:
    """Rows of how far results on one batch are from one another."""
    batch = bench.batches(form)[0]
    ours, again = _results(batch), _results(batch)
    on_cpu = _results({name: value.cpu() for name, value in batch.items()})
    yield {"form": form, "from": "cpu"} | _differences(ours, on_cpu)
    same = np.array_equal(again[0].values, ours[0].values)
    yield {"form": form, "from": "itself, again", "same_bits": bool(same)} | _differences(again, ours)


def _results(batch: Row) -> tuple[Any, Any]:
    tokens = pack(**batch)
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
    for form in FORMS:
        if form != "padded_int64":
            yield {"what": "equality"}, partial(equality, bench, form)
        yield {"what": "functions", "form": form}, partial(functions, bench, form)


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
