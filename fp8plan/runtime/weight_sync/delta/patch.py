"""The change of one tensor as bytes: where its values changed, and the new ones.

A step of RL changes few values (docs/evidence/change_ratios.md). A patch holds the new values themselves, so applying
it twice does no harm. Its places take the shortest of four forms:

    GAPS_1, GAPS_2  the unchanged values before each changed one, in 1 or 2 bytes. The largest number of that size
                    stands for as many unchanged values and no changed one
    BITMAP          a bit for each value, from the lowest bit of a byte on
    DENSE           no places: all values of the tensor

    bytes of a patch: HEADER int64 (form, changed values, bytes of places, digests, checksum of all that follows)
                      | digests, int32 | places | values

Values are stored by planes: the first bytes of all values, then the second ones. So a general compressor finds the
bytes that are alike, such as the exponents of BF16.

A digest tells a receiver that its tile of the tensor is as the trainer's. It is the high half of the sum of the tile's
32-bit words, each times a random constant of its place, modulo 2^64 (multilinear hashing: Lemire & Kaser, The Computer
Journal 57(11), 2014). Two tiles that differ have equal digests with a probability of 2^-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from numpy.random import PCG64

from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DENSE, GAPS_1, GAPS_2, BITMAP = range(4)
LARGEST: Final = {GAPS_1: 255, GAPS_2: 65535}  # number of a gap's size
HEADER: Final = 5
DIGEST_BYTES: Final = 4
TILE: Final = (128, 512)  # rows, and bytes of each: shards of matrices mostly begin and end at such tiles
WORDS: Final = TILE[1] // 4
SEED: Final = 20261128  # of the digests' constants, which both ends must share


class Change(NamedTuple):
    """The changed values of one tensor.

    places:  their places in the flat tensor, int64 [changed], rising; None: all values, in order
    words:   their bit patterns, an integer dtype of the tensor's size [changed]
    digests: of the tensor's tiles after the change, int32 [rows of tiles, columns of tiles]
    """

    places: Tensor | None
    words: Tensor
    digests: Tensor


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bit patterns as a view of the same shape: uint8, int16 or int32."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that a tensor's tiles are counted in: leading dimensions are rows."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def tiles(shape: Sequence[int], item: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of tiles of a tensor. item: bytes of a value"""
    rows, columns = flat(shape)
    return -(-rows // TILE[0]), -(-columns * item // TILE[1])


def change(base: Tensor, new: Tensor) -> Change | None:
    """Return what has changed from `base` to `new`, of one dtype and shape, on one device; None for nothing.

    It has all values where that takes no more bytes than the changed ones with their places.
    """
    words = bits(new.contiguous())
    places = (words != bits(base)).flatten().nonzero().flatten()
    if not places.numel():
        return None
    shortest = min(_sizes(_gaps(places), new.numel()))
    if shortest + places.numel() * new.element_size() >= new.nbytes:
        return whole(new)
    return Change(places, words.flatten()[places], digests(words.view(flat(new.shape))))


def whole(new: Tensor) -> Change:
    """Return the Change that writes all values of a tensor, as a copy."""
    words = bits(new.contiguous())
    return Change(None, words.flatten().clone(), digests(words.view(flat(new.shape))))


def apply(base: Tensor, made: Change) -> None:
    """Write a Change into `base`, which is contiguous."""
    words = bits(base).view(-1)
    if made.places is None:
        words.copy_(made.words)
    else:
        words[made.places] = made.words


def digests(words: Tensor) -> Tensor:
    """Return the digests of a matrix of bit patterns, int32 [rows of tiles, columns of tiles]."""
    import torch

    height, width = tiles(words.shape, words.element_size())
    data = words.view(torch.uint8)
    if data.shape[1] != width * TILE[1] or data.stride() != (data.shape[1], 1) or data.storage_offset() % 4:
        data = data.new_zeros(data.shape[0], width * TILE[1])  # of whole tiles, and aligned
        data[:, : words.shape[1] * words.element_size()] = words.view(torch.uint8)
    stripes = data.view(torch.int32).view(-1, width, WORDS).split(TILE[0])
    # A row of tiles at a time: products take eight bytes for each word.
    sums = torch.empty(height, width, dtype=torch.int64, device=words.device)
    for row, stripe in enumerate(stripes):
        sums[row] = (stripe * _constants(words.device)[: stripe.shape[0]]).sum((0, 2))
    return (sums >> 32).to(torch.int32)


def _checksum(data: Tensor) -> int:
    """Return a checksum of bytes, which tells a damaged patch."""
    import torch

    spare = -data.numel() % TILE[1]
    rows = digests(torch.nn.functional.pad(data, (0, spare)).view(-1, TILE[1])).flatten().long()
    return int((rows * (2 * torch.arange(rows.numel(), device=rows.device) + 1)).sum())


@cache
def _constants(device: torch.device) -> Tensor:
    """Return the constants of a tile's words, int64 [rows, 1, words of a row]."""
    import torch

    numbers = PCG64(SEED).random_raw(TILE[0] * WORDS)  # the same with every version of torch
    return torch.from_numpy(numbers.view("int64").reshape(TILE[0], 1, WORDS)).to(device)


def packed(made: Change, size: int) -> Tensor:
    """Return the patch of a Change as bytes, uint8 [bytes] on its device. size: values in the tensor"""
    import torch

    item, count = made.words.element_size(), made.words.numel()
    form, places = DENSE, made.words.new_empty(0, dtype=torch.uint8)
    if made.places is not None:
        form, places = _placed(made.places, size)
    planes = made.words.view(torch.uint8).view(count, item).t().reshape(-1)
    body = torch.cat([made.digests.reshape(-1).view(torch.uint8), places, planes])
    numbers = [form, count, places.numel(), made.digests.numel(), _checksum(body)]
    header = torch.tensor(numbers, dtype=torch.int64, device=body.device)
    return torch.cat([header.view(torch.uint8), body])


def _gaps(places: Tensor) -> Tensor:
    import torch

    return torch.diff(places, prepend=places.new_full((1,), -1)) - 1


def _sizes(gaps: Tensor, size: int) -> tuple[int, int, int]:
    """Return the bytes of the places as GAPS_1, GAPS_2 and BITMAP."""
    skips = [int((gaps // most).sum()) for most in LARGEST.values()]
    return gaps.numel() + skips[0], 2 * (gaps.numel() + skips[1]), -(-size // 8)


def _placed(places: Tensor, size: int) -> tuple[int, Tensor]:
    """Return the shortest form of the places, and their bytes."""
    import torch

    gaps = _gaps(places)
    sizes = _sizes(gaps, size)
    form = (GAPS_1, GAPS_2, BITMAP)[sizes.index(min(sizes))]
    if form == BITMAP:
        mask = places.new_zeros(-(-size // 8) * 8, dtype=torch.uint8)
        mask[places] = 1
        return form, (mask.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1).to(torch.uint8)
    most = LARGEST[form]
    skips = gaps // most
    ends = torch.cumsum(skips + 1, 0)
    stream = gaps.new_full((int(ends[-1]),), most)
    stream[ends - 1] = gaps - skips * most
    if form == GAPS_1:
        return form, stream.to(torch.uint8)
    return form, torch.where(stream < 2**15, stream, stream - 2**16).to(torch.int16).view(torch.uint8)


def unpacked(patch: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Change:
    """Return the Change in a patch of a tensor of this dtype and shape. Raises ConfigError for other bytes."""
    import torch

    size, item, height_width = prod(shape), dtype.itemsize, tiles(shape, dtype.itemsize)
    if patch.numel() < 8 * HEADER:
        raise ConfigError(f"a patch of {patch.numel()} bytes; allowed: {8 * HEADER} and more")
    form, count, long, own, checksum = patch[: 8 * HEADER].clone().view(torch.int64).tolist()
    lengths = [8 * HEADER, DIGEST_BYTES * own, long, count * item]
    if own != prod(height_width) or min(lengths) < 0 or sum(lengths) != patch.numel() or count > size:
        raise ConfigError("the bytes of a patch do not fit its tensor: they are another tensor's, or damaged")
    if _checksum(patch[8 * HEADER :]) != checksum:
        raise ConfigError("the bytes of a patch are damaged")
    _, tile_bytes, places, planes = patch.split(lengths)
    values = torch.empty(count, item, dtype=torch.uint8, device=patch.device)  # aligned, as a part of bytes is not
    words = bits(values.copy_(planes.view(item, count).t()).view(-1).view(dtype))
    where = None if form == DENSE else _places(form, places, size)
    if (size if where is None else where.numel()) != count:
        raise ConfigError("a patch has other places than values: it is damaged")
    if where is not None and count and not 0 <= int(where[-1]) < size:
        raise ConfigError("a patch has places outside of its tensor: it is damaged")
    return Change(where, words, tile_bytes.clone().view(torch.int32).view(height_width))  # a clone, to be aligned


def _places(form: int, places: Tensor, size: int) -> Tensor:
    import torch

    if form == BITMAP:
        flags = (places.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=places.device)) & 1
        return flags.flatten()[:size].nonzero().flatten()
    if form not in (GAPS_1, GAPS_2) or places.numel() % form:
        raise ConfigError(f"a patch has the form {form}; allowed: {DENSE} to {BITMAP}")
    most = LARGEST[form]
    stream = places.long() if form == GAPS_1 else places.clone().view(torch.int16).long() & 65535
    changed = stream != most
    return (torch.cumsum(stream + changed, 0) - 1)[changed]
