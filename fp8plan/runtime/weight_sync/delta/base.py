"""The trainer's copy of the tensors that an engine holds, from which the next sync's patches are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fp8plan.errors import ConfigError
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.quantize.block_fp8 import described
from fp8plan.runtime.quantize.targets import quantized
from fp8plan.runtime.weight_sync.delta.patch import Change, apply, changes, packed, whole
from fp8plan.runtime.weight_sync.delta.tiles import bits
from fp8plan.runtime.weight_sync.delta.top_k import Residual, for_each_matrix, refuse_codes, thinned
from fp8plan.runtime.weight_sync.manifest import SCALE_SUFFIX, Manifest, dtype_name, gathered, pair_of

if TYPE_CHECKING:
    from torch import Tensor


BATCH: Final = 2**27  # bytes of tensors on GPUs that are compared together


@dataclass(frozen=True, slots=True)
class Chain:
    """Patches that were made elsewhere, as a source of a sync (runtime.weight_sync.delta.store).

    manifest: entries of all tensors of the model
    base:     stamp of the weights that the patches start from; None: they hold all tensors
    stamp:    name of the weights that they lead to
    patches:  gives (name, patch) pairs from the start; a tensor may have several
    """

    manifest: Manifest
    base: str | None
    stamp: str
    patches: Callable[[], Iterator[tuple[str, Tensor]]]


class Base:
    """The tensors that all replicas hold, by name, in the format that is sent.

    manifest: entries of the tensors
    device:   where they are kept, "cpu" or "cuda"
    fp8:      names of the tensors that engines hold in FP8: a trainer's BF16 is quantised
    top_k:    sends the most useful changes only; None: all of them
    stamp:    name of this state, which the workers keep, too; None before the first commit
    complete: True once `patches` has seen all tensors of the next state
    residual: what top_k has left out of that state

    Between two commits the changes wait: a sync that fails leaves the base as it was.
    """

    def __init__(
        self, manifest: Manifest, device: str, fp8: Collection[str] = frozenset(), top_k: TopK | None = None
    ) -> None:
        self.manifest, self.device, self.fp8, self.top_k = manifest, device, frozenset(fp8), top_k
        if top_k is not None and manifest:
            for_each_matrix(top_k, manifest)  # raises ConfigError for too few bytes, before anything is sent
        self.stamp: str | None = None
        self.complete = False
        self.residual = Residual()
        self._tensors: dict[str, Tensor] = {}
        self._changes: dict[str, Change] = {}

    def recorded(self, pairs: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a sync of all of a trainer's pairs, and keep a copy of each.

        Raises ConfigError as pair_of does, for a tensor that comes twice, and for one that no patch can hold.
        """
        self._changes.clear()
        for item in pairs:
            own, tensor = pair_of(item)
            if self.top_k is not None:
                refuse_codes(own, dtype_name(tensor.dtype))
            for name, part in in_format(own, tensor, self.fp8).items():
                if name in self._tensors:
                    raise ConfigError(f"{name} came twice")
                if not (part.numel() and part.dim() and part.element_size() in (1, 2, 4)):
                    raise ConfigError(
                        f"{name} is {described(part)}; allowed with delta: values of 1, 2 or 4 bytes, and not empty"
                    )
                self._tensors[name] = self._own(part, part)
                yield name, part

    def patches(self, pairs: Iterable[object], groups: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, patch) for each tensor that differs from the base, uint8 [bytes].

        pairs:  a trainer's
        groups: tensor that vLLM must reload -> number of its group. If one of a group differs, all its tensors are
                sent whole

        `complete` is True once all pairs have come. Raises ConfigError as pair_of does, and for tensors that are
        missing or other than announced.
        """
        import torch

        self.complete = False
        self._changes.clear()
        self.residual = Residual()
        missing, sizes = dict.fromkeys(self._tensors), Counter(groups.values())
        waiting: dict[int, dict[str, Tensor]] = {}
        batch: dict[str, Tensor] = {}
        size = 0
        for name, new in self._new(pairs, missing, groups):
            group = groups.get(name)
            if group is None:
                batch[name] = new
                size += new.nbytes
                if self.device == "cpu" or size >= BATCH:
                    yield from self._patches(batch)
                    batch, size = {}, 0
                continue
            members = waiting.setdefault(group, {})
            members[name] = new
            if len(members) == sizes[group]:
                del waiting[group]
                if not all(torch.equal(bits(self._tensors[each]), bits(tensor)) for each, tensor in members.items()):
                    yield from ((each, self._changed(each, whole(tensor))) for each, tensor in members.items())
        yield from self._patches(batch)
        if missing:
            raise ConfigError(f"announced and not sent: {', '.join(list(missing)[:4])} ({len(missing)} in all)")
        self.complete = True

    def _new(
        self, pairs: Iterable[object], missing: dict[str, None], groups: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's next tensors as its own copies, and take their names out of `missing`.

        groups: names that are sent whole
        """
        top_k = None if self.top_k is None else for_each_matrix(self.top_k, self.manifest)
        for item in pairs:
            own, tensor = pair_of(item)
            exact = gathered(tensor)
            parts = in_format(own, exact, self.fp8)
            for name, new in parts.items():
                if name not in missing:
                    raise ConfigError(f"{name} {'came twice' if name in self._tensors else 'was not announced'}")
                del missing[name]
                base = self._tensors[name]
                if new.shape != base.shape or new.dtype != base.dtype:
                    raise ConfigError(f"{name} is {described(new)}; announced: {described(base)}")
                parts[name] = self._own(new, exact)
            if top_k is not None and own not in groups:
                parts[own] = thinned(parts, {name: self._tensors[name] for name in parts}, exact, top_k, self.residual)
            yield from parts.items()

    def _own(self, part: Tensor, trainers: Tensor) -> Tensor:
        """Return a tensor where the base is kept, contiguous, and apart from the trainer's memory.

        With "cuda" it stays on the trainer's GPU, which may not be torch's current one.
        """
        here = part.contiguous() if part.device.type == self.device else part.to(self.device).contiguous()
        return here.clone() if here.data_ptr() == trainers.data_ptr() else here

    def _patches(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the patches of tensors that are compared together."""
        pairs = [(self._tensors[name], new) for name, new in batch.items()]
        for name, made in zip(batch, changes(pairs), strict=True):
            if made is not None:
                yield name, self._changed(name, made)

    def _changed(self, name: str, made: Change) -> Tensor:
        """Note a change until the next commit, and return its patch."""
        self._changes[name] = made
        return packed(made, self._tensors[name].numel())

    def commit(self, stamp: str) -> None:
        """Move the base on, and name it: the replicas have committed what was sent."""
        for name, made in self._changes.items():
            apply(self._tensors[name], made)
        self._changes.clear()
        self.stamp = stamp

    def drop(self) -> None:
        """Forget the changes that wait: the replicas have not committed them."""
        self._changes.clear()

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, with the changes that wait."""
        for name, tensor in self._tensors.items():
            made = self._changes.get(name)
            if made is not None:
                tensor = tensor.clone()
                apply(tensor, made)
            yield name, tensor


def in_format(name: str, tensor: Tensor, fp8: Collection[str]) -> dict[str, Tensor]:
    """Return a trainer's tensor in the format of a base, by name: E4M3 and its scales if it is named in `fp8`.

    One that is quantised already stays as it is.
    """
    import torch

    matrices = gathered(tensor)
    if name not in fp8 or tensor.element_size() == 1:
        return {name: matrices}
    parts = quantized(list(matrices.reshape(-1, *matrices.shape[-2:])))
    stacks = (torch.stack([part[which] for part in parts]) for which in (0, 1))
    shaped = [stack.reshape(*matrices.shape[:-2], *stack.shape[-2:]) for stack in stacks]
    return {name: shaped[0], name + SCALE_SUFFIX: shaped[1]}
