"""Weights from a trainer's GPU to the engine's over NCCL: the trainer's end, and what a sync takes instead of tensors.

One process trains and drives the engine:

    transfer = connect(engine.join_transfer, workers=1)
    engine.sync_weights(transfer.source(named_tensors))

Or the trainer is a process of its own, that the driver tells when to send:

    where = Rendezvous(address, port, world_size=2)
    trainer:  transfer = TrainerTransfer(where).ready();  transfer.send(named_tensors, manifest)
    driver:   engine.join_transfer(where);                engine.sync_weights(RemoteSource(manifest, tell_the_trainer))

The bytes go as vLLM's packed broadcasts. A broadcast waits for all its ranks for ever, so both ends make sure that none
is left alone: manifests are compared over the rendezvous's store before any byte; what was announced is sent in full,
zeros after a failure, and taken in full; then both say how it went; and a peer that has died is not waited for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.weight_sync.manifest import Manifest, manifest_of, read_manifest
from fp8plan.runtime.weight_sync.nccl.lane import Lane
from fp8plan.runtime.weight_sync.nccl.protocol import (
    agree,
    completed,
    digest,
    gathered,
    limited,
    misaligned,
    wait,
    working,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting place of trainer and workers, and how tensors are packed; the same at both ends.

    address, port: of the trainer's process, which listens there
    world_size:    1 for the trainer, and the engine's workers (tensor x pipeline x data parallel), of all replicas
    buffer_bytes:  size of one broadcast, which its last tensor may exceed
    buffers:       broadcasts under way; each end holds one buffer more
    limit_s:       seconds after which a sync is broken off: the other end has died
    first_rank:    of the engine's workers; a fleet gives each replica its own

    Raises ConfigError for values out of range.
    """

    address: str
    port: int
    world_size: int
    buffer_bytes: int = 1 << 28
    buffers: int = 2
    limit_s: float = 300.0
    first_rank: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 2 or self.buffer_bytes < 1 or self.buffers < 1 or not self.limit_s > 0:
            raise ConfigError(f"{self}; allowed: world_size of 2 or more, the trainer and its workers; others above 0")


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """Tensors that a trainer sends to every worker by itself: goes where a sync takes tensors.

    manifest: what will come, in this order
    start:    makes the trainer send, without waiting for it; may return a Future, whose failure is the sync's
    """

    manifest: Manifest
    start: Callable[[], Future[None] | None]

    def metadata(self) -> Manifest:
        return self.manifest


class TrainerTransfer:
    """The trainer's end, rank 0. It listens at once; `ready` waits for the workers.

    device: the trainer's; the current CUDA device unless given. One process at a time sends; with FSDP or Megatron the
    other ranks call `follow` with the same tensors, as gathering those takes all of them.
    """

    def __init__(self, where: Rendezvous, device: str | None = None) -> None:
        import torch

        self._where = where
        self._device = torch.device(device or f"cuda:{torch.cuda.current_device()}")
        # A thread of its own: vLLM changes the current stream of the thread in which it opens NCCL.
        self._lane = Lane("fp8plan-transfer")
        self._group = self._lane.submit(self._meet)

    def ready(self) -> TrainerTransfer:
        """Return itself, once all workers have come. Raises ConfigError without NCCL, and what vLLM raises."""
        self._group.result()
        return self

    def send(self, pairs: Any, manifest: Any = None) -> None:
        """Send what `sync_weights` would take; returns once every worker has it.

        manifest: for an iterator, which must keep its order. Raises SyncError if either end failed.
        """
        self._lane.submit(self._send, pairs, self.source(pairs, manifest).manifest).result()

    def source(self, pairs: Any, manifest: Any = None) -> RemoteSource:
        """Return what `sync_weights` takes in this very process: the same tensors, sent while the workers receive."""
        announced = manifest_of(pairs) if manifest is None else read_manifest(manifest)
        if announced is None:
            raise ConfigError(
                "an iterator does not say what it will send; allowed: manifest=[(name, dtype, shape), ...]"
            )
        return RemoteSource(announced, lambda: self._lane.submit(self._send, pairs, announced))

    @staticmethod
    def follow(pairs: Iterable[tuple[str, Any]]) -> None:
        """Take part in gathering what rank 0 sends, on the trainer's other ranks."""
        for _, tensor in pairs:
            gathered(tensor)

    def _meet(self) -> Any:
        from fp8plan.runtime.weight_sync.plain_group import PlainGroup, communicator

        where = self._where
        with _current(self._device):
            return working(communicator(PlainGroup.met(where.address, where.port, 0, where.world_size)))

    def _send(self, pairs: Any, manifest: Manifest) -> None:
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        group, where, failures = working(self._group.result()), self._where, list[str]()
        agree(group, digest(manifest), misaligned(manifest, where.buffer_bytes))
        with torch.no_grad(), _current(self._device), limited(group, where.limit_s):
            wait(self._device)  # for whoever still writes the weights: the broadcasts are on other streams
            packed_nccl_broadcast_producer(
                iterator=completed(pairs, manifest, self._device, failures),
                group=group,
                src=0,
                post_iter_func=lambda pair: pair[1],
                buffer_size_bytes=where.buffer_bytes,
                num_buffers=where.buffers,
            )
            wait(self._device)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # as at the other end: 0.26's buffers stay cached for streams that are gone
        agree(group, digest(manifest), next(iter(failures), None))


def connect(
    join: Callable[[Rendezvous], Any], workers: int = 1, device: str | None = None, **settings: Any
) -> TrainerTransfer:
    """Connect both ends from the process that trains and drives the engine.

    join: engine.join_transfer; workers: of the engine; settings: of Rendezvous. Raises ConfigError as those do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = Rendezvous(**({"address": "127.0.0.1", "port": port, "world_size": 1 + workers} | settings))
    transfer = TrainerTransfer(where, device)
    join(where)
    return transfer.ready()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Run this thread on that GPU."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
