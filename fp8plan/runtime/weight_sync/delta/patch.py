"""The change of one tensor as bytes: where its values changed, and the new ones.

A step of RL changes few values (docs/evidence/change_ratios.md). A patch holds the new values themselves, so applying
it twice does no harm. Its places take the shortest of four forms:

    GAPS_1, GAPS_2  the unchanged values before each changed one, in 1 or 2 bytes. The largest number of that size
                    stands for as many unchanged values and no changed one
    BITMAP          a bit for each value, from the lowest bit of a byte on
    DENSE           no places: all values of the tensor

    bytes of a patch: HEADER int64 (form and changed values, bytes of places, checksum of all that follows)
                      | digests of the new tensor's tiles, int32 | places | values

Values are stored by planes: the first bytes of all values, then the second ones. So a general compressor finds the
bytes that are alike, such as the exponents of BF16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.weight_changes import DIGEST_BYTES, LARGEST_GAPS, PATCH_HEADER
from fp8plan.runtime.weight_sync.delta.tiles import TILE, bits, compared, digests, flat, tiles

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DENSE, GAPS_1, GAPS_2, BITMAP = range(4)  # the number of a form of gaps is the bytes of a gap
FORMS: Final = 4
HEADER: Final = PATCH_HEADER // 8
FEW_VALUES: Final = 2**20  # fewer changed values are packed on the CPU: launches would take longer


class Change(NamedTuple):
    """The changed values of one tensor, on one device.

    places:  their places in the flat tensor, int64 [changed], rising; None: all values, in order
    words:   their bit patterns, an integer dtype of the tensor's size [changed]
    digests: of the tensor's tiles after the change, int32 [rows of tiles, columns of tiles]
    """

    places: Tensor | None
    words: Tensor
    digests: Tensor


def change(base: Tensor, new: Tensor) -> Change | None:
    """Return what has changed from `base` to `new`; None for nothing. As `changes`."""
    return changes([(base, new)])[0]


def changes(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Change | None]:
    """Return what has changed in each pair of a base and a new tensor; None for nothing.

    A Change has all values where that takes no more bytes than the changed ones with their places. Few changes on a GPU
    come to the CPU, where they are packed.

    pairs: alike in shape, dtype and device, contiguous
    """

    if not pairs:
        return []
    news = [new for _, new in pairs]
    places, own = map(list, zip(*compared(news, [base for base, _ in pairs]), strict=True))
    counts = [each.numel() for each in places]
    words = [bits(new).view(-1)[where] for new, where in zip(news, places, strict=True)]
    if any(each.is_cuda for each in places) and sum(counts) <= FEW_VALUES:
        moved = iter(_on_cpu([*places, *words, *own]))
        places, words, own = ([next(moved) for _ in pairs] for _ in range(3))
    return [_shortest(new, Change(*parts)) for new, *parts in zip(news, places, words, own, strict=True)]


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU, by one copy for each dtype and device."""
    import torch

    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.device].append(tensor.flatten())
    parts = {key: iter(torch.cat(some).cpu().split([each.numel() for each in some])) for key, some in groups.items()}
    return [next(parts[tensor.dtype, tensor.device]).view(tensor.shape) for tensor in tensors]


def _shortest(new: Tensor, made: Change) -> Change | None:
    """Return a Change, or that of all values if it takes no more bytes; None for nothing."""
    assert made.places is not None
    if not made.places.numel():
        return None
    shortest = min(_sizes(_gaps(made.places), new.numel()))
    if shortest + made.places.numel() * new.element_size() >= new.nbytes:
        return whole(new)
    return made


def whole(new: Tensor) -> Change:
    """Return the Change that writes all values of a tensor, as a copy."""
    words = bits(new.contiguous())
    return Change(None, words.flatten().clone(), digests([words.view(flat(new.shape))])[0])


def apply(base: Tensor, made: Change) -> None:
    """Write a Change into `base`, which is contiguous."""
    words = bits(base).view(-1)
    if made.places is None:
        words.copy_(made.words)
    else:
        words[made.places.to(words.device)] = made.words.to(words.device)


def _checksum(data: Tensor) -> int:
    """Return a checksum of bytes, which tells a damaged patch."""
    import torch

    spare = -data.numel() % TILE[1]
    (own,) = digests([torch.nn.functional.pad(data, (0, spare)).view(-1, TILE[1])])
    rows = own.flatten().long()
    return int((rows * (2 * torch.arange(rows.numel(), device=rows.device) + 1)).sum())


def packed(made: Change, size: int) -> Tensor:
    """Return the patch of a Change as bytes, uint8 [bytes] on the Change's device. size: values in the tensor"""
    import torch

    item, count = made.words.element_size(), made.words.numel()
    form, places = DENSE, made.words.new_empty(0, dtype=torch.uint8)
    if made.places is not None:
        form, places = _placed(made.places, size)
    planes = made.words.view(torch.uint8).view(count, item).t().reshape(-1)
    body = torch.cat([made.digests.reshape(-1).view(torch.uint8), places, planes])
    numbers = [form + FORMS * count, places.numel(), _checksum(body)]
    header = torch.tensor(numbers, dtype=torch.int64, device=body.device)
    return torch.cat([header.view(torch.uint8), body])


def _gaps(places: Tensor) -> Tensor:
    import torch

    return torch.diff(places, prepend=places.new_full((1,), -1)) - 1


def _sizes(gaps: Tensor, size: int) -> tuple[int, int, int]:
    """Return the bytes of the places as GAPS_1, GAPS_2 and BITMAP."""
    skips = [int((gaps // most).sum()) for most in LARGEST_GAPS.values()]
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
    most = LARGEST_GAPS[form]
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
    form_count, long, checksum = patch[: 8 * HEADER].clone().view(torch.int64).tolist()
    count, form = divmod(form_count, FORMS)
    lengths = [8 * HEADER, DIGEST_BYTES * prod(height_width), long, count * item]
    if min(lengths) < 0 or sum(lengths) != patch.numel() or count > size:
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
        raise ConfigError("a patch has gaps of half a number: it is damaged")
    most = LARGEST_GAPS[form]
    stream = places.long() if form == GAPS_1 else places.clone().view(torch.int16).long() & 65535
    changed = stream != most
    return (torch.cumsum(stream + changed, 0) - 1)[changed]
