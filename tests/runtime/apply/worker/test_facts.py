"""A worker's facts about itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp8plan.runtime.apply.worker import facts


@pytest.mark.parametrize("number", [0, 1, 3, 4, 63, 64, 65, 1001])
def test_a_digest_is_the_sum_of_words_times_their_places(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(number)
    tensor = torch.randint(0, 256, (number,), dtype=torch.uint8)
    words = np.frombuffer(tensor.numpy().tobytes() + bytes(-number % 4), np.int32)
    expected = sum(int(word) * place for place, word in enumerate(words, 1)) % 2**64
    assert facts.digest(tensor) == expected
    monkeypatch.setattr(facts, "PART", 64)
    assert facts.digest(tensor) == expected
    if number:
        tensor[number // 2] ^= 1
        assert facts.digest(tensor) != expected


def implementation(name: str, *variants: str) -> Any:
    """An attention implementation by the name of its class, or one that picks one of its variants for each batch."""
    made = type(name, (), {})()
    if variants:
        made.get_impl_variants = lambda: tuple(map(implementation, variants))
    return made


def attention(kind: Any, dtype: str = "fp8_e4m3") -> torch.nn.Module:
    layer = torch.nn.Linear(1, 1)
    layer.layer_name, layer._k_scale, layer.impl, layer.kv_cache_dtype = str(id(layer)), torch.ones(1), kind, dtype
    return layer


def facts_of(*layers: torch.nn.Module) -> dict[str, Any]:
    """A worker's facts, with these layers as its model."""
    pytest.importorskip("vllm")
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False, quantization=None, is_moe=False),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    model = torch.nn.Sequential(*layers)
    runner = SimpleNamespace(get_model=lambda: model)
    return facts.worker_facts(SimpleNamespace(model_runner=runner, vllm_config=config, rank=0))


FLASH, FLASHINFER, TRITON = "FlashAttentionImpl", "FlashInferImpl", "TritonAttentionImpl"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ((), []),
        ((implementation(FLASH), implementation(FLASH)), [FLASH]),
        ((implementation(FLASH), implementation(FLASHINFER)), [FLASH, FLASHINFER]),
        ((implementation(TRITON), implementation(FLASH), implementation(FLASHINFER)), [FLASH, FLASHINFER, TRITON]),
        ((implementation("Composite", TRITON, FLASHINFER),), [FLASHINFER, TRITON]),
    ],
)
def test_every_layer_says_what_reads_its_kv_cache(kinds: tuple[Any, ...], named: list[str]) -> None:
    assert facts_of(torch.nn.Linear(1, 1), *map(attention, kinds))["attention"] == named


@pytest.mark.vllm
def test_only_linears_in_fp8_blocks_have_a_kind_of_scales() -> None:
    """vLLM's method of one scale for each matrix has a kernel, too, and None as its blocks."""

    kernel = SimpleNamespace(use_deep_gemm_e8m0=True)
    for block, called, e8m0 in (
        (None, kernel, None),
        ([128, 128], kernel, True),
        ([128, 128], SimpleNamespace(fallback=kernel), True),
        ([128, 128], SimpleNamespace(), False),
    ):
        layer, method = torch.nn.Linear(1, 1), SimpleNamespace(fp8_linear=called, weight_block_size=block)
        layer.quant_method = method  # type: ignore[assignment]
        assert facts_of(torch.nn.Linear(1, 1), layer)["e8m0"] is e8m0


def test_a_checkpoints_config_names_its_scales() -> None:
    for how, e8m0 in (({"scale_fmt": "ue8m0"}, True), ({"scale_fmt": None}, False), (None, False)):
        model_config = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=how))
        assert facts._holds_e8m0(model_config) is e8m0


@pytest.mark.vllm
def test_a_cache_is_fp8_if_a_layers_is() -> None:
    plain, fp8 = attention(implementation(FLASH), "auto"), attention(implementation(FLASH))
    assert facts_of(plain, fp8)["kv_cache_dtype"] == facts_of(fp8, plain)["kv_cache_dtype"] == "fp8_e4m3"
    assert facts_of(plain)["kv_cache_dtype"] == "auto"
    assert facts_of(torch.nn.Linear(1, 1))["kv_cache_dtype"] is None
