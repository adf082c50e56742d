"""Triton kernels of fp8plan.runtime.mismatch.fused. Each program has one tile: tokens [cuts[i], cuts[i + 1]).

Sums over a tile are float64 and go to sums[row, tile]; so is exp where they are measured, as k3 cancels. Weights have
a float32 exp, which costs a tenth and is within 2 ulps of torch's. Places within a tile are int32 and counted from its
first token: int64 ones cost more than the exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8plan.runtime.mismatch.histogram import BINS, FIRST, LIMIT, SHIFT, SIDE

ROW = 4  # numbers of a bin, of which three are used: one line of 32 bytes, where L2 adds to all of them at once
# Bits of a float64's mantissa that the histogram drops, and half of the last one that it keeps.
DROPPED = 22

_LIMIT, _SHIFT, _FIRST, _SIDE = tl.constexpr(LIMIT), tl.constexpr(SHIFT), tl.constexpr(FIRST), tl.constexpr(SIDE)
_ROW, _SIZE = tl.constexpr(ROW), tl.constexpr(ROW * BINS)
_KEPT, _HALF = tl.constexpr(-(1 << DROPPED)), tl.constexpr(1 << (DROPPED - 1))


# Were the histogram known to be aligned, a thread would have two numbers of a bin, and L2 a request for each.
@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["histogram"])
def measure(log_ratio, train, cuts, tiles, histogram, sums, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """histogram: [COPIES, BINS, ROW] float64 zeros; to it is added, for each bin, [tokens, ratio, k3].

    sums: [10, tiles]: log ratio, k3, train, ratio^2; tokens, ratio and k3 in the last bin below 0, in the first above
    """
    tile, start, lane, valid = _tile(cuts, BLOCK)
    x = tl.load(log_ratio + start + lane, valid, 0.0)
    exact = x.to(tl.float64)
    # k3 is not clamped above, the ratio is.
    exponential = tl.exp(tl.maximum(x, -_LIMIT).to(tl.float64))
    ratio = tl.where(x > _LIMIT, tl.exp(tl.full([1], _LIMIT, tl.float64)), exponential)
    k3 = tl.maximum(exponential - 1.0 - exact, 0.0)

    # As fp8plan.runtime.mismatch.histogram.bins.
    magnitude = tl.minimum(tl.abs(x), _LIMIT).to(tl.int32, bitcast=True)
    step = tl.maximum((magnitude >> _SHIFT) - (_FIRST - 1), 0)
    bin_ = _SIDE + tl.where(x < 0, -1 - step, step)
    # Many tokens are as good as equal on both sides. They would all wait at the same two addresses, so they are summed
    # in registers, as the sums of a sequence are.
    near = valid & (step == 0)
    far = valid & (step > 0)
    # A token's three numbers are added by as many neighbouring threads: one request to L2, not three.
    column = tl.arange(0, _ROW)[None, :]
    one, short_ratio, short_k3 = tl.full([BLOCK], 1.0, tl.float64), _short(ratio), _short(k3)
    values = tl.where(column == 1, short_ratio[:, None], tl.where(column == 2, short_k3[:, None], one[:, None]))
    place = histogram + (tile % COPIES) * _SIZE + (bin_ * _ROW)[:, None] + column
    tl.atomic_add(place, values, far[:, None] & (column < 3), sem="relaxed")

    found = sums + tile
    tl.store(found, tl.sum(exact))
    tl.store(found + tiles, tl.sum(k3))
    tl.store(found + 2 * tiles, tl.sum(tl.load(train + start + lane, valid, 0.0).to(tl.float64)))
    tl.store(found + 3 * tiles, _sum(ratio * ratio, valid))
    _store_bin(found + 4 * tiles, tiles, near & (x < 0), ratio, k3)
    _store_bin(found + 7 * tiles, tiles, near & (x >= 0), ratio, k3)


@triton.jit(do_not_specialize=["tiles"])
def weigh(log_ratio, cuts, tiles, low, high, weights, inside, sums, BAND: tl.constexpr, BLOCK: tl.constexpr):
    """weights: [tokens] float32, truncated at `high` or, with BAND, 0 where `inside` [tokens] uint8 is 0

    sums: [7, tiles]: weight, raw ratio, weight^2; ratios above `high`, below `low`; smallest and largest weight
    """
    tile, start, lane, valid = _tile(cuts, BLOCK)
    x = tl.load(log_ratio + start + lane, valid, 0.0)
    raw = _exp(tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT))
    raw = tl.where(valid, raw, 0.0)  # what is not the tile's own adds nothing, and is no larger than a weight
    above, below = raw > high, raw < low
    if BAND:
        within = (above | below) == 0
        weight = tl.where(within, raw, 0.0)
        tl.store(inside + start + lane, within.to(tl.uint8), valid)
    else:
        weight = tl.minimum(raw, high)
    tl.store(weights + start + lane, weight, valid)

    found, exact = sums + tile, weight.to(tl.float64)
    tl.store(found, tl.sum(exact))
    tl.store(found + tiles, tl.sum(raw.to(tl.float64)))
    tl.store(found + 2 * tiles, tl.sum(exact * exact))
    tl.store(found + 3 * tiles, _count(above))
    tl.store(found + 4 * tiles, _count(below & valid))
    tl.store(found + 5 * tiles, tl.min(tl.where(valid, weight, float("inf"))).to(tl.float64))
    tl.store(found + 6 * tiles, tl.max(weight).to(tl.float64))


@triton.jit
def _exp(x):
    """exp of float32 within +-80, to 1 ulp: 2^n exp(r) with r = x - n log 2, in two parts as log 2 is no float32.

    Without the units for exp, rounding and conversion, which take a sixteenth of the threads at a time: 2^23 + 2^22,
    added, rounds to an integer that is then in the last bits; exp(r) is a polynomial, minimax for |r| <= log(2) / 2.
    """
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    exponential = tl.fma(r, 0.0013814465, 0.008368781)
    exponential = tl.fma(exponential, r, 0.041668393)
    exponential = tl.fma(exponential, r, 0.1666652)
    exponential = tl.fma(exponential, r, 0.49999994)
    exponential = tl.fma(exponential, r, 1.0)
    exponential = tl.fma(exponential, r, 1.0)
    power = shifted.to(tl.int32, bitcast=True) << 23
    return (exponential.to(tl.int32, bitcast=True) + power).to(tl.float32, bitcast=True)


@triton.jit
def count(kept, cuts, counts, BLOCK: tl.constexpr):
    """counts: [tiles] int32: how many of a tile's `kept` [tokens] uint8 are not 0."""
    tile, start, lane, valid = _tile(cuts, BLOCK)
    tl.store(counts + tile, tl.sum(_is_kept(kept + start, lane, valid)))


@triton.jit
def gather(train, rollout, kept, cuts, ends, train_out, rollout_out, log_ratio, BLOCK: tl.constexpr):
    """Kept tokens of both sides, one after the other, as float32, and their difference. ends: counts, added up."""
    tile, start, lane, valid = _tile(cuts, BLOCK)
    keep = _is_kept(kept + start, lane, valid)
    number = tl.sum(keep)
    if number > 0:  # padding is whole tiles
        first, place, own = tl.load(ends + tile) - number, tl.cumsum(keep) - 1, keep != 0
        one = tl.load(train + start + lane, own, 0.0).to(tl.float32)
        other = tl.load(rollout + start + lane, own, 0.0).to(tl.float32)
        tl.store(train_out + first + place, one, own)
        tl.store(rollout_out + first + place, other, own)
        tl.store(log_ratio + first + place, one - other, own)


@triton.jit
def scatter(values, kept, cuts, ends, out, BLOCK: tl.constexpr):
    """values, one after the other, to where tokens are kept in `out`, which has their dtype."""
    tile, start, lane, valid = _tile(cuts, BLOCK)
    keep = _is_kept(kept + start, lane, valid)
    number = tl.sum(keep)
    if number > 0:
        first, place, own = tl.load(ends + tile) - number, tl.cumsum(keep) - 1, keep != 0
        tl.store(out + start + lane, tl.load(values + first + place, own), own)


@triton.jit
def _tile(cuts, BLOCK: tl.constexpr):
    """Number of this program's tile; its first token (int64), BLOCK places (int32) from there, which are its own."""
    tile = tl.program_id(0)
    start, lane = tl.load(cuts + tile), tl.arange(0, BLOCK)
    return tile, start, lane, lane < (tl.load(cuts + tile + 1) - start).to(tl.int32)


@triton.jit
def _is_kept(kept, lane, valid):
    return (tl.load(kept + lane, valid, 0) != 0).to(tl.int32)


@triton.jit
def _sum(values, mask):
    return tl.sum(tl.where(mask, values, 0.0))


@triton.jit
def _count(mask):
    return tl.sum(mask.to(tl.int32)).to(tl.float64)


@triton.jit
def _store_bin(found, tiles, mask, ratio, k3):
    tl.store(found, _count(mask))
    tl.store(found + tiles, _sum(ratio, mask))
    tl.store(found + 2 * tiles, _sum(k3, mask))


@triton.jit
def _short(values):
    """Rounded to 31 bits. Values of one bin have almost one exponent, so float64 adds up to 2^21 of them exactly: the
    sum does not depend on the order in which programs come, and a GPU gives the same histogram each time."""
    return ((values.to(tl.int64, bitcast=True) + _HALF) & _KEPT).to(tl.float64, bitcast=True)
