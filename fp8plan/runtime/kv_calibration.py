"""KV scales of a live engine, measured by prompts or taken from the trainer: procedures, as in weight_sync.py."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.kv_scales import PARTS, Amax, clipped, largest, scales_from
from fp8plan.runtime.sync_state import Call, SyncState, rpc

# Passes of the calibration prompts until none of its own scales clips: each at least doubles them.
MOST_CALIBRATIONS = 12


def kv_scales(
    state: SyncState,
    amax: Mapping[str, Sequence[float]] | None,
    prompts: Sequence[Sequence[int]] | None,
    source: str,
) -> Generator[Call, Any, str | None]:
    """Scales from the trainer's amax, or from prompts through the live engine; where they come from. Both are such that
    `refuse_calibration` lets them pass."""
    if not state.fp8_kv:
        return None
    if amax is not None:
        found, source = {layer: list(parts) for layer, parts in amax.items()}, "trainer"
    else:
        found = yield from _calibrate(state, prompts or ())
    scales = scales_from(found, state.settings.kv_margin)
    yield from rpc("fp8plan_set_kv_scales", scales)
    state.kv_scales = scales
    return source


def refuse_calibration(
    state: SyncState, amax: Mapping[str, Sequence[float]] | None, prompts: Sequence[Sequence[int]] | None
) -> None:
    """Raises ConfigError for what KV scales cannot be made of: an amax that is not one of each attention layer or not
    finite, no prompts, and prompts that the engine does not take."""
    if not state.fp8_kv:
        return
    if amax is not None:
        scales_from(amax)
        if wrong := sorted(amax.keys() ^ (state.kv_scales or amax).keys()):
            raise ConfigError(
                f"kv_amax: {', '.join(wrong[:4])} is missing or unknown; allowed: every attention layer, by vLLM's "
                f"name, as {next(iter(state.kv_scales or {}))}"
            )
    elif prompts is None or not len(prompts):
        raise ConfigError(
            "the KV cache is FP8 and there is nothing to calibrate it with; allowed: kv_prompts=[[token ids], ...] or "
            "kv_amax={layer: (q, k, v)}"
        )
    elif wrong := [len(p) for p in prompts if not 1 <= len(p) <= (state.longest_prompt or len(p))]:
        raise ConfigError(
            f"kv_prompts: one has {wrong[0]:,} tokens; allowed: 1 to {state.longest_prompt:,}, as max_model_len says"
        )


def _calibrate(state: SyncState, prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Amax]:
    """The amax of prompts, run until none of the scales that they ran with clipped them.

    It always begins at scales of 1.0: what a layer sees depends a little on the scales of those before it, and the same
    weights and prompts are to get the same scales, whatever ran before.
    """
    scales = {layer: [1.0] * len(PARTS) for layer in state.kv_scales or ()}
    for _ in range(MOST_CALIBRATIONS):
        yield from rpc("fp8plan_set_kv_scales", scales)
        yield Call("reset")
        yield from rpc("fp8plan_record_amax", True)
        try:
            yield Call("generate", (prompts, {"max_tokens": 1, "temperature": 0.0}))
        finally:
            ranks = yield from rpc("fp8plan_record_amax", False)
        amax = largest(ranks)
        if not amax or not any(any(parts) for parts in amax.values()):
            raise ConfigError("calibration saw no attention; its prompts ran in whole CUDA graphs")
        wider = clipped(amax, scales)
        if not wider:
            return amax
        scales = scales | wider
    raise ConfigError(f"calibration was still clipped after {MOST_CALIBRATIONS} passes; allowed: finite activations")
