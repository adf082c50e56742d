"""The KV cache of a worker, as memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def zero_kv(worker: Any) -> int:
    """Zero all of a worker's KV cache, and return its bytes. Only while no request runs, and not while it sleeps.

    Attention multiplies what it masks by 0, and 0 x NaN is NaN: NaN that unusable weights have left in a block would
    reach the request that gets the block next. Whole storages are zeroed as bytes, whatever the dtype (FP8 is stored as
    uint8) and the layout of the views: layers may share one, and have padding.
    """
    import torch

    views = _tensors(worker.model_runner.kv_caches)
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache: it is one, a list of a layer's states (Mamba), or None for a layer without."""
    import torch

    if isinstance(nested, torch.Tensor):
        yield from [nested] if nested.numel() else []
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            yield from _tensors(part)
