"""Broadcasts between processes on CPUs, over the rendezvous of vLLM's NCCL backend: the same protocol without NCCL.

Tensors go through the store of the rendezvous, so this is for small models: tests, and a trainer on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from fp8plan.runtime.weight_sync.manifest import Manifest, dtype_named

if TYPE_CHECKING:
    import torch

EXPIRY_S: Final = 60  # after which the store forgets a broadcast: every rank has read it, or has died


class StoreCommunicator:
    """The part of vLLM's PyNcclCommunicator that transfers use.

    group: vLLM's StatelessProcessGroup, in which the trainer is rank 0; tensors go through it as in a PlainGroup
    """

    def __init__(self, group: Any) -> None:
        import torch

        from fp8plan.runtime.weight_sync.plain_group import PlainGroup

        self.group = PlainGroup.of(group)
        self.group.data_expiration_seconds = EXPIRY_S
        self.rank, self.world_size = group.rank, group.world_size
        self.device, self.disabled = torch.device("cpu"), False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send `tensor` from rank `src`, and fill it on the others. Raises SyncError as PlainGroup does."""
        self.group.broadcast(tensor, src)

    def destroy(self) -> None:
        """Let go of the store; vLLM calls this at a shutdown from 0.32 on."""
        del self.group
        self.disabled = True


def meet(address: str, port: int, rank: int, world_size: int) -> StoreCommunicator:
    """Meet the other ranks, as `stateless_init_process_group` of vLLM's NCCL backend does."""
    from fp8plan.runtime.weight_sync.plain_group import PlainGroup

    return StoreCommunicator(PlainGroup.met(address, port, rank, world_size))


def send(pairs: Iterable[tuple[str, torch.Tensor]], group: Any) -> None:
    """Broadcast tensors from rank 0, each by itself."""
    for _, tensor in pairs:
        group.broadcast(tensor, src=0)


def receive(
    manifest: Manifest, group: Any, buffer_bytes: int | None, load: Callable[[Sequence[tuple[str, Any]]], None]
) -> None:
    """Take the tensors of a manifest from rank 0, and load each broadcast.

    buffer_bytes: of the packing, as at the other end; None: each tensor is a broadcast of its own
    """
    import torch

    for part in _parts(manifest, buffer_bytes):
        sizes = [entry.numel * dtype_named(entry.dtype).itemsize for entry in part]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        if buffer_bytes is None:  # it comes in its own dtype and shape
            group.broadcast(buffer.view(dtype_named(part[0].dtype)).view(part[0].shape), src=0)
        else:
            group.broadcast(buffer, src=0)
        pieces = zip(part, buffer.split(sizes), strict=True)
        load([(entry.name, bits.view(dtype_named(entry.dtype)).view(entry.shape)) for entry, bits in pieces])


def _parts(manifest: Manifest, buffer_bytes: int | None) -> Iterator[Manifest]:
    """Cut a manifest into broadcasts, where vLLM's packing does: after the tensor that exceeds the buffer."""
    begin = size = 0
    for at, entry in enumerate(manifest):
        size += prod(entry.shape) * dtype_named(entry.dtype).itemsize
        if buffer_bytes is None or size > buffer_bytes:
            yield manifest[begin : at + 1]
            begin, size = at + 1, 0
    if begin < len(manifest):
        yield manifest[begin:]
