"""The attention calls that are measured, and the lengths and blocks of one call. Pure: numpy only.

A point's shape holds what the cost model needs: requests, tokens and heads. `num_splits` is the bound that vLLM 0.26
hands to FlashAttention: 32 where CUDA graphs are captured (up to 512 tokens), 0 (the kernel decides) beyond.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.calibrate.held_out import ATTENTION, UNEQUAL
from fp8plan.runtime.measure.kernels.sweep import Point

Ints = NDArray[np.int64]

# (query heads, KV heads, head size) come from these, and from those that are held out.
REFERENCE = "Qwen/Qwen3-8B"
MODELS = (
    REFERENCE,
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-1.5B",
    "fp8plan/dense-50m",
)
WIDE_MODELS = ("Qwen/Qwen3.5-9B", "fp8plan/qwen3-next-16-layers")  # of 256 elements, with 4 and 2 KV heads

KV_DTYPES = {"bf16": 2, "fp8": 1}  # bytes per element
BLOCK_SIZE = 16  # tokens; vLLM's default on this backend
MAX_GRAPH_TOKENS, MAX_GRAPH_SPLITS = 512, 32  # max_cudagraph_capture_size, flash_attn_max_num_splits_for_cuda_graph
MAX_MODEL_LEN = 8192  # tokens: the width of the engine's block table, where no request is longer
MAX_KV_BYTES = 40e9  # of one layer in one call
MAX_PREFILL_TOKENS = 16384  # max_num_batched_tokens

BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
FEW_BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
FEW_CONTEXTS = (256, 1024, 2048, 4096, 8192)
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SIGMA = 0.8  # of ln(context) where contexts are skewed


def heads_of(model: str) -> dict[str, int]:
    """The heads of a model whose attention layers are all alike."""
    [(attention, _)] = ModelShape.from_hf(model).parts_of(Attention)
    return {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, in an order that can be cut anywhere: neighbours are unrelated."""
    found = list(dict.fromkeys(_quick() if grid == "quick" else _full()))
    order = np.random.default_rng(0).permutation(len(found))
    return [Point(kernel, dict(shape)) for kernel, shape in (found[i] for i in order)]


Key = tuple[str, tuple[tuple[str, int | str], ...]]  # hashable, so that doubles are easily dropped


def _quick() -> Iterator[Key]:
    yield from _decode(REFERENCE, FEW_BATCHES, FEW_CONTEXTS)
    yield from _decode(REFERENCE, (32, 128, 512), (512, 2048), skew=UNEQUAL)
    yield from _decode("Qwen/Qwen3-30B-A3B", FEW_BATCHES[1::2], FEW_CONTEXTS[::2])
    yield from _prefill(REFERENCE, CHUNKS[1::3], (1, 8), (0,))
    yield from _small(REFERENCE, TOKENS[::3])


def _full() -> Iterator[Key]:
    yield from _quick()
    yield from _decode(REFERENCE, BATCHES, CONTEXTS)
    yield from _decode(REFERENCE, FEW_BATCHES[2:], (512, 1024, 2048, 4096), skew=UNEQUAL)
    for model in (*MODELS, *WIDE_MODELS, *ATTENTION):
        yield from _decode(model, FEW_BATCHES[1:-1], FEW_CONTEXTS[::2])
        yield from _decode(model, (64, 256), (1024,), skew=UNEQUAL)
        yield from _prefill(model, CHUNKS[1::3], (1,), (0, 4096))
    for model in (REFERENCE, ATTENTION[0]):
        yield from _prefill(model, CHUNKS, (1, 4, 16, 64), (0,))
        yield from _mixed(model, (8, 64, 256), (1024, 4096), (512, 2048))
        yield from _small(model, TOKENS[1::2])
    yield from _small(REFERENCE, TOKENS)


def _point(kernel: str, model: str, tokens: int, **shape: int | str) -> Key:
    splits = MAX_GRAPH_SPLITS if tokens <= MAX_GRAPH_TOKENS else 0
    return kernel, tuple((shape | heads_of(model) | {"num_splits": splits}).items())


def _decode(model: str, batches: tuple[int, ...], contexts: tuple[int, ...], skew: str = "even") -> Iterator[Key]:
    for batch, context, (kv, size) in product(batches, contexts, KV_DTYPES.items()):
        if batch * context * kv_bytes(heads_of(model), size) <= MAX_KV_BYTES:
            yield _point(f"attention_decode.{kv}", model, batch, batch=batch, context=context, skew=skew)


def _prefill(model: str, lengths: tuple[int, ...], counts: tuple[int, ...], contexts: tuple[int, ...]) -> Iterator[Key]:
    for length, count, context, kv in product(lengths, counts, contexts, KV_DTYPES):
        if (tokens := length * count) <= MAX_PREFILL_TOKENS:
            yield _point(f"attention_prefill.{kv}", model, tokens, chunks=count, chunk=length, context=context)


def _mixed(model: str, batches: tuple[int, ...], contexts: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Key]:
    """Decoding requests beside one prefill chunk: one call, as vLLM makes it."""
    for batch, context, length, kv in product(batches, contexts, lengths, KV_DTYPES):
        shape = {"batch": batch, "context": context, "chunks": 1, "chunk": length}
        yield _point(f"attention_mixed.{kv}", model, batch + length, **shape)


def _small(model: str, counts: tuple[int, ...]) -> Iterator[Key]:
    for tokens in counts:
        shape = {"tokens": tokens} | heads_of(model)
        yield from ((f"kv_write.{kv}", tuple(shape.items())) for kv in KV_DTYPES)
        yield "quantise_query.fp8", tuple(shape.items())


def kv_bytes(heads: dict[str, int], element_bytes: int) -> int:
    """K and V bytes of one token in one layer."""
    return 2 * heads["kv_heads"] * heads["head_dim"] * element_bytes


def lengths(point: Point) -> tuple[Ints, Ints]:
    """(query tokens, KV tokens including them) of each request of an attention point. Decoding requests come first.

    Skewed contexts are lognormal with the same mean, always the same for the same batch.
    """
    shape = point.shape
    if point.kernel.startswith("attention_prefill"):
        queries = np.full(shape["chunks"], shape["chunk"], np.int64)
        return queries, queries + shape["context"]
    batch, context = shape["batch"], shape["context"]
    contexts = lognormal(batch, context) if shape.get("skew") == UNEQUAL else np.full(batch, context, np.int64)
    queries = np.ones(batch, np.int64)
    if point.kernel.startswith("attention_mixed"):
        chunk = np.full(shape["chunks"], shape["chunk"], np.int64)
        return np.concatenate([queries, chunk]), np.concatenate([contexts, chunk])
    return queries, contexts


def lognormal(batch: int, mean: int) -> Ints:
    """Lognormal lengths whose sum is exactly batch * mean: rounded running sums, so no error piles up."""
    draws = np.exp(SIGMA * np.random.default_rng(batch).standard_normal(batch))
    sums = np.rint(np.cumsum(draws) / draws.sum() * batch * mean).astype(np.int64)
    return np.diff(sums, prepend=0)


def needed_blocks(kv_tokens: Ints) -> int:
    return int((-(-kv_tokens // BLOCK_SIZE)).sum())


def block_tables(kv_tokens: Ints, copies: int, blocks: int) -> NDArray[np.int32]:
    """Block numbers of every request, shape (copies, requests, width): scattered, and no two entries share a block.

    Entries behind a request's last block are 0, as in the engine. Raises ValueError if `blocks` are too few.
    """
    needed = -(-kv_tokens // BLOCK_SIZE)
    width = -(-max(MAX_MODEL_LEN, int(kv_tokens.max())) // BLOCK_SIZE)
    total = copies * needed_blocks(kv_tokens)
    if total > blocks:
        raise ValueError(f"{copies} copies need {total} KV blocks, the pool has {blocks}")
    tables = np.zeros((copies, len(kv_tokens), width), np.int32)
    tables[np.broadcast_to(np.arange(width) < needed[:, None], tables.shape)] = _shuffled(blocks)[:total]
    return tables


@lru_cache(maxsize=32)
def _shuffled(blocks: int) -> NDArray[np.int32]:
    return np.random.default_rng(1).permutation(blocks).astype(np.int32)
