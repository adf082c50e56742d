"""Seconds of GPU kernels, and the random data and the vLLM configuration that they run with.

Many calls on cold weights are captured in one CUDA graph: a step of the engine is a graph replay, too, without launch
gaps from Python. `graph_seconds` is too short for the power limit to matter. `sustained_seconds` runs until clock and
power have settled, and reads them (fp8plan.model.cost.power).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8plan.model.precision import E4M3_MAX
from fp8plan.runtime.measure.machine import gpu_energy_j, gpu_power_w, sm_clock_mhz

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

LEAST_COPIES, MOST_COPIES, TIMES_L2 = 3, 256, 4
LEAST_REPLAYS, MOST_REPLAYS = 5, 40
BUDGET_S = 0.03  # of all replays, unless LEAST_REPLAYS take longer
CALLS_PER_REPLAY = 64  # short calls in a replay, which is then long against the resolution of events (0.5 us)
AHEAD_CYCLES = 2_000_000  # about 1 ms in which the GPU waits while Python queues the timed work
SETTLE_S = 1.0  # NVML's watts are means over a second
SUSTAINED_S = 2.0
QUEUED_S = 0.05  # seconds of work that the GPU has queued meanwhile
FILLED_AT_ONCE = 2**28  # elements


@dataclass(frozen=True, slots=True)
class Timing:
    """One timing.

    seconds: median of one call; spread: (p90 - p10) / median of the replays; sm_mhz: clock while they ran
    """

    seconds: float
    spread: float
    replays: int
    sm_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class SustainedTiming(Timing):
    """One timing of a kernel that runs for seconds. replays: timed batches of QUEUED_S

    sm_mhz:   mean of NVML's readings
    power_w:  mean of NVML's readings, as in a rollout's record; None if NVML does not know
    energy_w: mean power by NVML's counter of energy, over the same seconds; up to 31 W from power_w on an H200
    """

    power_w: float | None = None
    energy_w: float | None = None


def copies(bytes_per_call: int, l2_bytes: int) -> int:
    """The number of copies of a call's data for a working set of TIMES_L2 times the L2 cache, so each is evicted.

    There are LEAST_COPIES to MOST_COPIES. At the most, with calls below 1 MiB on an H200, data are partly warm, as in
    an engine with layers that small.
    """
    wanted = -(-TIMES_L2 * l2_bytes // max(1, bytes_per_call))
    return min(max(wanted, LEAST_COPIES), MOST_COPIES)


def graph_seconds(calls: Sequence[Call]) -> Timing:
    """Time one call of `calls` (the same work on different data), all captured in one CUDA graph.

    They first run eagerly, on the capturing stream, to compile kernels and allocate workspaces. All replays take about
    BUDGET_S, or longer if LEAST_REPLAYS need it. Raises the calls' errors.
    """
    import torch

    with torch.cuda.stream(stream()):
        graph, number = captured(calls, BUDGET_S)
        first = min(elapsed(graph.replay, 2))
        return _timing(graph.replay, first, number)


def sustained_seconds(calls: Sequence[Call], settle_s: float = SETTLE_S, run_s: float = SUSTAINED_S) -> SustainedTiming:
    """Time one call of `calls` (the same work on different data), and the GPU's power meanwhile.

    They are repeated for `settle_s` seconds untimed and for `run_s` seconds timed. Raises the calls' errors.
    """
    import torch

    with torch.cuda.stream(stream()):
        graph, number = captured(calls, QUEUED_S)
        batch = max(1, round(QUEUED_S / min(elapsed(graph.replay, 2))))
        _repeated(graph.replay, batch, settle_s)
        begun, joules = time.monotonic(), gpu_energy_j()
        each, clocks, powers = _repeated(graph.replay, batch, run_s)
        used, took = gpu_energy_j(), time.monotonic() - begun
    low, median, high = np.percentile(each, (10, 50, 90))
    return SustainedTiming(
        seconds=float(np.mean(each)) / (batch * number),
        spread=float((high - low) / median),
        replays=len(each),
        sm_mhz=round(np.mean(clocks)) if clocks else None,
        power_w=float(np.mean(powers)) if powers else None,
        energy_w=None if used is None or joules is None else (used - joules) / took,
    )


def _repeated(replay: Callable[[], Any], batch: int, seconds: float) -> tuple[list[float], list[int], list[float]]:
    """Seconds of each batch of replays, for `seconds` in all, with NVML's clocks and watts.

    The GPU always runs a batch during a reading.
    """
    import torch

    events, readings, begun = [torch.cuda.Event(enable_timing=True)], [], time.monotonic()
    events[0].record()
    while time.monotonic() - begun < seconds:
        for _ in range(batch):
            replay()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-2].synchronize()
        readings.append((sm_clock_mhz(), gpu_power_w()))
    events[-1].synchronize()
    each = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
    clocks, powers = zip(*readings, strict=True)
    return each, [mhz for mhz in clocks if mhz is not None], [watts for watts in powers if watts is not None]


def captured(calls: Sequence[Call], budget_s: float) -> tuple[Any, int]:
    """A CUDA graph of calls, and their number. LEAST_REPLAYS take `budget_s`, unless each call once takes longer.

    Call it on the capturing stream.
    """
    import torch

    on = stream()
    on.wait_stream(torch.cuda.default_stream())
    _run(calls)
    torch.cuda.synchronize()
    one_pass = elapsed(lambda: _run(calls), 1)[0]
    rounds = max(1, min(-(-CALLS_PER_REPLAY // len(calls)), int(budget_s / LEAST_REPLAYS / one_pass)))
    graph = torch.cuda.CUDAGraph()
    with _uncollected(), torch.cuda.graph(graph, stream=on):
        for _ in range(rounds):
            _run(calls)
    return graph, rounds * len(calls)


def eager_seconds(calls: Sequence[Call]) -> Timing:
    """Time one call of `calls`, launched from Python one by one. Launches bound short kernels."""
    import torch

    _run(calls)
    torch.cuda.synchronize()
    first = elapsed(lambda: _run(calls), 1, ahead=0)[0]
    return _timing(lambda: _run(calls), first, len(calls), ahead=0)


@cache
def stream() -> Any:
    """The stream of all captures: cuBLAS keeps a workspace for each stream."""
    import torch

    return torch.cuda.Stream()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch Python's garbage collector off. If it destroys an older graph, a capture fails and breaks the generator
    of random numbers (pytorch pull request 161037).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _timing(replay: Callable[[], Any], first_s: float, calls: int, ahead: int = AHEAD_CYCLES) -> Timing:
    number = int(min(max(LEAST_REPLAYS, BUDGET_S / first_s), MOST_REPLAYS))
    clocks: list[int | None] = []
    replays = elapsed(replay, number, ahead, lambda: clocks.append(sm_clock_mhz()))
    low, median, high = np.percentile(replays, (10, 50, 90)) / calls
    return Timing(float(median), float((high - low) / median), number, clocks[0])


def elapsed(
    replay: Callable[[], Any],
    number: int,
    ahead: int = AHEAD_CYCLES,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[float]:
    """The seconds of `number` replays, back to back. They start `ahead` GPU cycles after Python's first launch."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    torch.cuda._sleep(ahead)
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    meanwhile()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def l2_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def random_normal(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    """Standard normal values of `dtype` "bf16" or "fp8" (E4M3)."""
    import torch

    values = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return values.to(torch.float8_e4m3fn) if dtype == "fp8" else values


def random_pool(elements: int, dtype: str, share: float, deviation: float = 1.0) -> torch.Tensor:
    """Up to `elements` normal values of "bf16" or "fp8", which take at most `share` of the free memory.

    A pool is read in many shapes, because filling tens of gigabytes for each point would take longer than timing it.
    """
    import torch

    element = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    room = int(torch.cuda.mem_get_info()[0] * share) // element.itemsize
    pool = torch.empty(min(room, elements), dtype=element, device="cuda")
    for part in pool.split(FILLED_AT_ONCE):
        part.copy_(random_normal(len(part)).mul_(deviation).clamp_(-E4M3_MAX, E4M3_MAX))
    return pool


@contextmanager
def engine_config() -> Iterator[None]:
    """vLLM's default configuration and workspace, which its classes need, without E8M0 scales, as in plans."""
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # read when vLLM is imported
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
    with set_current_vllm_config(VllmConfig()):
        yield
