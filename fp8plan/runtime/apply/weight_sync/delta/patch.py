"""The changes of tensors as bytes: where their values changed, and the new ones.

A step of RL changes few values (docs/evidence/weight_sync.md). A patch holds the new values of one tensor themselves,
so applying it twice does no harm. Its places take the shortest of four forms:

    GAPS_1, GAPS_2  the unchanged values before each changed one, in 1 or 2 bytes. The largest number of that size
                    stands for as many unchanged values and no changed one
    BITMAP          a bit for each value, from the lowest bit of a byte on
    DENSE           no places: all values of the tensor

A patch without changed values carries digests alone: the engine compares its tensor with them.

    bytes of a patch: HEADER int64 (form and changed values, bytes of places, CRC-32 of the tensor's name and
                      all that follows) | digests of the new tensor's tiles, int32 | places | values

Values are stored by planes: the first bytes of all values, then the second ones. So a general compressor finds the
bytes that are alike, such as the exponents of BF16.

Patches lie in the CPU's memory. The tensors' device turns places into bytes and back. It takes many tensors at once:
launches for each one would take longer than the work.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.model.weight_changes import DIGEST_BYTES, LARGEST_GAPS, PATCH_HEADER
from fp8plan.runtime.apply.weight_sync.delta.parts import at_cuts, cuts_of, numbers_by, owners_of, sums
from fp8plan.runtime.apply.weight_sync.delta.places import values_at, whole_window, write_values
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits, compared, digests, matrix, tiles
from fp8plan.runtime.apply.weight_sync.manifest import Entry, dtype_named

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DENSE, GAPS_1, GAPS_2, BITMAP = range(4)  # the number of a form of gaps is the bytes of a gap
FORMS: Final = 4
PINNED_BYTES: Final = 2**28  # larger copies are slower and stay pageable, as torch never frees pinned memory
VALUES: Final = 2**24  # that are looked at together
HEADER: Final = struct.Struct("<qqq")
assert HEADER.size == PATCH_HEADER

Bytes = NDArray[np.uint8]


class Change(NamedTuple):
    """The changed values of one tensor, on one device.

    places:  their places in the flat tensor, int64 [changed], rising; None: all values, in order
    words:   their bit patterns, an integer dtype of the tensor's size [changed]
    digests: of the tensor's tiles after the change, int32 [rows of tiles, columns of tiles], on any device
    """

    places: Tensor | None
    words: Tensor
    digests: Tensor


def changes(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Change | None]:
    """Return what has changed in each pair of a base and a new tensor; None for nothing.

    pairs: alike in shape, dtype and device, contiguous
    """
    bases, news = ([matrix(pair[which]) for pair in pairs] for which in (0, 1))
    places, own = [], []
    for each in compared(news, bases):
        places.append(each.places)
        own.append(each.digests)
    words = values_at(news, places)
    return [Change(*made) if made[0].numel() else None for made in zip(places, words, own, strict=True)]


def whole(new: Tensor) -> Change:
    """Return the Change that writes all values of a tensor, as a copy."""
    words = matrix(new.contiguous())
    return Change(None, words.flatten().clone(), digests([words])[0])


def unchanged(tensors: Sequence[Tensor]) -> list[Change]:
    """Return Changes that write nothing, and hold the digests of contiguous tensors."""
    words = [matrix(tensor) for tensor in tensors]
    nothing = [each.flatten()[:0] for each in words]
    return [Change(*made) for made in zip([each.long() for each in nothing], nothing, digests(words), strict=True)]


def apply(tensors: Sequence[Tensor], made: Sequence[Change]) -> None:
    """Write a Change into each tensor. Both are on one device, tensors contiguous."""
    sparse = [
        (whole_window(matrix(tensor)), *each[:2])
        for tensor, each in zip(tensors, made, strict=True)
        if each.places is not None
    ]
    for tensor, each in zip(tensors, made, strict=True):
        if each.places is None:
            bits(tensor).view(-1).copy_(each.words)
    if sparse:
        write_values(*zip(*sparse, strict=True))


def packed(names: Sequence[str], made: Sequence[Change], news: Sequence[Tensor]) -> list[Tensor]:
    """Return the patch of each Change, uint8 [bytes] on the CPU.

    names: of the tensors; news: the tensors after the changes. A patch holds all values where that takes no more bytes
    """
    import torch

    forms = [DENSE if each.words.numel() else GAPS_1 for each in made]
    places = [np.empty(0, dtype=np.uint8)] * len(made)
    dense = [not each.words.numel() or _dense(each, new) for each, new in zip(made, news, strict=True)]
    by_device = [None if all_values else each.words.device for each, all_values in zip(made, dense, strict=True)]
    for numbers in numbers_by(by_device):
        streams = _placed([made[number] for number in numbers], [news[number] for number in numbers])
        for number, (form, stream) in zip(numbers, streams, strict=True):
            forms[number], places[number] = form, stream
    words = [
        each.words if each.places is None or form != DENSE else bits(new).view(-1)
        for each, form, new in zip(made, forms, news, strict=True)
    ]
    parts = zip(
        names,
        forms,
        words,
        _on_cpu([each.digests for each in made]),
        places,
        _on_cpu([_planes(each) for each in words]),
        strict=True,
    )
    patches, header = [], np.empty(HEADER.size, dtype=np.uint8)
    for name, form, changed, *body in parts:
        data = np.concatenate([header, *body])
        checksum = _checksum(name, data[HEADER.size :])
        HEADER.pack_into(data.data, 0, form + FORMS * changed.numel(), body[1].size, checksum)
        patches.append(torch.from_numpy(data))
    return patches


def _checksum(name: str, body: Bytes) -> int:
    """Return the CRC-32 of a tensor's name and a patch's bytes, so that no patch is taken for another tensor's."""
    return crc32(body.data, crc32(name.encode("utf-8")))


def changed_values(patch: Tensor) -> int:
    """Return the number of values that a patch changes; 0 for digests alone, and for a patch that is cut off."""
    if len(patch) < HEADER.size:
        return 0
    form_count, *_ = HEADER.unpack_from(patch.numpy().data)
    return int(form_count) // FORMS


def _dense(made: Change, new: Tensor) -> bool:
    """Return True if no form of the places can be shorter than all values: each takes a byte, or all a bit."""
    count = made.words.numel()
    return made.places is None or min(count, new.numel() // 8) + count * new.element_size() >= new.nbytes


def _planes(words: Tensor) -> Tensor:
    import torch

    item = words.element_size()
    planes = words.view(torch.uint8)
    return planes if item == 1 else planes.view(words.numel(), item).t().reshape(-1)


def _on_cpu(tensors: Sequence[Tensor]) -> list[Bytes]:
    """Return the bytes of tensors, by one copy for each dtype and device."""
    import torch

    parts: dict[int, Bytes] = {}
    for numbers in numbers_by([(tensor.dtype, tensor.device) for tensor in tensors]):
        some = [tensors[number].reshape(-1) for number in numbers]
        data = _copied(torch.cat(some))
        parts.update(zip(numbers, _split(data, [tensor.nbytes for tensor in some]), strict=True))
    return [parts[number] for number in range(len(tensors))]


def _copied(tensor: Tensor) -> Bytes:
    if tensor.device.type != "cpu":
        tensor = _room(tensor.numel(), tensor.dtype, tensor.device).copy_(tensor)
    return tensor.numpy().view(np.uint8)


def _sent(parts: Sequence[Bytes], device: torch.device) -> Tensor:
    """Return bytes on a device, one part after the other."""
    import torch

    host = _room(sum(part.size for part in parts), torch.uint8, device)
    np.concatenate(parts, out=host.numpy())
    return host.to(device, non_blocking=host.is_pinned())


def _room(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of the CPU for a copy from or to a device: pinned, if it is not large."""
    import torch

    pinned = device.type == "cuda" and count * dtype.itemsize <= PINNED_BYTES
    return torch.empty(count, dtype=dtype, pin_memory=pinned)


def _split(data: Bytes, lengths: Iterable[int]) -> list[Bytes]:
    """Return parts of these lengths as views, as numpy.split does in more time."""
    cuts = [0, *accumulate(map(int, lengths))]
    return [data[start:stop] for start, stop in pairwise(cuts)]


def _placed(made: Sequence[Change], news: Sequence[Tensor]) -> list[tuple[int, Bytes]]:
    """Return the shortest form of each Change's places, and their bytes."""
    import torch

    places = [each.places for each in made if each.places is not None]
    counts = [each.numel() for each in places]
    every = torch.cat(places)
    cuts = cuts_of(counts, every.device)
    gaps = torch.diff(every, prepend=every[:1]) - 1
    gaps[cuts[:-1]] = every[cuts[:-1]]
    skips = {form: gaps // most for form, most in LARGEST_GAPS.items()}
    skipped = torch.stack([sums(each, cuts) for each in skips.values()]).tolist()
    owner = owners_of(cuts, len(every))
    forms, numbers_in = [], np.empty((len(counts), len(skips)), dtype=np.int64)
    for number, (count, new) in enumerate(zip(counts, news, strict=True)):
        numbers_in[number] = [count + each[number] for each in skipped]
        sizes = {form: form * int(n) for form, n in zip(LARGEST_GAPS, numbers_in[number], strict=True)}
        sizes[BITMAP] = -(-new.numel() // 8)
        shortest = min(sizes, key=sizes.__getitem__)
        forms.append(DENSE if sizes[shortest] + count * new.element_size() >= new.nbytes else shortest)
    streams: list[Bytes] = [np.empty(0, dtype=np.uint8)] * len(counts)
    for column, (form, most) in enumerate(LARGEST_GAPS.items()):
        numbers = [number for number, each in enumerate(forms) if each == form]
        if numbers:
            chosen = torch.tensor([each == form for each in forms], device=every.device)[owner]
            own, own_skips = gaps[chosen], skips[form][chosen]
            ends = torch.cumsum(own_skips + 1, 0)
            lengths = numbers_in[numbers, column]
            stream = torch.full((int(lengths.sum()),), most, dtype=torch.int32, device=every.device)
            stream[ends - 1] = (own - own_skips * most).int()
            data = _copied(stream.view(torch.uint8).view(-1, 4)[:, :form].reshape(-1))  # little-endian
            for number, part in zip(numbers, _split(data, form * lengths), strict=True):
                streams[number] = part
    for number, form in enumerate(forms):
        if form == BITMAP:
            streams[number] = _bitmap(places[number], news[number].numel())
    return list(zip(forms, streams, strict=True))


def _bitmap(places: Tensor, size: int) -> Bytes:
    import torch

    mask = places.new_zeros(-(-size // 8) * 8, dtype=torch.uint8)
    mask[places] = 1
    shifted = mask.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return _copied(shifted.sum(1, dtype=torch.uint8))


def refuse_values(name: str, values: Tensor, matrix: bool) -> None:
    """Raise ConfigError for values that engines refuse: NaN, Inf, and a matrix of zeros.

    values: of floating point; matrix: they are all those of a matrix
    """
    import torch

    largest = 0.0
    for some in values.flatten().split(VALUES) if values.numel() else ():
        wide = some.float() if some.element_size() == 1 else some
        amax = float(torch.linalg.vector_norm(wide, inf, dtype=torch.float32))  # NaN, if there is one
        if not isfinite(amax):
            raise ConfigError(f"not finite: {name}; allowed: no NaN, no Inf")
        largest = max(largest, amax)
    if matrix and not largest:
        raise ConfigError(
            f"all zeros: {name}; allowed: the policy's weights, gathered from where the trainer keeps them"
        )


class _Parts(NamedTuple):
    entry: Entry
    form: int
    changed: int
    digests: Bytes
    places: Bytes
    planes: Bytes


def unpacked(patches: Sequence[Tensor], entries: Sequence[Entry], device: torch.device) -> list[Change]:
    """Return the Changes in patches on the CPU, with their places and words on a device.

    Raises ConfigError, with the tensor's name, for other bytes than a patch of that tensor.
    """
    parts = [_parts(patch, entry) for patch, entry in zip(patches, entries, strict=True)]
    places: dict[int, Tensor] = {}
    for form in LARGEST_GAPS:
        numbers = [number for number, each in enumerate(parts) if each.form == form]
        if numbers:
            places.update(zip(numbers, _located(form, [parts[number] for number in numbers], device), strict=True))
    places.update((number, _marked(each, device)) for number, each in enumerate(parts) if each.form == BITMAP)
    words = _words(parts, device)
    return [Change(places.get(number), words[number], _digests(each)) for number, each in enumerate(parts)]


def _parts(patch: Tensor, entry: Entry) -> _Parts:
    data, item = patch.numpy(), dtype_named(entry.dtype).itemsize
    if data.size < HEADER.size:
        raise ConfigError(f"{entry.name}: a patch of {data.size} bytes; allowed: {HEADER.size} and more")
    form_count, long, checksum = HEADER.unpack_from(data.data)
    count, form = divmod(form_count, FORMS)
    lengths = [DIGEST_BYTES * prod(tiles(entry.shape, item)), long, count * item]
    body = data[HEADER.size :]
    size = prod(entry.shape)
    if min(lengths) < 0 or sum(lengths) != body.size or count > size or (form == DENSE and (count != size or long)):
        raise ConfigError(
            f"{entry.name}: the bytes of a patch do not fit its tensor: they are another tensor's, or damaged"
        )
    if _checksum(entry.name, body) != checksum:
        raise ConfigError(f"{entry.name}: the bytes of a patch are damaged, or another tensor's")
    return _Parts(entry, form, count, *_split(body, lengths))


def _located(form: int, parts: Sequence[_Parts], device: torch.device) -> list[Tensor]:
    import torch

    for each in parts:
        if each.places.size % form:
            raise ConfigError(
                f"{each.entry.name}: the bytes of a patch's gaps are no multiple of {form}: it is damaged"
            )
    data, most = _sent([each.places for each in parts], device), LARGEST_GAPS[form]
    stream = data.int() if form == 1 else data.view(torch.int16).int() & most
    changed = stream != most
    lengths, counts = [each.places.size // form for each in parts], [each.changed for each in parts]
    cuts = cuts_of(lengths, device)
    total = torch.cumsum(stream + changed, 0, dtype=torch.int64)
    before = at_cuts(total, cuts)
    own, ends = torch.stack([sums(changed, cuts), before.diff()]).tolist()
    for each, count, end in zip(parts, own, ends, strict=True):
        if count != each.changed:
            raise ConfigError(f"{each.entry.name}: a patch has other places than values: it is damaged")
        if end > prod(each.entry.shape):
            raise ConfigError(f"{each.entry.name}: a patch has places outside of its tensor: it is damaged")
    owner = owners_of(cuts_of(counts, device), sum(counts))
    return list((total[changed] - 1 - before[owner]).split(counts))


def _marked(part: _Parts, device: torch.device) -> Tensor:
    import torch

    size = prod(part.entry.shape)
    data = torch.from_numpy(part.places.copy()).to(device)
    flags = (data.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    places = flags.flatten().nonzero().flatten()
    if places.numel() != part.changed:
        raise ConfigError(f"{part.entry.name}: a patch has other places than values: it is damaged")
    if part.changed and int(places[-1]) >= size:
        raise ConfigError(f"{part.entry.name}: a patch has places outside of its tensor: it is damaged")
    return places


def _words(parts: Sequence[_Parts], device: torch.device) -> list[Tensor]:
    if not parts:
        return []
    data = _sent([each.planes for each in parts], device)
    words = []
    for each, planes in zip(parts, data.split([each.planes.size for each in parts]), strict=True):
        item = dtype_named(each.entry.dtype).itemsize
        values = planes if item == 1 else planes.view(item, each.changed).t().flatten().clone()  # aligned
        words.append(bits(values.view(dtype_named(each.entry.dtype))))
    return words


def _digests(part: _Parts) -> Tensor:
    import torch

    return torch.from_numpy(part.digests.copy().view(np.int32)).view(
        tiles(part.entry.shape, dtype_named(part.entry.dtype).itemsize)
    )
