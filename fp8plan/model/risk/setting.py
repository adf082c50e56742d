"""What of a model of any parts the mismatch depends on, and what nobody has measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, log
from typing import Final

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention, Layer, Mamba2, Mixer, Mlp, mixers
from fp8plan.model.precision import Precision
from fp8plan.model.risk.theory import Setting

LATENT: Final = "latent attention"
ONE_SCALE: Final = "FP8 weights without blocks"
STATE_SPACE: Final = "state-space layers"
SMALL: Final = "models below 0.5B parameters"
SMALLEST_FITTED: Final = 0.49e9  # parameters: Qwen2.5-0.5B

# Extra standard deviation of log KL for mixers that no fitted observation has. A factor of two, assumed, but for
# state-space layers: the two published runs that have some (Nemotron 3, in the table but not fitted) are at ten times
# what the theory says. Runs with a gated delta net (Qwen3.5) keep to it.
UNMEASURED_SD: Final = log(2.0)
STATE_SPACE_SD: Final = log(4.0)

# The same for small models. Of three that were measured, at the start of a run and without this, one of 126M was at
# 0.05 to 0.2 of what the theory says (profiles/.../probe), one of 25M at 0.07 in BF16 and 0.7 in FP8
# (benchmarks/learning/h200), and SmolLM2-135M on a CPU at 3.2 (benchmarks/learning/cpu/smollm2_probe.json). The means
# of each model's log factors have an RMS of 1.8, of which the fit knows 0.5.
SMALL_SD: Final = log(5.5)


def setting_of(shape: ModelShape, precision: Precision, e8m0: bool = True, tensor_parallel_size: int = 1) -> Setting:
    """The setting of a model in a precision."""
    hidden, tp = shape.hidden_size, tensor_parallel_size
    quantised = sum(_quantised(part, hidden, tp) for layer in shape.layers for part in _sub_layers(layer)) / 2
    return Setting(
        layers=sum(len(_sub_layers(layer)) for layer in shape.layers) / 2,
        quantised_layers=quantised,
        # Recurrent layers keep their state in BF16 or FP32 whatever the KV dtype. A layer that reads another's keys and
        # values reads them in FP8.
        kv_layers=float(sum(any(map(_reads_kv, mixers(layer))) for layer in shape.layers)),
        moe=bool(shape.parts_of(Experts)),
        qk_norm=has_qk_norm(shape),
        fp8_weights=precision.weights != "bf16",
        fp8_kv=precision.kv == "fp8",
        e8m0=e8m0,
    )


def has_qk_norm(shape: ModelShape) -> bool:
    """Tell whether the attention logits of every layer are those of normalised queries and keys.

    MLA counts as without, which is modelled and not measured: its RMSNorm (kv_a_layernorm) is on the latent, before the
    keys of each head are made of it by a matrix of any size, and the keys' rotated part has no norm at all. So the
    logits are not bounded. But K has no outliers: see `clipped_keys`.
    """
    norms = [part.qk_norm != "none" for part, _ in shape.parts_of(Attention)]
    return all(norms) and not shape.parts_of(LatentAttention)


def has_qkv_bias(shape: ModelShape) -> bool:
    """Tell whether queries, keys and values of some layer have biases."""
    return any(part.qkv_bias for part, _ in shape.parts_of(Attention))


def clipped_keys(shape: ModelShape) -> bool:
    """Tell whether some layer has biased keys without a norm, which E4M3 at scale 1.0 clips."""
    return any(part.qkv_bias and part.qk_norm == "none" for part, _ in shape.parts_of(Attention))


def unmeasured_parts(shape: ModelShape) -> tuple[str, ...]:
    """Names of what no fitted observation has: small models, and all mixers but attention over all tokens, whose norms,
    if there are any, are over each head.
    """
    small = [SMALL] if shape.num_parameters < SMALLEST_FITTED else []
    mixed = [name for layer in dict.fromkeys(shape.layers) for name in map(_name, mixers(layer)) if name]
    return tuple(dict.fromkeys(small + mixed))


def unmeasured_sd(parts: Sequence[str]) -> float:
    """The extra standard deviation of log KL for what was not measured, by its names."""
    mixed = set(parts) - {SMALL}
    sd = STATE_SPACE_SD if STATE_SPACE in mixed else UNMEASURED_SD if mixed else 0.0
    return hypot(sd, SMALL_SD) if SMALL in parts else sd


def _name(mixer: Mixer) -> str:
    """The name of a mixer that was not measured; "" of one that was."""
    if isinstance(mixer, LatentAttention):
        return LATENT
    if isinstance(mixer, Mamba2):
        return STATE_SPACE
    if not isinstance(mixer, Attention):
        return "recurrent layers"
    if mixer.window or mixer.chunk:
        return "attention over a window"
    plain = Attention(mixer.heads, mixer.kv_heads, mixer.head_dim)
    if mixer.qk_norm != "width" and replace(mixer, qkv_bias=False, o_bias=False, qk_norm="none", bf16=None) == plain:
        return ""
    return "attention of another kind than Qwen3's"


def _sub_layers(layer: Layer) -> list[Mixer | Mlp | Experts]:
    """The additions to the residual stream, one part for each: what stands in parallel adds with its neighbour."""
    return [part for part in (layer.mixer, layer.mlp) if part is not None]


def _quantised(part: Mixer | Mlp | Experts, hidden: int, tp: int) -> float:
    """The share of a sub-layer's linears that are in FP8, of those that vLLM hands the quantisation config. Each counts
    alike, whatever its size: modelled, not measured.
    """
    linears = part.linears(hidden, tp) + (part.expert_linears(hidden) if isinstance(part, Experts) else ())
    asked = [linear.quantised for linear in linears if linear.quantisable]
    return sum(asked) / len(asked)


def _reads_kv(mixer: Mixer) -> bool:
    return isinstance(mixer, Attention | LatentAttention)
