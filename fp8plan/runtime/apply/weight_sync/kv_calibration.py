"""KV scales of a live engine, measured by prompts or taken from the trainer: procedures, as in procedure.py."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Sized
from typing import Any, Final

from fp8plan.errors import ConfigError, some, warn
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, Procedure, Reset, rpc
from fp8plan.runtime.apply.weight_sync.fixed_scales import MEASURED_SCALES
from fp8plan.runtime.apply.weight_sync.kv_scales import (
    PARTS,
    Amax,
    Scales,
    beyond,
    clipped,
    largest,
    scales_from,
)
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.tokens import refuse_tokens

# Most passes of the calibration prompts. After each, scales that clipped are at least doubled.
MOST_CALIBRATIONS = 12

# Sequences of the last rollout that KV scales are calibrated on, and tokens of each; random tokens before the first.
CALIBRATION_SEQUENCES, CALIBRATION_TOKENS = 16, 1024
RANDOM_TOKENS: Final = 256
RANDOM: Final = "random tokens, as no rollout has run yet"
FIXED: Final = "the engine's start"


# Limits of a trainer's amax. Within them scales are normal numbers of float32, with any sensible margin.
LEAST_AMAX: Final = 1e-30
MOST_AMAX: Final = 1e30


def kv_scales(
    state: SyncState,
    amax: Mapping[str, Sequence[float]] | None,
    prompts: Sequence[Sequence[int]] | None,
    source: str,
    known: Scales | None = None,
) -> Generator[Call, Any, str | None]:
    """Set KV scales by the trainer's amax, or by prompts that the live engine runs; return where they come from.

    An engine with fixed scales keeps those of its start. `state.kv_clipped` then has the layers that they clip, and a
    warning names them.

    `refuse_calibration` must have passed amax and prompts.

    source: name of the prompts, returned if they are used
    known:  scales of another replica with the same weights; nothing is measured then
    """
    if not state.fp8_kv:
        return None
    if state.kv_fixed:
        if known is None:
            seen = (yield from _recorded(prompts or ())) if amax is None else amax
            state.kv_clipped = beyond(seen, state.kv_scales or {})
        if state.kv_clipped:
            warn(_clips(state.kv_clipped))
        return FIXED
    if known is not None:
        yield from rpc("fp8plan_set_kv_scales", known)
        state.kv_scales = known
        return "another replica"
    if amax is not None:
        measured, source = {layer: list(parts) for layer, parts in amax.items()}, "trainer"
    else:
        measured = yield from _calibrate(state, prompts or ())
    scales = scales_from(measured)
    yield from rpc("fp8plan_set_kv_scales", scales)
    state.kv_scales = scales
    return source


def clean(state: SyncState) -> Procedure:
    """Zero a KV cache that is awake after weights that may have written NaN: kernels multiply masked values by 0."""
    if state.soiled and "kv_cache" not in state.asleep:
        yield from rpc("fp8plan_zero_kv")
        state.soiled = False


def rescaled(state: SyncState) -> Procedure:
    """Put the KV scales back after vLLM has set them to 1.0."""
    if state.kv_scales is not None:
        yield from rpc("fp8plan_set_kv_scales", state.kv_scales)


def _clips(clipped: Mapping[str, float]) -> str:
    """The alarm of layers whose K or V is larger than their fixed scales can store."""
    worst = max(clipped, key=clipped.__getitem__)
    return (
        f"the fixed KV scales clip {len(clipped)} layer(s): {worst} has {clipped[worst]:.3g} times what its "
        f"scale holds; type {MEASURED_SCALES}, or step down to a BF16 KV cache: engine.apply(Action.KV_TO_BF16)"
    )


def refuse_calibration(
    state: SyncState, amax: Mapping[str, Sequence[float]] | None, prompts: Sequence[Sequence[int]] | None
) -> None:
    """Raises ConfigError if no KV scales can be made of an amax or prompts.

    An amax must be finite, above 0 and complete. Prompts must fit the engine. Exactly one of the two is needed. With a
    BF16 KV cache both are optional, and only values of a wrong kind are refused.
    """
    if amax is not None and not isinstance(amax, Mapping):
        raise ConfigError(f"kv_amax is of type {type(amax).__name__}; allowed: a dict, {{layer: (q, k, v)}}")
    if not state.fp8_kv:
        if prompts is not None:
            refuse_tokens("kv_prompts", prompts, state.vocabulary, state.longest_prompt)
        return
    if amax is not None:
        if prompts is not None:
            raise ConfigError("kv_amax and kv_prompts are both given; allowed: one of them")
        _refuse_amax(state, amax)
    elif prompts is None or (isinstance(prompts, Sized) and not len(prompts)):
        raise ConfigError(
            "the KV cache is FP8 and there is nothing to calibrate it with; allowed: kv_prompts=[[token ids], ...] or "
            "kv_amax={layer: (q, k, v)}"
        )
    else:
        refuse_tokens("kv_prompts", prompts, state.vocabulary, state.longest_prompt)


def _refuse_amax(state: SyncState, amax: Mapping[str, Sequence[float]]) -> None:
    scales_from(amax)
    if wrong := sorted(map(str, amax.keys() ^ (state.kv_scales or amax).keys())):
        raise ConfigError(
            f"kv_amax: {some(wrong)} is missing or unknown; allowed: every attention layer, by vLLM's name, "
            f"as {next(iter(state.kv_scales or {}))}"
        )
    for layer, parts in amax.items():
        if not all(LEAST_AMAX <= value <= MOST_AMAX for value in parts):
            raise ConfigError(
                f"kv_amax of {layer} is {list(parts)}; allowed: numbers above 0, within float32: the largest |q|, |k| "
                "and |v| that the layer has seen"
            )


def random_prompts(vocabulary: int | None, longest: int, count: int = CALIBRATION_SEQUENCES) -> list[list[int]]:
    """Return prompts of random token ids, for an engine without a rollout. longest: most tokens of each"""
    import numpy as np

    size = (count, min(RANDOM_TOKENS, longest))
    prompts: list[list[int]] = np.random.default_rng(0).integers(0, vocabulary or 1000, size).tolist()
    return prompts


def _calibrate(state: SyncState, prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Amax]:
    """Measure the amax of prompts. They run again, with wider scales, until none is clipped.

    The first scales are always 1.0: the same weights and prompts must give the same scales, whatever ran before, and a
    layer's input depends a little on the scales of the layers before it.
    """
    scales = {layer: [1.0] * len(PARTS) for layer in state.kv_scales or ()}
    for _ in range(MOST_CALIBRATIONS):
        yield from rpc("fp8plan_set_kv_scales", scales)
        amax = yield from _recorded(prompts)
        wider = clipped(amax, scales)
        if not wider:
            return amax
        scales = scales | wider
    raise ConfigError(f"calibration was still clipped after {MOST_CALIBRATIONS} passes; allowed: finite activations")


def _recorded(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Amax]:
    """Run prompts with an empty KV cache, and return the largest |q|, |k| and |v| of each layer.

    Raises ConfigError if the recorders saw no attention, or zeros alone.
    """
    yield Reset()
    yield from rpc("fp8plan_record_amax", True)
    try:
        yield Generate(prompts, {"max_tokens": 1, "temperature": 0.0})
    finally:
        ranks = yield from rpc("fp8plan_record_amax", False)
    amax = largest(ranks) if all(ranks) else {}
    if not amax:
        raise ConfigError("calibration saw no attention; its prompts ran in whole CUDA graphs")
    if not any(any(parts) for parts in amax.values()):
        raise ConfigError("every query, key and value is 0, so there is no scale for them; the weights are wrong")
    return amax
