"""The dense linear layers that are measured: y[m, n] = x[m, k] @ W[n, k]^T, the (n, k) of real models on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product

import numpy as np

from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.calibrate.held_out import LINEARS
from fp8plan.runtime.measure.kernels.sweep import Point

# DeepGEMM compiles a kernel for each (n, k) and tile, some ten for all m together and a few seconds each. So FP8 is
# measured on these layers, at every m, and BF16 on them and, at some m, on those of all models.
CORE = {
    "Qwen/Qwen3-8B": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "Qwen/Qwen3-1.7B": ("qkv_proj", "gate_up_proj"),
    "Qwen/Qwen3-32B": ("gate_up_proj", "down_proj"),
    "Qwen/Qwen2.5-7B": ("down_proj",),
    "fp8plan/dense-50m": ("gate_up_proj",),
}
QUICK = {"Qwen/Qwen3-8B": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}

SWAP_AB_BELOW = 32  # rows; vLLM on Hopper: FlashInfer quantises inside its GEMM, DeepGEMM's input is quantised before

DECODE = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)
PREFILL = (1024, 2048, 4096, 8192, 16384)
ROWS = DECODE + PREFILL
FEW_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
LOGITS_ROWS = (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # lm_head: one row for each sampled token
STRIDE = 8  # of ROWS, for layers that are not in CORE

Weight = tuple[int, int]  # n, k
Key = tuple[str, int, int, int]  # kernel, m, n, k


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, in an order that can be cut anywhere: neighbours are unrelated."""
    found = list(dict.fromkeys(_quick() if grid == "quick" else _full()))
    order = np.random.default_rng(0).permutation(len(found))
    return [_point(*found[i]) for i in order]


def _point(kernel: str, m: int, n: int, k: int) -> Point:
    return Point(kernel, {"m": m, "k": k} if kernel == "quantise" else {"m": m, "n": n, "k": k})


def _quick() -> Iterator[Key]:
    weights = weights_of(QUICK)
    yield from _linears("gemm.bf16", FEW_ROWS, weights)
    yield from _linears("linear.fp8_block", FEW_ROWS, weights)
    yield from _linears("gemm.fp8_block", (64, 256, 2048), weights)
    yield from _quantise((1, 32, 256, 2048, 8192), weights)
    yield from _linears("gemm.bf16", (32, 512, 4096), weights_of(CORE))
    yield from _linears("gemm.bf16", LOGITS_ROWS[::3], lm_heads()[::5])


def _full() -> Iterator[Key]:
    yield from _quick()
    core, held_out = weights_of(CORE), weights_of(LINEARS)
    for kernel in ("gemm.bf16", "linear.fp8_block"):
        yield from _linears(kernel, ROWS, core)
        yield from _linears(kernel, FEW_ROWS, held_out)
    yield from _linears("gemm.fp8_block", [m for m in ROWS[::2] if m >= SWAP_AB_BELOW], core)
    yield from _quantise(FEW_ROWS, core + held_out)
    for i, weight in enumerate(linears()):
        yield from _linears("gemm.bf16", ROWS[i % STRIDE :: STRIDE], [weight])
    for i, weight in enumerate(lm_heads()):
        yield from _linears("gemm.bf16", LOGITS_ROWS[i % 3 :: 3], [weight])


def _linears(kernel: str, rows: Iterable[int], weights: Iterable[Weight]) -> Iterator[Key]:
    yield from ((kernel, m, n, k) for m, (n, k) in product(rows, weights))


def _quantise(rows: Iterable[int], weights: Iterable[Weight]) -> Iterator[Key]:
    yield from (("quantise", m, 0, k) for m, k in product(rows, sorted({k for _, k in weights})))


def weights_of(layers: Mapping[str, tuple[str, ...]]) -> list[Weight]:
    """(n, k) of the named linear layers of models. Raises KeyError for one that a model has not."""
    found = []
    for model, names in layers.items():
        shapes = {linear.name: (linear.n, linear.k) for linear in ModelShape.from_hf(model).linears()}
        found += [shapes[name] for name in names]
    return list(dict.fromkeys(found))


@cache
def linears() -> list[Weight]:
    """(n, k) of the layers that FP8_BLOCK quantises, of all bundled models."""
    return _all(quantised=True)


@cache
def lm_heads() -> list[Weight]:
    """(n, k) of all bundled models' lm_head; routers, which FP8_BLOCK leaves in BF16 too, are below 1024 rows."""
    return [weight for weight in _all(quantised=False) if weight[0] >= 1024]


def _all(quantised: bool) -> list[Weight]:
    shapes = map(ModelShape.from_hf, bundled_models())
    return sorted({(w.n, w.k) for shape in shapes for w in shape.linears() if w.quantised == quantised})
