"""Scales of the FP8 KV cache, measured anew after every weight sync.

vLLM keeps one scale per layer for K, V and (where attention runs in FP8) Q. It is 1.0 unless a checkpoint brings
another, and values above 448 are then clipped. E4M3 is a floating-point format: a scale matters only for values that
would be clipped or underflow, so the largest magnitudes (amax) are enough. From 0.28 on vLLM measures no scales, and a
reload or a wake-up sets them back to 1.0.

scale = margin * amax / 448, per tensor (vllm/model_executor/layers/attention: the stored value is x / scale).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.precision import E4M3_MAX

if TYPE_CHECKING:
    import torch

PARTS: Final = ("q", "k", "v")

# Room for values beyond those of the calibration prompts; NeMo-RL's margin.
MARGIN: Final = 1.05

Amax = dict[str, list[float]]  # layer -> largest |q|, |k|, |v|
Scales = dict[str, list[float]]  # layer -> scales of q, k, v


def scales_from(amax: Mapping[str, Sequence[float]]) -> Scales:
    """Return scales for MARGIN times the amax; 1.0 for an amax of 0. Raises ConfigError for NaN, Inf."""
    scales = {}
    for layer, parts in amax.items():
        try:
            fits = len(parts) == len(PARTS) and all(isfinite(value) and value >= 0 for value in parts)
        except TypeError:
            fits = False
        if not fits:
            values = list(parts) if isinstance(parts, Sequence) else parts
            raise ConfigError(f"amax of {layer} is {values!r}; allowed: three finite numbers, of q, k and v")
        scales[layer] = [MARGIN * value / E4M3_MAX if value > 0 else 1.0 for value in parts]
    return scales


def largest(ranks: Sequence[Amax]) -> Amax:
    """Return the amax over tensor-parallel ranks, which must all use the same scales."""
    return {layer: [max(values) for values in zip(*(rank[layer] for rank in ranks), strict=True)] for layer in ranks[0]}


def clipped(amax: Amax, scales: Scales) -> Scales:
    """Return wider scales, with twice the room, for the layers that were clipped in a calibration with `scales`.

    Q is recorded after vLLM has quantised it, so its amax cannot exceed 448 scales. Reaching that counts as clipped.
    """
    return {
        layer: [
            2 * max(value, E4M3_MAX * scale) / E4M3_MAX if value >= E4M3_MAX * scale else scale
            for value, scale in zip(parts, scales[layer], strict=True)
        ]
        for layer, parts in amax.items()
        if any(value >= E4M3_MAX * scale for value, scale in zip(parts, scales[layer], strict=True))
    }


def beyond(amax: Mapping[str, Sequence[float]], scales: Scales) -> dict[str, float]:
    """Return layer -> its largest |k| or |v| over the largest that its scales can store, for layers that clip."""
    times = {
        layer: max(value / (E4M3_MAX * scale) for value, scale in zip(parts[1:], scales[layer][1:], strict=True))
        for layer, parts in amax.items()
    }
    return {layer: most for layer, most in times.items() if most > 1}


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of every attention layer of a vLLM model."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "_k_scale") and hasattr(layer, "impl"):
            yield layer.layer_name, layer


def live_scales(model: torch.nn.Module) -> dict[str, dict[str, float]]:
    """Return layer -> scales: "q", "k", "v" on the device, and "q_host", ... on the host, where some backends read."""
    return {
        name: {part: float(getattr(layer, f"_{part}_scale").max()) for part in PARTS}
        | {f"{part}_host": float(getattr(layer, f"_{part}_scale_float")) for part in PARTS}
        for name, layer in attention_layers(model)
    }


def device_scales(live: Mapping[str, Mapping[str, float]]) -> Scales:
    """Return the scales on the device. live: as `live_scales` returns them"""
    return {layer: [float(parts[part]) for part in PARTS] for layer, parts in live.items()}


def set_scales(model: torch.nn.Module, scales: Mapping[str, Sequence[float]]) -> None:
    """Write scales into the buffers that CUDA graphs have captured, and into their host copies.

    Raises ConfigError unless they are for the model's layers.
    """
    import torch

    layers = dict(attention_layers(model))
    if wrong := layers.keys() ^ scales.keys():
        raise ConfigError(f"scales for {sorted(wrong)[:4]}; allowed: one for each of {len(layers)} attention layers")
    live, values = [], []
    for name, layer in layers.items():
        for part, scale in zip(PARTS, scales[name], strict=True):
            live.append(getattr(layer, f"_{part}_scale"))
            values.append(float(scale))
            setattr(layer, f"_{part}_scale_float", float(scale))
            host = getattr(layer, f"_{part}_scale_cpu", None)
            if host is not None:
                host.fill_(scale)
    if live:  # all at once: a model has a hundred scales, and each launch takes time
        moved = torch.tensor(values, dtype=torch.float32).to(live[0].device).unbind()
        torch._foreach_copy_(live, [value.expand_as(scale) for value, scale in zip(moved, live, strict=True)])


def scales_of(model: torch.nn.Module) -> Scales:
    """Return the scales of a model's layers, as the host has them."""
    return {name: [getattr(layer, f"_{part}_scale_float") for part in PARTS] for name, layer in attention_layers(model)}


@contextmanager
def keeping_scales(model: torch.nn.Module) -> Iterator[None]:
    """Put the scales back at the end: a reload of any layer sets all of them to 1.0."""
    before = scales_of(model)
    try:
        yield
    finally:
        set_scales(model, before)
