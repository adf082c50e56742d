"""A small stream of tensors, also of a trainer that has them sharded over processes (spawned ones import this file)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fp8plan.runtime.apply.weight_sync.manifest import manifest_of
from fp8plan.runtime.apply.weight_sync.state import Checked
from fp8plan.runtime.apply.weight_sync.stream import chunks

NAMES = ("q", "x", "k", "y", "v")  # q, k and v are one group


def checked() -> Checked:
    groups = [0, 1, 0, 2, 0]
    return Checked(0, groups, Counter(groups), {name: number for number, name in enumerate(NAMES)})


def tensors() -> dict[str, Any]:
    import torch

    return {name: torch.full((4, 8), float(number), dtype=torch.bfloat16) for number, name in enumerate(NAMES)}


def sharded(rank: int, folder: str) -> None:
    """One of two processes: what chunks gives of sharded tensors is whole."""
    import torch
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = {name: torch.arange(32).reshape(4, 8).bfloat16() + number for number, name in enumerate(NAMES)}
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_() for name, tensor in whole.items()}
    assert all(tensor.to_local().shape == (2, 8) for tensor in sharded.values())
    assert manifest_of(sharded) == manifest_of(whole)
    for numbers, found in chunks(sharded.items(), checked(), most=1):
        for number, tensor in zip(numbers, found, strict=True):
            assert type(tensor) is torch.Tensor
            assert not tensor.requires_grad
            assert torch.equal(tensor, whole[NAMES[number]])
    destroy_process_group()
