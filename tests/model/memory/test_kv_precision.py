from __future__ import annotations

from typing import get_args

import pytest

from fp8plan.model.memory.kv_specs import LayerCache, kernel_block, why_no_fp8_kv

FULL, STATE, LATENT = LayerCache("full", 4096), LayerCache("state", state_bytes=100_000), LayerCache("latent", 576)
SLIDING = LayerCache("sliding", 4096, 128)


def test_keys_and_values_can_be_fp8() -> None:
    for caches in ([FULL], [FULL, SLIDING], [FULL, STATE], [LATENT], [LATENT, STATE]):
        assert why_no_fp8_kv(caches, head_dims=[128]) is None


def test_states_cannot() -> None:
    assert "MambaDType" in (why_no_fp8_kv([STATE, STATE]) or "")


def test_large_heads_of_one_size_are_not_known_in_0_26() -> None:
    assert "512" in (why_no_fp8_kv([FULL], head_dims=[512]) or "")
    assert why_no_fp8_kv([FULL], head_dims=[512], vllm="0.30") is None
    assert why_no_fp8_kv([FULL, SLIDING], head_dims=[256, 512]) is None  # Gemma 4


def test_fp8_latents_come_in_larger_blocks() -> None:
    assert kernel_block([FULL, SLIDING], 1) == 16
    assert kernel_block([LATENT], 2) == 16
    assert kernel_block([LATENT], 1) == 64
    assert kernel_block([LATENT], 2, sparse=True) == 64


@pytest.mark.vllm
def test_what_vllm_says_of_its_states_and_backends() -> None:
    from vllm.config.cache import MambaDType
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    assert not [name for name in get_args(MambaDType) if "fp8" in name]
    for backend, sparse in ((FlashMLABackend, False), (FlashMLASparseBackend, True)):
        assert "fp8" in backend.supported_kv_cache_dtypes
        (size,) = backend.get_supported_kernel_block_sizes()
        assert getattr(size, "base", size) == kernel_block([LATENT], 1, sparse)  # from 0.32 any multiple of it
