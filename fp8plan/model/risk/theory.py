"""The theory of mismatch: closed forms from rounding errors to KL, ESS, clipping and rejection.

It has three steps. Rounding: the relative RMS difference of Gaussian numbers that trainer and rollout round, each on
its grid (tools/risk_report.py). Propagation: the sum of those differences as the variance of a token's log-ratio, and
the routes that they change. Statistics: the importance weights of a log-ratio of that variance. Nothing here is fitted;
fp8plan.model.risk.expected scales the propagation step to published observations.

`setting_of` gives the model's properties that matter, and `unmeasured_parts` those without observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import erfc, hypot, log, sqrt
from typing import Final

import numpy as np

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention, Layer, Mamba2, Mixer, Mlp, mixers
from fp8plan.model.cost.base import FloatArray
from fp8plan.model.precision import Precision
from fp8plan.model.risk.remedies import BF16, NO_REMEDIES, POW2, Remedies

# Layers of Qwen3-8B, the model with the best matched BF16 and FP8 runs: a unit, not a limit.
REFERENCE_LAYERS: Final = 36.0

# Variance of attention logits in nats^2, with QK-norm and without, which multiplies K and Q errors. Assumed: with
# QK-norm FP8 KV is about as bad as FP8 linears, as in the FP8-RL paper (arXiv 2601.18150); without it the spread
# doubles. The fit has one coefficient for each.
ATTENTION_LOGIT_VARIANCE: Final = {True: 3.0, False: 12.0}

# Spread (standard deviation) of log sigma^2 over tokens: most tokens hardly move, a few move a lot.
# True: MoE with routes that differ. The value gives the chi2_token published beside the KL in verl#7242 and verl#7519
# (five pairs, KL 0.005 to 0.03). It makes the ratio E[x^2] / E[|x|]^2 4.7; MoE runs have 5.7 to 14.
# False: dense models, and MoE with replayed routes. The value gives the ratio of a BF16 run with replayed routes, 2.8.
TOKEN_SPREAD: Final = {False: 1.5, True: 2.25}

LATENT: Final = "latent attention"
ONE_SCALE: Final = "FP8 weights without blocks"
STATE_SPACE: Final = "state-space layers"
SMALL: Final = "models below 0.5B parameters"
SMALL_LANGUAGE: Final = "language models below 0.5B parameters"
SMALLEST_FITTED: Final = 0.49e9  # parameters: Qwen2.5-0.5B
# Words of a language model's vocabulary, at least: SmolLM2's, the smaller one of those measured. Small models that were
# trained on made-up text have 16,384 at most.
SMALLEST_VOCABULARY: Final = 49_152

# Extra standard deviation of log KL for mixers that no fitted observation has: a factor of two, assumed. State-space
# layers have more: the two published runs with some (Nemotron 3, in the table but not fitted) are at ten times the
# theory.
UNMEASURED_SD: Final = log(2.0)
STATE_SPACE_SD: Final = log(4.0)

# KL of small language models, times the theory's: the mean of two models' mean log errors. They were measured in four
# precisions each (profiles/.../probe/smollm2 and gemma). One model's mean foresees the other's rows with an error of
# 2.05 times (RMS; benchmarks/tables/probe.py). The fit's own spread explains a part of it, and a further factor of 1.65
# the rest. SMALL_SD takes 2, as the models are two, and both came from 4-bit files.
SMALL_LANGUAGE_FACTOR: Final = 5.17

# Extra standard deviations for small models. For those that are no language models: the RMS of three mean log errors
# before the factor is 1.8 (profiles/.../probe, qk-norm in benchmarks/learning/gpus and SmolLM2), and the fit has 0.5.
SMALL_SD: Final = {SMALL: log(5.5), SMALL_LANGUAGE: UNMEASURED_SD}


# Extra standard deviation of log KL for a trainer on the rollout's grid. Of five published runs, one has a sixth of
# what the others foresee (xtuner#2044), and one three times as much (Lumen-RL). Student's t makes the RMS of the five
# left-out errors the spread to expect of a sixth run. The fit's own spread explains a part of it, and this the rest.
SAME_GRID_SD: Final = 1.02


@dataclass(frozen=True, slots=True)
class RoundingErrors:
    """The relative RMS errors of rounding Gaussian numbers, as fractions.

    weight:             trainer's grid -> rollout's grid -> difference between the two roundings of the same weights
    activation:         the same for activations, which differ before they are rounded: what rounding adds to that
    kv:                 one scale for the whole tensor
    bf16:               bfloat16
    """

    weight: Mapping[str, Mapping[str, float]]
    activation: Mapping[str, Mapping[str, float]]
    kv: float
    bf16: float


@dataclass(frozen=True, slots=True)
class Setting:
    """The properties of a model, a rollout precision and a trainer on which the mismatch depends.

    layers:                   half of the sub-layers: mixers and MLPs, each of which adds to the residual stream
    quantised_layers:         half of those whose linears FP8 rounds
    kv_layers, expert_layers: layers that read keys and values, and layers that route tokens to experts
    qk_norm:                  true if the model has it
    rollout, trainer:         the grids of their linears, named as in RoundingErrors
    fp8_kv:                   of the rollout
    router_replay:            the trainer uses the rollout's experts
    """

    layers: float
    quantised_layers: float
    kv_layers: float
    expert_layers: float
    qk_norm: bool
    rollout: str
    fp8_kv: bool
    trainer: str = BF16
    router_replay: bool = False

    @property
    def moe(self) -> bool:
        return self.expert_layers > 0

    @property
    def routing(self) -> bool:
        """True if trainer and rollout may pick different experts."""
        return self.moe and not self.router_replay

    @property
    def same_grid(self) -> bool:
        """True if trainer and rollout round their linears alike."""
        return self.rollout == self.trainer != BF16


def kl_terms(setting: Setting, errors: RoundingErrors) -> tuple[float, float, float]:
    """KL per token from (BF16 kernels, FP8 linears, FP8 KV), if a relative error of the hidden state became a log-ratio
    one to one.

    BF16: trainer and engine each round the whole residual stream after each of 2 x layers sub-layers, at different
    places. FP8 linears: an error is relative to one sub-layer's update, 1/(2 x layers) of the stream, and each has two
    GEMMs in a row. That sum does not depend on depth, yet deeper models differ more. So quantised layers are counted
    against REFERENCE_LAYERS: assumed, as the data span 28 to 48 layers. Each counts alike, first and last ones too:
    assumed. An FP8 trainer leaves the same linears in BF16 as the rollout: assumed. FP8 KV: V and the probabilities
    enter as they are, K and Q through the softmax. At most half of the sub-layers are attention. Errors are
    independent: variances add.
    """
    kernels = 2 * kernel_variance(setting.layers, errors.bf16)
    weight, activation = (table[setting.trainer][setting.rollout] for table in (errors.weight, errors.activation))
    linears = 2 * (weight**2 + activation**2) * setting.quantised_layers / REFERENCE_LAYERS
    attention = (1 + ATTENTION_LOGIT_VARIANCE[setting.qk_norm]) * errors.kv**2 * setting.kv_layers / REFERENCE_LAYERS
    return kernels / 2, linears / 2, attention / 2 * setting.fp8_kv


def kernel_variance(layers: float, bf16: float) -> float:
    """Relative variance between the two hidden states halfway through so many layers, from BF16 kernels alone."""
    return 2 * layers * bf16**2


def routing_term(dense: float, expert_layers: float, errors: RoundingErrors) -> float:
    """KL per token from tokens that other experts work on, beside the KL `dense` of all other causes.

    A router picks other experts where two logits lie closer than the error of its input. The share of such tokens grows
    as that error, which is the square root of a variance. The jump to another expert's output is of one size, whatever
    moved the token there. So this KL grows as the square root of the rest. Its level is assumed: as large as the rest,
    in BF16 with REFERENCE_LAYERS layers. Layers are counted against these, as in `kl_terms`. Gaussian logits give
    nearly the same level for 8 of 128 experts and 2 of 8: more logits lie at the border, and each expert weighs less.
    """
    return expert_layers / REFERENCE_LAYERS * sqrt(dense * kernel_variance(REFERENCE_LAYERS, errors.bf16))


@dataclass(frozen=True, slots=True)
class TokenLogRatio:
    """The distribution of log pi_train / pi_rollout of one token of the rollout policy: a scale mixture of normals.

    A token of variance s^2 has mean -s^2/2, so that E[ratio] is exactly 1, as pi_train sums to 1. log s^2 is normal
    with standard deviation TOKEN_SPREAD, cut at +-3, so that the moments exist.

    probability: (n,) weights of the components
    variance:    (n,) their variances s^2
    """

    probability: FloatArray
    variance: FloatArray

    @property
    def ess(self) -> float:
        """The effective sample size, 1 / E[ratio^2] = 1 / E[exp(s^2)], with exponents clamped at 20 as in verl."""
        return float(1 / (self.probability @ np.exp(np.minimum(self.variance, 20.0))))

    def fraction_above(self, threshold: float) -> float:
        components = zip(self.probability.tolist(), self.variance.tolist(), strict=True)
        return float(sum(p * erfc((log(threshold) + v / 2) / sqrt(v) / sqrt(2)) / 2 for p, v in components))


def token_log_ratio(kl: float, routing: bool) -> TokenLogRatio:
    """The TokenLogRatio with that mean KL, and the tail with or without routes that differ.

    Raises ValueError unless kl > 0.
    """
    if not kl > 0:
        raise ValueError(f"kl is {kl!r}; allowed: above 0")
    z = np.linspace(-3, 3, 25)
    probability = np.exp(-(z**2) / 2)
    probability /= probability.sum()
    scale = np.exp(TOKEN_SPREAD[routing] * z)
    return TokenLogRatio(probability, 2 * kl * scale / (probability @ scale))


def sequence_rejection(kl: float, lengths: FloatArray, low: float, high: float) -> FloatArray:
    """The probability that the product of a sequence's ratios is outside [low, high], for each length (n,) in tokens.

    The log-ratio less its conditional mean is a martingale under rollout sampling, so token terms are uncorrelated. The
    sum is about N(-T kl, 2 T kl), and hardly shows the heavy tail of the tokens.
    """
    mean, deviation = -lengths * kl, np.sqrt(2 * lengths * kl)
    return 1 - (normal_cdf((log(high) - mean) / deviation) - normal_cdf((log(low) - mean) / deviation))


def normal_cdf(x: FloatArray) -> FloatArray:
    """Standard normal distribution function, absolute error below 1e-7 (Abramowitz and Stegun 26.2.17).

    scipy has an exact one, but importing scipy.special would cost a plan more than everything else here.
    """
    t = 1 / (1 + 0.2316419 * np.abs(x))
    powers = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-(x**2) / 2) / sqrt(2 * np.pi) * powers
    return np.where(x > 0, 1 - upper, upper)


def setting_of(
    shape: ModelShape,
    precision: Precision,
    e8m0: bool = True,
    tensor_parallel_size: int = 1,
    remedies: Remedies = NO_REMEDIES,
) -> Setting:
    """The setting of a model in a precision, with a trainer. Raises ConfigError as `keeping_bf16` of the shape does."""
    hidden = shape.hidden_size
    # A rollout in BF16 has no FP8 linears, so an FP8 trainer's are the same on every layout.
    tp = 1 if precision.weights == "bf16" else tensor_parallel_size
    rounded = shape.keeping_bf16(remedies.keep_bf16).layers
    quantised = sum(_quantised(part, hidden, tp) for layer in rounded for part in _sub_layers(layer)) / 2
    return Setting(
        layers=sum(len(_sub_layers(layer)) for layer in shape.layers) / 2,
        quantised_layers=quantised,
        # Recurrent layers keep their state in BF16 or FP32 whatever the KV dtype. A layer that reads another's keys and
        # values reads them in FP8.
        kv_layers=float(sum(any(isinstance(m, Attention | LatentAttention) for m in mixers(x)) for x in shape.layers)),
        expert_layers=float(sum(number for _, number in shape.parts_of(Experts))),
        qk_norm=has_qk_norm(shape),
        rollout=POW2 if precision.in_blocks and e8m0 else precision.weights,
        fp8_kv=precision.kv == "fp8",
        trainer=remedies.trainer_precision,
        router_replay=remedies.router_replay,
    )


def has_qk_norm(shape: ModelShape) -> bool:
    """True if every layer normalises its queries and keys.

    MLA counts as without, by reasoning alone. Its RMSNorm (kv_a_layernorm) is on the latent, from which a matrix of any
    size makes the keys of each head, and their rotated part has no norm. So the logits are not bounded. But K has no
    outliers: see `clipped_keys`.
    """
    norms = [part.qk_norm != "none" for part, _ in shape.parts_of(Attention)]
    return all(norms) and not shape.parts_of(LatentAttention)


def clipped_keys(shape: ModelShape) -> bool:
    """True if E4M3 at scale 1.0 clips the keys of some layer."""
    return any(clipped(part) for part, _ in shape.parts_of(Attention))


def clipped(attention: Attention) -> bool:
    """True if E4M3 at scale 1.0 clips a layer's keys: they have a bias and no norm (vllm-project/vllm#11906)."""
    return attention.qkv_bias and attention.qk_norm == "none"


def unmeasured_parts(shape: ModelShape) -> tuple[str, ...]:
    """Names of the model's properties that no fitted observation has: small size, and unmeasured mixers.
    The measured one is plain attention over all tokens, with norms over each head or none.
    """
    named = SMALL_LANGUAGE if shape.vocab_size >= SMALLEST_VOCABULARY else SMALL
    small = [named] if shape.num_parameters < SMALLEST_FITTED else []
    mixed = [name for layer in dict.fromkeys(shape.layers) for name in map(_name, mixers(layer)) if name]
    return tuple(dict.fromkeys(small + mixed))


def unmeasured_sd(parts: Sequence[str]) -> float:
    """The extra standard deviation of log KL for unmeasured parts, by their names."""
    mixed = set(parts) - SMALL_SD.keys()
    sd = UNMEASURED_SD if mixed else 0.0
    if STATE_SPACE in mixed:
        sd = STATE_SPACE_SD
    return hypot(sd, *(SMALL_SD[part] for part in parts if part in SMALL_SD))


def trainer_sd(setting: Setting) -> float:
    """The extra standard deviation of log KL for an FP8 trainer."""
    if setting.trainer == BF16:
        return 0.0
    return SAME_GRID_SD if setting.same_grid else UNMEASURED_SD


def _name(mixer: Mixer) -> str:
    """The name of an unmeasured mixer; "" for a measured one."""
    if isinstance(mixer, LatentAttention):
        return LATENT
    if isinstance(mixer, Mamba2):
        return STATE_SPACE
    if not isinstance(mixer, Attention):
        return "recurrent layers"
    if mixer.window or mixer.chunk:
        return "attention over a window"
    plain = Attention(mixer.heads, mixer.kv_heads, mixer.head_dim, bf16=mixer.bf16, stored=mixer.stored)
    if mixer.qk_norm != "width" and replace(mixer, qkv_bias=False, o_bias=False, qk_norm="none") == plain:
        return ""
    return "attention of another kind than Qwen3's"


def _sub_layers(layer: Layer) -> list[Mixer | Mlp | Experts]:
    """The additions to the residual stream. Parallel parts are one addition."""
    return [part for part in (layer.mixer, layer.mlp) if part is not None]


def _quantised(part: Mixer | Mlp | Experts, hidden: int, tp: int) -> float:
    """The FP8 share of a sub-layer's linears to which vLLM hands the quantisation config.

    Each counts alike, whatever its size: modelled, not measured.
    """
    linears = part.linears(hidden, tp) + (part.expert_linears(hidden) if isinstance(part, Experts) else ())
    quantised = [linear.quantised for linear in linears if linear.quantisable]
    return sum(quantised) / len(quantised)
