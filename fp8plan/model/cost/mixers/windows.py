"""The KV tokens that attention reads of a step where it sees the last tokens only, or those of a chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8plan.model.architecture.parts import Attention
from fp8plan.model.cost.base import READS, Array, StepBatch, WindowReads


def seen(batch: StepBatch, attention: Attention) -> StepBatch:
    """The steps with what the attention's window or chunk leaves of their KV tokens and pairs."""
    if attention.window:
        return _left(batch, "sliding", attention.window)
    if attention.chunk:
        return _left(batch, "chunked", attention.chunk)
    return batch


def last_tokens(batch: StepBatch, number: int) -> StepBatch:
    """The steps where each query reads `number` tokens at most, as if the requests of a step were equally long."""
    return _with(batch, _of_equal_requests(batch, "sliding", number))


def _left(batch: StepBatch, kind: str, window: int) -> StepBatch:
    known = (reads for reads in batch.windows if (reads.kind, reads.window) == (kind, window))
    return _with(batch, next(known, None) or _of_equal_requests(batch, kind, window))


def _with(batch: StepBatch, reads: WindowReads) -> StepBatch:
    return replace(batch, **{name: getattr(reads, name) for name in READS})


def _of_equal_requests(batch: StepBatch, kind: str, window: int) -> WindowReads:
    """The reads that a window leaves if all decoding requests of a step are equally long, and all its chunks."""
    requests, chunks = np.maximum(batch.decode_requests, 1), np.maximum(batch.prefill_requests, 1)
    context, after = batch.decode_kv_tokens / requests, batch.prefill_kv_tokens / chunks
    before = after - batch.prefill_tokens / chunks
    if kind == "sliding":
        decode, read = np.minimum(context, window), after - np.maximum(before - window + 1, 0)
    else:  # a token of a long request stands anywhere in its chunk
        decode = np.where(context > window, (window + 1) / 2, context)
        read = after - before // window * window
    pairs = _pairs_below(kind, window, after) - _pairs_below(kind, window, before)
    return WindowReads(kind, window, decode * batch.decode_requests, read * batch.prefill_requests, pairs * chunks)


def _pairs_below(kind: str, window: int, position: Array) -> Array:
    """Query-key pairs of the queries before a position."""
    if kind == "sliding":
        growing = np.minimum(position, window)
        return np.asarray(growing * (growing + 1) / 2 + (position - growing) * window)
    rest = position % window
    return np.asarray(position // window * (window * (window + 1) / 2) + rest * (rest + 1) / 2)
