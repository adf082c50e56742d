"""Mismatch metrics and token TIS of one batch: fp8plan against verl 0.9.1's rollout_corr_helper, in one run.

    .venv-test/bin/python benchmarks/correction_speed.py [--runs 3] [--threads 2]

writes benchmarks/results/correction_speed.jsonl, a line for each run.

Both get the same padded tensors, a third of whose tokens are valid, and give weights, a mask and all metrics. Each
measurement is a process of its own; the two alternate. On a machine that does other work, take --threads 1: threads
that wait for one another cost more than they bring. Extra memory is the peak of the process's resident memory while
it works, sampled each 2 ms, over what it was when it began: what is returned is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "correction_speed.jsonl"
MONITOR = "Monitor.step"
TOKENS = 8_000_000
CONFIG = {
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "token IcePop + seq_mean_k3": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_5.0",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.01,
    },
    "metrics alone": {"rollout_is": None},
}


def batch(rows: int, length: int) -> tuple[Any, Any, Any]:
    """(train, rollout, mask) [rows, length]: log-normal lengths, a third of the tokens valid, mask int64 as in verl."""
    from benchmarks.gpu.correction import padded

    train, rollout, mask = padded(rows, length, 0, "cpu")
    return train, rollout, mask.long()


def verl(config: dict[str, Any]) -> Callable[[Any, Any, Any], Any]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return lambda *data: compute_rollout_correction_and_rejection_mask(*data, **config)


def fp8plan(config: dict[str, Any]) -> Callable[[Any, Any, Any], Any]:
    from fp8plan.runtime.correction.correct import correct
    from fp8plan.runtime.correction.verl import from_verl
    from fp8plan.runtime.mismatch.measure import measure, pack

    settings = from_verl(config)

    def run(*data: Any) -> Any:
        tokens = pack(*data)
        return correct(tokens, settings), measure(tokens).metrics()

    return run


class Peak:
    """The largest resident memory of this process while in the block, over that at its beginning, in bytes."""

    def __enter__(self) -> Peak:
        self.begin = self.top = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self.top, _resident()) - self.begin

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.top = max(self.top, _resident())


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one(who: str, what: str, rows: int, length: int, threads: int) -> dict[str, float]:
    """Time one function in this process: seconds and extra bytes of its second call. The first has a few rows."""
    import torch

    torch.set_num_threads(threads)
    data = batch(rows, length)
    run = {"verl": verl, "fp8plan": fp8plan}[who](CONFIG[what])
    run(*(tensor[:8] for tensor in data))  # what is imported and compiled on the first call
    with Peak() as peak:
        start, used = time.perf_counter(), time.process_time()
        result = run(*data)
        seconds, used = time.perf_counter() - start, time.process_time() - used
    del result
    return {"seconds": seconds, "cpu_seconds": used, "extra_bytes": peak.extra}


def monitor_step(tokens: int, sequences: int) -> dict[str, float]:
    """Time Monitor.step in this process: packed batch, one thread, with a run file; seconds, the best of five."""
    import numpy as np
    import torch

    from fp8plan.runtime.monitor.monitor import Monitor
    from fp8plan.runtime.monitor.sinks import JsonLines

    torch.set_num_threads(1)
    shares = np.random.default_rng(0).lognormal(0, 0.9, sequences)
    lengths = (shares / shares.sum() * tokens).astype(int)
    lengths[0] += tokens - lengths.sum()
    rollout = -3 * torch.rand(tokens)
    train = rollout + 0.05 * torch.randn(tokens)
    took = []
    with tempfile.TemporaryDirectory() as folder, Monitor(sinks=[JsonLines(Path(folder) / "run.jsonl")]) as monitor:
        for _ in range(5):
            start = time.perf_counter()
            monitor.step(train, rollout, lengths=lengths)
            took.append(time.perf_counter() - start)
    return {"seconds": min(took)}


def table(path: Path = RESULTS) -> str:
    """The medians of the committed runs, in Markdown."""
    from benchmarks.tables import markdown
    from fp8plan import jsonl

    rows = jsonl.rows(path)
    heads = ("on a batch of", "verl 0.9.1", "fp8plan", "faster", "verl, CPU time", "fp8plan, CPU time", "extra memory")
    lines = []
    for what in CONFIG:
        theirs, ours = (
            {name: statistics.median(row[name] for row in rows if (row["what"], row["who"]) == (what, who))
             for name in ("seconds", "cpu_seconds", "extra_bytes")}
            for who in ("verl", "fp8plan")
        )  # fmt: skip
        gigabytes = " / ".join(f"{one['extra_bytes'] / 1e9:.2f}" for one in (theirs, ours))
        cells = [
            f"{rows[0]['rows']:,} x {rows[0]['length']:,}, {what}",
            *(f"{one['seconds']:.2f} s" for one in (theirs, ours)),
            f"{theirs['seconds'] / ours['seconds']:.1f}x",
            *(f"{one['cpu_seconds']:.2f} s" for one in (theirs, ours)),
            f"{gigabytes} GB ({ours['extra_bytes'] / theirs['extra_bytes']:.0%})",
        ]
        lines.append(cells)
    (step,) = (row for row in rows if row["what"] == MONITOR)
    of_step = f"{step['tokens']:,} packed tokens, {MONITOR}, best of five"
    lines.append([of_step, "", f"{step['seconds']:.2f} s", "", "", "", ""])
    machine = (
        f"{rows[0]['cpu_model']}, {rows[0]['threads']} threads, {step['what']} one; torch {rows[0]['torch_version']}"
    )
    runs = sum((row["what"], row["who"]) == (what, "verl") for row in rows)
    return f"{markdown.table(heads, lines)}\n\nElse medians of {runs} runs, on {rows[0]['date']}; {machine}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--length", type=int, default=20480)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        who, what = given.one
        found = (
            monitor_step(TOKENS, given.rows)
            if what == MONITOR
            else one(who, what, given.rows, given.length, given.threads)
        )
        print(json.dumps(found))
        return
    from fp8plan.runtime.measure.machine import machine_facts

    facts = {name: machine_facts()[name] for name in ("cpu_count", "cpu_model", "torch_version")}
    facts |= {name: getattr(given, name) for name in ("rows", "length", "threads")} | {
        "date": time.strftime("%Y-%m-%d")
    }
    asked = [(who, what) for what in CONFIG for _ in range(given.runs) for who in ("verl", "fp8plan")]
    with given.output.open("w") as file:
        for who, what in [*asked, ("fp8plan", MONITOR)]:
            command = [sys.executable, __file__, "--one", who, what]
            for name in ("rows", "length", "threads"):
                command += [f"--{name}", str(getattr(given, name))]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = {"what": what, "who": who} | json.loads(done.stdout.splitlines()[-1])
            row |= {"tokens": TOKENS} if what == MONITOR else {}
            file.write(json.dumps(row | facts) + "\n")
            file.flush()
    print(table(given.output))


if __name__ == "__main__":
    main()
