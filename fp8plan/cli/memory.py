"""The memory that a command has freed, which its next arrays take again.

A plan makes arrays of a megabyte thousands of times. glibc would give each back to the kernel, which then clears every
page for the next one: a twentieth of a large plan's CPU time.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL
from typing import Final

TRIM_THRESHOLD: Final = -1, 256 << 20  # M_TRIM_THRESHOLD of malloc.h, and bytes
MMAP_THRESHOLD: Final = -3, 32 << 20  # M_MMAP_THRESHOLD, and the most that glibc takes


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, up to 256 MiB of it. Does nothing where the C library is not glibc."""
    with suppress(OSError, TypeError, AttributeError):
        library = CDLL(None)
        for parameter, value in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            library.mallopt(parameter, value)
