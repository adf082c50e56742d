"""The protocol of a transfer, so that neither end is left alone in a broadcast (runtime.weight_sync.nccl).

group: vLLM's PyNcclCommunicator, in which the trainer is rank 0; its own `group`, a PlainGroup, speaks without NCCL,
       over the store of the rendezvous, and waits 5 minutes at most
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError, LostEngineError, SyncError
from fp8plan.runtime.weight_sync.manifest import Entry, Manifest, dtype_named, entry_of

if TYPE_CHECKING:
    import torch

BROKEN = "the transfer has broken off; connect the trainer and the engine again (fp8plan.runtime.weight_sync.nccl)"


def completed(
    pairs: Any, manifest: Manifest, device: torch.device, failures: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all announced tensors on `device`. From the first that fails on, which is noted, they are zeros."""
    import torch

    stream = iter(((e.name, pairs[e.name]) for e in manifest) if isinstance(pairs, Mapping) else pairs)
    for entry in (*manifest, None):
        tensor = None
        if not failures:
            try:
                tensor = _next(stream, entry)
            except Exception as error:  # the workers wait for the rest, whatever it is
                failures.append(f"{type(error).__name__}: {error}")
        if entry is None:
            return
        if tensor is None:
            tensor = torch.zeros(entry.shape, dtype=dtype_named(entry.dtype), device=device)
        yield entry.name, tensor.to(device)


def _next(stream: Iterator[tuple[str, Any]], entry: Entry | None) -> torch.Tensor | None:
    """Return the next tensor, which must be `entry`; None: expect the end. Raises ConfigError for anything else."""
    found = next(stream, None)
    if entry is None:
        if found is not None:
            raise ConfigError(f"{found[0]} was not announced")
        return None
    if found is None:
        raise ConfigError(f"announced and not sent: {entry.name}")
    tensor = gathered(found[1])
    if (came := entry_of(found[0], tensor)) != entry:
        raise ConfigError(f"{came.name} {came.dtype} {list(came.shape)} came; announced: {tuple(entry)}, in this order")
    return tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values without its gradient; of a DTensor, all shards."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach() if whole.requires_grad else whole  # a model may have 20,000 tensors


@lru_cache(maxsize=8)
def digest(manifest: Manifest) -> str:
    """Return a text that is equal only for equal manifests, order included."""
    return hashlib.sha256(repr([tuple(entry) for entry in manifest]).encode()).hexdigest()


def misaligned(manifest: Manifest, buffer_bytes: int) -> str | None:
    """Say which tensor vLLM's packing, which leaves no gaps, cannot unpack again; None if it can unpack all."""
    at = 0
    for entry in manifest:
        size = dtype_named(entry.dtype).itemsize
        if at % size:
            return (
                f"{entry.name} would begin at byte {at} of a broadcast; announce wider dtypes before odd-sized tensors"
            )
        at = 0 if at + entry.numel * size > buffer_bytes else at + entry.numel * size
    return None


def agree(group: Any, key: str, failure: str | None = None) -> None:
    """Compare notes with all ranks. Raises SyncError for the first failure told, other manifests, or no answer.

    After no answer the group is not used again: its ends would speak of different syncs.
    """
    try:
        told = group.group.all_gather_obj((key, failure))
    except Exception as error:
        group.destroy()
        raise SyncError(f"the other end does not answer ({type(error).__name__}); {BROKEN}") from error
    for rank, (_, failed) in enumerate(told):
        if failed is not None:
            raise SyncError(f"{f'worker {rank - 1}' if rank else 'the trainer'} failed: {failed}")
    if len({other for other, _ in told}) > 1:
        raise SyncError("the trainer and the engine were given different manifests; allowed: the same, in one order")


@contextmanager
def limited(group: Any, seconds: float) -> Iterator[Callable[[], None]]:
    """Break NCCL off after so many seconds, which ends broadcasts whose other end has died. What this yields begins to
    count them anew.

    Raises SyncError then; on a GPU LostEngineError, as CUDA does not survive it (seen on an H200: illegal memory access
    at the next use).
    """
    ended, late, until = threading.Event(), threading.Event(), [time.monotonic() + seconds]

    def renew() -> None:
        until[0] = time.monotonic() + seconds

    def watch() -> None:
        while (left := until[0] - time.monotonic()) > 0:
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
            raise lost(f"the tensors took more than {seconds:g} s; {BROKEN}")


def working(group: Any) -> Any:
    """Return the group if it works. Raises ConfigError if it does not: vLLM's would leave tensors as they are."""
    if group.disabled:
        raise ConfigError(f"NCCL does not work here, or no longer: {BROKEN}; unset VLLM_DISABLE_PYNCCL")
    return group


def wait(device: torch.device) -> None:
    """Wait for all that runs on a GPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
