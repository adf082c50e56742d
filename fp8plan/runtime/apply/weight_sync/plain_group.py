"""The group in which a trainer and an engine's workers meet. In it, unlike vLLM's, a peer cannot run code.

vLLM's StatelessProcessGroup unpickles everything that comes over the store of the rendezvous, so any peer that reaches
the store can run a program. PlainGroup takes data alone. Objects keep vLLM's format, for vLLM's and TRL's own trainers:
only plain values and NCCL's id are read from it. Tensors are raw bytes behind a header.
"""

from __future__ import annotations

import io
import json
import pickle
import time
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from fp8plan.errors import SyncError

# The classes of NCCL's id, as pickle names them. Plain values name no class.
ID: Final = {("_ctypes", "_unpickle"), (ncclUniqueId.__module__, ncclUniqueId.__name__)}


class PlainGroup(StatelessProcessGroup):  # type: ignore[misc]
    """vLLM's group, which runs nothing that comes from a peer.

    limit_s: seconds that it waits for a peer's message
    """

    limit_s: float = 300.0

    @classmethod
    def met(cls, address: str, port: int, rank: int, world_size: int) -> PlainGroup:
        """Meet the other ranks; rank 0 listens. Raises the error of torch's store after 5 minutes alone."""
        return cls.of(StatelessProcessGroup.create(address, port, rank, world_size))

    @classmethod
    def of(cls, group: StatelessProcessGroup) -> PlainGroup:
        """Turn a group of vLLM's that is still unused into one that takes data alone."""
        if isinstance(group, cls):
            return group
        plain = cls(rank=group.rank, world_size=group.world_size, store=group.store)
        plain._made = group  # it may hold the socket on which rank 0 listens
        return plain

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Send an object as vLLM does, or take one. Raises SyncError for an object that is more than data."""
        if self.rank == src:
            return super().broadcast_obj(obj, src)
        return read(self._next(f"broadcast_from/{src}", src))

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Send a tensor, or fill it. Raises SyncError for anything but raw values of its dtype and shape."""
        flat = tensor.detach().contiguous()
        values = flat.reshape(-1).view(torch.uint8).numpy()
        kind = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        header = json.dumps(kind).encode() + b"\n"
        if self.rank == src:
            self.expire_data()
            key = f"broadcast_tensor/{src}/{self.broadcast_send_counter}"
            self.store.set(key, header + values.tobytes())
            self.broadcast_send_counter += 1
            self.entries.append((key, time.time()))
            return tensor
        content = self._next(f"broadcast_tensor/{src}", src)
        if not content.startswith(header) or len(content) != len(header) + values.size:
            raise SyncError(
                f"{len(content)} bytes came, which begin with {content[:40]!r}; allowed: {header.decode().strip()} and "
                f"a line's end, then {values.size} bytes of raw values"
            )
        values[:] = np.frombuffer(content, np.uint8, offset=len(header))
        return tensor if flat.data_ptr() == tensor.data_ptr() else tensor.copy_(flat)

    def recv_obj(self, *_: Any) -> Any:
        """Raise NotImplementedError: vLLM's own method unpickles what comes, and no transfer needs it."""
        raise NotImplementedError("PlainGroup receives no pickled objects; allowed: broadcast_obj, plain values")

    recv = recv_obj

    def _next(self, kind: str, src: int) -> bytes:
        """Return the next message of a kind. Raises SyncError if none comes in time, and if the store has died."""
        key = f"{kind}/{self.broadcast_recv_src_counter[src]}"
        try:
            self.store.wait([key], timedelta(seconds=self.limit_s))
            content: bytes = self.store.get(key)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise SyncError(f"nothing came from the trainer for {self.limit_s:g} s, or it has died: {reason}") from None
        self.broadcast_recv_src_counter[src] += 1
        return content


def communicator(group: PlainGroup) -> pynccl.PyNcclCommunicator:
    """Open NCCL on this thread's current device, as vLLM's own ends do."""
    return pynccl.PyNcclCommunicator(group, device=torch.accelerator.current_device_index())


def read(content: bytes) -> Any:
    """Return the plain values, or NCCL's id, in a pickle. Raises SyncError for any other, and runs none of it."""
    try:
        return _Data(io.BytesIO(content)).load()
    except SyncError:
        raise
    except Exception as error:
        raise SyncError(f"{len(content)} bytes came that are no data ({type(error).__name__}: {error})") from None


class _Data(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ID:
            raise SyncError(f"the other end sent {module}.{name}, which is not run; allowed: data, and NCCL's id")
        return super().find_class(module, name)
