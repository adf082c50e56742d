from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits, cudagraph_capture_sizes
from fp8plan.model.memory.plan import cudagraph_reserve_bytes
from fp8plan.model.precision import BF16

GIB = 1 << 30
H200 = find_gpu("h200")
QWEN3_8B = ModelShape.from_hf("Qwen3-8B")
QWEN3_30B = ModelShape.from_hf("Qwen3-30B-A3B")


def test_both_model_runners_reserve_for_cuda_graphs() -> None:
    # Public logs of V1 (experts) with these graphs say 0.5 to 0.8 GiB. V2 (dense) reserved nothing before 0.29.
    limits = EngineLimits(max_num_seqs=256)
    assert cudagraph_reserve_bytes(QWEN3_8B, BF16, H200, limits, "0.28.0") == 0
    assert cudagraph_reserve_bytes(QWEN3_8B, BF16, H200, limits, "0.29.0") > 0.5 * GIB
    assert cudagraph_reserve_bytes(QWEN3_8B, BF16, H200, replace(limits, enforce_eager=True)) == 0
    assert 0.5 < cudagraph_reserve_bytes(QWEN3_30B, BF16, H200, limits, "0.26.0") / GIB < 0.8
    assert cudagraph_reserve_bytes(QWEN3_30B, BF16, H200, replace(limits, enforce_eager=True)) == 0


def test_capture_sizes_equal_the_list_vllm_logs() -> None:
    # An engine with max_num_seqs 256 logs this list (vLLM PR 30515) and, of it, "PIECEWISE=51 (largest=512), FULL=35
    # (largest=256)" (LMCache issue 3430).
    sizes = cudagraph_capture_sizes(QWEN3_8B, H200, EngineLimits(max_num_seqs=256))
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[33:37] == (248, 256, 272, 288)
    assert (len(sizes), sizes[-1]) == (51, 512)
    assert sum(size <= 256 for size in sizes) == 35


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (EngineLimits(max_num_seqs=1), (1, 2)),
        (EngineLimits(max_num_seqs=4), (1, 2, 4, 8)),
        (EngineLimits(max_num_seqs=16, max_num_batched_tokens=20), (1, 2, 4, 8, 16, 20)),
        (EngineLimits(max_num_seqs=16, enforce_eager=True), ()),
        (EngineLimits(max_num_seqs=1024, max_cudagraph_capture_size=16), (1, 2, 4, 8, 16)),
    ],
)
def test_capture_sizes_at_the_edges(limits: EngineLimits, expected: tuple[int, ...]) -> None:
    assert cudagraph_capture_sizes(QWEN3_8B, H200, limits) == expected


@pytest.mark.parametrize(
    ("model", "gpu", "version", "largest", "own"),
    [
        ("Qwen3-8B", "h200", "0.26.0", 512, False),
        ("Qwen3-8B", "h200", "0.31.0", 512, True),
        ("Qwen3-8B", "b200", "0.27.0", 512, False),
        ("Qwen3-8B", "b200", "0.28.0", 992, False),
        ("Qwen3-8B", "rtx5090", "0.28.0", 512, False),
        ("fp8plan/gpt-oss-20b-bf16", "h200", "0.26.0", 1024, False),
    ],
)
def test_the_largest_graph_depends_on_gpu_model_and_version(
    model: str, gpu: str, version: str, largest: int, own: bool
) -> None:
    limits = EngineLimits(max_num_seqs=501, max_num_batched_tokens=8192)  # twice as many are no listed size
    sizes = cudagraph_capture_sizes(ModelShape.from_hf(model), find_gpu(gpu), limits, version)
    assert sizes[-1] == largest
    assert (501 in sizes) is own


@given(st.integers(1, 2048), st.integers(1, 2048))
def test_a_larger_limit_captures_all_sizes_of_a_smaller_one(limit: int, more: int) -> None:
    limits = EngineLimits(max_num_seqs=1024)
    small, large = (
        set(cudagraph_capture_sizes(QWEN3_8B, H200, replace(limits, max_cudagraph_capture_size=size)))
        for size in (limit, limit + more)
    )
    assert small <= large
    assert max(small) <= limit


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_cudagraph_capture_size is 0; allowed: .*, or leave it out: vLLM's own"):
        EngineLimits(max_cudagraph_capture_size=0)
