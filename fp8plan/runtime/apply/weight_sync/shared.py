"""Names that share one storage in the engine, as embed_tokens and lm_head of a tied model do, must have equal values.

The last one written would win. A trainer sends two values if its copies were untied, by Megatron, FSDP or PEFT's
`modules_to_save`. The groups of such names come from a trace of vLLM's loaders (apply.worker.load_map), so that no
list of names is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits, digests, matrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Groups = Sequence[Sequence[str]]
Digests = dict["torch.dtype", "Tensor"]


class Twins:
    """The tensors of shared storages as they come. groups: names that share a storage, in each group"""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._came: dict[int, tuple[str, Digests]] = {}  # number of a group -> its first tensor's name and digests

    def take(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
        """Return the pairs of names whose values differ among tensors that have come together, and before.

        A tensor is kept as digests if one of its group has not come. FP32 beside BF16 counts as rounded.
        """
        apart = []
        for number, group in enumerate(self._groups):
            here = [name for name in group if name in tensors]
            apart += [(here[0], name) for name in here[1:] if not _alike(tensors[here[0]], tensors[name])]
            if here and len(here) < len(group):
                own = _digests(tensors[here[0]])
                first, theirs = self._came.setdefault(number, (here[0], own))
                if first != here[0] and not _equal(own, theirs):
                    apart.append((first, here[0]))
        return apart


def refuse_apart(apart: Sequence[tuple[str, str]]) -> None:
    """Raises ConfigError for pairs of names whose values differ."""
    if apart:
        first, second = sorted(apart[0])
        more = f" ({len(apart)} such pairs)" if len(apart) > 1 else ""
        raise ConfigError(
            f"{first} and {second} differ{more}, and the engine has one storage for both; allowed: equal values. Tie "
            "them in the trainer, or start the engine from a checkpoint that does not tie them"
        )


def apart_by_digests(groups: Groups, written: Mapping[str, Tensor], changed: Collection[str]) -> list[tuple[str, str]]:
    """Return the pairs of names that patches have made different.

    written: name -> digests of its tiles after the last patch
    changed: names whose values a patch has changed; before it the whole group was equal
    """
    apart = []
    for group in groups:
        moved = [name for name in group if name in changed]
        others = [name for name in group if name not in changed]
        apart += [(moved[0], name) for name in others if moved]
        apart += [(moved[0], name) for name in moved[1:] if not _same(written[moved[0]], written[name])]
    return apart


def _alike(tensor: Tensor, other: Tensor) -> bool:
    import torch

    if tensor.dtype != other.dtype:
        if min(tensor.element_size(), other.element_size()) < 2:
            return False
        tensor, other = tensor.to(torch.bfloat16), other.to(torch.bfloat16)
    if tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride() and tensor.shape == other.shape:
        return True
    return torch.equal(bits(tensor), bits(other))


def _digests(tensor: Tensor) -> Digests:
    """Return dtype -> digests of a tensor's tiles in it. An FP32 tensor has a second dtype, BF16."""
    import torch

    forms = [tensor] if tensor.dtype != torch.float32 else [tensor, tensor.to(torch.bfloat16)]
    return {form.dtype: digests([matrix(form.contiguous())])[0] for form in forms}


def _equal(digested: Digests, other: Digests) -> bool:
    common = digested.keys() & other.keys()
    return bool(common) and all(_same(digested[dtype], other[dtype]) for dtype in common)


def _same(tensor: Tensor, other: Tensor) -> bool:
    import torch

    return tensor.shape == other.shape and torch.equal(tensor, other.to(tensor.device))
