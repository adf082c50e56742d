"""A store over a slow link: an fsspec file system in memory. Files of patches come slowly until `fast` is set."""

from __future__ import annotations

import io
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fp8plan.runtime.apply.weight_sync.delta import files

URL = "slow://store"
TRICKLE, WAIT_S = 4, 0.01  # bytes of a read, and its seconds


class SlowFiles(MemoryFileSystem):
    """opened: names of the files of patches that were read, without stamps; fast: set once these need no time;
    vanishing: part of the names of those that are deleted when they are opened"""

    protocol = "slow"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    opened: ClassVar[list[str]] = []
    fast: ClassVar = threading.Event()
    begun: ClassVar = threading.Event()
    vanishing: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("slow://")))

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode != "rb" or path.endswith(".json"):
            return super()._open(path, mode, **more)
        self.opened.append(name := re.sub("-[0-9a-f]{8}", "", path.rpartition("/")[2]))
        if any(part in name for part in self.vanishing):
            self.rm_file(path)
        return SlowFile(super()._open(path, mode, **more).getvalue())


class SlowFile(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        SlowFiles.begun.set()
        if SlowFiles.fast.is_set():
            return super().read(size)
        time.sleep(WAIT_S)
        return super().read(TRICKLE)


def stored(part: str) -> str:
    """The path of the one file whose name without its stamp holds `part`."""
    (path,) = (path for path in SlowFiles.store if part in re.sub("-[0-9a-f]{8}", "", path))
    return path


@contextmanager
def slow_files(folder: Path) -> Iterator[type[SlowFiles]]:
    """An empty file system behind slow://. Temporary files go to the new folder, and must be gone in the end."""
    fsspec.register_implementation("slow", SlowFiles, clobber=True)
    SlowFiles.store.clear()
    SlowFiles.pseudo_dirs[:] = [""]
    SlowFiles.opened.clear()
    SlowFiles.vanishing.clear()
    SlowFiles.begun.clear()
    SlowFiles.fast.set()
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(files, "PAUSES_S", (0.01,))
        yield SlowFiles
    SlowFiles.fast.set()
    assert list(folder.iterdir()) == []
