"""A table of step seconds. A StepModel fills it once, and a simulated scheduler reads it at every step.

    gpu  = (seconds^16 + least^16)^(1/16)
    host = seconds of a step + requests * of each + prompt tokens * of each
    step = |ahead + gpu, host + launches|_8 - ahead    with async scheduling
           host + |gpu, launches|_8                    without
           host + gpu + launches                       on a CPU without

`seconds` are those of the kernels, and `least` are those that their energy takes at the power limit. Both are sums:

    tokens[all tokens] + sampled[sampled requests]
    + for each kind of reads: decode[decoding requests, tokens that one reads]
                              + first[size, tokens that a query reads] + (chunks - 1) * further[the same]

Kinds of reads are those of the whole context, and those of each window. Tokens that are read are interpolated between
DEPTHS. The chunks of one step count as equally long. Their size is rounded up to a whole SIZE_STEP, as attention
computes whole tiles of rows.

Besides +, -, * and / there are only square roots, which IEEE 754 rounds correctly. So C gives the same bits if it is
compiled without fused multiply-adds (-ffp-contract=off).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8plan.model.cost.base import QUANTITIES, READS, Array, FloatArray, IntArray, StepBatch, WindowReads
from fp8plan.model.cost.power import energy_of
from fp8plan.model.cost.step import StepModel
from fp8plan.model.profile.profile import GPU_PACE

DEPTHS = (0, *sorted(base << power for base in (64, 96) for power in range(12)))  # tokens; straight on beyond them
SIZE_STEP = 16  # tokens
SEVERAL = 65  # chunks in the step that is compared with a step of one


@dataclass(frozen=True, slots=True)
class Clock:
    """The seconds of one model's steps. Arrays are float64. A last axis of 2 has seconds and `least`.

    tokens:   shape (budget + 1, 2)
    sampled:  shape (max_num_seqs + 1, 2)
    decode:   shape (kinds of reads, max_num_seqs + 1, depths, 2)
    first:    of one chunk, shape (kinds of reads, sizes + 1, depths, 2)
    further:  of each further chunk in the step, of the same shape
    uneven:   of each KV token that chunks read beyond those of equal ones with as many pairs, shape (2,)
    launches: seconds of the host for launches in a step without prompts, and in one with them, shape (budget + 1, 2)
    host:     other seconds of the host: of a step, of each request and of each prompt token, shape (3,)
    overlaps: GPU and host work at the same time, as with async scheduling
    leads:    the host begins a step that has launches while the GPU runs the step before
    on_cpu:   there is no GPU beside the host
    """

    tokens: FloatArray
    sampled: FloatArray
    decode: FloatArray
    first: FloatArray
    further: FloatArray
    uneven: FloatArray
    launches: FloatArray
    host: FloatArray
    overlaps: bool
    leads: bool
    on_cpu: bool

    @classmethod
    def of(cls, model: StepModel, windows: Sequence[tuple[str, int]] = ()) -> Clock:
        """The clock of a model's steps, at the pace of its rollouts, without a trainer's front.

        windows: kind and size, as in WindowReads, of the windows whose reads `step` gets. In other windows queries read
                 as if all decoding requests of a step were equally long, and all its chunks too
        """
        sampler = _Sampler(model, tuple(windows))
        counts = np.arange(int(model.limits.max_num_batched_tokens) + 1)
        requests = np.arange(int(model.limits.max_num_seqs) + 1)
        sizes = np.arange(0, int(counts[-1]) + SIZE_STEP, SIZE_STEP)
        tokens = sampler.costs(prefill_tokens=counts, prefill_kv_tokens=counts)
        decoding = sampler.costs(decode_requests=counts)
        few = sampler.costs(decode_requests=np.array([0, 1, 0]), prefill_tokens=np.array([0, 0, 1]))
        host = few.scheduling - np.array([0.0, 1.0, 1.0]) * few.scheduling[0]
        one, several = (sampler.chunks(sizes, number) for number in (1, SEVERAL))
        return cls(
            tokens=tokens.gpu,
            sampled=sampler.costs(sampled_requests=requests).gpu - tokens.gpu[0],
            decode=sampler.decodes(requests, tokens.gpu),
            first=one,
            further=(several - one) / (SEVERAL - 1),
            uneven=sampler.uneven(),
            launches=np.stack([decoding.launching, tokens.launching], axis=1),
            host=host,
            overlaps=model.limits.async_scheduling,
            leads=model.limits.async_scheduling and not model.shape.recurrent,
            on_cpu=model.gpu.is_cpu,
        )

    def seconds(
        self,
        decode_requests: int,
        decode_kv_tokens: int,
        prefill_tokens: int,
        prefill_requests: int,
        prefill_kv_tokens: int,
        prefill_pairs: int,
        sampled_requests: int,
    ) -> float:
        """Seconds of a step that follows none. Its arguments are as in a StepBatch of one step."""
        return self.step(
            decode_requests,
            decode_kv_tokens,
            prefill_tokens,
            prefill_requests,
            prefill_kv_tokens,
            prefill_pairs,
            sampled_requests,
        )[0]

    def step(
        self,
        decode_requests: int,
        decode_kv_tokens: int,
        prefill_tokens: int,
        prefill_requests: int,
        prefill_kv_tokens: int,
        prefill_pairs: int,
        sampled_requests: int,
        windows: Sequence[tuple[int, int]] = (),
        ahead: float = 0.0,
    ) -> tuple[float, float]:
        """Seconds of a step, and `ahead` for the step that follows it.

        windows: decode_kv_tokens and prefill_pairs within each of the clock's windows
        ahead:   seconds that the GPU still needs for the step before when the host is done with it; 0 after a pause
        """
        all_tokens, chunks = decode_requests + prefill_tokens, prefill_requests
        seconds = self.tokens.item(all_tokens, 0) + self.sampled.item(sampled_requests, 0)
        least = self.tokens.item(all_tokens, 1) + self.sampled.item(sampled_requests, 1)
        reads = ((decode_kv_tokens, prefill_pairs), *windows)
        if decode_requests:
            for kind, (kv_tokens, _) in enumerate(reads):
                more = _between(self.decode[kind, decode_requests], kv_tokens / decode_requests)
                seconds, least = seconds + more[0], least + more[1]
        if chunks:
            size = -(-prefill_tokens // (chunks * SIZE_STEP))
            for kind, (_, pairs) in enumerate(reads):
                depth = pairs / prefill_tokens
                more = _between(self.first[kind, size], depth)
                seconds, least = seconds + more[0], least + more[1]
                more = _between(self.further[kind, size], depth)
                seconds, least = seconds + (chunks - 1) * more[0], least + (chunks - 1) * more[1]
            equal = prefill_tokens / 2.0 + chunks * (prefill_pairs / prefill_tokens - 0.5)
            seconds = seconds + (prefill_kv_tokens - equal) * self.uneven.item(0)
            least = least + (prefill_kv_tokens - equal) * self.uneven.item(1)
        gpu = _norm(seconds, least, 4)
        launching = self.launches.item(all_tokens, 1 if prefill_tokens else 0)
        of_step, of_request, of_token = self.host.tolist()
        host = of_step + (decode_requests + chunks) * of_request + prefill_tokens * of_token
        if not self.overlaps:
            return host + (gpu + launching if self.on_cpu else _norm(gpu, launching, 3)), 0.0
        host += launching
        begun = _norm(gpu, host, 3)
        spare = begun - host if self.leads else 0.0
        if not self.leads or launching == 0.0 or ahead == 0.0:
            return begun, spare
        return _norm(ahead + gpu, host, 3) - ahead, spare


def _between(table: FloatArray, depth: float) -> tuple[float, float]:
    """Seconds and `least` of a depth. table: those at DEPTHS, shape (depths, 2)"""
    cell = min(bisect_right(DEPTHS, depth), len(DEPTHS) - 1) - 1
    share = (depth - DEPTHS[cell]) / (DEPTHS[cell + 1] - DEPTHS[cell])
    (low, low_least), (high, high_least) = table[cell : cell + 2].tolist()
    return low + (high - low) * share, low_least + (high_least - low_least) * share


def _norm(x: float, y: float, doublings: int) -> float:
    """The root of x^n + y^n, with 2^doublings for n; neither is negative."""
    largest = max(x, y)
    if largest <= 0.0:
        return 0.0
    ratio = min(x, y) / largest
    for _ in range(doublings):
        ratio = ratio * ratio
    total = 1.0 + ratio
    for _ in range(doublings):
        total = math.sqrt(total)
    return largest * total


class _Costs(NamedTuple):
    """Costs of steps: `gpu` has shape (steps, 2) for seconds and `least`, the others have shape (steps,)."""

    gpu: FloatArray
    scheduling: FloatArray
    launching: FloatArray


class _Sampler(NamedTuple):
    """The costs of chosen steps of a model. windows: as in `Clock.of`"""

    model: StepModel
    windows: tuple[tuple[str, int], ...]

    def costs(self, kind: int = 0, **work: IntArray) -> _Costs:
        """The costs of steps. work: quantities of a StepBatch; others are 0. kind: number of the kind of its reads"""
        model, none = self.model, np.zeros_like(next(iter(work.values())))
        reads = [dict.fromkeys(READS, none) for _ in range(1 + len(self.windows))]
        reads[kind] = {name: work.pop(name, none) for name in READS}
        windows = tuple(WindowReads(*window, **x) for window, x in zip(self.windows, reads[1:], strict=True))
        batch = StepBatch(**(dict.fromkeys(QUANTITIES, none) | work | reads[0]), windows=windows)
        timed, load = model.timed(batch), model.load(batch)
        energy = energy_of(model, batch, load, model.profile)
        least = np.zeros(none.shape) if energy is None else energy.least
        gpu = np.stack(np.broadcast_arrays(load.seconds, least), axis=-1)
        gpu = gpu * (model.profile.coefficient(GPU_PACE) * model.pace)
        return _Costs(gpu, timed.scheduling.seconds * model.pace, timed.launching.seconds * model.pace)

    def decodes(self, requests: IntArray, tokens: FloatArray) -> FloatArray:
        """The costs of decoding, beyond those of the tokens, shape (kinds of reads, requests, depths, 2)."""
        number, depth = (x.ravel() for x in np.meshgrid(requests, DEPTHS, indexing="ij"))
        tables = []
        for kind in range(1 + len(self.windows)):
            costs = self.costs(kind, decode_requests=number, decode_kv_tokens=number * depth).gpu
            table = costs.reshape(len(requests), len(DEPTHS), 2)
            without = tables[0][:, :1] + tokens[: len(requests), None] if kind else tokens[: len(requests), None]
            tables.append(table - without)
        return np.stack(tables)

    def chunks(self, sizes: IntArray, number: int) -> FloatArray:
        """The costs of `number` chunks in a step, beyond those of its tokens, shape (kinds of reads, sizes, depths, 2)."""
        size, depth = (x.ravel() for x in np.meshgrid(sizes, DEPTHS, indexing="ij"))
        chunks, tokens = np.full_like(sizes, number), sizes * number
        tables = []
        for kind in range(1 + len(self.windows)):
            if kind:
                without = self.costs(prefill_tokens=tokens, prefill_requests=chunks)
            else:
                without = self.costs(prefill_tokens=tokens, prefill_kv_tokens=tokens)
            costs = self.costs(
                kind,
                prefill_tokens=number * size,
                prefill_requests=np.full_like(size, number),
                prefill_kv_tokens=number * (size + depth - size // 2),
                prefill_pairs=number * size * depth,
            )
            tables.append(costs.gpu.reshape(len(sizes), len(DEPTHS), 2) - without.gpu[:, None])
        return np.stack(tables)

    def uneven(self) -> FloatArray:
        """The cost of a KV token that chunks read in addition to an even depth, shape (2,)."""
        work = {"prefill_tokens": SIZE_STEP * SEVERAL, "prefill_requests": SEVERAL, "prefill_pairs": DEPTHS[-1]}
        rows = {name: np.full(2, value) for name, value in work.items()}
        read = SEVERAL * np.array(DEPTHS[-2:])
        low, high = self.costs(**rows, prefill_kv_tokens=read).gpu
        return np.asarray((high - low) / (read[1] - read[0]))
