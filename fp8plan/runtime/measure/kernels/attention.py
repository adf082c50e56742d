"""Time attention as vLLM runs it on Hopper: FlashAttention 3 over a paged KV cache, one layer per call.

    python -m fp8plan.runtime.measure.kernels.attention --output FOLDER [--grid quick|full] [--seconds N] [--part i/n]

Kernels, each .bf16 or .fp8 by the KV cache (a row of FOLDER/attention.jsonl says which):
    attention_decode    one query token of each of `batch` requests over `context` tokens on average
    attention_prefill   `chunks` requests with `chunk` query tokens each, after `context` tokens of KV
    attention_mixed     both in one call, as when a prompt enters a running batch
    kv_write            `tokens` keys and values into their blocks
    quantise_query      `tokens` queries to E4M3 (fp8 only), by vLLM's CUDA kernel, as beside FP8_BLOCK weights;
                        otherwise torch.compile fuses it into the rotary embedding at no cost

vLLM's own FlashAttentionImpl runs, so the kernel and its arguments are the engine's: max_num_splits, the schedule made
ahead of time and, for FP8, quantised queries with descales. The schedule, made once per step for all layers, is not
timed. Inputs are cold in L2; in the engine queries and new KV may still be warm.

A point's shape holds the requests, tokens and heads that the cost model needs. `num_splits` is vLLM's bound for
FlashAttention: 32 with CUDA graphs (up to 512 tokens), 0 (the kernel decides) beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.calibrate.profile_of import ATTENTION, UNEQUAL
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.sweep import Point, Work, command, shuffled
from fp8plan.runtime.measure.kernels.timing import engine_config, l2_bytes, random_normal, random_pool

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]

# Models of (query heads, KV heads, head size), beside those that are held out.
REFERENCE = "Qwen/Qwen3-8B"
MODELS = (
    REFERENCE, "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B", "Qwen/Qwen2.5-1.5B", "fp8plan/dense-50m",
)  # fmt: skip
WIDE_MODELS = ("Qwen/Qwen3.5-9B", "fp8plan/qwen3-next-16-layers")  # heads of 256 elements, 4 and 2 KV heads

KV_DTYPES = {"bf16": 2, "fp8": 1}  # bytes per element
BLOCK_SIZE = 16  # tokens; vLLM's default on this backend
MAX_GRAPH_TOKENS, MAX_GRAPH_SPLITS = 512, 32  # max_cudagraph_capture_size, flash_attn_max_num_splits_for_cuda_graph
MAX_MODEL_LEN = 8192  # tokens: least width of the engine's block table
MAX_KV_BYTES = 40e9  # one layer's, in one call
SHARE_OF_MEMORY = 0.4  # share of the free GPU memory for the first of two pools
MAX_PREFILL_TOKENS = 16384  # max_num_batched_tokens

BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
FEW_BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
FEW_CONTEXTS = (256, 1024, 2048, 4096, 8192)
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SIGMA = 0.8  # standard deviation of ln(context), for skewed contexts
# Fields of vLLM's metadata to 0.31; 0.32 has none of them.
OLDER_METADATA: dict[str, Any] = {
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
    "sliding_window": (-1, -1),
}


def heads_of(model: str) -> dict[str, int]:
    """The heads of a model whose attention layers are all the same."""
    [(attention, _)] = ModelShape.from_hf(model).parts_of(Attention)
    return {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, shuffled."""
    return shuffled(_quick() if grid == "quick" else _full())


def _quick() -> Iterator[Point]:
    yield from _decode(REFERENCE, FEW_BATCHES, FEW_CONTEXTS)
    yield from _decode(REFERENCE, (32, 128, 512), (512, 2048), skew=UNEQUAL)
    yield from _decode("Qwen/Qwen3-30B-A3B", FEW_BATCHES[1::2], FEW_CONTEXTS[::2])
    yield from _prefill(REFERENCE, CHUNKS[1::3], (1, 8), (0,))
    yield from _small(REFERENCE, TOKENS[::3])


def _full() -> Iterator[Point]:
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


def _point(kernel: str, model: str, tokens: int, **shape: int | str) -> Point:
    splits = MAX_GRAPH_SPLITS if tokens <= MAX_GRAPH_TOKENS else 0
    return Point(kernel, shape | heads_of(model) | {"num_splits": splits})


def _decode(model: str, batches: tuple[int, ...], contexts: tuple[int, ...], skew: str = "even") -> Iterator[Point]:
    for batch, context, (kv, size) in product(batches, contexts, KV_DTYPES.items()):
        if batch * context * kv_bytes(heads_of(model), size) <= MAX_KV_BYTES:
            yield _point(f"attention_decode.{kv}", model, batch, batch=batch, context=context, skew=skew)


def _prefill(
    model: str, lengths: tuple[int, ...], counts: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator[Point]:
    for length, count, context, kv in product(lengths, counts, contexts, KV_DTYPES):
        if (tokens := length * count) <= MAX_PREFILL_TOKENS:
            yield _point(f"attention_prefill.{kv}", model, tokens, chunks=count, chunk=length, context=context)


def _mixed(
    model: str, batches: tuple[int, ...], contexts: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[Point]:
    """Yield decoding requests beside one prefill chunk, in one call as in vLLM."""
    for batch, context, length, kv in product(batches, contexts, lengths, KV_DTYPES):
        shape = {"batch": batch, "context": context, "chunks": 1, "chunk": length}
        yield _point(f"attention_mixed.{kv}", model, batch + length, **shape)


def _small(model: str, counts: tuple[int, ...]) -> Iterator[Point]:
    for tokens in counts:
        shape = {"tokens": tokens} | heads_of(model)
        yield from (Point(f"kv_write.{kv}", shape) for kv in KV_DTYPES)
        yield Point("quantise_query.fp8", shape)


def kv_bytes(heads: dict[str, int], element_bytes: int) -> int:
    """K and V bytes of one token in one layer."""
    return 2 * heads["kv_heads"] * heads["head_dim"] * element_bytes


def lengths(point: Point) -> tuple[Ints, Ints]:
    """The query tokens, and the KV tokens with them, of each request of a point. Decoding requests come first.

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
    """Lognormal lengths whose sum is exactly batch * mean, from rounded running sums."""
    draws = np.exp(SIGMA * np.random.default_rng(batch).standard_normal(batch))
    sums = np.rint(np.cumsum(draws) / draws.sum() * batch * mean).astype(np.int64)
    return np.diff(sums, prepend=0)


def needed_blocks(kv_tokens: Ints) -> int:
    return int((-(-kv_tokens // BLOCK_SIZE)).sum())


def block_tables(kv_tokens: Ints, copies: int, blocks: int) -> NDArray[np.int32]:
    """Scattered block numbers of every request, shape (copies, requests, width); no block is used twice.

    Entries behind a request's last block are 0, as in the engine. Raises ConfigError if `blocks` are too few.
    """
    needed = -(-kv_tokens // BLOCK_SIZE)
    width = -(-max(MAX_MODEL_LEN, int(kv_tokens.max())) // BLOCK_SIZE)
    total = copies * needed_blocks(kv_tokens)
    if total > blocks:
        raise ConfigError(f"{copies} copies need {total} KV blocks, the pool has {blocks}")
    tables = np.zeros((copies, len(kv_tokens), width), np.int32)
    tables[np.broadcast_to(np.arange(width) < needed[:, None], tables.shape)] = _shuffled(blocks)[:total]
    return tables


@lru_cache(maxsize=32)
def _shuffled(blocks: int) -> NDArray[np.int32]:
    return np.random.default_rng(1).permutation(blocks).astype(np.int32)


class Bench:
    """The data that all calls of a sweep share. Use within `engine_config()`."""

    def __init__(self) -> None:
        import torch

        self.pools: dict[str, torch.Tensor] = {}
        self.l2_bytes = l2_bytes()
        scale = torch.ones((), device="cuda")
        self.layer = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)

    def work(self, point: Point) -> Work:
        """The same work several times, each call on its own KV blocks."""
        name, _, kv = point.kernel.partition(".")
        if name == "quantise_query":
            return Work(self._quantise_query(point))
        return Work(self._kv_write(point, kv) if name == "kv_write" else self._attention(point, kv))

    def _attention(self, point: Point, kv: str) -> Sequence[Callable[[], object]]:
        import torch

        queries, kv_tokens = lengths(point)
        heads, head_dim = point.shape["heads"], point.shape["head_dim"]
        query_and_output = 2 * queries.sum() * heads * head_dim * 2
        needed = int(kv_tokens.sum() * kv_bytes(point.shape, KV_DTYPES[kv]) + query_and_output)
        cache, impl = self._cache(point, kv), _impl(point, kv)
        fit = max(len(cache) // needed_blocks(kv_tokens), 1)
        tables = block_tables(kv_tokens, min(timing.copies(needed, self.l2_bytes), fit), len(cache))
        metadata = _metadata(point, kv, queries, kv_tokens, impl.vllm_flash_attn_version)
        calls = []
        for table in torch.from_numpy(tables).cuda():
            query = random_normal(int(queries.sum()), heads, head_dim, dtype=kv)
            output = torch.empty(query.shape, dtype=torch.bfloat16, device="cuda")
            calls.append(partial(impl.forward, self.layer, query, query, query, cache, metadata(table), output))
        return calls

    def _kv_write(self, point: Point, kv: str) -> Sequence[Callable[[], object]]:
        import torch

        tokens, kv_heads, head_dim = (point.shape[name] for name in ("tokens", "kv_heads", "head_dim"))
        cache, impl = self._cache(point, kv), _impl(point, kv)
        queries = point.shape["heads"]
        calls = []
        for _ in range(timing.copies(tokens * kv_bytes(point.shape, 2 + KV_DTYPES[kv]), self.l2_bytes)):
            # Views into the output of qkv_proj; every token goes into another block, as in decode.
            qkv = random_normal(tokens, queries + 2 * kv_heads, head_dim)
            _, key, value = qkv.split([queries, kv_heads, kv_heads], dim=1)
            slots = torch.randperm(len(cache), device="cuda")[:tokens] * BLOCK_SIZE
            slots += torch.randint(BLOCK_SIZE, (tokens,), device="cuda")
            calls.append(partial(impl.do_kv_cache_update, self.layer, key, value, cache, slots))
        return calls

    def _quantise_query(self, point: Point) -> Sequence[Callable[[], object]]:
        from vllm._custom_ops import scaled_fp8_quant

        tokens, row = point.shape["tokens"], point.shape["heads"] * point.shape["head_dim"]
        number = timing.copies(tokens * row * 3, self.l2_bytes)
        whole = (-1, -1)  # one scale for the tensor
        return [
            partial(scaled_fp8_quant, random_normal(tokens, row), self.layer._q_scale, group_shape=whole)
            for _ in range(number)
        ]

    def _cache(self, point: Point, kv: str) -> torch.Tensor:
        """The KV cache of one layer: the whole pool, in the engine's shape and strides."""
        import torch

        if kv not in self.pools:
            size = int(1.02 * MAX_KV_BYTES) // KV_DTYPES[kv]  # 2% more for last blocks, which are not full
            self.pools[kv] = random_pool(size, kv, SHARE_OF_MEMORY)
            if kv == "fp8":
                self.pools[kv] = self.pools[kv].view(torch.uint8)  # as vLLM's cache holds it
        return cache_of(self.pools[kv], point.shape["kv_heads"], point.shape["head_dim"])


def cache_of(pool: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """View the first whole blocks of a pool as the KV cache of one layer, in the engine's shape and strides."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    block = 2 * BLOCK_SIZE * kv_heads * head_dim  # elements
    blocks = len(pool) // block
    shape = (blocks, kv_heads, BLOCK_SIZE, 2 * head_dim)
    order = get_supported_kv_cache_layouts([FlashAttentionBackend])[0].layer_view_order
    stored = pool[: blocks * block].view([shape[i] for i in order])
    return stored.permute([order.index(i) for i in range(len(order))])


def _impl(point: Point, kv: str) -> Any:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    head_dim = point.shape["head_dim"]
    return FlashAttentionImpl(
        num_heads=point.shape["heads"],
        head_size=head_dim,
        scale=head_dim**-0.5,
        num_kv_heads=point.shape["kv_heads"],
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="fp8" if kv == "fp8" else "auto",
    )


def _metadata(point: Point, kv: str, queries: Ints, kv_tokens: Ints, version: int) -> Callable[[torch.Tensor], Any]:
    """Block table -> the step's metadata for every layer, as the engine's builder makes it."""
    import torch
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, get_scheduler_metadata

    shape, splits = point.shape, point.shape["num_splits"] if version == 3 else 0
    starts = torch.tensor([0, *queries.cumsum()], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(kv_tokens, dtype=torch.int32, device="cuda")
    longest_query, longest = int(queries.max()), int(kv_tokens.max())
    schedule = None
    if version == 3:
        schedule = get_scheduler_metadata(
            batch_size=len(queries),
            max_seqlen_q=longest_query,
            max_seqlen_k=longest,
            num_heads_q=shape["heads"],
            num_heads_kv=shape["kv_heads"],
            headdim=shape["head_dim"],
            cache_seqlens=seq_lens,
            qkv_dtype=torch.float8_e4m3fn if kv == "fp8" else torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=BLOCK_SIZE,
            causal=True,
            window_size=(-1, -1),
            num_splits=splits,
        )
    in_full_graph = longest_query == 1 and len(queries) <= MAX_GRAPH_TOKENS
    known = {field.name for field in fields(FlashAttentionMetadata)}
    older = {name: value for name, value in OLDER_METADATA.items() if name in known}
    return lambda table: FlashAttentionMetadata(
        num_actual_tokens=int(queries.sum()),
        max_query_len=longest_query,
        query_start_loc=starts,
        max_seq_len=max(MAX_MODEL_LEN, longest) if in_full_graph else longest,  # graphs are captured for the longest
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=starts,  # used by the KV write alone
        scheduler_metadata=schedule,
        max_num_splits=splits,
        causal=True,
        **older,
    )


if __name__ == "__main__":
    none = ()  # vLLM's wheel has these kernels compiled
    raise SystemExit(command("attention", __doc__, points, lambda: Bench().work, engine_config, compiled=none))
