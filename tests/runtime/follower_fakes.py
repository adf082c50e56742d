"""An engine without vLLM, as far as a Follower goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.engine.base import driven
from fp8plan.runtime.apply.weight_sync.calls import Call, Reset
from fp8plan.runtime.apply.weight_sync.delta.base import Chain
from fp8plan.runtime.apply.weight_sync.delta.listing import Formats
from fp8plan.runtime.apply.weight_sync.delta.patch import changed_values
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import SyncState

# What it writes to engine.json.
FORMATS: dict[str, Any] = {"manifest": [["a", "bfloat16", [64, 8]], ["b", "bfloat16", [4]]], "fp8": [], "reloaded": {}}


@dataclass(frozen=True)
class Report:
    """A stand-in for a SyncReport."""

    stamp: str
    healed: str | None = None


class Engine:
    """A stand-in that takes each chain from its own weights on, unless it refuses patches or is busy."""

    def __init__(self) -> None:
        self.state, self.serving = SyncState(SyncSettings(), None, False), True
        self.refuses_patches = self.busy = False
        self.written: list[tuple[bool, list[str]]] = []  # patched or not, and the names of all patches
        self.meanwhile: Callable[[], None] = lambda: None

    def drive(self, procedure: Any) -> Any:
        return driven(procedure, self.answer)

    def answer(self, call: Call) -> None:
        assert call == Reset()
        self.meanwhile()

    def asking(self, procedure: Any) -> Any:
        procedure.close()
        yield from ()
        return msgspec.convert(FORMATS, Formats)

    def syncing(self, chain: Chain, *_: Any) -> Any:
        if self.busy:
            raise SyncError("1 requests are running; the old weights serve")
        yield Reset()
        try:
            patches = chain.patches()
            if chain.base is not None and (self.refuses_patches or chain.base != self.state.stamp):
                raise ConfigError("patches of other weights")
            self.written.append((chain.base is not None, [name for name, patch in patches if changed_values(patch)]))
        except ConfigError as error:
            raise SyncError(f"{error}; the old weights serve") from error
        self.state.stamp = chain.stamp
        return Report(chain.stamp)
