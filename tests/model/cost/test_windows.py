"""The reads of a step within a window or a chunk, counted and by the shortcut for equal requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.architecture.parts import Attention
from fp8plan.model.cost.attention import last_tokens, seen
from fp8plan.model.cost.base import READS, StepBatch, WindowReads

SLIDING, CHUNKED = Attention(8, 8, 64, window=100), Attention(8, 8, 64, chunk=100)


def counted(kind: str, window: int, before: int, after: int) -> tuple[int, int]:
    """KV tokens and query-key pairs of the queries at [before, after), one by one."""
    firsts = [max(0, i - window + 1) if kind == "sliding" else i // window * window for i in range(before, after)]
    pairs = sum(i + 1 - first for i, first in zip(range(before, after), firsts, strict=True))
    return after - firsts[0], pairs


def step(decode: tuple[int, int] = (0, 0), chunks: tuple[int, int, int] = (0, 0, 0)) -> StepBatch:
    """decode: requests, tokens of each, the new one included; chunks: how many, tokens before and after of each"""
    requests, context = decode
    number, before, after = chunks
    _, pairs = counted("sliding", 10**6, before, after) if number else (0, 0)
    values = (requests, requests * context, number * (after - before), number, number * after, number * pairs, requests)
    return StepBatch(*(np.array([float(x)]) for x in values))


@given(st.sampled_from([SLIDING, CHUNKED]), st.integers(1, 5), st.integers(0, 450), st.integers(1, 300))
def test_chunks_of_prefill_read_what_their_queries_see(
    attention: Attention, number: int, before: int, new: int
) -> None:
    kind = "sliding" if attention.window else "chunked"
    read, pairs = counted(kind, 100, before, before + new)
    found = seen(step(chunks=(number, before, before + new)), attention)
    assert found.prefill_pairs.item() == pytest.approx(number * pairs)
    assert found.prefill_kv_tokens.item() == pytest.approx(number * read)


@given(st.integers(1, 50), st.integers(1, 400))
def test_a_decoding_request_reads_its_window_at_most(requests: int, context: int) -> None:
    assert seen(step((requests, context)), SLIDING).decode_kv_tokens.item() == requests * min(context, 100)
    assert last_tokens(step((requests, context)), 37).decode_kv_tokens.item() == requests * min(context, 37)


def test_a_decoding_request_stands_anywhere_in_its_chunk() -> None:
    mean = np.mean([i % 100 + 1 for i in range(100, 500)])
    assert seen(step((3, 333)), CHUNKED).decode_kv_tokens.item() == pytest.approx(3 * mean)
    assert seen(step((3, 33)), CHUNKED).decode_kv_tokens.item() == 3 * 33


def test_what_the_schedule_counted_comes_first_and_full_attention_sees_all() -> None:
    batch = step((3, 333), (2, 100, 250))
    reads = WindowReads("sliding", 100, *(np.array([x]) for x in (7.0, 8.0, 9.0)))
    counted_too = replace(batch, windows=(replace(reads, window=99), reads))
    assert [getattr(seen(counted_too, SLIDING), name).item() for name in READS] == [7, 8, 9]
    assert seen(counted_too, SLIDING).decode_requests is batch.decode_requests
    assert seen(counted_too, CHUNKED).decode_kv_tokens.item() == pytest.approx(3 * 50.5)
    assert seen(batch, Attention(8, 8, 64)) is batch
