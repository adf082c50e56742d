"""The operations between GEMMs and attention of a compiled model, for Inductor to fuse. Imports torch and vLLM.

Each function takes first the tensors whose first dimension is the number of tokens, m.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

EPSILON = 1e-6

activation = SiluAndMul.forward_native  # [m, 2 inner] -> [m, inner]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last dimension, in FP32."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype) * weight


def norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of the next layer and the new residual, both [m, hidden]."""
    total = x.float() + residual.float()
    return rms_norm(total, weight).to(x.dtype), total.to(x.dtype)


def rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    heads: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key from the output of qkv_proj. weights: their norms'; heads: (query heads, KV heads, head size)."""
    queries, keys, head_dim = heads
    q, k, _ = qkv.split([queries * head_dim, keys * head_dim, keys * head_dim], dim=-1)
    if weights:
        q = rms_norm(q.unflatten(-1, (queries, head_dim)), weights[0]).flatten(-2)
        k = rms_norm(k.unflatten(-1, (keys, head_dim)), weights[1]).flatten(-2)
    rotated: tuple[torch.Tensor, torch.Tensor] = RotaryEmbedding.forward_static(
        positions, q, k, head_dim, head_dim, cos_sin, True
    )
    return rotated
