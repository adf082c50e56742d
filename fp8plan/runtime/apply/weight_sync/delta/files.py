"""Files in a folder or an object store: one kind of error for all of them, and no wait without an end.

A fault that may pass (status 500, a lost connection, a body that is cut off, silence) is tried again after PAUSES_S.
What stays is a SyncError that names the address. A file that is missing or damaged is an UnreadableError: others of the
store may do in its place.

URLs are fsspec's: a path, s3://..., gs://..., memory://... Some need a package that fsspec names.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

from fp8plan.checks import seconds_in
from fp8plan.errors import ConfigError, SyncError, text_of
from fp8plan.runtime.apply.interrupts import let_in
from fp8plan.runtime.apply.threads import within

TIMEOUT: Final = "FP8PLAN_STORE_TIMEOUT_S"  # variable of the environment
TIMEOUT_S: Final = 120.0  # its default: seconds for a block of BLOCK bytes, or any other single call to a store
PAUSES_S: Final = (0.5, 2.0, 8.0)  # before the second, third and fourth try
BLOCK: Final = 1 << 22  # bytes that are copied at once

# Errors of a file system that do not pass by themselves.
LASTING: Final = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR,
    errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip
PASSING_STATUS: Final = (408, 429)  # of HTTP, beside 500 and above

Answer = TypeVar("Answer")


class UnreadableError(ConfigError):
    """A file of a store that is missing, cut off or damaged. where: its address"""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where


class CutOffError(Exception):
    """A file that has come in another size than its writer gave it."""


class StoreFiles:
    """The files behind a URL. Raises ConfigError for a URL that fsspec does not know.

    Its methods raise SyncError, with the file's address, for a store that does not do what it is asked for.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = str(url)
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url!r}: {error}; allowed: a folder, or a URL of an fsspec file system") from error
        self._limit_s = seconds_in(TIMEOUT, TIMEOUT_S)
        self._tried("opening", "", partial(self._within, self._system.makedirs, self._root, exist_ok=True))

    def path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes; None if it is not there."""
        try:
            data: bytes = self._tried("reading", name, partial(self._within, self._system.cat_file, self.path(name)))
        except SyncError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file that readers see whole or not at all."""
        self._tried("writing", name, partial(self._replace, name, data))

    def write_blocks(self, name: str, blocks: Callable[[], Iterable[bytes]]) -> int:
        """Write a file, and return its bytes. A part of one is deleted. blocks: gives its content, from the start"""
        try:
            nbytes: int = self._tried("writing", name, partial(self._write, name, blocks))
        except BaseException:
            with suppress(Exception):
                self._delete(name)
            raise
        return nbytes

    def fetch(self, sizes: Mapping[str, int], folder: str) -> dict[str, str]:
        """Return name -> local path of files: their own in a store that is a folder, else that of a copy.

        sizes:  name -> bytes, as its writer has counted them
        folder: for the copies; those that are there already are taken

        Raises UnreadableError for a file that is missing or has another size, SyncError for one that cannot be copied.
        """
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._system, LocalFileSystem):
            return {name: self.path(name) for name in sizes}
        paths = {name: f"{folder}/{name}" for name in sizes}
        for name, path in paths.items():
            if Path(path).exists() and Path(path).stat().st_size == sizes[name]:
                continue
            try:
                self._tried("copying", name, partial(self._copy, name, path, sizes[name]), f" to {path}")
            except SyncError as error:
                if isinstance(error.__cause__, (FileNotFoundError, CutOffError)):
                    raise UnreadableError(str(error), self.address(name)) from error
                raise
        return paths

    def names(self) -> list[str]:
        """Return the names of the files that are there."""
        paths = self._tried("listing", "", partial(self._within, self._listed))
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def delete(self, names: Iterable[str]) -> None:
        """Delete those of the files that are there."""
        for name in names:
            try:
                self._tried("deleting", name, partial(self._delete, name))
            except SyncError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def _tried(self, doing: str, name: str, act: Callable[[], Answer], where: str = "") -> Answer:
        """Return what `act` returns, if need be at a later try. Only here do errors of a store become those of fp8plan.

        doing, where: the words before and after the file's address in an error

        Raises SyncError, whose cause is the store's own error.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                return act()
            except Exception as error:  # each file system has its own
                if pause_s is None or not _may_pass(error):
                    raise SyncError(f"{doing} {self.address(name)}{where}: {text_of(error)}") from error
                until = time.monotonic() + pause_s
            while time.monotonic() < until:
                let_in()
                time.sleep(0.05)
        raise AssertionError

    def _within(self, act: Callable[..., Answer], *arguments: Any, **more: Any) -> Answer:
        """Return what one call of the file system returns. Raises TimeoutError if it does not come in time."""
        return within(self._limit_s, partial(act, *arguments, **more), f"set {TIMEOUT} to wait longer")

    def _replace(self, name: str, data: bytes) -> None:
        part = self.path(f"{name}.{uuid4().hex}.part")
        try:
            self._within(self._system.pipe_file, part, data)
            self._within(self._system.mv, part, self.path(name))
        except BaseException:
            with suppress(Exception):
                self._within(self._system.rm_file, part)
            raise

    def _write(self, name: str, blocks: Callable[[], Iterable[bytes]]) -> int:
        size = 0
        file = self._within(self._system.open, self.path(name), "wb")
        try:
            for piece in _pieces(blocks()):
                self._within(file.write, piece)
                size += len(piece)
                let_in()
        except BaseException:
            with suppress(Exception):
                self._within(file.close)
            raise
        self._within(file.close)
        return size

    def _copy(self, name: str, path: str, size: int) -> None:
        """Copy a file. fsspec's own get_file cannot be broken off."""
        file = self._within(self._system.open, self.path(name), "rb")
        try:
            with open(path, "wb") as copy:
                block_ends, until = BLOCK, time.monotonic() + self._limit_s
                while data := self._within(file.read, BLOCK):
                    copy.write(data)
                    let_in()
                    if copy.tell() > size:
                        raise CutOffError(f"it has more than its {size} bytes")
                    if copy.tell() >= block_ends:
                        block_ends, until = copy.tell() + BLOCK, time.monotonic() + self._limit_s
                    elif time.monotonic() > until:  # a read may give a few bytes: a proxy's page, again and again
                        raise TimeoutError(f"no block for {self._limit_s:g} s; set {TIMEOUT} to wait longer")
                if copy.tell() < size:
                    raise CutOffError(f"it ends after {copy.tell()} of its {size} bytes")
        finally:
            with suppress(Exception):
                self._within(file.close)

    def _delete(self, name: str) -> None:
        self._within(self._system.rm_file, self.path(name))

    def _listed(self) -> list[str]:
        self._system.invalidate_cache()
        paths: list[str] = self._system.ls(self._root, detail=False)
        return paths


def _pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of BLOCK, as each write takes a thread."""
    waiting = bytearray()
    for block in blocks:
        waiting += block
        while len(waiting) >= BLOCK:
            yield bytes(waiting[:BLOCK])
            del waiting[:BLOCK]
    yield bytes(waiting)


def _may_pass(error: Exception) -> bool:
    """Return True for a fault that another try may not meet."""
    status = error.status if hasattr(error, "status") else getattr(error, "code", None)  # aiohttp's name, and gcsfs's
    if isinstance(status, int):
        return status >= 500 or status in PASSING_STATUS
    if isinstance(error, OSError) and error.errno in LASTING:
        return False
    return not isinstance(error, (FileNotFoundError, NotImplementedError, ValueError, TypeError, AttributeError))
