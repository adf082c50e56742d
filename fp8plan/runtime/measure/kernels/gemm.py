"""Time dense linear layers, y[m, n] = x[m, k] @ W[n, k]^T, as vLLM runs those of real models on one GPU.

    python -m fp8plan.runtime.measure.kernels.gemm --output FOLDER [--grid quick|full] [--seconds N] [--compile [N]]

Kernels, a row of FOLDER/gemm.jsonl each:
    gemm.bf16         torch.nn.functional.linear, which is vLLM's unquantised linear on CUDA: cuBLAS
    linear.fp8_block  the whole FP8_BLOCK linear: BF16 in, 1x128 quantisation, GEMM, BF16 out. `backend` is the kernel
                      class that vLLM selects: on Hopper FlashInfer's swapAB below 32 rows, else DeepGEMM
    gemm.fp8_block    its GEMM alone, from 32 rows on
    quantise          its quantisation alone, [m, k]

Weights are cold in L2: calls rotate over copies. Activations are warm, as in the engine, where the operation before has
just written them. DeepGEMM compiles a kernel per (n, k) and tile; --compile does that in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.calibrate.profile_of import LINEARS
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.sweep import Point, Work, command, shuffled
from fp8plan.runtime.measure.kernels.timing import engine_config, l2_bytes, random_normal, random_pool

if TYPE_CHECKING:
    import torch

# DeepGEMM compiles some ten kernels for each (n, k), a few seconds each. So FP8 is measured on these layers only, at
# every m, and BF16 also on those of all models that one GPU holds, at some m.
CORE = {
    "Qwen/Qwen3-8B": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "Qwen/Qwen3-1.7B": ("qkv_proj", "gate_up_proj"),
    "Qwen/Qwen3-32B": ("gate_up_proj", "down_proj"),
    "Qwen/Qwen2.5-7B": ("down_proj",),
    "fp8plan/dense-50m": ("gate_up_proj",),
}
QUICK = {"Qwen/Qwen3-8B": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}

MOST_ON_ONE_GPU = 180 * 10**9  # parameters. In FP8 they fill a B200 of 180 GB; larger models need several GPUs

SWAP_AB_BELOW = (
    32  # rows. Below it FlashInfer on Hopper quantises inside its GEMM. DeepGEMM's input is quantised before
)

DECODE = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)
PREFILL = (1024, 2048, 4096, 8192, 16384)
ROWS = DECODE + PREFILL
FEW_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
LOGITS_ROWS = (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # lm_head: one row for each sampled token
STRIDE = 8  # each 8th of ROWS, for layers that are not in CORE

BLOCK = 128  # FP8_BLOCK scales
# Elements of a pool of weights, its share of the free GPU memory, standard deviation: FP8_BLOCK weights fill the range
# of E4M3. BF16: three copies of the largest lm_head.
POOLS = {"bf16": (3 * 152064 * 8192, 0.3, 0.02), "fp8": (10**9, 0.3, 100.0)}

Weight = tuple[int, int]  # n, k


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, shuffled."""
    return shuffled(_quick() if grid == "quick" else _full())


def _quick() -> Iterator[Point]:
    weights = weights_of(QUICK)
    yield from _linears("gemm.bf16", FEW_ROWS, weights)
    yield from _linears("linear.fp8_block", FEW_ROWS, weights)
    yield from _linears("gemm.fp8_block", (64, 256, 2048), weights)
    yield from _quantise((1, 32, 256, 2048, 8192), weights)
    yield from _linears("gemm.bf16", (32, 512, 4096), weights_of(CORE))
    yield from _linears("gemm.bf16", LOGITS_ROWS[::3], lm_heads()[::5])


def _full() -> Iterator[Point]:
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


def _linears(kernel: str, rows: Iterable[int], weights: Iterable[Weight]) -> Iterator[Point]:
    yield from (Point(kernel, {"m": m, "n": n, "k": k}) for m, (n, k) in product(rows, weights))


def _quantise(rows: Iterable[int], weights: Iterable[Weight]) -> Iterator[Point]:
    yield from (Point("quantise", {"m": m, "k": k}) for m, k in product(rows, sorted({k for _, k in weights})))


def weights_of(layers: Mapping[str, tuple[str, ...]]) -> list[Weight]:
    """(n, k) of the named linear layers of models. Raises KeyError for a layer that a model lacks."""
    weights: dict[Weight, None] = {}
    for model, names in layers.items():
        shapes = {linear.name: (linear.n, linear.k) for linear in ModelShape.from_hf(model).linears()}
        weights |= dict.fromkeys(shapes[name] for name in names)
    return list(weights)


@cache
def linears() -> list[Weight]:
    """(n, k) of the layers that FP8_BLOCK quantises, of all bundled models that one GPU holds."""
    return _all(quantised=True)


@cache
def lm_heads() -> list[Weight]:
    """(n, k) of the lm_head of each bundled model that one GPU holds.

    Routers, which are BF16 in FP8_BLOCK too, have fewer than 1024 rows.
    """
    return [weight for weight in _all(quantised=False) if weight[0] >= 1024]


def _all(quantised: bool) -> list[Weight]:
    shapes = [shape for shape in map(ModelShape.from_hf, bundled_models()) if shape.num_parameters <= MOST_ON_ONE_GPU]
    return sorted({(w.n, w.k) for shape in shapes for w in shape.linears() if w.quantised == quantised})


class Bench:
    """The data that all calls of a sweep share. Use within `model_config()`."""

    def __init__(self) -> None:
        self.pools: dict[str, torch.Tensor] = {}
        self.l2_bytes = l2_bytes()

    def work(self, point: Point) -> Work:
        timed: dict[str, Callable[..., Work]] = {
            "gemm.bf16": self._bf16,
            "linear.fp8_block": self._fp8_linear,
            "gemm.fp8_block": self._fp8_gemm,
            "quantise": self._quantise,
        }
        return timed[point.kernel](**point.shape)

    def _bf16(self, m: int, n: int, k: int) -> Work:
        from torch.nn.functional import linear

        x = random_normal(m, k)
        return Work([partial(linear, x, weight) for weight in self._weights("bf16", n, k)], {"backend": "cublas"})

    def _fp8_linear(self, m: int, n: int, k: int) -> Work:
        kernel, x = fp8_kernel(n, k), random_normal(m, k)
        calls = [partial(kernel.apply_weights, layer, x) for layer in self._layers(kernel, n, k)]
        return Work(calls, {"backend": type(kernel).__name__})

    def _fp8_gemm(self, m: int, n: int, k: int) -> Work:
        kernel = fp8_kernel(n, k)
        x, scales = quantiser(kernel)(random_normal(m, k))
        gemm = getattr(kernel, "fallback", kernel)
        calls = [
            partial(gemm.apply_block_scaled_mm, x, layer.weight, scales, layer.weight_scale_inv)
            for layer in self._layers(kernel, n, k)
        ]
        return Work(calls, {"backend": type(gemm).__name__})

    def _quantise(self, m: int, k: int) -> Work:
        kernel = fp8_kernel(BLOCK, k)
        return Work([partial(quantiser(kernel), random_normal(m, k))], {"backend": type(kernel).__name__})

    def _weights(self, dtype: str, n: int, k: int) -> Sequence[torch.Tensor]:
        """Windows [n, k] of one pool, each of them cold. Raises ConfigError if the pool is too small for two."""
        if dtype not in self.pools:
            elements, share, deviation = POOLS[dtype]
            self.pools[dtype] = random_pool(elements, dtype, share, deviation)
        pool = self.pools[dtype]
        number = min(timing.copies(n * k * pool.itemsize, self.l2_bytes), len(pool) // (n * k))
        if number < 2:
            raise ConfigError(f"two weights of {n} x {k} do not fit in the pool of {len(pool):,}")
        return pool[: number * n * k].view(number, n, k).unbind()

    def _layers(self, kernel: Any, n: int, k: int) -> list[Any]:
        """Layers with weights and scales in the kernel's layout, as after loading a model."""
        import torch

        layers: list[Any] = []
        for weight in self._weights("fp8", n, k):
            scales = torch.rand(-(-n // BLOCK), -(-k // BLOCK), device="cuda").add_(0.5).mul_(2e-4)
            layer: Any = torch.nn.Module()
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
            layer.input_scale, layer.weight_block_size = None, [BLOCK, BLOCK]
            kernel.process_weights_after_loading(layer)
            layers.append(layer)
        return layers


@cache
def fp8_kernel(n: int, k: int) -> Any:
    """The kernel that vLLM selects for an online FP8_BLOCK linear of this shape."""
    import torch
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    return init_fp8_linear_kernel(
        activation_quant_key=kFp8Dynamic128Sym,
        weight_quant_key=kFp8Static128BlockSym,
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        weight_shape=(n, k),
    )


def quantiser(kernel: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """x[m, k] -> (E4M3, scales), as `kernel` calls it before its GEMM."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    if fallback := getattr(kernel, "fallback", None):  # FlashInfer below 32 rows, this one from there on
        e8m0 = fallback.use_deep_gemm_e8m0
        return partial(per_token_group_quant_fp8, group_size=BLOCK, column_major_scales=True, use_ue8m0=e8m0)
    if not kernel.apply_input_quant:
        raise ConfigError(f"{type(kernel).__name__} quantises inside its GEMM; only linear.fp8_block can be measured")
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = kernel.quant_fp8.forward_cuda
    return quantise


@contextmanager
def model_config() -> Iterator[None]:
    """vLLM's default configuration, with the model's facts that decide about a kernel."""
    with engine_config():
        import torch
        from vllm.config import get_current_vllm_config

        text = SimpleNamespace(model_type="qwen3")  # a type that may use DeepGEMM on Blackwell too
        model = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text, is_diffusion=False)
        get_current_vllm_config().model_config = model
        yield


if __name__ == "__main__":
    compiled = ("linear.fp8_block", "gemm.fp8_block")
    raise SystemExit(command("gemm", __doc__, points, lambda: Bench().work, model_config, compiled=compiled))
