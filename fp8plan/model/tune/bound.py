"""A lower bound on the makespan of a rollout, whatever the schedule.

The GPU's kernels alone are counted, at their best. Let a rollout of T response tokens, M computed tokens and W KV
tokens read take N steps or more that sample a token. Let a + c x bound the seconds of the linear layers from below in
every step of x tokens, with a >= 0. Then all steps take a N + c M or more. The same holds for lm_head and the sampler
with the T sampled tokens. Attention takes its least seconds per KV token, times W. No step has more requests than
max_num_seqs, and a response gets one token a step, so N is at least T / max_num_seqs and the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8plan.model.cost.base import Array, FloatArray, StepBatch, WindowReads
from fp8plan.model.cost.host import start_cost
from fp8plan.model.cost.step import StepModel
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.profile import GPU_PACE, Profile
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch

RATIO = 1.3  # of neighbouring numbers of tokens at which kernels are evaluated
CONTEXTS = (1024, 8192, 65536)  # KV tokens of a request, for the least seconds of attention
SLOPES = 64
BY_REQUEST, BY_CONTEXT = ("lm_head", "sampling"), ("attention", "recurrent")


@dataclass(frozen=True, slots=True)
class Least:
    """The least seconds of an engine's kernels, whatever CUDA graphs there are.

    counts:      numbers of tokens, ascending
    of_tokens:   seconds of the kernels that depend on a step's tokens, at each count
    of_requests: of those that depend on its requests
    per_read:    of attention, for each KV token
    model:       the engine's
    """

    counts: Array
    of_tokens: FloatArray
    of_requests: FloatArray
    per_read: float
    model: StepModel

    @classmethod
    def of(cls, setup: EngineSetup, profile: Profile, max_num_batched_tokens: int) -> Least:
        """The kernels of an engine with at most this budget of tokens."""
        model = replace(setup, limits=replace(setup.limits, enforce_eager=True)).step_model(profile)  # pads no tokens
        counts = _spread(max_num_batched_tokens)
        return cls(counts, *_kernels(model, counts), model)

    def makespan(self, batches: Sequence[Batch], limits: EngineLimits) -> float:
        """The least seconds of a rollout under some limits.

        batches: the requests of each replica; the one with most response tokens is looked at
        """
        batch = max(batches, key=lambda batch: int(batch.responses.sum()))
        seqs, profile = limits.max_num_seqs, self.model.profile
        sampled = int(batch.responses.sum())
        _, firsts = np.unique(batch.prompt_ids, return_index=True)
        prompts = batch.prompts[firsts] if limits.enable_prefix_caching else batch.prompts
        computed = sampled - len(batch.responses) + int(prompts.sum())
        decoded = batch.responses.astype(np.float64) - 1  # the first token comes with the prompt's prefill
        reads = float((decoded * batch.prompts + decoded * (decoded + 1) / 2).sum())
        steps = max(int(batch.responses.max()), math.ceil(sampled / seqs))
        few = self.counts <= seqs
        engine = _least(self.counts, self.of_tokens, steps, computed)
        engine += _least(self.counts[few], self.of_requests[few], steps, sampled)
        start = float(start_cost(len(batch.prompts), int(batch.prompts.sum()), profile).seconds[0])
        return self.model.pace * (start + profile.coefficient(GPU_PACE) * (engine + self.per_read * reads))


def _spread(most: int) -> Array:
    """Numbers from 1 to `most`, each at most RATIO times the one before, or one more."""
    return np.unique(np.rint(RATIO ** np.arange(0, math.log(most, RATIO) + 1)).astype(np.int64).clip(1, most))


def _kernels(model: StepModel, counts: Array) -> tuple[FloatArray, FloatArray, float]:
    """The seconds of Least: by tokens and by requests, at each of `counts`, and of attention per KV token."""
    beside = np.repeat(counts, len(CONTEXTS))
    requests = np.append(counts, beside)
    reads = np.append(counts, beside * np.tile(CONTEXTS, len(counts)))
    nothing = np.zeros_like(requests)
    windows = dict.fromkeys((cache.kind, cache.window) for cache in model.shape.caches() if cache.window)
    unread = tuple(WindowReads(kind, window, nothing, nothing, nothing) for kind, window in windows)
    work = StepBatch(requests, reads, nothing, nothing, nothing, nothing, requests, unread)
    parts = {component.name: component.seconds() for component in model.timed(work).components}
    by_tokens = sum((x for name, x in parts.items() if name not in (*BY_REQUEST, *BY_CONTEXT)), np.zeros(1))
    by_requests = sum((parts[name] for name in BY_REQUEST), np.zeros(1))
    attention = parts.get("attention", np.zeros_like(reads, dtype=np.float64))[len(counts) :]
    return by_tokens[: len(counts)], by_requests[: len(counts)], float((attention / reads[len(counts) :]).min())


def _least(counts: Array, seconds: FloatArray, steps: int, total: int) -> float:
    """The largest a * steps + c * total, for SLOPES values of c, with a + c x at most the seconds of x, and a >= 0.

    Between two counts the seconds are taken to be at least those of the lower one.
    """
    low = np.minimum.accumulate(seconds[::-1])[::-1]
    x = np.append(counts, counts[1:]).astype(np.float64)
    y = np.append(low, low[:-1])
    slopes = np.linspace(0.0, (y / x).min(), SLOPES)  # a steeper line has a < 0
    offsets = (y - slopes[:, None] * x).min(axis=1)
    return float((offsets * steps + slopes * total).max())
