"""A trainer's stream of tensors, cut into chunks of complete fused groups, and the way of chunks to workers.

Tensors reach a worker in another process through memory that both map, a chunk at a time. On a CPU that is a file in
shared memory, on a GPU a buffer that the worker opens by its CUDA IPC handle. vLLM's messages carry only names, shapes
and offsets: vLLM cannot send tensors to a worker, and its own IPC engine wants Ray.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.interrupts import released
from fp8plan.runtime.apply.weight_sync.calls import Method, Rpc
from fp8plan.runtime.apply.weight_sync.manifest import dtype_name, dtype_named, gathered, pair_of
from fp8plan.runtime.apply.weight_sync.state import Checked

if TYPE_CHECKING:
    import torch


def chunks(pairs: Iterable[Any], checked: Checked, most: int) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Cut the stream into chunks of complete groups, about `most` bytes each, as (numbers in the manifest, tensors).

    A group is held back until its last tensor has come. Raises SyncError for a tensor that was not announced, that came
    twice, or that was written to while it was held back: an iterator must not reuse its buffers.
    """
    came: dict[int, tuple[str, int]] = {}
    for numbers, tensors in _joined(_groups(pairs, checked, came), most):
        _refuse_reused(numbers, tensors, came)
        yield numbers, tensors


def loose_chunks(
    pairs: Iterable[tuple[str, torch.Tensor]], checked: Checked, most: int
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Cut a stream of tensors that may come in any order into chunks as `chunks`."""
    return _joined(([(checked.numbers[name], tensor)] for name, tensor in pairs), most)


def _groups(
    pairs: Iterable[Any], checked: Checked, came: dict[int, tuple[str, int]]
) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Yield each group once it is complete, and at the end the incomplete ones, whose tensors the workers miss.

    came: gets name and version of each tensor, by its number
    """
    missing: dict[int, int] = dict(checked.sizes)
    waiting: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in _whole(pairs):
        number = checked.numbers.get(name)
        if number is None or number in came:
            raise SyncError(f"{name} {'was not announced' if number is None else 'came twice'}")
        came[number] = name, _version(tensor)
        group = checked.groups[number]
        waiting.setdefault(group, []).append((number, tensor))
        missing[group] -= 1
        if not missing[group]:
            yield waiting.pop(group)
    yield from waiting.values()


def _joined(
    groups: Iterable[list[tuple[int, torch.Tensor]]], most: int
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Join groups into chunks of about `most` bytes, as (numbers, tensors)."""
    numbers: list[int] = []
    tensors: list[torch.Tensor] = []
    size = 0
    for group in groups:
        for number, tensor in group:
            numbers.append(number)
            tensors.append(tensor)
            size += tensor.nbytes
        if size >= most:
            yield numbers, tensors
            numbers, tensors, size = [], [], 0
    if numbers:
        yield numbers, tensors


def _whole(pairs: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trainer's pairs, with the shards of each tensor gathered.

    Reading and gathering run the trainer's code, which Ctrl-C may break off anywhere. Raises ConfigError as pair_of.
    """
    stream = iter(pairs)
    while True:
        with released():
            item = next(stream, stream)
            if item is stream:
                return
            name, tensor = pair_of(item)
            tensor = gathered(tensor)
        yield name, tensor


def _version(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def _refuse_reused(numbers: list[int], tensors: list[torch.Tensor], came: dict[int, tuple[str, int]]) -> None:
    for number, tensor in zip(numbers, tensors, strict=True):
        name, version = came[number]
        if _version(tensor) != version:
            raise SyncError(
                f"{name} was written to after it was given; an iterator must not reuse its buffers: type "
                "yield name, tensor.clone()"
            )


ALIGNMENT: Final = 256  # bytes, as of CUDA's own allocations


class Channel:
    """The way of chunks to an engine's workers: directly within one process, else through one shared buffer.

    staged_on: device of the buffer, "cpu" or "cuda"; None: workers are in this process
    nbytes:    its least size
    workers:   number of processes that open it

    counts: "tensors", "bytes" and "chunks" so far
    """

    def __init__(self, staged_on: str | None, nbytes: int, workers: int = 1) -> None:
        self._staged_on, self._nbytes, self._workers = staged_on, nbytes, workers
        self.counts = {"tensors": 0, "bytes": 0, "chunks": 0}
        self._buffer: torch.Tensor | None = None
        self._address: list[Any] = []
        self._path: str | None = None  # name of the file behind the buffer

    def message(self, method: Method, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Rpc:
        """Return the Call that hands over a chunk to a method in TAKE_TENSORS."""
        self.counts["chunks"] += 1
        self.counts["tensors"] += len(tensors)
        self.counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
        if self._staged_on is None:
            return Rpc(method, (numbers, tensors))
        need = sum(_padded(tensor.nbytes) for tensor in tensors)
        if self._buffer is None or self._buffer.numel() < need:
            self.close()
            self._buffer = self._shared(max(need, self._nbytes), self._staged_on)
            self._address = self._address_of(self._buffer)
        return Rpc(method, (numbers, {"address": self._address, "layout": _pack(self._buffer, tensors)}))

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file's name once all workers have it open. Then it cannot outlive a killed process."""
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)

    def _shared(self, nbytes: int, device: str) -> torch.Tensor:
        import torch

        if device != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, self._path = tempfile.mkstemp(prefix="fp8plan-", dir=folder)
        os.truncate(handle, nbytes)
        os.close(handle)
        return torch.from_file(self._path, shared=True, size=nbytes, dtype=torch.uint8)

    def _address_of(self, buffer: torch.Tensor) -> list[Any]:
        """Return the address that `opened` takes, as plain data that vLLM can send.

        On a GPU it is a handle for each worker. torch counts each handle's receivers down from 1. With two receivers
        the count passes 0, and torch never frees the buffer (pytorch/pytorch#149187).
        """
        if self._path is not None:
            return ["file", self._path, buffer.numel()]
        from torch.multiprocessing.reductions import reduce_tensor

        return ["cuda", [pickle.dumps(reduce_tensor(buffer)[1]) for _ in range(self._workers)], buffer.numel()]


def _pack(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Copy tensors into the buffer, one after the other. Return their layout: [[dtype, shape, offset], ...]."""
    import torch

    offsets = [0, *accumulate(_padded(tensor.nbytes) for tensor in tensors)][: len(tensors)]
    places = [
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]
    with torch.no_grad():
        torch._foreach_copy_(places, list(tensors))
    torch.get_device_module(buffer.device).synchronize(buffer.device)
    return [
        [dtype_name(tensor.dtype), list(tensor.shape), offset] for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def arrived(worker: Any, staged: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a chunk, as views of its buffer. staged: as Channel.message sends it

    The buffer stays open in `worker._fp8plan_stage`.
    """
    import torch

    kind, where, nbytes = staged["address"]
    where = where if kind == "file" else where[worker.rank]
    stage = worker._fp8plan_stage
    if stage[0] != where:
        if kind == "file":
            buffer = torch.from_file(where, shared=True, size=nbytes, dtype=torch.uint8)
        else:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            parts = list(pickle.loads(where))
            parts[6] = worker.device.index or 0  # the device's number differs between processes, the memory does not
            buffer = rebuild_cuda_tensor(*parts)
        stage = worker._fp8plan_stage = (where, buffer)
    buffer = stage[1]
    tensors = []
    for name, shape, offset in staged["layout"]:
        dtype = dtype_named(name)
        tensors.append(buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape)))
    return tensors


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
