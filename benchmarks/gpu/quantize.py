"""Time and check the quantisation of BF16 weights to blockwise FP8 on one GPU.

    python -m benchmarks.gpu.quantize --output FILE.jsonl [--verl-kernel PATH]

Kernels, a row of FILE.jsonl each; what fails goes to FILE.failed.jsonl, the machine to machines.jsonl beside it:
    copy              one BF16 tensor to another, by cudaMemcpy or by an elementwise kernel of torch (faster on an
                      H200): the rate of the faster is what others are compared with, as `of_copy`
    copy.group        CopyTargets' kernels, which look for NaN and Inf on the way
    quantise.triton   QuantizeTargets' kernels, by rounding and warps
    quantise.vllm     vLLM's function on one matrix after the other, "compiled" as vLLM has it, or "eager"; timer
                      "graph" is the GPU's time alone, "launched" is what a caller waits for
    quantise.verl     the same with the function of verl/utils/kernel/fp8_kernel.py, of which PATH is a copy
    run.quantise      QuantizeTargets.run: seconds until Python may go on, checks and table included
    equality          in how many q and scales ours differ from vLLM's function, compiled and eager

`seconds` are of the whole group of matrices. gb_per_s counts what has to be read and written: 2 bytes of a weight, 1 of
its q, 4 of a scale. Weights are cold in L2, which holds less than a group.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.gpu import quantize_cases
from fp8plan.errors import Fp8PlanError
from fp8plan.runtime.apply.quantize import block_fp8 as quantize
from fp8plan.runtime.apply.quantize.targets import QuantizeTargets
from fp8plan.runtime.measure.calibrate import note
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.sweep import Point, Work, check_gpu, sweep
from fp8plan.runtime.measure.kernels.timing import random_pool

if TYPE_CHECKING:
    from torch import Tensor

COPIED_BYTES = 2**30
COPIED_BY = "memcpy", "kernel"  # cudaMemcpy, and an elementwise kernel of torch, which is faster on an H200
LAYER_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}  # Qwen3-8B
# Matrices [n, k], and how many of each.
GROUPS = {name: [(*shape, 8)] for name, shape in LAYER_8B.items()} | {
    "experts_up": [(768, 2048, 384)],  # Qwen3-30B-A3B
    "experts_down": [(2048, 768, 384)],
    "8b": [(*shape, 36) for shape in LAYER_8B.values()],
}
KERNELS = ("exact", 8), ("exact", 16), ("eager", 8), ("compiled", 8), ("compiled", 16)  # rounding, warps
VLLM = ("compiled", "graph"), ("compiled", "launched"), ("eager", "graph")
TIMERS = {"graph": timing.graph_seconds, "launched": timing.eager_seconds}
COPIED = [(group, dtype) for group in ("8b", "experts_up") for dtype in ("bf16", "fp8")]
RUNS = 10


@dataclass(frozen=True)
class Throughput:
    """Timing of all calls together; of_copy: share of the rate of a copy."""

    seconds: float
    spread: float
    replays: int
    sm_mhz: int | None
    gb_per_s: float
    of_copy: float


class Group(NamedTuple):
    weights: list[Tensor]
    q: list[Tensor]
    scales: list[Tensor]
    flags: Tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self[:3] for tensor in tensors)


def copying(by: str, source: Tensor) -> Callable[[], Any]:
    """A copy of `source` to new memory, to be called again and again; by: one of COPIED_BY."""
    import torch

    out = torch.empty_like(source)
    return partial(out.copy_, source) if by == "memcpy" else partial(torch.add, source, 0, out=out)


def points(verl: bool) -> list[Point]:
    found = [Point("copy", {"bytes": COPIED_BYTES, "by": by}) for by in COPIED_BY]
    for group in GROUPS:
        found += [Point("quantise.triton", {"group": group, "rounding": r, "warps": w}) for r, w in KERNELS]
        found += [Point("quantise.vllm", {"group": group, "mode": mode, "timer": timer}) for mode, timer in VLLM]
        found += [Point("quantise.verl", {"group": group})] if verl else []
        found += [Point("run.quantise", {"group": group})]
    found += [Point("copy.group", {"group": group, "dtype": dtype}) for group, dtype in COPIED]
    return found + [
        Point("equality", {"case": c, "ours": o}) for c in quantize_cases.CASES for o in quantize_cases.OURS
    ]


class Bench:
    """Memory for the largest group, 21 GB, and the rate of a copy."""

    def __init__(self, verl_kernel: Path | None) -> None:
        import torch

        self._verl_kernel = verl_kernel
        elements = max(sum(n * k * number for n, k, number in group) for group in GROUPS.values())
        self._weights = random_pool(elements, "bf16", 0.4, 0.02)
        self._q = torch.empty(len(self._weights), dtype=torch.float8_e4m3fn, device="cuda")

    def work(self, point: Point) -> Work:
        return {
            "copy": self._copy,
            "copy.group": self._copy_group,
            "quantise.triton": self._triton,
            "quantise.vllm": self._vllm,
            "quantise.verl": self._verl,
            "run.quantise": self._run,
            "equality": quantize_cases.work,
        }[point.kernel](**point.shape)

    @cached_property
    def copy_rate(self) -> float:
        """Bytes read and written in a second."""
        import torch

        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
        ways = [copying(by, source) for by in COPIED_BY]
        return 2 * COPIED_BYTES / min(timing.graph_seconds([way]).seconds for way in ways)

    def group(self, name: str) -> Group:
        """Windows of the pools, one after the other."""
        import torch

        shapes = [(n, k) for n, k, number in GROUPS[name] for _ in range(number)]
        ends = np.cumsum([n * k for n, k in shapes])
        places = [(slice(end - n * k, end), (n, k)) for end, (n, k) in zip(ends.tolist(), shapes, strict=True)]
        weights, q = ([pool[place].view(shape) for place, shape in places] for pool in (self._weights, self._q))
        scales = [torch.empty(quantize.scale_shape(*shape), device="cuda") for shape in shapes]
        return Group(weights, q, scales, torch.zeros(len(shapes), dtype=torch.int32, device="cuda"))

    def _copy(self, **shape: Any) -> Work:
        import torch

        source = torch.empty(shape["bytes"] // 2, dtype=torch.bfloat16, device="cuda").normal_()
        return self._timed([copying(shape["by"], source)], 2 * source.nbytes)

    def _copy_group(self, group: str, dtype: str) -> Work:
        import torch

        from fp8plan.runtime.apply.quantize import triton_kernels as quantize_triton

        found = self.group(group)
        if dtype == "fp8":
            QuantizeTargets(found.q, found.scales).run(found.weights, found.flags)
        sources = found.weights if dtype == "bf16" else found.q
        outs = [torch.empty_like(source) for source in sources]
        calls = quantize_triton.copy_calls(sources, outs, found.flags)
        return self._timed(calls, 2 * sum(source.nbytes for source in sources), outs=outs)

    def _triton(self, group: str, rounding: str, warps: int) -> Work:
        from fp8plan.runtime.apply.quantize import triton_kernels as quantize_triton

        found = self.group(group)
        outs = quantize_triton.addresses(found.q, found.scales)
        calls = quantize_triton.quantize_calls(found.weights, outs, found.flags, rounding, warps)
        return self._timed(calls, found.bytes, outs=found)

    def _vllm(self, group: str, mode: str, timer: str) -> Work:
        found = self.group(group)
        function = quantize_cases.vllm_function(mode)
        return self._timed([partial(function, weight) for weight in found.weights], found.bytes, timer)

    def _verl(self, group: str) -> Work:
        found = self.group(group)
        size = [quantize.BLOCK, quantize.BLOCK]
        return self._timed([partial(self._verl_function, weight, size) for weight in found.weights], found.bytes)

    @cached_property
    def _verl_function(self) -> Callable[..., Any]:
        """scaled_fp8_blockwise(weight, block size) -> (q, scales), on a GPU by verl's Triton kernel."""
        spec = spec_from_file_location("verl_fp8_kernel", self._verl_kernel)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.scaled_fp8_blockwise

    def _run(self, group: str) -> Work:
        found = self.group(group)
        targets = QuantizeTargets(found.q, found.scales)
        return Work([partial(targets.run, found.weights, found.flags)], {"matrices": len(found.q)}, _host_seconds)

    def _timed(self, calls: Sequence[timing.Call], moved: int, timer: str = "graph", outs: object = None) -> Work:
        """outs: what the calls write to and only know the address of, kept until they are timed."""

        def throughput(calls: Sequence[timing.Call], outs: object = outs) -> Throughput:
            found = asdict(TIMERS[timer](calls))
            found["seconds"] *= len(calls)
            rate = moved / found["seconds"]
            return Throughput(**found, gb_per_s=rate / 1e9, of_copy=rate / self.copy_rate)

        return Work(calls, {"moved_bytes": moved, "calls": len(calls)}, throughput)


def _host_seconds(calls: Sequence[timing.Call]) -> timing.Timing:
    """Until the only call returns, with nothing else queued on the GPU; the first, which compiles, does not count."""
    import torch

    seconds = []
    for _ in range(RUNS + 1):
        begun = time.perf_counter()
        calls[0]()
        seconds.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    low, median, high = np.percentile(seconds[1:], (10, 50, 90))
    return timing.Timing(float(median), float((high - low) / median), RUNS)


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a point failed, 2 if it could not go on."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="file of rows, which is appended to")
    parser.add_argument("--verl-kernel", type=Path, help="a copy of verl/utils/kernel/fp8_kernel.py")
    given = parser.parse_args(words)
    try:
        check_gpu("auto")
        bench = Bench(given.verl_kernel)
        return 1 if sweep(points(given.verl_kernel is not None), bench.work, given.output) else 0
    except Fp8PlanError as error:
        note(f"quantize: {error}")
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
