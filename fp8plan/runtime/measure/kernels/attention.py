"""Time attention as vLLM 0.26 runs it on Hopper: FlashAttention 3 over a paged KV cache, one layer per call.

    python -m fp8plan.runtime.measure.kernels.attention --output FOLDER [--grid quick|full] [--seconds N] [--part i/n]

Kernels, each .bf16 or .fp8 by the KV cache (a row of FOLDER/attention.jsonl says which):
    attention_decode    one query token of each of `batch` requests over `context` tokens on average
    attention_prefill   `chunks` requests with `chunk` query tokens each, after `context` tokens of KV
    attention_mixed     both in one call, as when a prompt enters a running batch
    kv_write            `tokens` keys and values into their blocks
    quantise_query      `tokens` queries to E4M3 (fp8 only), by vLLM's CUDA kernel. The engine uses that kernel beside
                        FP8_BLOCK weights; otherwise torch.compile fuses it into the rotary embedding, where it is free

vLLM's own FlashAttentionImpl is called, so the kernel and its arguments are the engine's: max_num_splits, the
schedule made ahead of time and, for FP8, quantised queries with descales. That schedule is made once per step, for
all layers, and is not timed. Inputs are cold in L2; in the engine queries and new KV may still be warm there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fp8plan.runtime.measure.grids.attention import (
    BLOCK_SIZE,
    KV_DTYPES,
    MAX_GRAPH_TOKENS,
    MAX_KV_BYTES,
    MAX_MODEL_LEN,
    Ints,
    block_tables,
    kv_bytes,
    lengths,
    needed_blocks,
    points,
)
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.gpu_data import engine_config, l2_bytes, random_normal, random_pool
from fp8plan.runtime.measure.kernels.sweep import Point, command

if TYPE_CHECKING:
    import torch

SHARE_OF_MEMORY = 0.4  # of the free GPU memory, for the first pool; there are two


class Bench:
    """Everything the calls of a sweep share. Use within `engine_config()`."""

    def __init__(self) -> None:
        import torch

        self.pools: dict[str, torch.Tensor] = {}
        self.l2_bytes = l2_bytes()
        one = torch.ones((), device="cuda")
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)

    def calls(self, point: Point) -> Sequence[Callable[[], object]]:
        """The same work several times, each on its own KV blocks."""
        name, _, kv = point.kernel.partition(".")
        if name == "quantise_query":
            return self._quantise_query(point)
        return self._kv_write(point, kv) if name == "kv_write" else self._attention(point, kv)

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
        found = []
        for table in torch.from_numpy(tables).cuda():
            query = random_normal(int(queries.sum()), heads, head_dim, dtype=kv)
            output = torch.empty(query.shape, dtype=torch.bfloat16, device="cuda")
            found.append(partial(impl.forward, self.layer, query, query, query, cache, metadata(table), output))
        return found

    def _kv_write(self, point: Point, kv: str) -> Sequence[Callable[[], object]]:
        import torch

        tokens, kv_heads, head_dim = (point.shape[x] for x in ("tokens", "kv_heads", "head_dim"))
        cache, impl = self._cache(point, kv), _impl(point, kv)
        queries = point.shape["heads"]
        found = []
        for _ in range(timing.copies(tokens * kv_bytes(point.shape, 2 + KV_DTYPES[kv]), self.l2_bytes)):
            # Views into the output of qkv_proj; every token goes into another block, as in decode.
            qkv = random_normal(tokens, queries + 2 * kv_heads, head_dim)
            _, key, value = qkv.split([queries, kv_heads, kv_heads], dim=1)
            slots = torch.randperm(len(cache), device="cuda")[:tokens] * BLOCK_SIZE
            slots += torch.randint(BLOCK_SIZE, (tokens,), device="cuda")
            found.append(partial(impl.do_kv_cache_update, self.layer, key, value, cache, slots))
        return found

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
        """The KV cache of one layer in the engine's shape and strides, as many blocks as the pool holds."""
        import torch
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        if kv not in self.pools:
            size = int(1.02 * MAX_KV_BYTES) // KV_DTYPES[kv]  # requests do not end where blocks do
            self.pools[kv] = random_pool(size, kv, SHARE_OF_MEMORY)
            if kv == "fp8":
                self.pools[kv] = self.pools[kv].view(torch.uint8)  # as vLLM's cache holds it
        pool, block = self.pools[kv], BLOCK_SIZE * kv_bytes(point.shape, 1)  # elements
        blocks = len(pool) // block
        sizes = (blocks, BLOCK_SIZE, point.shape["kv_heads"], point.shape["head_dim"])
        shape = FlashAttentionBackend.get_kv_cache_shape(*sizes)
        order = FlashAttentionBackend.get_kv_cache_stride_order()
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
    """block table -> what the engine's metadata builder would hand to every layer of this step."""
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
    return lambda table: FlashAttentionMetadata(
        num_actual_tokens=int(queries.sum()),
        max_query_len=longest_query,
        query_start_loc=starts,
        max_seq_len=max(MAX_MODEL_LEN, longest) if in_full_graph else longest,  # graphs are captured for the longest
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=starts,  # used by the KV write alone
        use_cascade=False,
        common_prefix_len=0,
        cu_prefix_query_lens=None,
        prefix_kv_lens=None,
        suffix_kv_lens=None,
        scheduler_metadata=schedule,
        max_num_splits=splits,
        causal=True,
        sliding_window=(-1, -1),
    )


if __name__ == "__main__":
    nothing = ()  # is compiled at first use: vLLM's wheel has these kernels
    raise SystemExit(command("attention", __doc__, points, lambda: Bench().calls, engine_config, compiled=nothing))
