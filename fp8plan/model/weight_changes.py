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

A sparse sync (TopK) leaves changes for later ones. In a long run each of them comes, so it saves only where a weight
changes several times before it is sent. A residual sets a threshold: a change is sent once it takes a squared error of
threshold^2 away. A weight with a narrower spacing moves on by the threshold first, and lacks threshold^2 / 3 on
average. With a wider one it goes by threshold^2 / (2 * spacing) too far, and lacks threshold^2 / 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.model.precision import E4M3_MANTISSA_BITS, E4M3_MAX, FP8_BYTES
from fp8plan.model.weights import Weights

DEFAULT_OPTIMIZER: Final = "adamw"
OPTIMIZERS: Final = (DEFAULT_OPTIMIZER, "muon")
BETA_1: Final = 0.9
SIGNAL: Final = 0.1  # least squares of the log ratios in benchmarks/tables/change_ratios.py, at rates to 1e-4
MUON_RMS: Final = 0.2
MEAN_OF_NORMAL: Final = float(np.sqrt(2 / np.pi))  # E|N(0, 1)|

BF16_MANTISSA_BITS: Final = 7
E4M3_LEAST_EXPONENT: Final = -6
TINY: Final = 1e-30

# The sizes of a patch, which fp8plan.runtime.apply.weight_sync.delta takes from here.
PATCH_HEADER: Final = 24
TILE_ROWS, TILE_BYTES, DIGEST_BYTES = 128, 512, 4
LARGEST_GAPS: Final = {1: 255, 2: 65535}  # bytes of a gap -> its largest number

MEAN_LACK: Final = 0.4  # of threshold^2: between a third and a half
# KL per token that top-k adds, over residual^2: least and most in benchmarks/results/slow_links_steps.jsonl, by budget.
KL_OF_RESIDUAL: Final = {"share": (1500, 2500), "residual": (65, 1300)}
UNITS: Final = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def check_optimizer(optimizer: str) -> None:
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True, slots=True)
class TopK:
    """Settings of a sparse sync, which leaves the least useful changes for later ones. Give exactly one.

    share:    largest share of a matrix's values that a sync sends
    nbytes:   largest bytes of a sync. All matrices get the same share
    residual: largest RMS of what is left out of a matrix, over that of its weights. A sync sends as much as it must

    Blocks with new scales, and matrices that vLLM must reload, come on top. Raises ConfigError for other values.
    """

    share: float | None = None
    nbytes: float | None = None
    residual: float | None = None

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("share", "nbytes", "residual")}
        values = {name: value for name, value in values.items() if value is not None}
        if len(values) != 1:
            raise ConfigError(
                "top_k needs one of its three settings; type: TopK(share=1e-4), TopK(nbytes=20_000_000) or "
                "TopK(residual=1e-3)"
            )
        ((name, value),) = values.items()
        most, allowed = 1.0, "a number above 0, up to 1"
        if name == "nbytes":
            most, allowed = math.inf, "a number of bytes above 0"
        if not (is_number(value) and 0 < value <= most):
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")

    @classmethod
    def parse(cls, text: str) -> TopK:
        """Return the settings in a text: "1e-4" is a share, "20MB" bytes, "residual=1e-3" a residual.

        Raises ConfigError for other texts.
        """
        match = re.fullmatch(r"(residual=)?([\d.]+(?:[eE][+-]?\d+)?) ?(KB|MB|GB)?", text)
        try:
            number = float(match[2]) if match and not (match[1] and match[3]) else None
        except ValueError:  # such as 1.2.3
            number = None
        if match is None or number is None:
            raise ConfigError(f"top_k is {text!r}; allowed: 1e-4 (a share of the values), 20MB or residual=1e-3")
        if match[3]:
            return cls(nbytes=number * UNITS[match[3]])
        return cls(residual=number) if match[1] else cls(share=number)

    def __str__(self) -> str:
        if self.nbytes is not None:
            return f"{self.nbytes / 1e6:g}MB"
        return f"{self.share:g}" if self.share is not None else f"residual={self.residual:g}"

    def in_shares(self, matrices: Iterable[tuple[int, int, int, int]], rest: float) -> TopK:
        """Return settings that hold for each matrix: a share in the place of bytes.

        matrices: (rows, columns, bytes of a value, number of such matrices)
        rest:     bytes of all other patches

        Raises ConfigError if nbytes is less than headers, digests and the rest take.
        """
        if self.nbytes is None:
            return self
        width, most = max(LARGEST_GAPS.items())
        fixed, each = rest, 0
        for rows, columns, item, number in matrices:
            # Skips, and the value by which a share is rounded up.
            fixed += number * (frame_bytes(rows, columns, item) + width * (rows * columns // most + 1) + item)
            each += number * rows * columns * (item + width)
        if self.nbytes <= fixed:
            raise ConfigError(f"nbytes is {self.nbytes:.15g}; allowed for this model: more than {fixed:.15g}")
        return TopK(share=min(1.0, (self.nbytes - fixed) / each))


class Step(NamedTuple):
    """One optimiser step of a kind of weights, in learning rates or, times the rate, in weights.

    mean:  of its magnitude
    moved: root mean square of the way from a BF16 checkpoint until the middle of this step; None: so far that weights
           may lie anywhere between two rounding points
    """

    mean: float
    moved: float | None = None

    def times(self, rate: float) -> Step:
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
    """Shares of values that one step changes, or a sync sends.

    bf16:     of BF16 values
    codes:    of E4M3 codes of blocks of 128 x 128
    scales:   of their scales
    rescaled: of codes, those in blocks with a new scale alone
    """

    bf16: float
    codes: float
    scales: float
    rescaled: float

    def limited(self, share: float) -> Changed:
        """Return what a sync of at most a share of the values sends. Blocks with new scales come on top."""
        return self._replace(bf16=min(self.bf16, share), codes=min(self.codes, share + self.rescaled))


@lru_cache(256)
def changed(step: Step, weights: Weights, residual: float = 0.0) -> Changed:
    """Return the shares of weights that a step changes, or that a sync with a residual sends in a long run.

    step:     times the learning rate
    residual: as TopK has it

    A code changes with its weight, and with its block's scale.
    """
    threshold = residual * weights.spread / MEAN_LACK**0.5
    values = weights.values
    largest = np.broadcast_to(weights.largest[:, None], values.shape)
    spacing, of_largest = _bf16_spacing(values), _bf16_spacing(weights.largest)
    met = _met(spacing, step.moved)
    by_scale = np.minimum(1.0, step.mean / of_largest * _met(of_largest, step.moved))
    scale = largest / E4M3_MAX
    exponents = np.maximum(np.floor(np.log2(np.maximum(values / scale, TINY))), E4M3_LEAST_EXPONENT)
    of_codes = scale * 2.0 ** (exponents - E4M3_MANTISSA_BITS)
    by_weight = np.minimum(1.0, step.mean / np.maximum(of_codes, threshold) * met)
    shifted = np.minimum(1.0, values * (of_largest / weights.largest)[:, None] / of_codes)
    rescaled = by_scale[:, None] * (by_weight + (1 - by_weight) * shifted)
    codes = by_weight * (1 - by_scale[:, None]) + rescaled
    bf16 = np.minimum(1.0, step.mean / np.maximum(spacing, threshold) * met)
    return Changed(*(float(share.mean()) for share in (bf16, codes, by_scale, rescaled)))


def frame_bytes(rows: int, columns: int, item: int) -> int:
    """Return the bytes of a patch of a matrix beside places and values. item: bytes of a value"""
    return PATCH_HEADER + DIGEST_BYTES * -(-rows // TILE_ROWS) * -(-columns * item // TILE_BYTES)


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
    for width, most in LARGEST_GAPS.items():
        beyond = (1 - share) ** most
        forms.append(changed * width * (1 + beyond / (1 - beyond)))
    sent = 1 - (1 - share) ** size
    body = min(float(size * item), min(forms) + changed * item)
    return sent * frame_bytes(rows, columns, item) + body


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
