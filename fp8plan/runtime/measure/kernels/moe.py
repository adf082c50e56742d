"""Time routed experts as vLLM 0.26 runs them on one GPU: router logits in, reduced output out, one layer per call.

    python -m fp8plan.runtime.measure.kernels.moe --output FOLDER [--grid quick|full] [--seconds N] [--part i/n]

Kernels moe.bf16 and moe.fp8_block: top-k softmax, assignment of tokens to experts, both grouped GEMMs, SiLU, (FP8:
both activation quantisations) and the weighted sum. vLLM's oracle selects the backend, as for a model; on an H200
that is Triton for both. The router's GEMM is not included. Calls rotate over layers, so that weights are cold.

Columns beside the shape: `hit`, how many experts the tokens of a call really hit; `busiest`, the tokens of the
busiest one; `backend`, the class that ran them; `tuned`, whether vLLM ships a Triton configuration tuned for them.
"""

from __future__ import annotations

from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.measure.grids.moe import DRAWS, Experts, expert_elements, load, points, route
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.gpu_data import engine_config, l2_bytes, random_normal, random_pool
from fp8plan.runtime.measure.kernels.sweep import Point, Work, command

if TYPE_CHECKING:
    import torch

LEAST_LAYERS, MOST_LAYERS = 2, 32
POOL_ELEMENTS = 5 * 10**9  # two layers of Qwen3-235B-A22B
# Element, share of the free GPU memory for the pool, standard deviation: FP8_BLOCK weights fill the range of E4M3.
WEIGHTS = {"bf16": ("bf16", 0.3, 0.02), "fp8_block": ("fp8", 0.3, 100.0)}
BLOCK = 128  # FP8_BLOCK scales


class Bench:
    """Everything the calls of a sweep share. Use within `engine_config()`."""

    def __init__(self) -> None:
        self.pools: dict[str, torch.Tensor] = {}
        self.l2_bytes = l2_bytes()

    def work(self, point: Point) -> Work:
        """The same work in several layers, each with its own weights and tokens."""
        import torch

        shape, dtype = point.shape, point.kernel.partition(".")[2]
        layer = shape["experts"], shape["top_k"], shape["hidden"], shape["inner"]
        routings = [route(shape["tokens"], *layer[:2], shape["skew"], seed) for seed in range(DRAWS)]
        columns = load(routings)
        calls = []
        for i, (w13, w2) in enumerate(self._layers(dtype, layer, columns["hit"])):
            # One where a token goes, zero elsewhere: the top k are exactly those, in BF16 too.
            logits = torch.from_numpy(routings[i % DRAWS]).cuda().to(torch.bfloat16)
            tokens = random_normal(shape["tokens"], shape["hidden"])
            kernel, w13, w2 = _bf16(layer, w13, w2) if dtype == "bf16" else _fp8_block(layer, w13, w2)
            calls.append(partial(_run, kernel, tokens, logits, w13, w2, layer))
        backend = type(kernel.fused_experts).__name__
        return Work(calls, columns | {"tuned": _tuned(dtype, layer), "backend": backend, "layers": len(calls)})

    def _layers(self, dtype: str, layer: Experts, hit: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(w13, w2) of enough layers, each a window of one pool of random weights. ConfigError if two do not fit."""
        if dtype not in self.pools:
            self.pools[dtype] = random_pool(POOL_ELEMENTS, *WEIGHTS[dtype])
        pool, (experts, _, hidden, inner) = self.pools[dtype], layer
        size = experts * expert_elements(layer)
        wanted = timing.copies(ceil(hit * expert_elements(layer)) * pool.itemsize, self.l2_bytes)
        number = min(wanted, MOST_LAYERS, len(pool) // size)
        if number < LEAST_LAYERS:
            raise ConfigError(f"{LEAST_LAYERS} layers of {size:,} weights do not fit in the pool of {len(pool):,}")
        found = []
        for window in pool[: number * size].view(number, size):
            w13, w2 = window.split([size // 3 * 2, size // 3])
            found.append((w13.view(experts, 2 * inner, hidden), w2.view(experts, hidden, inner)))
        return found


def _tuned(dtype: str, layer: Experts) -> bool:
    """Return True if vLLM has a Triton configuration that was tuned for such experts on this GPU."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    quantised = () if dtype == "bf16" else (BLOCK, BLOCK)
    return get_moe_configs(layer[0], layer[3], None if dtype == "bf16" else "fp8_w8a8", *quantised) is not None


def _config(layer: Experts) -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    experts, top_k, hidden, inner = layer
    return FusedMoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=inner,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.RenormalizeNaive,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )


def _bf16(layer: Experts, w13: torch.Tensor, w2: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """vLLM's kernel for unquantised experts, and the weights in the layout it wants."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    config = _config(layer)
    backend, experts = oracle.select_unquantized_moe_backend(config)
    w13, w2 = oracle.convert_to_unquantized_kernel_format(backend, config, w13, w2)
    return oracle.make_unquantized_moe_kernel(FusedMoEQuantConfig.make(), config, backend, experts), w13, w2


def _fp8_block(layer: Experts, w13: torch.Tensor, w2: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The same for experts with 128x128 scales, as online quantisation leaves them."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Dynamic128Sym,
        kFp8Static128BlockSym,
    )

    config, block = _config(layer), [BLOCK, BLOCK]
    backend, experts = oracle.select_fp8_moe_backend(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    scales = [
        torch.full((w.shape[0], -(-w.shape[1] // BLOCK), -(-w.shape[2] // BLOCK)), 2e-4, device="cuda")
        for w in (w13, w2)
    ]
    holder = SimpleNamespace(weight_block_size=block)
    w13, w2, *scales = oracle.convert_to_fp8_moe_kernel_format(backend, holder, w13, w2, *scales, None, None)
    quant = oracle.make_fp8_moe_quant_config(backend, *scales, None, None, block_shape=block)
    return oracle.make_fp8_moe_kernel(quant, config, experts, backend), w13, w2


def _run(
    kernel: Any, tokens: torch.Tensor, logits: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, layer: Experts
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    weights, experts, _ = fused_topk(tokens, logits, layer[1], renormalize=True)
    out: torch.Tensor = kernel.apply(
        hidden_states=tokens,
        w1=w13,
        w2=w2,
        topk_weights=weights,
        topk_ids=experts,
        activation=MoEActivation.SILU,
        global_num_experts=layer[0],
        expert_map=None,
        apply_router_weight_on_input=False,
    )
    return out


if __name__ == "__main__":
    raise SystemExit(command("moe", __doc__, points, lambda: Bench().work, engine_config))
