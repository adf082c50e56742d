from __future__ import annotations

from typing import get_args

import pytest

from fp8plan.model.attention_backend import kernel_block, why_no_fp8_kv

FULL, STATE, LATENT, SLIDING = "full", "state", "latent", "sliding"


def test_keys_and_values_can_be_fp8() -> None:
    for kinds in ([FULL], [FULL, SLIDING], [FULL, STATE], [LATENT], [LATENT, STATE]):
        assert why_no_fp8_kv(kinds, head_dims=[128]) is None


def test_states_cannot() -> None:
    assert "MambaDType" in (why_no_fp8_kv([STATE, STATE]) or "")


def test_large_heads_of_one_size_are_not_known_in_0_26() -> None:
    assert "512" in (why_no_fp8_kv([FULL], head_dims=[512], vllm="0.26.0") or "")
    assert why_no_fp8_kv([FULL], head_dims=[512]) is None


def test_heads_of_several_sizes_and_shorter_values_depend_on_gpu_and_version() -> None:
    """Gemma 4, and MiMo-V2-Flash: as vLLM 0.30 and 0.32 start them (tests/model/test_start.py)."""
    gemma, mimo = {"head_dims": [256, 512]}, {"head_dims": [192], "shorter_values": True}
    for vllm, known in (("0.30.0", False), ("0.32.0", True)):
        assert (why_no_fp8_kv([FULL, SLIDING], vllm=vllm, **gemma) is None) == known
        assert why_no_fp8_kv([FULL, SLIDING], vllm=vllm, capability=(10, 0), **gemma) is None
        for capability in ((9, 0), (12, 0)):
            assert (why_no_fp8_kv([FULL, SLIDING], vllm=vllm, capability=capability, **mimo) is None) == known
        assert why_no_fp8_kv([FULL, SLIDING], vllm=vllm, capability=(10, 3), **mimo) is not None


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [(None, 16, 64), ((8, 0), 16, 16), ((8, 9), 16, 16), ((9, 0), 16, 64), ((10, 3), 32, 32), ((12, 0), 16, 16)],
)
def test_latents_come_in_blocks_of_their_kernel(capability: tuple[int, int] | None, bf16: int, fp8: int) -> None:
    assert kernel_block(capability, latent=False, fp8_kv=True) == 16
    assert kernel_block(capability, latent=True, fp8_kv=False) == bf16
    assert kernel_block(capability, latent=True, fp8_kv=True) == fp8
    assert kernel_block(capability, latent=True, fp8_kv=False, indexed=True) == 64


@pytest.mark.vllm
def test_what_vllm_says_of_its_states_and_backends() -> None:
    from vllm.config.cache import MambaDType
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    assert not [name for name in get_args(MambaDType) if "fp8" in name]
    for backend, sparse in ((FlashMLABackend, False), (FlashMLASparseBackend, True)):
        assert "fp8" in backend.supported_kv_cache_dtypes
        (size,) = backend.get_supported_kernel_block_sizes()
        assert getattr(size, "base", size) == kernel_block((9, 0), True, True, sparse)  # from 0.32 any multiple of it
