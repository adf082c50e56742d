"""A trainer that kills itself (SIGKILL) in the middle of a publish.

    python -m benchmarks.fault_drill.preempted URL TENSORS STAGE

TENSORS: safetensors; STAGE: "file" (half of a whole version is written), "listed" (before latest.json), "moved" (before
latest.json is moved to its place) or "cleaned" (before older files are deleted)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from safetensors.torch import load_file

from fp8plan.runtime.apply.weight_sync.delta import files
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The first block of a file, and half of the next one."""
    for number, block in enumerate(blocks):
        yield block[: len(block) // 2] if number else block
        if number:
            break
    die()


def main(url: str, tensors: str, stage: str) -> None:
    publisher: Any = Publisher(url, every=2)
    if stage == "file":
        whole = files._pieces
        files._pieces = lambda blocks: whole(half(blocks))
    elif stage == "listed":
        publisher._store.write_json = die
    elif stage == "moved":
        publisher._store._system.mv = die
    else:
        publisher._clean = die
    publisher.publish(load_file(tensors))


if __name__ == "__main__":
    main(*sys.argv[1:])
