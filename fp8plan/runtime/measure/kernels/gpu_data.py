"""Pools of random data on the GPU and vLLM's default configuration, for the sweeps of attention and MoE."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp8plan.model.precision import E4M3_MAX

if TYPE_CHECKING:
    import torch

FILLED_AT_ONCE = 2**28  # elements


def l2_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def random_normal(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    """Standard normal values of `dtype` "bf16" or "fp8" (E4M3)."""
    import torch

    values = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return values.to(torch.float8_e4m3fn) if dtype == "fp8" else values


def random_pool(elements: int, dtype: str, share: float, deviation: float = 1.0) -> torch.Tensor:
    """`elements` normal values of "bf16" or "fp8", fewer where they would take more than `share` of the free memory.

    Made once and read in many shapes: to allocate and fill tens of gigabytes for each point would take longer than
    to time it.
    """
    import torch

    element = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    room = int(torch.cuda.mem_get_info()[0] * share) // element.itemsize
    pool = torch.empty(min(room, elements), dtype=element, device="cuda")
    for part in pool.split(FILLED_AT_ONCE):
        part.copy_(random_normal(len(part)).mul_(deviation).clamp_(-E4M3_MAX, E4M3_MAX))
    return pool


@contextmanager
def engine_config() -> Iterator[None]:
    """vLLM's default configuration and workspace, which its classes ask for. No E8M0 scales: as in fp8plan's plans."""
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # read when vLLM is imported
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
    with set_current_vllm_config(VllmConfig()):
        yield
