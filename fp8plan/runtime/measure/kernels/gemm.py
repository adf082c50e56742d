"""Time dense linear layers as vLLM 0.26 runs them on one GPU.

    python -m fp8plan.runtime.measure.kernels.gemm --output FOLDER [--grid quick|full] [--seconds N] [--compile-in 12]

Kernels, a row of FOLDER/gemm.jsonl each:
    gemm.bf16         torch.nn.functional.linear, which is vLLM's unquantised linear on CUDA: cuBLAS
    linear.fp8_block  the whole FP8_BLOCK linear: BF16 in, 1x128 quantisation, GEMM, BF16 out; `backend` is the kernel
                      class that vLLM selects. On Hopper that is FlashInfer's swapAB below 32 rows, else DeepGEMM
    gemm.fp8_block    its GEMM alone, from 32 rows on
    quantise          its quantisation alone, [m, k]

Weights are cold in L2: calls rotate over copies. Activations are warm: in the engine the operation before has just
written them. DeepGEMM compiles a kernel per (n, k) and tile; --compile-in does that in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.measure.grids.gemm import points
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.gpu_data import engine_config, l2_bytes, random_normal, random_pool
from fp8plan.runtime.measure.kernels.sweep import Point, Work, command

if TYPE_CHECKING:
    import torch

BLOCK = 128  # FP8_BLOCK scales
# Elements of the pool of weights, the share of the free GPU memory they may take, their standard deviation: FP8_BLOCK
# weights fill the range of E4M3. BF16: three copies of the largest lm_head.
POOLS = {"bf16": (3 * 152064 * 8192, 0.3, 0.02), "fp8": (10**9, 0.3, 100.0)}


class Bench:
    """Everything the calls of a sweep share. Use within `model_config()`."""

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
        """Windows [n, k] of one pool, enough to find each cold. Raises ConfigError if the pool has no room for two."""
        if dtype not in self.pools:
            elements, share, deviation = POOLS[dtype]
            self.pools[dtype] = random_pool(elements, dtype, share, deviation)
        pool = self.pools[dtype]
        number = min(timing.copies(n * k * pool.itemsize, self.l2_bytes), len(pool) // (n * k))
        if number < 2:
            raise ConfigError(f"two weights of {n} x {k} do not fit in the pool of {len(pool):,}")
        return pool[: number * n * k].view(number, n, k).unbind()

    def _layers(self, kernel: Any, n: int, k: int) -> list[Any]:
        """Layers with weights and scales in the layout that the kernel wants, as after loading a model."""
        return [self._layer(kernel, weight) for weight in self._weights("fp8", n, k)]

    def _layer(self, kernel: Any, weight: torch.Tensor) -> Any:
        import torch

        n, k = weight.shape
        scales = torch.rand(-(-n // BLOCK), -(-k // BLOCK), device="cuda").add_(0.5).mul_(2e-4)
        layer: Any = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
        layer.input_scale, layer.weight_block_size = None, [BLOCK, BLOCK]
        kernel.process_weights_after_loading(layer)
        return layer


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

    if fallback := getattr(kernel, "fallback", None):  # FlashInfer below 32 rows, this from there on
        e8m0 = fallback.use_deep_gemm_e8m0
        return partial(per_token_group_quant_fp8, group_size=BLOCK, column_major_scales=True, use_ue8m0=e8m0)
    if not kernel.apply_input_quant:
        raise ConfigError(f"{type(kernel).__name__} quantises inside its GEMM; only linear.fp8_block can be measured")
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = kernel.quant_fp8.forward_cuda
    return quantise


@contextmanager
def model_config() -> Iterator[None]:
    """vLLM's default configuration, with what a kernel's selection asks of the model."""
    with engine_config():
        import torch
        from vllm.config import get_current_vllm_config

        text = SimpleNamespace(model_type="qwen3")  # on Blackwell some types are kept from DeepGEMM; this is not one
        model = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text, is_diffusion=False)
        get_current_vllm_config().model_config = model
        yield


if __name__ == "__main__":
    raise SystemExit(
        command(
            "gemm", __doc__, points, lambda: Bench().work, model_config, compiled=("linear.fp8_block", "gemm.fp8_block")
        )
    )
