"""A trainer's stream of tensors, cut into messages that hold complete fused groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fp8plan.errors import SyncError
from fp8plan.runtime.engine.interrupts import released
from fp8plan.runtime.weight_sync.manifest import pair_of
from fp8plan.runtime.weight_sync.nccl.protocol import gathered
from fp8plan.runtime.weight_sync.state import Checked

if TYPE_CHECKING:
    import torch


def chunks(pairs: Iterable[Any], checked: Checked, most: int) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Cut the stream into chunks of about `most` bytes, as (numbers in the manifest, tensors), of complete groups only.

    A group is held back until its last tensor has come. Raises SyncError for a tensor that was not announced, that came
    twice, or that was written to while it was held back: an iterator must not reuse its buffers.
    """
    left: dict[int, int] = dict(checked.sizes)
    waiting: dict[int, list[tuple[int, torch.Tensor]]] = {}
    came: dict[int, tuple[str, int]] = {}
    numbers: list[int] = []
    tensors: list[torch.Tensor] = []
    size = 0
    for name, tensor in _whole(pairs):
        number = checked.numbers.get(name)
        if number is None or number in came:
            raise SyncError(f"{name} {'was not announced' if number is None else 'came twice'}")
        came[number] = name, _version(tensor)
        group = checked.groups[number]
        waiting.setdefault(group, []).append((number, tensor))
        left[group] -= 1
        if left[group]:
            continue
        for number, tensor in waiting.pop(group):
            numbers.append(number)
            tensors.append(tensor)
            size += tensor.nbytes
        if size >= most:
            _refuse_reused(numbers, tensors, came)
            yield numbers, tensors
            numbers, tensors, size = [], [], 0
    for some in waiting.values():  # the workers say what is missing
        numbers += [number for number, _ in some]
        tensors += [tensor for _, tensor in some]
    if numbers:
        _refuse_reused(numbers, tensors, came)
        yield numbers, tensors


def _whole(pairs: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trainer's pairs, with the shards of each tensor gathered.

    Both run the trainer's code, which Ctrl-C may break off anywhere. Raises ConfigError for what is no pair of a name
    and a tensor with values.
    """
    given = iter(pairs)
    while True:
        with released():
            item = next(given, given)
            if item is given:
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
