"""The tensors' way to the workers in one sync: all of them, or what has changed since a base.

Whatever fails on the way of patches, a sync of all tensors heals: the base knows the new state whole.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.interrupts import released
from fp8plan.runtime.weight_sync.delta.base import Base, Chain
from fp8plan.runtime.weight_sync.manifest import Manifest
from fp8plan.runtime.weight_sync.nccl import RemoteSource
from fp8plan.runtime.weight_sync.state import Call, Checked, Procedure, SyncState, rpc
from fp8plan.runtime.weight_sync.stream import ALIGNMENT, Channel, chunks, loose_chunks

Sent = Generator[Call, Any, list[Any]]  # its answers are the reports of the workers
ANY = ""  # stamp of patches that hold all tensors, whatever the engine has


class Sending:
    """One sync's tensors on their way.

    counts:  tensors, bytes and chunks sent
    patched: True once the workers have taken what has changed, and nothing else
    healed:  why all tensors had to be sent after a try to patch; None if they had not
    stamp:   name of the state that a Chain leads to; None: the sync gives one
    """

    def __init__(self, state: SyncState, manifest: Manifest, checked: Checked, seconds: dict[str, float]) -> None:
        self._state, self._manifest, self._checked, self._seconds = state, manifest, checked, seconds
        self.counts = {"tensors": 0, "bytes": 0, "chunks": 0}
        self.patched = False
        self.healed: str | None = None
        self.stamp: str | None = None

    def write(self, pairs: Any, serving: bool) -> Sent:
        """Send a trainer's pairs, a RemoteSource or a Chain. Raises ConfigError for what the workers refuse.

        serving: the engine's weights are sound, so that they can be patched
        """
        state, base = self._state, self._state.base
        if isinstance(pairs, Chain):
            state.base, self.stamp, self.patched = None, pairs.stamp, pairs.base is not None
            return (yield from self._patch(pairs.patches(), ANY if pairs.base is None else pairs.base))
        if isinstance(pairs, RemoteSource):
            state.base = None
            return (yield from self._replace(pairs))
        if base is None or not serving or base.stamp is None or base.manifest != self._manifest:
            state.base = None
            if state.settings.delta is not None:
                state.base = Base(self._manifest, state.settings.delta)
                pairs = state.base.recorded(pairs)
            return (yield from self._replace(pairs))
        patches = base.patches(pairs, self._checked.reloaded)
        try:
            answers = yield from self._patch(patches, base.stamp)
            self.patched = True
            return answers
        except ConfigError as error:
            for _ in patches:  # those that were not sent any more
                pass
            if not base.complete:
                raise  # the trainer's tensors are at fault
            self.healed = str(error)
            yield from rpc("fp8plan_abort")
            return (yield from self._replace(base.pairs()))

    def _patch(self, patches: Iterable[tuple[str, Any]], stamp: str) -> Sent:
        """Send patches of the weights with that stamp."""
        settings, names = self._state.settings, set[str]()

        def named() -> Iterator[tuple[str, Any]]:
            for name, patch in patches:
                names.add(name)
                yield name, patch

        with timed(self._seconds, "begin"):
            yield from rpc("fp8plan_begin", self._checked.number, 0, self._state.version, settings.rollback, stamp)
        with timed(self._seconds, "load"):
            parts = loose_chunks(named(), self._checked, settings.chunk_bytes)
            few = sum(entry.nbytes for entry in self._manifest) // 100
            self.counts = yield from _handed(self._state, parts, few, "fp8plan_patch")
        if stamp == ANY and len(names) < len(self._manifest):
            raise ConfigError(f"{len(names)} tensors of {len(self._manifest)} have come")
        with timed(self._seconds, "finish"):
            return (yield from _finished(len(names)))

    def _replace(self, pairs: Any) -> Sent:
        """Send all tensors."""
        settings = self._state.settings
        with timed(self._seconds, "begin"):
            yield from rpc(
                "fp8plan_begin", self._checked.number, settings.samples, self._state.version, settings.rollback
            )
        with timed(self._seconds, "load"):
            if isinstance(pairs, RemoteSource):
                self.counts = yield from _received(pairs, self._manifest)
            else:
                self.counts = yield from streamed(self._state, pairs, self._manifest, self._checked, "fp8plan_load")
        with timed(self._seconds, "finish"):
            return (yield from _finished())


def _finished(patches: int | None = None) -> Sent:
    """Let every worker check what it has written. Raises ConfigError where the live weights differ."""
    answers = yield from rpc("fp8plan_finish", patches)
    if differ := next((answer["check"]["differ"] for answer in answers if answer["check"]["differ"]), None):
        raise ConfigError(f"the live weights differ from what was sent: {', '.join(differ)}")
    return answers


def _received(source: RemoteSource, manifest: Manifest) -> Procedure:
    """Have the workers receive the tensors that a trainer sends by itself. Returns counts as `streamed`."""
    with released():
        sending = source.start()
    answers = yield from rpc("fp8plan_receive", True)
    with released():
        if sending:
            sending.result()
    return {"tensors": len(manifest), "bytes": sum(entry.nbytes for entry in manifest), "chunks": answers[0]}


def streamed(
    state: SyncState, pairs: Iterable[Any], manifest: Manifest, checked: Checked, method: str
) -> Generator[Call, Any, dict[str, int]]:
    """Send tensors to a method of the workers, by complete groups. Returns counts of tensors, bytes and chunks."""
    whole = sum(entry.nbytes + ALIGNMENT for entry in manifest)
    return (yield from _handed(state, chunks(pairs, checked, state.settings.chunk_bytes), whole, method))


def _handed(
    state: SyncState, parts: Iterable[tuple[list[int], list[Any]]], nbytes: int, method: str
) -> Generator[Call, Any, dict[str, int]]:
    """Send chunks of tensors to a method of the workers. Returns counts of tensors, bytes and chunks.

    nbytes: about as many as all take
    """
    counts = {"tensors": 0, "bytes": 0, "chunks": 0}
    channel = Channel(state.staged_on, min(state.settings.chunk_bytes, nbytes), state.workers)
    try:
        for numbers, tensors in parts:
            counts["chunks"] += 1
            counts["tensors"] += len(tensors)
            counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
            name, arguments = channel.message(method, numbers, tensors)
            yield from rpc(name, *arguments)
            channel.close()  # all workers have it open; removed now, it cannot outlive a killed process
    finally:
        channel.close()
    return counts


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note the seconds of a phase."""
    begun = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begun
