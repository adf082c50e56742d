"""Weights from a trainer's GPU to the engine's over NCCL: the trainer's end, and the source of such a sync.

One process trains and drives the engine:

    transfer = connect(engine.join_transfer, workers=1)
    engine.sync_weights(transfer.source(named_tensors))

Or the trainer is a process of its own. The driver tells it when to send:

    where = Rendezvous(address, port, world_size=2)
    trainer:  transfer = TrainerTransfer(where).ready();  transfer.send(named_tensors, manifest)
    driver:   engine.join_transfer(where);                engine.sync_weights(RemoteSource(manifest, tell_the_trainer))

The bytes go as vLLM's packed broadcasts. A broadcast waits for all its ranks for ever, so no end may be alone in one.
Both ends first compare manifests over the rendezvous's store. The sender always sends every announced tensor (zeros
after a failure), and the receiver always takes them all. Then both report success or failure. Nobody waits for a peer
that has died.

In all functions `group` is vLLM's PyNcclCommunicator, in which the trainer is rank 0. The `group` inside it, a
PlainGroup, speaks without NCCL, over the store of the rendezvous, and waits 5 minutes at most.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

from fp8plan.errors import ConfigError, LostEngineError, SyncError
from fp8plan.runtime.apply.interrupts import released
from fp8plan.runtime.apply.weight_sync.calls import Procedure, rpc
from fp8plan.runtime.apply.weight_sync.manifest import (
    Entry,
    Manifest,
    dtype_named,
    entry_of,
    gathered,
    manifest_of,
    read_manifest,
)

if TYPE_CHECKING:
    import torch

BUFFER_BYTES: Final = 1 << 28
BROKEN = (
    "the transfer has broken off; connect the trainer and the engine again (fp8plan.runtime.apply.weight_sync.nccl)"
)


def completed(
    pairs: Any, manifest: Manifest, device: torch.device, failures: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all announced tensors on `device`. The first failure is noted, and all tensors from it on are zeros."""
    import torch

    stream = iter(((e.name, pairs[e.name]) for e in manifest) if isinstance(pairs, Mapping) else pairs)
    for entry in (*manifest, None):
        tensor = None
        if not failures:
            try:
                tensor = _next(stream, entry)
            except Exception as error:  # after any error the workers still wait for the rest
                failures.append(f"{type(error).__name__}: {error}")
        if entry is None:
            return
        if tensor is None:
            tensor = torch.zeros(entry.shape, dtype=dtype_named(entry.dtype), device=device)
        yield entry.name, tensor.to(device)


def _noted(pairs: Iterable[tuple[str, torch.Tensor]], note: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs, and call `note` before each."""
    for pair in pairs:
        note()
        yield pair


def _next(stream: Iterator[tuple[str, Any]], entry: Entry | None) -> torch.Tensor | None:
    """Return the next tensor, which must be `entry`; None: the end must come. Raises ConfigError for any other."""
    pair = next(stream, None)
    if entry is None:
        if pair is not None:
            raise ConfigError(f"{pair[0]} was not announced")
        return None
    if pair is None:
        raise ConfigError(f"announced and not sent: {entry.name}")
    tensor = gathered(pair[1])
    if (came := entry_of(pair[0], tensor)) != entry:
        raise ConfigError(f"{came.name} {came.dtype} {list(came.shape)} came; announced: {tuple(entry)}, in this order")
    return tensor


@lru_cache(maxsize=8)
def digest(manifest: Manifest) -> str:
    """Return a text that is equal only for equal manifests, order included."""
    return hashlib.sha256(repr([tuple(entry) for entry in manifest]).encode()).hexdigest()


def misaligned(manifest: Manifest, buffer_bytes: int) -> str | None:
    """Return an error for a tensor that vLLM cannot unpack again, if any. Its packing leaves no gaps."""
    at = 0
    for entry in manifest:
        size = dtype_named(entry.dtype).itemsize
        if at % size:
            return (
                f"{entry.name} would begin at byte {at} of a broadcast; announce wider dtypes before odd-sized tensors"
            )
        at = 0 if at + entry.nbytes > buffer_bytes else at + entry.nbytes
    return None


def agree(group: Any, key: str, failure: str | None = None) -> None:
    """Compare keys with all ranks. Raises SyncError for the first failure of a rank, other manifests, or no answer.

    Without an answer the group is destroyed, as its ends would speak of different syncs.
    """
    try:
        reports = group.group.all_gather_obj((key, failure))
    except Exception as error:
        group.destroy()
        raise SyncError(f"the other end does not answer ({type(error).__name__}); {BROKEN}") from error
    for rank, (_, failed) in enumerate(reports):
        if failed is not None:
            raise SyncError(f"{f'worker {rank - 1}' if rank else 'the trainer'} failed: {failed}")
    if len({other for other, _ in reports}) > 1:
        raise SyncError("the trainer and the engine were given different manifests; allowed: the same, in one order")


@contextmanager
def limited(group: Any, seconds: float) -> Iterator[Callable[[], None]]:
    """Break NCCL off after so many seconds without a tensor: a broadcast does not end if its other end has died.

    Yields a function that starts the count anew. Raises SyncError at the break, or LostEngineError on a GPU: CUDA does
    not survive a break (illegal memory access at the next use).
    """
    ended, late, until = threading.Event(), threading.Event(), time.monotonic() + seconds

    def renew() -> None:
        nonlocal until
        until = time.monotonic() + seconds

    def watch() -> None:
        while (left := until - time.monotonic()) > 0:
            if ended.wait(left):
                return
        late.set()
        group.destroy()

    watcher = threading.Thread(target=watch, name="fp8plan-limit", daemon=True)
    watcher.start()
    try:
        yield renew
    finally:
        ended.set()
        watcher.join()
        if late.is_set():
            lost = LostEngineError if group.device.type == "cuda" else SyncError
            raise lost(f"no tensor was sent or taken for {seconds:g} s; {BROKEN}")


def working(group: Any) -> Any:
    """Return the group. Raises ConfigError if it is disabled, as its broadcasts would do nothing."""
    if group.disabled:
        raise ConfigError(f"NCCL does not work here, or no longer: {BROKEN}; unset VLLM_DISABLE_PYNCCL")
    return group


class Lane:
    """A thread that does one call after another, and ends with this object or with the process.

    At its end a process waits for the threads of a ThreadPoolExecutor. A thread that waits in NCCL for failed ranks
    would never end.
    """

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        Thread(target=_done_in_turn, args=(self._work,), name=name, daemon=True).start()
        finalize(self, self._work.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function after all earlier ones. The Future has its result or its error."""
        future = Future[Any]()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        self._work.put(call)
        return future


def _done_in_turn(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()
        del call  # it holds the trainer's tensors, or the last reference to the Lane


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting place of trainer and workers, and how tensors are packed; the same at both ends.

    address, port: the trainer's, whose process listens there
    world_size:    1 for the trainer, and the engine's workers (tensor x pipeline x data parallel), of all replicas
    buffer_bytes:  size of one broadcast, which its last tensor may exceed
    buffers:       broadcasts under way; each end holds one buffer more
    limit_s:       seconds without a tensor after which a sync is broken off, as its other end must have died
    first_rank:    rank of the engine's first worker; a fleet gives each replica its own

    Raises ConfigError for values out of range.
    """

    address: str
    port: int
    world_size: int
    buffer_bytes: int = BUFFER_BYTES
    buffers: int = 2
    limit_s: float = 300.0
    first_rank: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 2 or self.buffer_bytes < 1 or self.buffers < 1 or not self.limit_s > 0:
            raise ConfigError(f"{self}; allowed: world_size of 2 or more, the trainer and its workers; others above 0")


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """A source of a sync whose tensors a trainer sends to every worker by itself.

    manifest: entries of the tensors, in their order
    start:    makes the trainer send, without waiting for it. If it returns a Future that fails, the sync fails
    pairs:    the trainer's tensors; None: they are in another process
    send:     sends tensors and their manifest to the same workers as `start`; None: the trainer is another process
    buffer_bytes: as Rendezvous has it; a chunk of patches has about so many bytes at most
    """

    manifest: Manifest
    start: Callable[[], Future[None] | None]
    pairs: Any = None
    send: Callable[[Any, Manifest], Future[None]] | None = None
    buffer_bytes: int = BUFFER_BYTES

    def metadata(self) -> Manifest:
        return self.manifest


def received(source: RemoteSource, manifest: Manifest, pairs: Any = None) -> Procedure:
    """Have the workers receive tensors that the trainer sends. Returns counts of tensors, bytes and broadcasts.

    pairs: sent in the place of the source's own
    """
    with released():
        if pairs is None:
            sending = source.start()
        else:
            assert source.send is not None
            sending = source.send(pairs, manifest)
    answers = yield from rpc("fp8plan_receive", True)
    with released():
        if sending:
            sending.result()
    return {"tensors": len(manifest), "bytes": sum(entry.nbytes for entry in manifest), "chunks": answers[0]}


def broadcast(source: RemoteSource, parts: Iterable[tuple[list[int], list[torch.Tensor]]]) -> Procedure:
    """Have the workers receive chunks of patches, each as one tensor. Returns counts as `received`."""
    import torch

    assert source.send is not None
    counts = {"tensors": 0, "bytes": 0, "chunks": 0}
    for numbers, patches in parts:
        lengths = [patch.numel() for patch in patches]
        manifest = chunk_manifest(lengths)
        with released():
            sending = source.send([(manifest[0].name, torch.cat(patches))], manifest)
        answers = yield from rpc("fp8plan_receive_patches", numbers, lengths)
        with released():
            sending.result()
        counts["tensors"] += len(patches)
        counts["bytes"] += sum(lengths)
        counts["chunks"] += answers[0]
    return counts


def chunk_manifest(lengths: Sequence[int]) -> Manifest:
    """Return the manifest of a chunk of patches. lengths: their bytes"""
    return (Entry("patches", "uint8", (sum(lengths),)),)


class TrainerTransfer:
    """The trainer's end, rank 0. It listens at once; `ready` waits for the workers.

    device: the trainer's; None: the current CUDA device

    One process at a time sends. With FSDP or Megatron the other ranks call `follow` with the same tensors, as gathering
    takes all ranks.
    """

    def __init__(self, where: Rendezvous, device: str | None = None) -> None:
        import torch

        self._where = where
        self._device = torch.device(device or f"cuda:{torch.cuda.current_device()}")
        self._lane = Lane("fp8plan-transfer")  # vLLM changes the current stream of the thread in which it opens NCCL
        self._group = self._lane.submit(self._meet)

    def ready(self) -> TrainerTransfer:
        """Return itself, once all workers have come. Raises ConfigError without NCCL, and vLLM's errors."""
        self._group.result()
        return self

    def send(self, pairs: Any, manifest: Any = None) -> None:
        """Send tensors as `sync_weights` takes them; return once every worker has them.

        manifest: needed for an iterator, which must keep its order

        Raises SyncError if either end failed.
        """
        self._lane.submit(self._send, pairs, self.source(pairs, manifest).manifest).result()

    def source(self, pairs: Any, manifest: Any = None) -> RemoteSource:
        """Return a source for `sync_weights` in this process: the tensors are sent while the workers receive."""
        announced = manifest_of(pairs) if manifest is None else read_manifest(manifest)
        if announced is None:
            raise ConfigError(
                "an iterator does not say what it will send; allowed: manifest=[(name, dtype, shape), ...]"
            )

        def send(pairs: Any, manifest: Manifest) -> Future[None]:
            return self._lane.submit(self._send, pairs, manifest)

        return RemoteSource(announced, lambda: send(pairs, announced), pairs, send, self._where.buffer_bytes)

    @staticmethod
    def follow(pairs: Iterable[tuple[str, Any]]) -> None:
        """Take part in gathering what rank 0 sends, on the trainer's other ranks."""
        for _, tensor in pairs:
            gathered(tensor)

    def _meet(self) -> Any:
        from fp8plan.runtime.apply.weight_sync.plain_group import PlainGroup, communicator

        where = self._where
        with _current(self._device):
            return working(communicator(PlainGroup.met(where.address, where.port, 0, where.world_size)))

    def _send(self, pairs: Any, manifest: Manifest) -> None:
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        group, where, failures = working(self._group.result()), self._where, list[str]()
        agree(group, digest(manifest), misaligned(manifest, where.buffer_bytes))
        with torch.no_grad(), _current(self._device), limited(group, where.limit_s) as renew:
            # Writes of the weights may still be under way, on other streams.
            torch.get_device_module(self._device).synchronize(self._device)
            packed_nccl_broadcast_producer(
                iterator=_noted(completed(pairs, manifest, self._device, failures), renew),
                group=group,
                src=0,
                post_iter_func=lambda pair: pair[1],
                buffer_size_bytes=where.buffer_bytes,
                num_buffers=where.buffers,
            )
            torch.get_device_module(self._device).synchronize(self._device)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # gives the buffers back to the GPU
        agree(group, digest(manifest), next(iter(failures), None))


def connect(
    join: Callable[[Rendezvous], Any], workers: int = 1, device: str | None = None, **settings: Any
) -> TrainerTransfer:
    """Connect both ends from the process that trains and drives the engine.

    join: engine.join_transfer; workers: of the engine; settings: of Rendezvous

    Raises ConfigError as those do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = Rendezvous(**({"address": "127.0.0.1", "port": port, "world_size": 1 + workers} | settings))
    transfer = TrainerTransfer(where, device)
    join(where)
    return transfer.ready()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
