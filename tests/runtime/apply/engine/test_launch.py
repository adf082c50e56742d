"""The settings that start an engine, and those that are refused of one that runs. No engine is started here."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from plans import index
from tiny_models import checkpoint, cpu_plan

from fp8plan.errors import ConfigError
from fp8plan.model.emit.vllm import ROUTER_PATTERN
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.engine.launch import Launch, launch
from fp8plan.runtime.apply.weight_sync.checkpoint import local_folder
from fp8plan.runtime.apply.weight_sync.fixed_scales import FIXED_SCALES, LIVE_SCALES, has_fixed_scales

pytestmark = pytest.mark.vllm  # its version is checked first


def launched(precision: str, folder: str | None = None, **more: Any) -> Launch:
    return launch(cpu_plan(precision).setup(), folder or str(checkpoint("dense", "a")), (0, 0), more)


AS_PLANNED = {
    "e8m0": False,
    "kv_cache_dtype": "fp8_e4m3",
    "attention": ["FlashAttentionImpl"],
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "layers": {"QKVParallelLinear / Fp8OnlineLinearMethod": 3},
}


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"e8m0": True}, r"power-of-two scales although VLLM_USE_DEEP_GEMM_E8M0=0 was planned"),
        ({"kv_cache_dtype": "bfloat16"}, "the KV cache runs as bfloat16, and fp8_block\\+fp8_kv was planned"),
        ({"attention": ["FlexAttentionImpl"]}, "attention runs as FlexAttentionImpl.*allowed.*TritonAttentionImpl"),
        ({"attention": ["FlashAttentionImpl", "TritonMLAImpl"]}, "attention runs as TritonMLAImpl, .*BF16 KV cache"),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode is FULL, which hides prompts from KV calibration"),
        ({"layers": {"QKVParallelLinear / UnquantizedLinearMethod": 3}}, "the layers run as QKVParallelLinear"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_engine_that_is_not_as_planned_is_refused(facts: dict[str, Any], says: str) -> None:
    subject = replace(launched("fp8_block+fp8_kv"), env={"VLLM_USE_DEEP_GEMM_E8M0": "0"})  # as a GPU's plan has it
    subject.refuse_other(AS_PLANNED)
    with pytest.raises(ConfigError, match=says):
        subject.refuse_other(AS_PLANNED | facts)


def test_flashinfer_keeps_its_scales_and_the_others_read_new_ones() -> None:
    kinds = {name: has_fixed_scales(AS_PLANNED | {"attention": [name]}) for name in (*FIXED_SCALES, *LIVE_SCALES)}
    assert {name for name, fixed in kinds.items() if fixed} == {"FlashInferImpl"}


@pytest.mark.parametrize("live", LIVE_SCALES)
def test_one_layer_that_keeps_its_scales_decides(live: str) -> None:
    assert has_fixed_scales(AS_PLANNED | {"attention": [*FIXED_SCALES, live]})
    assert has_fixed_scales(AS_PLANNED | {"attention": [live, *FIXED_SCALES]})


def test_only_an_fp8_kv_cache_cares_how_attention_reads_scales() -> None:
    bf16 = AS_PLANNED | {"kv_cache_dtype": "bfloat16", "cudagraph_mode": "FULL", "attention": ["FlashInferImpl"]}
    launched("fp8_block").refuse_other(bf16)


def test_blockwise_fp8_on_a_cpu_wants_a_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    launched("fp8_block").prepare()  # the tests' plugin has one
    (*_, own) = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    monkeypatch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [own])
    monkeypatch.setattr(own, "is_supported", lambda: (False, "requires AMX"))
    for precision in ("fp8_block", "fp8_block+fp8_kv"):
        with pytest.raises(
            ConfigError, match=rf"{re.escape(precision)} was planned, .* this CPU .*; allowed here: bf16"
        ):
            launched(precision).prepare()
    launched("fp8_kv").prepare()


def test_a_choice_is_a_number_or_a_precision() -> None:
    plan, folder = cpu_plan("bf16"), str(checkpoint("dense", "a"))
    by_name, by_number = (launch(plan.setup(choice), folder) for choice in ("fp8_kv", index("fp8_kv")))
    assert by_name.precision == by_number.precision == "fp8_kv"
    assert launch(plan.setup(), folder).precision == "bf16"


def test_a_hub_id_has_its_config_and_once_it_is_here_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def missing(*args: Any, **kwargs: Any) -> str:
        raise errors.LocalEntryNotFoundError("offline")

    found = launch(EngineSetup("Qwen/Qwen3-0.6B", "h200", "fp8_block", remedies=Remedies(keep_bf16=(1, 1))))
    assert r"re:.*\.layers\.(0|27)\..*" in found.kwargs["quantization_config"]["ignore"]  # it has 28
    monkeypatch.setattr("huggingface_hub.snapshot_download", missing)
    assert found.checkpoint() is None
    folder = checkpoint("dense", "a")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(folder))
    assert found.checkpoint() == launched("fp8_block").checkpoint()


def test_linears_stay_in_bf16_by_the_layout_that_runs() -> None:
    """dense has 512 inputs of down_proj and 256 of o_proj: on four ranks the latter's 64 are no block."""
    whole, cut = launched("fp8_block"), launched("fp8_block", tensor_parallel_size=4)
    ignore = [found.kwargs["quantization_config"]["ignore"] for found in (whole, cut)]
    assert ignore[0] == [ROUTER_PATTERN]
    assert ignore[1][0] == ignore[0][0]
    assert any(re.match(pattern.removeprefix("re:"), "model.layers.2.self_attn.o_proj") for pattern in ignore[1])
    assert not any(re.match(pattern.removeprefix("re:"), "model.layers.2.mlp.down_proj") for pattern in ignore[1])
    assert "quantization_config" not in cut.with_precision("bf16").kwargs


def test_what_is_no_name_has_no_folder() -> None:
    assert local_folder("no such: name") is None


def test_expert_parallelism_reaches_vllm_and_the_limits_that_run() -> None:
    setup = cpu_plan("bf16").setup()
    planned = launch(
        replace(setup, limits=replace(setup.limits, enable_expert_parallel=True)), str(checkpoint("moe", "a"))
    )
    by_hand = launch(setup, str(checkpoint("moe", "a")), more={"enable_expert_parallel": True})
    for found in (planned, by_hand):
        assert found.kwargs["enable_expert_parallel"] is True
        assert found.limits.enable_expert_parallel
    assert "enable_expert_parallel" not in launch(setup, str(checkpoint("dense", "a"))).kwargs
