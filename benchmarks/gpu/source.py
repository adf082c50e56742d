"""The source that measured a row. Its commit is not known if the package is only a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import fp8plan

PACKAGE = Path(fp8plan.__file__).resolve().parent


def source_hash(folder: Path = PACKAGE) -> str:
    """A hash of 12 hex digits over names and bytes of all Python files under `folder`: the same wherever it lies."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]
