"""The share of a model's values that one optimiser step changes, and the bytes of a patch that carries them.

Theory: a trainer keeps FP32 weights and rounds them. After some steps a weight's place between two rounding points is
uniform, so a step changes its rounded value with the probability min(1, |step| / spacing). Weights are taken as normal
with a given spread. The mean of |step| follows from the optimiser:

    adamw  |step| = rate * |m| / sqrt(v). Gradients are noise and a signal that lasts for many steps, with the share
           SIGNAL of the power. m averages the noise away: rate * E|N(0, SIGNAL + (1 - SIGNAL) * (1 - b1) / (1 + b1))|.
           In step t the noise has the factor (1 + b1^t) / (1 - b1^t) more, and in the first one |step| is the rate.
    muon   a step of orthogonal rows or columns with a root mean square of 0.2 * rate (Moonlight, arXiv 2502.16982;
           torch.optim.Muon with adjust_lr_fn="match_rms_adamw"). AdamW moves embeddings, lm_head and vectors.

Decay of weights is left out: at a usual 0.01 it moves a weight of 0.02 by 0.0002 * rate. A row of the embedding or
lm_head whose token occurs in no sample hardly moves, so their shares are mostly too high. So are those of the first
steps of a trainer that begins with BF16 weights, which lie in the middle between two rounding points, and those of a
model with wider weights than SPREAD.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from fp8plan.errors import ConfigError
from fp8plan.model.precision import BF16_BYTES, E4M3_MANTISSA_BITS, E4M3_MAX, FP8_BYTES

OPTIMIZERS: Final = ("adamw", "muon")
SPREAD: Final = 0.02  # standard deviation of weights: initializer_range of most configs. A wider one changes less
BETA_1: Final = 0.9
SIGNAL: Final = 0.07  # chosen on the logs of benchmarks/change_ratios.py: SmolLM2's need more, random models' less
MUON_RMS: Final = 0.2
MEAN_OF_NORMAL: Final = float(np.sqrt(2 / np.pi))  # E|N(0, 1)|

BF16_MANTISSA_BITS: Final = 7
E4M3_LEAST_EXPONENT: Final = -6
BLOCK: Final = 128 * 128  # weights that share a scale
POINTS: Final = 2**14  # quantiles that stand for the weights

# The format of a patch: fp8plan.runtime.weight_sync.delta.patch, which tests compare.
PATCH_HEADER: Final = 40
TILE_ROWS, TILE_BYTES, DIGEST_BYTES = 128, 512, 4


def check_optimizer(optimizer: str) -> None:
    """Raise ConfigError for an unknown optimiser."""
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")


def mean_step(optimizer: str, hidden: bool = True, step: int | None = None) -> float:
    """Return the mean of |step| in learning rates.

    hidden: a matrix inside of a layer; False: the embedding, lm_head or a vector
    step:   its number, from 1 on; None: a late one

    Raises ConfigError for an unknown optimiser.
    """
    check_optimizer(optimizer)
    if optimizer == "muon" and hidden:
        return MUON_RMS * MEAN_OF_NORMAL
    if step == 1:
        return 1.0
    kept = 0.0 if step is None else BETA_1**step
    noise = (1 - BETA_1) / (1 + BETA_1) * (1 + kept) / (1 - kept)
    return MEAN_OF_NORMAL * float(np.sqrt(SIGNAL + (1 - SIGNAL) * noise))


@cache
def bf16_share(step: float, spread: float = SPREAD) -> float:
    """Return the share of BF16 values that a step changes. step, spread: mean |step| and deviation of the weights"""
    return float(np.minimum(1.0, step / _bf16_spacing(_weights(spread))).mean())


@cache
def e4m3_share(step: float, spread: float = SPREAD) -> float:
    """Return the share of blockwise E4M3 codes that a step changes, as `bf16_share`.

    A code changes with its weight, and with its block's scale.
    """
    weights, largest = _weights(spread), _largest(spread)
    scale = largest / E4M3_MAX
    exponents = np.maximum(np.floor(np.log2(weights / scale)), E4M3_LEAST_EXPONENT)
    spacing = scale * 2.0 ** (exponents - E4M3_MANTISSA_BITS)
    by_weight = np.minimum(1.0, step / spacing).mean()
    shifts = weights * float(_bf16_spacing(largest)) / largest
    by_scale = np.minimum(1.0, shifts / spacing).mean()
    return float(by_weight + scale_share(step, spread) * (1 - by_weight) * by_scale)


def scale_share(step: float, spread: float = SPREAD) -> float:
    """Return the share of scales that a step changes: those of blocks whose largest BF16 value changes."""
    return min(1.0, step / float(_bf16_spacing(_largest(spread))))


def patch_bytes(rows: int, columns: int, item: int, share: float) -> float:
    """Return the mean bytes of a matrix's patch. item: bytes of a value; share: of values that change, all alike

    The places take the shortest form: gaps of 1 or 2 bytes, a bit for each value, or none in a dense patch. A gap is
    geometric, so it is at least n with the probability (1 - share)^n. A matrix without a change is not sent.
    """
    if share <= 0:
        return 0.0
    size = rows * columns
    changed = size * share
    forms = [float(-(-size // 8))]
    for most, width in ((255, 1), (65535, 2)):
        beyond = (1 - share) ** most
        forms.append(changed * width * (1 + beyond / (1 - beyond)))
    tiles = -(-rows // TILE_ROWS) * -(-columns * item // TILE_BYTES)
    sent = 1 - (1 - share) ** size
    body = min(float(size * item), min(forms) + changed * item)
    return sent * (PATCH_HEADER + DIGEST_BYTES * tiles) + body


def bf16_patch_bytes(rows: int, columns: int, step: float) -> float:
    """Return the mean bytes of the patch of a BF16 matrix of the usual spread. step: mean |step|"""
    return patch_bytes(rows, columns, BF16_BYTES, bf16_share(step))


def e4m3_patch_bytes(rows: int, columns: int, step: float, block: tuple[int, int]) -> float:
    """Return the mean bytes of the patches of a matrix in E4M3 blocks and of its FP32 scales, as `bf16_patch_bytes`."""
    codes = patch_bytes(rows, columns, FP8_BYTES, e4m3_share(step))
    return codes + patch_bytes(-(-rows // block[0]), -(-columns // block[1]), 4, scale_share(step))


@cache
def _quantiles() -> NDArray[np.float64]:
    """Return quantiles of |N(0, 1)|."""
    return np.asarray(norm.ppf(0.5 + (np.arange(POINTS) + 0.5) / (2 * POINTS)), dtype=np.float64)


def _weights(spread: float) -> NDArray[np.float64]:
    return _quantiles() * spread


def _largest(spread: float) -> float:
    """Return the median of the largest weight of a block."""
    return float(norm.ppf(0.5 + 0.5 * 0.5 ** (1 / BLOCK))) * spread


def _bf16_spacing(weights: NDArray[np.float64] | float) -> NDArray[np.float64]:
    return np.asarray(2.0 ** (np.floor(np.log2(weights)) - BF16_MANTISSA_BITS), dtype=np.float64)
