"""The theory of mismatch: closed forms from rounding errors to KL, ESS, clipping and rejection.

Three steps lead there. Rounding: the relative RMS error of E4M3 blocks, computed by rounding Gaussian numbers.
Propagation: how those errors add up to the variance of a token's log-ratio. Statistics: what a log-ratio of that
variance means for importance weights. Nothing here is fitted; fp8plan.model.risk.fit scales the propagation step to
published observations.

What of a model of any parts the mismatch depends on, and what nobody has measured of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import erfc, hypot, log, sqrt
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention, Layer, Mamba2, Mixer, Mlp, mixers
from fp8plan.model.cost.base import FloatArray
from fp8plan.model.precision import E4M3_MANTISSA_BITS, E4M3_MAX, Precision

GROUP: Final = 128  # weights in GROUP x GROUP blocks, activations in 1 x GROUP groups (vLLM's FP8_BLOCK)
E4M3_MIN_EXPONENT: Final = -6  # below 2^-6 E4M3 is subnormal: a fixed step of 2^-9 (OCP OFP8 specification)
BF16_MANTISSA_BITS: Final = 7

# Layers of Qwen3-8B, the model with the best matched BF16 and FP8 runs: a unit, not a limit.
REFERENCE_LAYERS: Final = 36.0

# Variance of attention logits in nats^2, by which K and Q errors are multiplied. Assumed, not measured: with QK-norm
# the value that makes FP8 KV about as bad as FP8 linears, as the FP8-RL paper orders them (arXiv 2601.18150); without
# it, twice the spread. The fit has one coefficient for each.
ATTENTION_LOGIT_VARIANCE: Final = {True: 3.0, False: 12.0}

# Spread (standard deviation) of log sigma^2 over tokens: most tokens hardly move, a few move a lot. MoE: the value
# that gives chi2_token as published beside the KL in verl#7242 and verl#7519 (five pairs, KL 0.005 to 0.03, tested;
# the model of the second is not stated). The ratio E[x^2] / E[|x|]^2 it gives, 4.7, is a little below MoE runs (5.7 to
# 14; one Gaussian: 1.6). Dense: from that ratio alone, 2.8 in a BF16 run with routes replayed.
TOKEN_SPREAD: Final = {False: 1.5, True: 2.25}


def round_e4m3(values: ArrayLike) -> FloatArray:
    """Round to the nearest E4M3 "fn" numbers (ties to even, saturating at 448), as float64 of the same shape."""
    x = np.asarray(values, dtype=np.float64)
    magnitude = np.minimum(np.abs(x), E4M3_MAX)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**E4M3_MIN_EXPONENT)))
    step = 2.0 ** (exponent - E4M3_MANTISSA_BITS)
    rounded: FloatArray = np.copysign(np.minimum(np.round(magnitude / step) * step, E4M3_MAX), x)
    return rounded


def round_bf16(values: ArrayLike) -> FloatArray:
    """Round to the nearest bfloat16 numbers of normal range (ties to even), as float64 of the same shape."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    steps = 2.0 ** (BF16_MANTISSA_BITS + 1)
    return np.asarray(np.ldexp(np.round(mantissa * steps) / steps, exponent), dtype=np.float64)


def power_of_two_scale(scale: FloatArray) -> FloatArray:
    """The scale that an E8M0 kernel uses instead: the next power of two, never smaller, so nothing saturates."""
    return np.asarray(2.0 ** np.ceil(np.log2(scale)), dtype=np.float64)


def quantise_blocks(values: FloatArray, block: tuple[int, int], e8m0: bool = False) -> FloatArray:
    """Round `values`, shape (rows, columns), to E4M3 with one amax/448 scale per block. The block must divide both
    sizes.
    """
    rows, columns = values.shape
    tiles = values.reshape(rows // block[0], block[0], columns // block[1], block[1])
    scale = np.abs(tiles).max(axis=(1, 3), keepdims=True) / E4M3_MAX
    scale = power_of_two_scale(scale) if e8m0 else scale
    return (round_e4m3(tiles / scale) * scale).reshape(rows, columns)


def relative_rms_error(exact: FloatArray, rounded: FloatArray) -> float:
    return float(np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2)))


@dataclass(frozen=True, slots=True)
class RoundingErrors:
    """The relative RMS errors of rounding Gaussian numbers, as fractions.

    weight:          128x128 blocks, FP32 scales
    weight_e8m0:     the same rounded again with power-of-two scales, as vLLM's DeepGEMM path does on Hopper
    activation:      1x128 groups, FP32 scales
    activation_e8m0: 1x128 groups, power-of-two scales
    kv:              one scale for the whole tensor
    bf16:            bfloat16
    """

    weight: float
    weight_e8m0: float
    activation: float
    activation_e8m0: float
    kv: float
    bf16: float


def rounding_errors(size: int = 1024) -> RoundingErrors:
    """Measure RoundingErrors on a (size, size) standard normal matrix; deterministic, about 0.2 s at 1024."""
    x = np.random.default_rng(0).standard_normal((size, size))
    square, row = (GROUP, GROUP), (1, GROUP)
    weight = quantise_blocks(x, square)
    return RoundingErrors(
        weight=relative_rms_error(x, weight),
        weight_e8m0=relative_rms_error(x, quantise_blocks(weight, square, e8m0=True)),
        activation=relative_rms_error(x, quantise_blocks(x, row)),
        activation_e8m0=relative_rms_error(x, quantise_blocks(x, row, e8m0=True)),
        kv=relative_rms_error(x, quantise_blocks(x, x.shape)),
        bf16=relative_rms_error(x, round_bf16(x)),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """The properties of a model and a rollout precision on which the mismatch depends.

    layers, quantised_layers: pairs of sub-layers, and how many of them have FP8 linears; a sub-layer adds to the
                              residual stream: a mixer or an MLP
    kv_layers:                layers that read keys and values
    moe, qk_norm:             of the model
    fp8_weights, fp8_kv:      of the rollout
    e8m0:                     the FP8 GEMMs use power-of-two scales
    """

    layers: float
    quantised_layers: float
    kv_layers: float
    moe: bool
    qk_norm: bool
    fp8_weights: bool
    fp8_kv: bool
    e8m0: bool


def kl_terms(setting: Setting, errors: RoundingErrors) -> tuple[float, float, float]:
    """KL per token from (BF16 kernels, FP8 linears, FP8 KV), if a relative error of the hidden state became a log-ratio
    one to one.

    BF16: trainer and engine each round the whole residual stream after every one of 2 x layers sub-layers, at
    different places. FP8 linears: an error is relative to one sub-layer's update, 1/(2 x layers) of the stream, and
    two GEMMs follow each other in each: the sum is layer-free; deeper models still differ more, so the share of
    quantised layers is counted against REFERENCE_LAYERS (an assumption; the data span 28 to 48 layers and cannot
    tell). FP8 KV: V and the probabilities enter as they are, K and Q through the softmax; half of the sub-layers
    are attention, or fewer where others mix by a state. Errors are independent, so variances add.
    """
    kernels = 2 * 2 * setting.layers * errors.bf16**2
    weight, activation = (
        (errors.weight_e8m0, errors.activation_e8m0) if setting.e8m0 else (errors.weight, errors.activation)
    )
    linears = 2 * (weight**2 + activation**2) * setting.quantised_layers / REFERENCE_LAYERS
    attention = (1 + ATTENTION_LOGIT_VARIANCE[setting.qk_norm]) * errors.kv**2 * setting.kv_layers / REFERENCE_LAYERS
    return kernels / 2, linears / 2 * setting.fp8_weights, attention / 2 * setting.fp8_kv


@dataclass(frozen=True, slots=True)
class TokenLogRatio:
    """The distribution of log pi_train / pi_rollout of one token, sampled from the rollout policy: a scale mixture of
    normals.

    A token of variance s^2 has mean -s^2/2, which makes E[ratio] exactly 1 for every token, as it must be: pi_train
    sums to 1. log s^2 is normal with standard deviation TOKEN_SPREAD, cut at +-3, so the mixture is finite and its
    moments exist.

    probability: (n,) weights of the components
    variance:    (n,) their variances s^2
    """

    probability: FloatArray
    variance: FloatArray

    @property
    def kl(self) -> float:
        """The KL, E[ratio - 1 - log ratio] = E[s^2] / 2: k1 and k3 have the same mean."""
        return float(self.probability @ self.variance) / 2

    @property
    def ess(self) -> float:
        """The effective sample size, 1 / E[ratio^2] = 1 / E[exp(s^2)], with exponents clamped at 20 as in verl."""
        return float(1 / (self.probability @ np.exp(np.minimum(self.variance, 20.0))))

    def fraction_above(self, threshold: float) -> float:
        """The probability that a ratio is above `threshold`."""
        return float(
            sum(p * _upper_tail((log(threshold) + v / 2) / sqrt(v)) for p, v in zip(*self._components(), strict=True))
        )

    def _components(self) -> tuple[list[float], list[float]]:
        return self.probability.tolist(), self.variance.tolist()


def token_log_ratio(kl: float, moe: bool) -> TokenLogRatio:
    """The TokenLogRatio with that mean KL and the tail of a dense or MoE model. Raises ValueError unless kl > 0."""
    if not kl > 0:
        raise ValueError(f"kl is {kl!r}; allowed: above 0")
    z = np.linspace(-3, 3, 25)
    probability = np.exp(-(z**2) / 2)
    probability /= probability.sum()
    scale = np.exp(TOKEN_SPREAD[moe] * z)
    return TokenLogRatio(probability, 2 * kl * scale / (probability @ scale))


def sequence_rejection(kl: float, lengths: FloatArray, low: float, high: float, inflation: float = 1.0) -> FloatArray:
    """The probability that the product of a sequence's ratios is outside [low, high], for each length
    (n,) in tokens.

    The log-ratio less its conditional mean is a martingale under rollout sampling, so token terms are uncorrelated and
    the sum is about N(-T kl, 2 T kl inflation); the heavy tail of the tokens hardly shows in it. `inflation`, at least
    1, is for what differs between sequences rather than between tokens.
    """
    mean, deviation = -lengths * kl, np.sqrt(2 * lengths * kl * inflation)
    return 1 - (normal_cdf((log(high) - mean) / deviation) - normal_cdf((log(low) - mean) / deviation))


def normal_cdf(x: FloatArray) -> FloatArray:
    """Standard normal distribution function, absolute error below 1e-7 (Abramowitz and Stegun 26.2.17).

    scipy has an exact one, but importing scipy.special would cost a plan more than everything else here.
    """
    t = 1 / (1 + 0.2316419 * np.abs(x))
    powers = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-(x**2) / 2) / sqrt(2 * np.pi) * powers
    return np.where(x > 0, 1 - upper, upper)


def _upper_tail(x: float) -> float:
    return erfc(x / sqrt(2)) / 2


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
