"""The notes that the simulated scheduler takes of each row of steps, whatever shares the pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from fp8plan.model.cost.base import IntArray

ROW = (
    "steps",  # alike steps in this row
    "decode_requests",  # requests that get one token in each of them
    "decode_kv_tokens",  # KV tokens they read in the first step, summed; grows by decode_requests a step
    "recomputed_tokens",  # work thrown away: tokens that the requests of `preemptions` had computed
    "running",
    "waiting",
    "used_blocks",  # while the last step of the row runs
    "preemptions",  # here, or in the step without tokens before: that costs nothing and has no row
    "finished",
)
# Of a row with prefill; zero in the others, which are most.
PREFILL = (
    "prefill_tokens",
    "prefill_requests",
    "prefill_kv_tokens",  # KV tokens the chunks read: context before them + their own, summed
    "prefill_pairs",  # query-key pairs of the chunks, summed
    "sampled_requests",  # of those whose prefill ends here; in `columns` the decoding requests are among them
    "cached_tokens",  # prefill that the prefix cache saved to requests admitted here
)


def columns_of(rows: list[int], prefills: list[int]) -> dict[str, IntArray]:
    """A history as columns: int64 arrays of shape (rows,), one per name in ROW and PREFILL.

    rows:     ROW of each row, one after the other
    prefills: (row, *PREFILL) of each row with prefill, one after the other
    """
    table = table_of(rows, len(ROW))
    columns = dict(zip(ROW, table, strict=True))
    at, *more = table_of(prefills, 1 + len(PREFILL))
    for name, values in zip(PREFILL, more, strict=True):
        columns[name] = np.zeros(table.shape[1], dtype=np.int64)
        columns[name][at] = values
    columns["sampled_requests"] += columns["decode_requests"]
    return columns


def prefill_work(chunks: Sequence[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """The (tokens, chunks, KV tokens read, query-key pairs) of chunks (request, tokens computed before, after)."""
    tokens = read = pairs = 0
    for _, before, after in chunks:
        tokens += after - before
        read += after
        pairs += (after - before) * (after + before + 1) // 2
    return tokens, len(chunks), read, pairs


def table_of(values: list[int], columns: int) -> IntArray:
    """Rows given one after the other, as an int64 array of shape (columns, rows)."""
    return np.frombuffer(array("q", values), dtype=np.int64).reshape(-1, columns).T
