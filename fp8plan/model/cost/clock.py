"""A table of step seconds. A StepModel fills it once, and a simulated scheduler reads it at every step.

    gpu  = (seconds^16 + least^16)^(1/16)
    host = seconds of a step + requests * of each + prompt tokens * of each
    step = |ahead + gpu, host + launches|_8 - ahead    with async scheduling
           host + |gpu, launches|_8                    without
           host + gpu + launches                       without, on a CPU

`seconds` are those of the kernels, and `least` are those that their energy takes at the power limit. Both are sums:

    tokens[all tokens] + sampled[sampled requests] + uneven * KV tokens
    + for each kind of reads: decode[decoding requests, depth]
                              + first[size, depth] + (chunks - 1) * further[size, depth]

Kinds of reads are those of the whole context, and those of each window. A depth is the number of tokens that a query
reads. Depths between those of DEPTHS are interpolated. The chunks of one step count as equally long. Their size is
rounded up to a whole SIZE_STEP, as attention computes whole tiles of rows.

Besides +, -, * and / there are only square roots, which IEEE 754 rounds correctly. So C gives the same bits if it is
compiled without fused multiply-adds (-ffp-contract=off).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8plan.model.cost.base import QUANTITIES, FloatArray, IntArray, StepBatch, WindowReads
from fp8plan.model.cost.power import load_of, power_limit
from fp8plan.model.cost.step import StepModel
from fp8plan.model.profile.profile import GPU_PACE
from fp8plan.model.profile.sibling import IDLE

DEPTHS = (0, *sorted(base << power for base in (64, 96) for power in range(12)))  # beyond them costs go on in a line
SIZE_STEP = 16  # tokens
SEVERAL = 65  # chunks of the step that is compared with a step of one


@dataclass(frozen=True, slots=True)
class Clock:
    """The seconds of one model's steps. Arrays are float64. A last axis of 2 has seconds and `least`.

    tokens:   shape (budget + 1, 2)
    sampled:  shape (max_num_seqs + 1, 2)
    decode:   shape (kinds of reads, max_num_seqs + 1, depths, 2)
    first:    of one chunk, shape (kinds of reads, sizes + 1, depths, 2)
    further:  of each further chunk in the step, of the same shape
    uneven:   of each KV token that chunks read beyond those of equal chunks with as many pairs, shape (2,)
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
        """The clock of a model's steps at the pace of its rollouts, without speculation and a trainer's front.

        windows: kind and size, as in WindowReads, of the windows whose reads `step` gets. In other windows queries read
                 as if all decoding requests of a step were equally long, and all its chunks too
        """
        sampler = _Sampler(model, tuple(windows))
        counts = np.arange(int(model.limits.max_num_batched_tokens) + 1)
        requests = np.arange(int(model.limits.max_num_seqs) + 1)
        sizes = np.arange(0, int(counts[-1]) + SIZE_STEP, SIZE_STEP)
        tokens, decodes = sampler.costs(prefill_tokens=counts), sampler.costs(decode_requests=counts)
        few = sampler.costs(decode_requests=np.array([0, 1, 0]), prefill_tokens=np.array([0, 0, 1]))
        of_step, with_request, with_token = few.scheduling
        first, several = sampler.chunks(sizes, 1), sampler.chunks(sizes, SEVERAL)
        return cls(
            tokens=tokens.gpu,
            sampled=sampler.costs(sampled_requests=requests).gpu - tokens.gpu[0],
            decode=sampler.reading(tokens.gpu[: len(requests)], decode_requests=requests),
            first=first,
            further=(several - first) / (SEVERAL - 1),
            uneven=sampler.uneven(),
            launches=np.stack([decodes.launching, tokens.launching], axis=1),
            host=np.array([of_step, with_request - of_step, with_token - of_step]),
            overlaps=model.limits.async_scheduling,
            leads=model.limits.async_scheduling and not model.shape.recurrent,
            on_cpu=model.gpu.is_cpu,
        )

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
        ahead:   seconds that the GPU still needs for the step before when the host is done with that step; 0 if no step
                 comes right before
        """
        all_tokens, chunks = decode_requests + prefill_tokens, prefill_requests
        seconds = self.tokens.item(all_tokens, 0) + self.sampled.item(sampled_requests, 0)
        least = self.tokens.item(all_tokens, 1) + self.sampled.item(sampled_requests, 1)
        reads = ((decode_kv_tokens, prefill_pairs), *windows)
        if decode_requests:
            for decode, (kv_tokens, _) in zip(self.decode, reads, strict=True):
                more, more_least = _at_depth(decode[decode_requests], kv_tokens / decode_requests)
                seconds, least = seconds + more, least + more_least
        if chunks:
            size, others = -(-prefill_tokens // (chunks * SIZE_STEP)), chunks - 1
            for first, further, (_, pairs) in zip(self.first, self.further, reads, strict=True):
                more, more_least = _at_depth(first[size], pairs / prefill_tokens)
                seconds, least = seconds + more, least + more_least
                more, more_least = _at_depth(further[size], pairs / prefill_tokens)
                seconds, least = seconds + others * more, least + others * more_least
            even = prefill_tokens / 2.0 + chunks * (prefill_pairs / prefill_tokens - 0.5)
            seconds = seconds + (prefill_kv_tokens - even) * self.uneven.item(0)
            least = least + (prefill_kv_tokens - even) * self.uneven.item(1)
        gpu = _norm(seconds, least, 4)
        launching = self.launches.item(all_tokens, 1 if prefill_tokens else 0)
        host = self.host.item(0) + (decode_requests + chunks) * self.host.item(1) + prefill_tokens * self.host.item(2)
        if not self.overlaps:
            return host + (gpu + launching if self.on_cpu else _norm(gpu, launching, 3)), 0.0
        host = host + launching
        alone = _norm(gpu, host, 3)
        if not self.leads:
            return alone, 0.0
        if launching == 0.0:
            return alone, alone - host
        return _norm(ahead + gpu, host, 3) - ahead, alone - host


def _at_depth(table: FloatArray, depth: float) -> tuple[float, float]:
    """Seconds and `least` at a depth. table: those at DEPTHS, shape (depths, 2)"""
    cell = min(bisect_right(DEPTHS, depth), len(DEPTHS) - 1) - 1
    share = (depth - DEPTHS[cell]) / (DEPTHS[cell + 1] - DEPTHS[cell])
    (low, low_least), (high, high_least) = table[cell : cell + 2].tolist()
    return low + (high - low) * share, low_least + (high_least - low_least) * share


def _norm(x: float, y: float, doublings: int) -> float:
    """The root of x^n + y^n for n = 2^doublings. At least one is positive, and none negative."""
    largest, ratio = (x, y / x) if x > y else (y, x / y)
    for _ in range(doublings):
        ratio = ratio * ratio
    total = 1.0 + ratio
    for _ in range(doublings):
        total = math.sqrt(total)
    return largest * total


class _Costs(NamedTuple):
    """Costs of steps: of the GPU, seconds and `least`, shape (steps, 2), and of the host, shape (steps,)."""

    gpu: FloatArray
    scheduling: FloatArray
    launching: FloatArray


class _Sampler(NamedTuple):
    """The costs of chosen steps of a model. Work is named as in a StepBatch; windows are as in `Clock.of`."""

    model: StepModel
    windows: tuple[tuple[str, int], ...]

    def costs(self, depths: Sequence[IntArray] = (), **work: IntArray) -> _Costs:
        """The costs of steps. depths: of each kind of reads; (): all 0"""
        none = np.zeros_like(next(iter(work.values())))
        work = dict.fromkeys(QUANTITIES, none) | work
        tokens, chunks = work["prefill_tokens"], work["prefill_requests"]
        half = tokens // np.maximum(chunks, 1) // 2  # of a chunk, which its mean query reads beside what came before
        context, *within = (
            {
                "decode_kv_tokens": work["decode_requests"] * depth,
                "prefill_kv_tokens": tokens + chunks * (depth - half),
                "prefill_pairs": tokens * depth,
            }
            for depth in depths or [none] * (1 + len(self.windows))
        )
        windows = tuple(
            WindowReads(kind, window, **reads) for (kind, window), reads in zip(self.windows, within, strict=True)
        )
        quantities: dict[str, Any] = work | context
        return self._costs_of(StepBatch(**quantities, windows=windows))

    def _costs_of(self, batch: StepBatch) -> _Costs:
        model, timed = self.model, self.model.timed(batch)
        load = load_of(timed.components, model.precision)
        limit = power_limit(model, batch, load, model.profile, near=0.0)
        least = np.zeros_like(load.seconds)
        if limit is not None:
            least = least + sum(joules for name, joules in limit.joules.items() if name != IDLE) / limit.left
        gpu = np.stack([load.seconds, least], axis=1) * (model.profile.coefficient(GPU_PACE) * model.pace)
        return _Costs(gpu, timed.scheduling.seconds * model.pace, timed.launching.seconds * model.pace)

    def reading(self, without: FloatArray, **work: IntArray) -> FloatArray:
        """The costs of requests by the depth of each kind of reads, shape (kinds of reads, steps, depths, 2).

        without: costs of the same tokens without requests, shape (steps, 2)

        The first kind has all costs that are the same at every depth.
        """
        kinds = range(1 + len(self.windows))
        every = {name: values.repeat(len(DEPTHS)) for name, values in work.items()}
        deep = np.tile(DEPTHS, len(without))
        tables = []
        for kind in kinds:
            depths = [deep if other == kind else np.zeros_like(deep) for other in kinds]
            tables.append(self.costs(depths, **every).gpu.reshape(len(without), len(DEPTHS), 2))
        not_deep = tables[0][:, :1]
        return np.stack([tables[0] - without[:, None], *(table - not_deep for table in tables[1:])])

    def chunks(self, sizes: IntArray, number: int) -> FloatArray:
        """`reading` for steps of `number` chunks of each size."""
        tokens, chunks = number * sizes, np.full_like(sizes, number)
        without = self.costs(prefill_tokens=tokens).gpu
        return self.reading(without, prefill_tokens=tokens, prefill_requests=chunks)

    def uneven(self) -> FloatArray:
        """`Clock.uneven`, from two steps that differ in the KV tokens alone and fill every window."""
        read = SEVERAL * np.array(DEPTHS[-2:])
        none, one = np.zeros_like(read), np.ones_like(read)
        chunks, tokens = SEVERAL * one, SEVERAL * SIZE_STEP * one
        fewer, more = self._costs_of(StepBatch(none, none, tokens, chunks, read, DEPTHS[-1] * tokens, none)).gpu
        return np.asarray((more - fewer) / (read[1] - read[0]))
