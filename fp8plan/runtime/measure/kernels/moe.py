"""Time routed experts as vLLM runs them on one GPU: router logits in, reduced output out, one layer per call.

    python -m fp8plan.runtime.measure.kernels.moe --output FOLDER [--grid quick|full] [--seconds N] [--part i/n]

Kernels moe.bf16 and moe.fp8_block: top-k softmax, assignment of tokens to experts, both grouped GEMMs, SiLU, (FP8:
both activation quantisations) and the weighted sum. vLLM's oracle selects the backend, as for a model; on an H200
that is Triton for both. The router's GEMM is not included. Calls rotate over layers, so that weights are cold.

Columns beside the shape: `hit`, the experts that a call's tokens go to; `busiest`, the tokens of the busiest one;
`backend`, the class that ran them; `tuned`, true if vLLM ships a Triton configuration tuned for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape, parts
from fp8plan.model.calibrate.profile_of import MOE
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.sweep import Point, Work, command, shuffled
from fp8plan.runtime.measure.kernels.timing import engine_config, l2_bytes, random_normal, random_pool

if TYPE_CHECKING:
    import torch

# One layer: number of experts, experts per token, hidden size, inner size of an expert.
Experts = tuple[int, int, int, int]
TINY: Experts = (16, 2, 512, 256)
MODELS = ("Qwen/Qwen3-30B-A3B", *MOE, "mistralai/Mixtral-8x7B-v0.1", "fp8plan/moe-7b")
# Other proportions: wide models with few experts, and hundreds of narrow experts.
OTHER_MODELS = ("deepseek-ai/DeepSeek-V2-Lite", "zai-org/GLM-4.7-Flash", "fp8plan/qwen3-next-16-layers")
FEW_WIDE: tuple[Experts, ...] = ((32, 4, 3072, 3072), (16, 2, 4096, 6400))

DTYPES = ("bf16", "fp8_block")
SKEWS = ("even", "lognormal_0.5", "power_law_1.2")
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
FEW_TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
DRAWS = 2  # routings of one point, which layers take in turn

LEAST_LAYERS, MOST_LAYERS = 2, 32
POOL_ELEMENTS = 5 * 10**9  # two layers of Qwen3-235B-A22B
# A pool's element, its share of the free GPU memory, standard deviation: FP8_BLOCK weights fill the range of E4M3.
WEIGHTS = {"bf16": ("bf16", 0.3, 0.02), "fp8_block": ("fp8", 0.3, 100.0)}
BLOCK = 128  # FP8_BLOCK scales


def experts_of(model: str) -> Experts:
    """The experts of a model whose layers have the same ones, or none. Raises ValueError for a model without any."""
    shape = ModelShape.from_hf(model)
    if not (kinds := shape.parts_of(parts.Experts)):
        raise ValueError(f"{model} has no routed experts")
    [(experts, _)] = kinds
    return experts.num_experts, experts.experts_per_token, shape.hidden_size, experts.intermediate_size


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, shuffled."""
    return shuffled(_point(*key) for key in (_quick() if grid == "quick" else _full()))


Key = tuple[str, Experts, str, int]  # dtype, layer, skew, tokens


def _quick() -> Iterator[Key]:
    reference, other = experts_of(MODELS[0]), experts_of(MODELS[3])
    yield from product(DTYPES, (reference,), ("even",), FEW_TOKENS)
    yield from product(DTYPES, (reference,), ("power_law_1.2",), (32, 256, 2048))
    yield from product(DTYPES, (other, experts_of(MODELS[2])), ("even",), FEW_TOKENS[::2])
    yield from product(DTYPES, (experts_of(MODELS[1]), TINY), ("even",), (8, 128, 2048))


def _full() -> Iterator[Key]:
    yield from _quick()
    layers = [experts_of(model) for model in MODELS]
    yield from product(DTYPES, layers[::3], ("even",), TOKENS)
    yield from product(DTYPES, [*layers, TINY], ("even",), TOKENS[::2] + TOKENS[-1:])
    yield from product(DTYPES, layers[:1], SKEWS[1:], (8, *FEW_TOKENS[2:]))
    yield from product(DTYPES, layers[1:], ("power_law_1.2",), (32, 128, 512, 4096))
    others = [*map(experts_of, OTHER_MODELS), *FEW_WIDE]
    yield from product(DTYPES, others, ("even",), TOKENS[::2] + TOKENS[-1:])


def _point(dtype: str, layer: Experts, skew: str, tokens: int) -> Point:
    experts, top_k, hidden, inner = layer
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "inner": inner, "skew": skew}
    return Point(f"moe.{dtype}", shape)


def popularity(experts: int, skew: str) -> NDArray[np.float64]:
    """Relative popularity of each expert, busiest last, as quantiles of a law.

    "power_law_A" has density x^-A on [1, experts], after AIConfigurator, which uses A of 1.01 and 1.2. "lognormal_S" is
    milder: ln x has standard deviation S.
    """
    if skew == "even":
        return np.ones(experts)
    law, _, number = skew.rpartition("_")
    quantiles = (np.arange(experts) + 0.5) / experts
    if law == "lognormal":
        return np.asarray(np.exp(float(number) * ndtri(quantiles)))
    power = 1 - float(number)
    return np.asarray((1 + quantiles * (float(experts) ** power - 1)) ** (1 / power))


def route(tokens: int, experts: int, top_k: int, skew: str, seed: int) -> NDArray[np.bool_]:
    """The experts of each token, bool of shape (tokens, experts): top_k distinct ones by popularity.

    The top k of log popularity plus Gumbel noise are drawn without replacement (Plackett-Luce).
    """
    rng = np.random.default_rng(seed)
    weights = rng.permutation(popularity(experts, skew))
    scores = np.log(weights) + rng.gumbel(size=(tokens, experts))
    chosen = np.zeros((tokens, experts), np.bool_)
    np.put_along_axis(chosen, np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k], True, axis=1)
    return chosen


def load(routings: Sequence[NDArray[np.bool_]]) -> dict[str, float]:
    """The number of experts that a routing hits, and the tokens of its busiest one. Both are means over `routings`."""
    loads = np.array([routing.sum(axis=0) for routing in routings])
    return {"hit": float((loads > 0).sum(axis=1).mean()), "busiest": float(loads.max(axis=1).mean())}


def expert_elements(layer: Experts) -> int:
    """Weights of one expert: gate, up and down."""
    return 3 * layer[2] * layer[3]


class Bench:
    """The data that all calls of a sweep share. Use within `engine_config()`."""

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
            # Logits of 1 for a token's experts and 0 elsewhere: the top k are exactly those, in BF16 too.
            logits = torch.from_numpy(routings[i % DRAWS]).cuda().to(torch.bfloat16)
            tokens = random_normal(shape["tokens"], shape["hidden"])
            kernel, w13, w2 = _bf16(layer, w13, w2) if dtype == "bf16" else _fp8_block(layer, w13, w2)
            calls.append(partial(_run, kernel, tokens, logits, w13, w2, layer))
        backend = type(kernel.fused_experts).__name__
        return Work(calls, columns | {"tuned": _tuned(dtype, layer), "backend": backend, "layers": len(calls)})

    def _layers(self, dtype: str, layer: Experts, hit: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(w13, w2) of enough layers, windows of one pool of random weights. Raises ConfigError if two do not fit."""
        if dtype not in self.pools:
            self.pools[dtype] = random_pool(POOL_ELEMENTS, *WEIGHTS[dtype])
        pool, (experts, _, hidden, inner) = self.pools[dtype], layer
        size = experts * expert_elements(layer)
        wanted = timing.copies(ceil(hit * expert_elements(layer)) * pool.itemsize, self.l2_bytes)
        number = min(wanted, MOST_LAYERS, len(pool) // size)
        if number < LEAST_LAYERS:
            raise ConfigError(f"{LEAST_LAYERS} layers of {size:,} weights do not fit in the pool of {len(pool):,}")
        layers = []
        for window in pool[: number * size].view(number, size):
            w13, w2 = window.split([size // 3 * 2, size // 3])
            layers.append((w13.view(experts, 2 * inner, hidden), w2.view(experts, hidden, inner)))
        return layers


def _tuned(dtype: str, layer: Experts) -> bool:
    """Return True if vLLM has a Triton configuration tuned for such experts on this GPU."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    quantised = () if dtype == "bf16" else (BLOCK, BLOCK)
    return get_moe_configs(layer[0], layer[3], None if dtype == "bf16" else "fp8_w8a8", *quantised) is not None


def _config(layer: Experts) -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

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
    """vLLM's kernel for unquantised experts, and the weights in its layout."""
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
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

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
