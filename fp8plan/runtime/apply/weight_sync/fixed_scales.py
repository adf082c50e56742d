"""The KV scales that an engine starts with, and the attention that keeps them.

FlashInfer takes scales as numbers, which its CUDA graphs keep. Such an engine runs with the scales that it started
with, and `kv_scales.beyond` says which layers they clip.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.calls import Procedure, rpc
from fp8plan.runtime.apply.weight_sync.kv_scales import device_scales
from fp8plan.runtime.apply.weight_sync.state import SyncState

# Attention classes of vLLM that read KV scales anew in every step: from the device, or on a CPU from the host.
LIVE_SCALES: Final = (
    "FlashAttentionImpl",
    "TritonAttentionImpl",
    "CPUAttentionBackendImpl",
    "FlashAttentionDiffKVImpl",  # this and the next: heads whose values are shorter than their keys
    "TritonAttentionDiffKVImpl",
)
# Those that keep the scales of their start: `k_scale=layer._k_scale_float` in
# vllm/v1/attention/backends/flashinfer.py.
FIXED_SCALES: Final = ("FlashInferImpl",)

# The advice for engines without a kernel that reads new scales.
MEASURED_SCALES: Final = "attention_backend='TRITON_ATTN', whose scales are measured after each sync"
INSTEAD: Final = f"{MEASURED_SCALES}, or a BF16 KV cache"


def keeps_scales(attention: Collection[str]) -> bool:
    """Return True if some layer keeps the scales that the engine started with. Syncs then change no layer's.

    attention: the classes of its implementations
    """
    return not set(attention).isdisjoint(FIXED_SCALES)


def has_fixed_scales(facts: Mapping[str, Any]) -> bool:
    """Return True if an engine with an FP8 KV cache keeps the scales that it started with; False if syncs set them.

    facts: a worker's (runtime.apply.worker.facts)

    Raises ConfigError for attention of which neither is known, and for CUDA graphs that hide what it reads.
    """
    unknown = sorted(set(facts["attention"]).difference(LIVE_SCALES, FIXED_SCALES))
    if unknown or not facts["attention"]:
        raise ConfigError(
            f"attention runs as {', '.join(unknown) or 'no class'}, and fp8plan does not know whether it reads new KV "
            f"scales; allowed with an FP8 KV cache: {', '.join((*LIVE_SCALES, *FIXED_SCALES))} (type {INSTEAD})"
        )
    if facts["cudagraph_mode"] == "FULL":
        raise ConfigError(
            "cudagraph_mode is FULL, which hides prompts from KV calibration; allowed with an FP8 KV cache: "
            "FULL_AND_PIECEWISE, vLLM's default, or any other"
        )
    return keeps_scales(facts["attention"])


def learn_scales(state: SyncState, facts: Mapping[str, Any]) -> Procedure:
    """Ask an engine that has started for its KV scales: 1.0, or the checkpoint's own. facts: a worker's

    Raises ConfigError as `has_fixed_scales` does.
    """
    state.kv_scales, state.kv_clipped = None, {}
    state.kv_fixed = state.fp8_kv and has_fixed_scales(facts)
    if state.fp8_kv:
        workers = yield from rpc("fp8plan_kv_scales")
        state.kv_scales = device_scales(workers[0])
