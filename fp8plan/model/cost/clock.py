"""A table of step seconds, which a StepModel fills once and a simulated scheduler reads at every step.

    gpu     = (seconds^16 + least^16)^(1/16)
    host    = step_s + requests * request_s + prompt tokens * prompt_token_s
    step    = |ahead + gpu, host + launches|_8 - ahead    with async scheduling
              host + |gpu, launches|_8                    without
              host + gpu + launches                       on a CPU

`seconds` and `least` (the energy of the step at the power limit) are sums of table entries:

    tokens[all tokens] + sampled[sampled requests] + decode[decoding requests, mean context]
    + first[size of a chunk, context before it] + (chunks - 1) * further[the same]

Token counts, sampled and decoding requests have an entry each. Contexts are interpolated between CONTEXTS. Chunks are
rounded up to SIZES tokens: attention computes whole tiles of rows.
The operations are +, -, *, / and square roots, which IEEE 754 rounds correctly. So C gives the same bits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from fp8plan.model.cost.base import FloatArray, IntArray, StepBatch
from fp8plan.model.cost.power import IDLE
from fp8plan.model.cost.step import StepModel
from fp8plan.model.profile.profile import GPU_PACE

CONTEXTS = (0, *(64 << i for i in range(13)))
SIZES = 16
SEVERAL = 9


@dataclass(frozen=True)
class Clock:
    contexts: FloatArray
    tokens: FloatArray
    sampled: FloatArray
    decode: FloatArray
    first: FloatArray
    further: FloatArray
    step_s: float
    request_s: float
    prompt_token_s: float
    kind: int

    @classmethod
    def of(cls, model: StepModel) -> Clock:
        budget, requests = int(model.limits.max_num_batched_tokens), int(model.limits.max_num_seqs)
        contexts = np.array(CONTEXTS)
        counts = np.arange(1, budget + 1)
        prefill = _parts(model, prefill_tokens=counts, prefill_kv_tokens=counts)
        decodes = _parts(model, decode_requests=counts)
        tokens = np.zeros((budget + 1, 4))
        tokens[1:] = np.stack([prefill.seconds, prefill.least, decodes.launching, prefill.launching], axis=1)
        n = np.arange(requests + 1)
        some = _parts(model, prefill_tokens=np.ones_like(n), prefill_kv_tokens=np.ones_like(n), sampled_requests=n)
        sampled = some.gpu - tokens[1, :2]
        d = np.arange(1, requests + 1).repeat(len(contexts))
        part = _parts(model, decode_requests=d, decode_kv_tokens=d * np.tile(contexts, requests))
        decode = np.zeros((requests + 1, len(contexts), 2))
        decode[1:] = (part.gpu - tokens[d, :2]).reshape(requests, len(contexts), 2)
        sizes = np.arange(SIZES, budget + SIZES, SIZES).repeat(len(contexts))
        before = np.tile(contexts, len(sizes) // len(contexts))
        chunks = np.zeros((2, len(sizes) // len(contexts) + 1, len(contexts), 2))
        several = []
        for number in (1, SEVERAL):
            part = _parts(
                model,
                prefill_tokens=sizes * number,
                prefill_requests=np.full_like(sizes, number),
                prefill_kv_tokens=(sizes + before) * number,
                prefill_pairs=(sizes * before + sizes * (sizes + 1) // 2) * number,
            )
            alone = _parts(model, prefill_tokens=sizes * number, prefill_kv_tokens=sizes * number)
            several.append((part.gpu - alone.gpu).reshape(-1, len(contexts), 2))
        chunks[0, 1:] = several[0]
        chunks[1, 1:] = (several[1] - several[0]) / (SEVERAL - 1)
        host = _parts(
            model,
            decode_requests=np.array([1, 2, 1]),
            prefill_tokens=np.array([0, 0, 1]),
        ).scheduling
        request_s, token_s = float(host[1] - host[0]), float(host[2] - host[0])
        kind = 1 if model.limits.async_scheduling else 0
        if model.gpu.is_cpu and not kind:
            kind = 2
        return cls(contexts.astype(float), tokens, sampled, decode, chunks[0], chunks[1],
                   float(host[0]) - request_s, request_s, token_s, kind)

    def parts(self, decode_requests, decode_kv_tokens, prefill_tokens, prefill_requests, prefill_kv_tokens, prefill_pairs, sampled_requests):
        at = decode_requests + prefill_tokens
        gpu = self.tokens.item(at, 0) + self.sampled.item(sampled_requests, 0)
        least = self.tokens.item(at, 1) + self.sampled.item(sampled_requests, 1)
        launch = self.tokens.item(at, 3 if prefill_tokens else 2)
        if decode_requests:
            cell, share = self.cell(decode_kv_tokens / decode_requests)
            gpu += self.between(self.decode, decode_requests, cell, share, 0)
            least += self.between(self.decode, decode_requests, cell, share, 1)
        if prefill_requests:
            cell, share = self.cell(prefill_pairs / prefill_tokens - (prefill_tokens / prefill_requests + 1.0) / 2.0)
            size = (prefill_tokens + SIZES * prefill_requests - 1) // (SIZES * prefill_requests)
            gpu += self.between(self.first, size, cell, share, 0) + (prefill_requests - 1) * self.between(self.further, size, cell, share, 0)
            least += self.between(self.first, size, cell, share, 1) + (prefill_requests - 1) * self.between(self.further, size, cell, share, 1)
        host = self.step_s + self.request_s * (decode_requests + prefill_requests) + self.prompt_token_s * prefill_tokens
        if least > 0:
            gpu = norm(gpu, least, 4)
        return gpu, host, launch

    def seconds(self, *a, ahead=0.0):
        gpu, host, launch = self.parts(*a)
        if self.kind == 1:
            return norm(ahead + gpu, host + launch, 3) - ahead
        if self.kind == 0:
            return host + norm(gpu, launch, 3)
        return host + gpu + launch

    def spare(self, *a):
        gpu, host, launch = self.parts(*a)
        host += launch
        return norm(gpu, host, 3) - host

    def cell(self, x):
        cell = min(bisect_right(self._nodes, x), len(self._nodes) - 1) - 1
        return cell, (x - self._nodes[cell]) / (self._nodes[cell + 1] - self._nodes[cell])

    @property
    def _nodes(self):
        return CONTEXTS

    def between(self, table, row, cell, share, column):
        low = table.item(row, cell, column)
        return low + (table.item(row, cell + 1, column) - low) * share


def norm(a, b, doublings):
    largest, ratio = (a, b / a) if a >= b else (b, a / b)
    for _ in range(doublings):
        ratio = ratio * ratio
    total = 1.0 + ratio
    for _ in range(doublings):
        total = math.sqrt(total)
    return largest * total


@dataclass
class _P:
    gpu: FloatArray
    scheduling: FloatArray
    launching: FloatArray
    @property
    def seconds(self): return self.gpu[:, 0]
    @property
    def least(self): return self.gpu[:, 1]


def _parts(model: StepModel, **quantities: IntArray) -> _P:
    from fp8plan.model.cost.base import QUANTITIES
    zeros = np.zeros_like(next(iter(quantities.values())))
    batch = StepBatch(**{q: quantities.get(q, zeros) for q in QUANTITIES})
    timed = model.timed(batch)
    pace = model.profile.coefficient(GPU_PACE)
    seconds = model.load(batch).seconds * pace
    least = zeros * 0.0
    if timed.limit is not None:
        least = sum(j for n, j in timed.limit.joules.items() if n != IDLE) / timed.limit.left * pace
    f = model.pace
    return _P(np.stack([seconds, least], axis=1) * f, timed.scheduling.seconds * f, timed.launching.seconds * f)
