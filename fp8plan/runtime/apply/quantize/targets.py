"""Many tensors written into an engine at once, quantised or as they are, and each checked for NaN, Inf and zeros.

A model of experts has tens of thousands of small matrices, and one launch for each would take longer than the work.
With Triton on a GPU, all tensors of one shape and dtype are one launch; elsewhere torch does one after the other. The
places of the results are known before the first step. Hence the two steps:

    targets = QuantizeTargets(q_outs, scale_outs)   # once
    flags = torch.zeros(len(q_outs), dtype=torch.int32, device="cuda")
    targets.run(weights, flags)                     # every step

Nothing waits for the GPU: the work is queued on the current stream, and sources must live as long as for torch's own
operations. A source's flag is 0 for zeros alone, FINITE, or NOT_FINITE if NaN or Inf is among its values. Its target is
overwritten in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.quantize.block_fp8 import check_quantized, described, quantize_into, scale_shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FINITE: Final = 1
NOT_FINITE: Final = 2


def quantized(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return (q, scale) of matrices [N, K], with the very bits that QuantizeTargets writes on their device.

    On a GPU it divides as vLLM's compiled function does; torch alone gives other bits. Raises ConfigError as
    QuantizeTargets does.
    """
    import torch

    qs = [torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device) for w in weights]
    scales = [torch.empty(scale_shape(*w.shape), dtype=torch.float32, device=w.device) for w in weights]
    if weights:
        flags = torch.zeros(len(qs), dtype=torch.int32, device=weights[0].device)
        QuantizeTargets(qs, scales).run(weights, flags)
    return list(zip(qs, scales, strict=True))


class QuantizeTargets:
    """Targets of a group of weights, quantised as by fp8plan.runtime.apply.quantize.block_fp8.

    q_outs: E4M3 [N, K]; scale_outs: FP32 [ceil(N/128), ceil(K/128)]. All on one device; rows contiguous, at any
    distance from each other; their storage must stay where it is. Raises ConfigError for other tensors.
    """

    def __init__(self, q_outs: Sequence[Tensor], scale_outs: Sequence[Tensor]) -> None:
        if len(q_outs) != len(scale_outs):
            raise ConfigError(f"{len(q_outs)} q_outs for {len(scale_outs)} scale_outs; give one scale for each q")
        for q, scale in zip(q_outs, scale_outs, strict=True):
            check_quantized(q, scale)
        _check_targets([*q_outs, *scale_outs], (2,))
        self._q_outs, self._scale_outs = list(q_outs), list(scale_outs)
        self._addresses = None
        if _by_triton(q_outs):
            from fp8plan.runtime.apply.quantize import triton_kernels

            self._addresses = triton_kernels.addresses(self._q_outs, self._scale_outs)

    def run(self, sources: Sequence[Tensor], flags: Tensor) -> None:
        """Quantise sources[i] into target i, and raise flags[i] to its flag; a higher flag stays.

        sources: bf16, fp16 or fp32 [N, K] as the targets, rows contiguous; flags: int32 [len(sources)]; both on the
        targets' device

        Raises ConfigError for others, before anything is written.
        """
        import torch

        weights = (torch.bfloat16, torch.float16, torch.float32)
        _check_sources(sources, self._q_outs, [weights] * len(self._q_outs), flags)
        if self._addresses is not None:
            from fp8plan.runtime.apply.quantize import triton_kernels

            calls = triton_kernels.quantize_calls(sources, self._addresses, flags, triton_kernels.ROUNDING)
            triton_kernels.run(calls, flags.device)
            return
        for source, q, scale, flag in zip(sources, self._q_outs, self._scale_outs, flags, strict=True):
            quantize_into(source, q, scale)
            flag.clamp_(min=content(source.detach()))


class CopyTargets:
    """Targets of a group of tensors copied as they are: bf16, fp16, fp32 or E4M3, [N, K] or [N].

    All on one device; rows contiguous, at any distance; their storage must stay where it is. Raises ConfigError for
    other tensors.
    """

    def __init__(self, outs: Sequence[Tensor]) -> None:
        import torch

        copied = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
        for out in outs:
            if out.dtype not in copied:
                raise ConfigError(f"a target is {described(out)}; copied are {', '.join(map(str, copied))}")
        _check_targets(outs, (1, 2))
        self._outs = list(outs)
        self._dtypes = [(out.dtype,) for out in outs]
        self._triton = _by_triton(outs)

    def run(self, sources: Sequence[Tensor], flags: Tensor) -> None:
        """Copy sources[i], of the dtype of target i, into it; the rest as `QuantizeTargets.run`. E4M3 has no Inf."""
        _check_sources(sources, self._outs, self._dtypes, flags)
        if self._triton:
            from fp8plan.runtime.apply.quantize import triton_kernels

            triton_kernels.run(triton_kernels.copy_calls(sources, self._outs, flags), flags.device)
            return
        for source, out, flag in zip(sources, self._outs, flags, strict=True):
            out.copy_(source.detach())
            flag.clamp_(min=content(source.detach().float()))


def content(values: Tensor) -> Tensor:
    """Return the flag of values, int32 []: 0, FINITE or NOT_FINITE."""
    return values.any().int() + (~values.isfinite().all()).int()


def _by_triton(outs: Sequence[Tensor]) -> bool:
    return bool(outs) and outs[0].is_cuda and find_spec("triton") is not None


def _check_targets(outs: Sequence[Tensor], dimensions: Collection[int]) -> None:
    for out in outs:
        if out.dim() not in dimensions or not _rows_contiguous(out):
            allowed = " or ".join(map(str, dimensions))
            raise ConfigError(
                f"a target is {described(out)}, strides {out.stride()}; give {allowed} dimensions, the last contiguous"
            )
        if out.device != outs[0].device:
            raise ConfigError(f"targets are on {outs[0].device} and {out.device}; make a group for each device")


def _check_sources(
    sources: Sequence[Tensor], outs: Sequence[Tensor], dtypes: Sequence[Collection[torch.dtype]], flags: Tensor
) -> None:
    import torch

    if len(sources) != len(outs):
        raise ConfigError(f"{len(sources)} sources for {len(outs)} targets; give one for each")
    if flags.shape != (len(outs),) or flags.dtype != torch.int32 or (outs and flags.device != outs[0].device):
        where = outs[0].device if outs else flags.device
        raise ConfigError(f"flags are {described(flags)}; they must be torch.int32 [{len(outs)}] on {where}")
    device = flags.get_device()
    for i, (source, out, allowed) in enumerate(zip(sources, outs, dtypes, strict=True)):
        if source.shape != out.shape or source.dtype not in allowed or source.get_device() != device:
            accepted = f"{' or '.join(map(str, allowed))} {list(out.shape)} on {out.device}"
            raise ConfigError(f"source {i} is {described(source)}; its target takes {accepted}")
        if not _rows_contiguous(source):
            raise ConfigError(f"source {i} has strides {source.stride()}, the last must be 1; give .contiguous()")


def _rows_contiguous(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
