"""Which tokens go through the fused kernels, and which through torch's operations."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def by_triton(tensor: torch.Tensor) -> bool:
    """Whether fp8plan.runtime.mismatch.fused computes with it: on a GPU, where Triton can be imported."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
