"""The kernel that vLLM chooses for attention, and which of them read new K and V scales."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8plan.model.attention_backend import KEEPS_SCALES, Backend, attention_backend, why_fixed_kv_scales
from fp8plan.model.hardware import find_gpu, gpus
from fp8plan.model.precision import BF16, FP8_KV, PRESETS
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.weight_sync.fixed_scales import FIXED_SCALES, LIVE_SCALES

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
HEADS = [64, 80, 128, 256]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_table_is_vllms_own_choice() -> None:
    script = Path(__file__).with_name("vllm_attention.py")
    words = [sys.executable, str(script), json.dumps(CAPABILITIES), json.dumps(HEADS)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == len(CAPABILITIES) * len(HEADS) * 4
    ours, theirs = {}, {}
    for row in rows:
        key = (*row["capability"], row["head"], row["fp8"], row["sinks"])
        if row["fp8"] and row["capability"][:1] == [8] and row["capability"][1] < 9 and row["backend"] == "TRITON_ATTN":
            row["backend"] = None  # vLLM's table has it, and Triton has no E4M3 there
        theirs[key] = row["backend"]
        ours[key] = attention_backend(tuple(row["capability"]), row["head"], row["fp8"], row["sinks"])
    assert ours == theirs


@pytest.mark.parametrize("card", gpus(), ids=lambda card: card.name)
def test_a_kernel_that_keeps_its_scales_is_never_said_to_be_measured(card) -> None:
    for precision in PRESETS.values():
        reason = why_fixed_kv_scales(card, precision, None)
        kernel = attention_backend(card.compute_capability, 128, precision.kv == "fp8")
        assert (reason is not None) == (precision.kv == "fp8" and kernel == KEEPS_SCALES)
    hopper = card.compute_capability == (9, 0)
    assert (why_fixed_kv_scales(card, FP8_KV, None) is None) == hopper


def test_a_cpu_reads_new_scales() -> None:
    assert EngineSetup("Qwen/Qwen3-8B", "cpu", FP8_KV).why_fixed_kv_scales is None


def test_the_size_of_heads_decides_with_the_gpu() -> None:
    assert attention_backend((8, 9), 80, fp8_kv=True) == Backend.TRITON_ATTN
    assert attention_backend((8, 9), 128, fp8_kv=True) == Backend.FLASHINFER
    assert attention_backend((8, 0), 80, fp8_kv=True) is None
    assert EngineSetup("Qwen/Qwen3-8B", find_gpu("b200"), BF16).why_fixed_kv_scales is None


def test_each_kernel_has_scales_of_one_kind() -> None:
    assert not set(LIVE_SCALES) & set(FIXED_SCALES)
    named = {Backend.FLASH_ATTN: "FlashAttentionImpl", Backend.FLASHINFER: "FlashInferImpl"}
    named[Backend.TRITON_ATTN] = "TritonAttentionImpl"
    assert {backend for backend, name in named.items() if name in FIXED_SCALES} == {KEEPS_SCALES}
    assert set(named.values()) <= {*LIVE_SCALES, *FIXED_SCALES}
