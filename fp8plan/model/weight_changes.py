"""The share of a model's values that one optimiser step changes, and the bytes of a patch that carries them.

Theory: a trainer keeps FP32 weights and rounds them. After many steps a weight's place between two rounding points is
uniform, so a step changes its rounded value with the probability min(1, |step| / spacing). The weights are a sample of
the checkpoint, or normal ones (fp8plan.model.weights). The mean of |step| follows from the optimiser:

    adamw  |step| = rate * |m| / sqrt(v). Gradients are noise and a signal that lasts for many steps, with the share
           SIGNAL of the power. m averages the noise away: rate * E|N(0, SIGNAL + (1 - SIGNAL) * (1 - b1) / (1 + b1))|.
           In step t the noise has the factor (1 + b1^t) / (1 - b1^t) more, and in the first one |step| is the rate.
    muon   a step of orthogonal rows or columns with a root mean square of 0.2 * rate (Moonlight, arXiv 2502.16982;
           torch.optim.Muon with adjust_lr_fn="match_rms_adamw"). AdamW moves embeddings, lm_head and vectors.

A trainer that begins with BF16 weights has them in the middle between two rounding points. After t steps they lie
about a normal distance from there, with the variance rate^2 * ((1 - SIGNAL) * t + SIGNAL * t^2): m hands on every
gradient in the end. So wide weights change less often at first.

Decay of weights is left out: at a usual 0.01 it moves a weight of 0.02 by 0.0002 * rate. A row of the embedding or
lm_head whose token occurs in no sample hardly moves, so their shares are mostly too high.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.model.precision import BF16_BYTES, E4M3_MANTISSA_BITS, E4M3_MAX, FP8_BYTES
from fp8plan.model.weights import Weights

OPTIMIZERS: Final = ("adamw", "muon")
BETA_1: Final = 0.9
SIGNAL: Final = 0.1  # least squares of the log ratios in benchmarks/change_ratios.py, at rates to 1e-4
MUON_RMS: Final = 0.2
MEAN_OF_NORMAL: Final = float(np.sqrt(2 / np.pi))  # E|N(0, 1)|

BF16_MANTISSA_BITS: Final = 7
E4M3_LEAST_EXPONENT: Final = -6
TINY: Final = 1e-30

# The format of a patch: fp8plan.runtime.weight_sync.delta, which tests compare.
PATCH_HEADER: Final = 24
TILE_ROWS, TILE_BYTES, DIGEST_BYTES = 128, 512, 4


def check_optimizer(optimizer: str) -> None:
    """Raise ConfigError for an unknown optimiser."""
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")


class Step(NamedTuple):
    """One optimiser step of a kind of weights, in learning rates or, times the rate, in weights.

    mean:  of its magnitude
    moved: root mean square of the way from a BF16 checkpoint until the middle of this step; None: so far that weights
           may lie anywhere between two rounding points
    """

    mean: float
    moved: float | None = None

    def times(self, rate: float) -> Step:
        """Return the step at a learning rate."""
        return Step(self.mean * rate, None if self.moved is None else self.moved * rate)


def one_step(optimizer: str, hidden: bool = True, number: int | None = None) -> Step:
    """Return a step in learning rates.

    hidden: a matrix inside of a layer; False: the embedding, lm_head or a vector
    number: of the step, from 1 on, after a BF16 checkpoint; None: a late one

    Raises ConfigError for an unknown optimiser.
    """
    check_optimizer(optimizer)
    kept = 0.0 if number is None else BETA_1**number
    rms, signal, way = 1.0, SIGNAL, None if number is None else number - 0.5
    if optimizer == "muon" and hidden:
        rms = MUON_RMS
        mean = MEAN_OF_NORMAL
    elif number == 1:
        mean = 1.0
    else:
        noise = (1 - BETA_1) / (1 + BETA_1) * (1 + kept) / (1 - kept)
        mean = MEAN_OF_NORMAL * float(np.sqrt(signal + (1 - signal) * noise))
    moved = None if way is None else rms * float(np.sqrt((1 - signal) * way + signal * way**2))
    return Step(rms * mean, moved)


class Changed(NamedTuple):
    """Shares of values that one step changes: BF16 values, E4M3 codes of blocks of 128 x 128, and their scales."""

    bf16: float
    codes: float
    scales: float


@lru_cache(256)
def changed(step: Step, weights: Weights) -> Changed:
    """Return the shares of weights that a step changes. step: times the learning rate

    A code changes with its weight, and with its block's scale.
    """
    values = weights.values
    largest = np.broadcast_to(weights.largest[:, None], values.shape)
    spacing, of_largest = _bf16_spacing(values), _bf16_spacing(weights.largest)
    met = _met(spacing, step.moved)
    by_scale = np.minimum(1.0, step.mean / of_largest * _met(of_largest, step.moved))
    scale = largest / E4M3_MAX
    exponents = np.maximum(np.floor(np.log2(np.maximum(values / scale, TINY))), E4M3_LEAST_EXPONENT)
    of_codes = scale * 2.0 ** (exponents - E4M3_MANTISSA_BITS)
    by_weight = np.minimum(1.0, step.mean / of_codes * met)
    shifted = np.minimum(1.0, values * (of_largest / weights.largest)[:, None] / of_codes)
    codes = by_weight + (by_scale[:, None] * (1 - by_weight)) * shifted
    bf16 = np.minimum(1.0, step.mean / spacing * met)
    return Changed(float(bf16.mean()), float(codes.mean()), float(by_scale.mean()))


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


def bf16_patch_bytes(rows: int, columns: int, share: Changed) -> float:
    """Return the mean bytes of the patch of a BF16 matrix."""
    return patch_bytes(rows, columns, BF16_BYTES, share.bf16)


def e4m3_patch_bytes(rows: int, columns: int, share: Changed, block: tuple[int, int]) -> float:
    """Return the mean bytes of the patches of a matrix in E4M3 blocks and of its FP32 scales."""
    codes = patch_bytes(rows, columns, FP8_BYTES, share.codes)
    return codes + patch_bytes(-(-rows // block[0]), -(-columns // block[1]), 4, share.scales)


def _bf16_spacing(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(2.0 ** (np.floor(np.log2(np.maximum(weights, TINY))) - BF16_MANTISSA_BITS), dtype=np.float64)


def _met(spacing: NDArray[np.float64], moved: float | None) -> NDArray[np.float64]:
    """Return the density of weights at the point between two roundings, in units of the uniform one.

    It is a normal one around the middle, wrapped to the spacing: with a wide one, it is uniform.
    """
    if moved is None:
        return np.ones_like(spacing)
    width = np.clip(moved / spacing, 0.05, 0.7)  # outside, it is 0 or 1 within 0.2%
    parts = (np.exp(-np.square(place / width) / 2) for place in (0.5, 1.5))
    return np.asarray(np.sqrt(2 / np.pi) / width * sum(parts), dtype=np.float64)
