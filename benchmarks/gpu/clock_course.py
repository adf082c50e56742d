"""Clock and speed of kernels from the first millisecond on, until the power limit holds them.

    python -m benchmarks.gpu.clock_course --output profiles/h200_sxm/vllm-0.26.0/kernels/clock_course.jsonl

The kernels are those of fp8plan.runtime.measure.kernels.power. Each runs after a second of rest for three seconds. A
row has, of each stretch of them, when it ended, the seconds of a call, and the clock of the SMs: cycles of their own
counters over nanoseconds of the global timer, read before and after, a median over SMs. NVML's clock is a reading now
and then, and higher: 1,459 MHz where BF16 GEMMs of 512 rows run at 1,316. It needs CuPy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fp8plan import jsonl
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.gemm import model_config
from fp8plan.runtime.measure.kernels.power import points, work
from fp8plan.runtime.measure.machine import machine_facts

STRETCHES_S = (0.002, 0.003, 0.005, 0.005, 0.005, 0.01, 0.01, 0.01, 0.02, 0.03, 0.05, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0)
REST_S = 1.0
SOURCE = r"""
extern "C" __global__ void stamp(unsigned long long* out) {
    unsigned int sm;
    unsigned long long cycles, nanoseconds;
    if (threadIdx.x == 0) {
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
        out[2 * sm] = cycles;
        out[2 * sm + 1] = nanoseconds;
    }
}
"""


class Stamps:
    """The counters of every SM, read in stream order."""

    def __init__(self) -> None:
        import cupy

        self._kernel, self._cupy = cupy.RawKernel(SOURCE, "stamp"), cupy
        self._sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]

    def __call__(self, stream: Any) -> Any:
        out = self._cupy.zeros((self._sms, 2), dtype=self._cupy.uint64)
        with self._cupy.cuda.ExternalStream(stream.cuda_stream):
            self._kernel((4 * self._sms,), (1024,), (out,))
        return out


def course(calls: Sequence[timing.Call], stamps: Stamps) -> list[dict[str, float]]:
    """The stretches of one kernel."""
    import torch

    with torch.cuda.stream(timing.stream()):
        graph, number = timing.captured(calls, STRETCHES_S[0])
        one = min(timing.elapsed(graph.replay, 2))
        torch.cuda.synchronize()
        time.sleep(REST_S)
        found, counts = [stamps(timing.stream())], [max(1, round(seconds / one)) for seconds in STRETCHES_S]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(counts) + 1)]
        events[0].record()
        for count, event in zip(counts, events[1:], strict=True):
            for _ in range(count):
                graph.replay()
            found.append(stamps(timing.stream()))
            event.record()
        torch.cuda.synchronize()
    gained = np.diff(np.array([x.get() for x in found]), axis=0).astype(float)  # (stretches, SMs, 2)
    clocks = np.median(gained[:, :, 0] / gained[:, :, 1], axis=1) * 1e3
    each = np.array([before.elapsed_time(after) / 1e3 for before, after in pairwise(events)])
    rows = zip(np.cumsum(each), each / (np.array(counts) * number), clocks, strict=True)
    return [{"until_s": float(until), "seconds": float(took), "sm_mhz": float(mhz)} for until, took, mhz in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    with model_config():
        facts, stamps = machine_facts(), Stamps()
        for point in points("full"):
            row = point.row | {"course": course(work(point).calls, stamps)}
            jsonl.write(given.output, facts | row)
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
