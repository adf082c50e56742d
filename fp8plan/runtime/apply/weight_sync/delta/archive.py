"""A file of patches: written by a trainer, and checked to the last bit before an engine takes any of it.

The file is its patches, one after the other, each compressed by zstd if the trainer says so; then an index in JSON, and
TAIL: the index's CRC-32 and its length. Each patch carries its own checksum (apply.weight_sync.delta.patch). The
index names the version, so that a file of another one is not taken for it.

The manifest bounds every size, and the file's own size all of them, before memory is taken for any.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal
from zlib import crc32

import msgspec
from msgspec import Struct

from fp8plan.errors import ConfigError, text_of
from fp8plan.model.weight_changes import frame_bytes
from fp8plan.packages import PARQUET, package
from fp8plan.runtime.apply.interrupts import let_in
from fp8plan.runtime.apply.weight_sync.delta.files import UnreadableError
from fp8plan.runtime.apply.weight_sync.delta.patch import refuse_values, unpacked
from fp8plan.runtime.apply.weight_sync.delta.tiles import flat
from fp8plan.runtime.apply.weight_sync.manifest import Entry, Manifest, dtype_named, is_matrix
from fp8plan.schemas import parse

if TYPE_CHECKING:
    from torch import Tensor

CODECS: Final = (None, "zstd")
TAIL: Final = struct.Struct("<qq")  # the index's checksum, and its bytes


def blocks(patches: Iterable[tuple[str, Tensor]], codec: str | None, stamp: str) -> Iterator[bytes]:
    """Yield the content of a file of patches. stamp: of the version that they lead to"""
    index: list[tuple[str, int, int]] = []
    for name, patch in patches:
        data = patch.cpu().numpy().tobytes()
        stored = _compressed(data) if codec else data
        index.append((name, len(stored), len(data)))
        yield stored
    text = msgspec.json.encode({"stamp": stamp, "codec": codec, "patches": index})
    yield text
    yield TAIL.pack(crc32(text), len(text))


class Archive:
    """A file of patches that is open, and whose index is sound.

    path:     of the file
    where:    its address in the store, for errors
    stamp:    of the version that it leads to
    size:     its bytes, as its writer has counted them
    manifest: entries of all tensors of the model
    whole:    it must hold a patch of each tensor

    Raises UnreadableError for a file that is missing or damaged, or another one than that.
    """

    def __init__(self, path: str, where: str, stamp: str, size: int, manifest: Manifest, whole: bool) -> None:
        self._where = where
        self._entries = {entry.name: entry for entry in manifest}
        try:
            self._file = open(path, "rb")  # noqa: SIM115 -- `close` does
        except OSError as error:
            raise UnreadableError(f"{where}: {text_of(error)}", where) from error
        try:
            self._index = _read_index(self._file, size, stamp, self._entries, whole)
        except (OSError, ConfigError) as error:
            self.close()
            raise UnreadableError(f"{where} is cut off or damaged: {text_of(error)}", where) from error

    def close(self) -> None:
        self._file.close()

    def check(self) -> None:
        """Read all patches as an engine would. Raises UnreadableError for one that it would refuse."""
        import torch

        for name, patch in self.patches():
            entry = self._entries[name]
            try:
                (change,) = unpacked([patch], [entry], torch.device("cpu"))
                values = change.words.view(dtype_named(entry.dtype))
                refuse_values(name, values, change.places is None and is_matrix(entry.shape))
            except ConfigError as error:
                raise UnreadableError(f"{self._where}: {error}", self._where) from error
            let_in()

    def patches(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, patch) of the file, from its start. Raises UnreadableError for bytes that are not there."""
        import torch

        self._file.seek(0)
        for name, stored, nbytes in self._index.patches:
            data = bytearray(stored)
            try:
                if self._file.readinto(data) < stored:
                    raise EOFError(f"it ends in the patch of {name}")
                expanded = _expanded(data, nbytes) if self._index.codec else data
            except (OSError, EOFError) as error:
                raise UnreadableError(f"{self._where} is damaged: {text_of(error)}", self._where) from error
            yield name, torch.frombuffer(expanded, dtype=torch.uint8)


class _Index(Struct):
    """patches: name, stored bytes and bytes of each"""

    stamp: str
    codec: Literal["zstd"] | None
    patches: list[tuple[str, int, int]]


def _read_index(file: BinaryIO, size: int, stamp: str, entries: Mapping[str, Entry], whole: bool) -> _Index:
    """Return a file's index. Raises ConfigError for a file of another size, and an index that does not fit the model.

    size: of the file
    """
    actual = file.seek(0, 2)
    if actual != size:
        raise ConfigError(f"it has {actual} bytes of {size}")
    file.seek(max(size - TAIL.size, 0))
    tail = file.read(TAIL.size)
    checksum, length = TAIL.unpack(tail) if len(tail) == TAIL.size else (0, 0)
    end = size - TAIL.size - length  # of the patches
    if length < 1 or end < 0:
        raise ConfigError("its index has no length")
    file.seek(end)
    text = file.read(length)
    if crc32(text) != checksum:
        raise ConfigError("its index has another checksum")
    try:
        index = msgspec.convert(parse(text, "its index"), _Index)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its index: {error}") from error
    codec, patches = index.codec, index.patches
    if index.stamp != stamp:
        raise ConfigError("it is a file of another version")
    names = {name for name, _, _ in patches}
    if len(names) < len(patches) or not names <= entries.keys():
        raise ConfigError("its index names a tensor twice, or one that the model does not have")
    if whole and names != entries.keys():
        raise ConfigError(f"it has {len(names)} tensors of {len(entries)}")
    for name, stored, nbytes in patches:
        most = _most_bytes(entries[name])
        if not (stored > 0 and 0 < nbytes <= most) or (codec is None and stored != nbytes):
            raise ConfigError(f"its index has a patch of {nbytes} bytes for {name}; allowed: {most} at most")
    if sum(stored for _, stored, _ in patches) != end:
        raise ConfigError("its index has other sizes than the file")
    return index


def _most_bytes(entry: Entry) -> int:
    """Return the bytes of a patch that holds all values of a tensor. No form is longer."""
    rows, columns = flat(entry.shape)
    return frame_bytes(rows, columns, entry.nbytes // entry.numel) + entry.nbytes


def _compressed(data: bytes) -> bytes:
    return bytes(zstd().compress(data, codec="zstd", asbytes=True))


def _expanded(data: bytearray, nbytes: int) -> bytearray:
    """Expand a patch. Raises OSError for other bytes than `nbytes` compressed ones."""
    plain = zstd().decompress(memoryview(data), decompressed_size=nbytes, codec="zstd", asbytes=True)
    return bytearray(plain)


def zstd() -> Any:
    """Return pyarrow, which compresses. Raises ConfigError without it."""
    return package("pyarrow", "the codec zstd", PARQUET)
