"""The trainer's copy of the tensors that an engine holds, from which the next sync's patches are made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fp8plan.errors import ConfigError, some
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.apply.quantize.block_fp8 import described
from fp8plan.runtime.apply.quantize.targets import quantized
from fp8plan.runtime.apply.weight_sync.delta.patch import Change, apply, changes, packed, unchanged, whole
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits
from fp8plan.runtime.apply.weight_sync.delta.top_k import Residual, for_each_matrix, refuse_codes, thinned
from fp8plan.runtime.apply.weight_sync.manifest import (
    SCALE_SUFFIX,
    Manifest,
    dtype_name,
    entry_of,
    refuse_quantising,
)
from fp8plan.runtime.apply.weight_sync.shared import Twins, refuse_apart

if TYPE_CHECKING:
    from torch import Tensor


COMPARED_BYTES: Final = 2**30  # bytes of a trainer's tensors that are quantised and compared together


@dataclass(frozen=True, slots=True)
class Chain:
    """Patches that were made elsewhere, as a source of a sync (runtime.apply.weight_sync.delta.store).

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
    twins:    groups of names that share one storage in the engines (weight_sync.shared)
    look_every: unchanged tensors are sent as digests alone, each once in so many states, so that an engine whose memory
              was written to by something else notices; 0: never

    Between two commits the changes wait: a sync that fails leaves the base as it was.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: str,
        fp8: Collection[str] = frozenset(),
        top_k: TopK | None = None,
        twins: Sequence[Sequence[str]] = (),
        look_every: int = 0,
    ) -> None:
        self.manifest, self.device, self.fp8, self.top_k = manifest, device, frozenset(fp8), top_k
        self.twins, self.look_every = twins, look_every
        if top_k is not None and manifest:
            for_each_matrix(top_k, manifest)  # raises ConfigError for too few bytes, before anything is sent
        self.stamp: str | None = None
        self.complete = False
        self.residual = Residual()
        self._tensors: dict[str, Tensor] = {}
        self._changes: dict[str, Change] = {}
        self._turn = 0  # commits so far

    def recorded(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a sync of all of a trainer's pairs (manifest.as_held), and keep a copy of each.

        Raises ConfigError for a tensor that comes twice, for one that no patch can hold, and for two of one storage
        that differ.
        """
        self._changes.clear()
        twins = Twins(self.twins)
        for own, tensor in pairs:
            if self.top_k is not None:
                refuse_codes(own, dtype_name(tensor.dtype))
            for name, part in in_format({own: tensor}, self.fp8)[own].items():
                if name in self._tensors:
                    raise ConfigError(f"{name} came twice")
                if not (part.numel() and part.dim() and part.element_size() in (1, 2, 4)):
                    raise ConfigError(
                        f"{name} is {described(part)}; allowed with delta: values of 1, 2 or 4 bytes, and not empty"
                    )
                refuse_apart(twins.take({name: part}))
                here = self._here(part)  # a reader may keep and write what it gets
                self._tensors[name] = here.clone() if here.data_ptr() == part.data_ptr() else here
                yield name, part

    def patches(self, pairs: Iterable[tuple[str, Tensor]], groups: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, patch) for each tensor that differs from the base, and for some that do not, uint8 [bytes].

        pairs:  a trainer's (manifest.as_held)
        groups: tensor that vLLM must reload -> number of its group. If one of a group differs, all its tensors are
                sent whole

        `complete` is True once all pairs have come. Raises ConfigError for tensors that are missing or other than
        announced, and for two of one storage that differ.
        """
        self.complete = False
        twins = Twins([group for group in self.twins if all(name in self._tensors for name in group)])
        self._changes.clear()
        self.residual = Residual()
        groups = {name: group for name, group in groups.items() if name in self._tensors}
        missing, sizes = dict.fromkeys(self._tensors), Counter(groups.values())
        waiting: dict[int, dict[str, Tensor]] = {}
        for batch in _batches(pairs):
            refuse_apart(twins.take(batch))
            alone: dict[str, Tensor] = {}
            for name, new in self._next(batch, missing, groups):
                group = groups.get(name)
                if group is None:
                    alone[name] = new
                    continue
                members = waiting.setdefault(group, {})
                members[name] = new
                if len(members) == sizes[group]:
                    yield from self._group(waiting.pop(group))
            made = changes([(self._tensors[name], new) for name, new in alone.items()])
            changed = {name: each for name, each in zip(alone, made, strict=True) if each}
            yield from self._packed(changed, alone)
            yield from self._looked({name: new for name, new in alone.items() if name not in changed})
        if missing:
            raise ConfigError(f"announced and not sent: {some(list(missing))}")
        self.complete = True

    def _next(
        self, batch: Mapping[str, Tensor], missing: dict[str, None], groups: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's next tensors, and take their names out of `missing`.

        batch:  copies of a trainer's tensors
        groups: names that are sent whole
        """
        top_k = None if self.top_k is None else for_each_matrix(self.top_k, self.manifest)
        for own, parts in in_format(batch, self.fp8).items():
            for name, new in parts.items():
                if name not in missing:
                    raise ConfigError(f"{name} {'came twice' if name in self._tensors else 'was not announced'}")
                del missing[name]
                base = self._tensors[name]
                if new.shape != base.shape or new.dtype != base.dtype:
                    raise ConfigError(f"{name} is {described(new)}; announced: {described(base)}")
                parts[name] = self._here(new)
            if top_k is not None and own not in groups:
                held = {name: self._tensors[name] for name in parts}
                parts[own] = thinned(parts, held, batch[own], top_k, self.residual)
            yield from parts.items()

    def _group(self, members: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the patches of a group that vLLM must reload: of all its tensors, if one has changed."""
        import torch

        if not all(torch.equal(bits(self._tensors[name]), bits(new)) for name, new in members.items()):
            yield from self._packed({name: whole(new) for name, new in members.items()}, members)

    def _here(self, part: Tensor) -> Tensor:
        """Return a tensor where the base is kept, contiguous.

        With "cuda" it stays on the trainer's GPU, which may not be torch's current one.
        """
        return (part if part.device.type == self.device else part.to(self.device)).contiguous()

    def _packed(self, made: Mapping[str, Change], news: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        self._changes |= made
        yield from zip(made, packed(list(made), list(made.values()), [news[name] for name in made]), strict=True)

    def _looked(self, same: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield patches without values of the unchanged tensors whose turn it is."""
        every = self.look_every
        numbers = {name: number for number, name in enumerate(self._tensors)} if every else {}
        turns = [name for name in same if every and numbers[name] % every == self._turn % every]
        tensors = [same[name] for name in turns]
        yield from zip(turns, packed(turns, unchanged(tensors), tensors), strict=True)

    def commit(self, stamp: str) -> None:
        """Move the base on, and name it: the replicas have committed what was sent."""
        self._turn += 1
        apply([self._tensors[name] for name in self._changes], list(self._changes.values()))
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
                apply([tensor], [made])
            yield name, tensor


def _batches(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield copies of a trainer's tensors, about COMPARED_BYTES at a time.

    A trainer's iterator may overwrite a tensor once it has given the next one.
    """
    import torch

    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in pairs:
        if name in batch:
            raise ConfigError(f"{name} came twice")
        batch[name] = tensor.clone(memory_format=torch.contiguous_format)
        size += batch[name].nbytes
        if size >= COMPARED_BYTES:
            yield batch
            batch, size = {}, 0
    yield batch


def in_format(tensors: Mapping[str, Tensor], fp8: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Return each of a trainer's tensors in the format of a base, by name: E4M3 and its scales if `fp8` names it.

    One that is quantised already stays as it is. Raises ConfigError for any other dtype than BF16 and FP32.
    """
    import torch

    refuse_quantising(tuple(entry_of(name, tensor) for name, tensor in tensors.items()), fp8)
    parts = {name: {name: tensor} for name, tensor in tensors.items()}
    by_device: dict[torch.device, dict[str, list[Tensor]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name in fp8 and tensor.element_size() > 1:
            by_device[tensor.device][name] = [tensor] if tensor.dim() == 2 else list(tensor.flatten(0, -3))
    for matrices in by_device.values():
        made = iter(quantized([each for stack in matrices.values() for each in stack]))
        for name, stack in matrices.items():
            stacks = zip(*(next(made) for _ in stack), strict=True)
            lead = tensors[name].shape[:-2]
            q, scales = (torch.stack(each).reshape(*lead, *each[0].shape) if lead else each[0] for each in stacks)
            parts[name] = {name: q, name + SCALE_SUFFIX: scales}
    return parts
