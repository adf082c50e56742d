"""The two JSON files of a store: which versions there are, and how engines hold the model. They are read with care."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from typing import Annotated, Any, Final, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct, field

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.calls import Call
from fp8plan.runtime.apply.weight_sync.delta.files import StoreFiles
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX, Manifest, held_manifest
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised, prepared
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.schemas import parse

LATEST: Final = "latest.json"
HELD: Final = "engine.json"
Count = Annotated[int, Meta(ge=0)]
Listed = TypeVar("Listed", "Latest", "Formats")


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """A version of a chain.

    stamp:   name of its weights, which engines that have them keep, too. A part of it names files
    patches: bytes of its file of patches; 0: it has none
    whole:   bytes of its file of all tensors; 0: it has none
    """

    version: Count
    stamp: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    patches: Count = 0
    whole: Count = 0

    @property
    def files(self) -> dict[str, int]:
        """The bytes of its files, by name. No two writers use one name, even for one version."""
        sizes = {"patches": self.patches, "whole": self.whole}
        return {self.file(kind): nbytes for kind, nbytes in sizes.items() if nbytes}

    def file(self, kind: str) -> str:
        return f"{self.version:08d}-{self.stamp[:8]}.{kind}"


class Writer(Struct, frozen=True, forbid_unknown_fields=True):
    """The one who may write to a store.

    epoch: how many have taken over so far, this one included
    token: unlike that of any other
    name:  host and process, for people
    since: date of the take-over; "" before it
    """

    epoch: Count = 0
    token: str = field(default_factory=lambda: uuid4().hex)
    name: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")
    since: str = ""

    def after(self, other: Writer) -> Writer:
        """Return this writer once it has taken over from another."""
        epoch = 1 + max(self.epoch, other.epoch)
        return Writer(epoch, self.token, self.name, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


class Latest(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions that are there.

    manifest: entries of all tensors
    chain:    the versions, the oldest first, which is whole
    """

    writer: Writer
    manifest: Manifest
    chain: Annotated[tuple[Link, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        _refuse_empty(self.manifest)
        if not all(link.files for link in self.chain):
            raise ValueError("a version has no file")

    @property
    def newest(self) -> Link:
        return self.chain[-1]


class Formats(Struct, frozen=True, forbid_unknown_fields=True):
    """How engines hold the model.

    manifest: entries of its tensors in the format that is sent
    fp8:      names of those that a trainer gives in BF16 and engines hold in E4M3
    reloaded: name of each tensor that vLLM must reload -> number of its group
    twins:    groups of names that share one storage, whether engines or a trainer have them (weight_sync.shared)
    """

    manifest: Manifest
    fp8: frozenset[str]
    reloaded: dict[str, Count]
    twins: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        _refuse_empty(self.manifest)

    @property
    def wide(self) -> frozenset[str]:
        """The names of the tensors that engines keep in FP32."""
        wide = (entry.name for entry in self.manifest if entry.dtype == "float32")
        return frozenset(name for name in wide if not name.endswith(SCALE_SUFFIX))


def _refuse_empty(manifest: Manifest) -> None:
    """Raise ConfigError for a tensor without values, and for an unknown dtype."""
    for entry in manifest:
        if entry.nbytes < 1 or min(entry.shape, default=1) < 1:
            raise ConfigError(f"{entry.name} has shape {list(entry.shape)}; allowed: tensors with values")


def formats(state: SyncState) -> Generator[Call, Any, Formats]:
    """Return how an engine holds the tensors of its checkpoint.

    Raises ConfigError for an engine whose checkpoint's files are not here.
    """
    if state.expected is None:
        raise ConfigError("the engine has no checkpoint to name its tensors; allowed: a model folder with safetensors")
    yield from learn_quantised(state)
    held = held_manifest(state.expected, state.quantised or (), state.wide)
    checked = yield from prepared(state, held)
    reloaded = dict(checked.reloaded)
    for group in checked.twins:  # also of a name that the checkpoint does not have
        if numbers := [reloaded[name] for name in group if name in reloaded]:
            reloaded |= dict.fromkeys(group, numbers[0])
    return Formats(held, frozenset(state.quantised or ()), reloaded, tuple(map(tuple, checked.twins)))


class Store(StoreFiles):
    """The files of a chain. Raises ConfigError and SyncError as StoreFiles, and ConfigError for a JSON file of another
    shape."""

    def latest(self) -> Latest | None:
        """Return the versions that are there; None without any."""
        return self._listed_in(LATEST, Latest, "Publisher writes", "delete it to begin a new chain")

    def held(self) -> Formats | None:
        """Return how engines hold the model; None if none has followed."""
        advice = "type, beside the engine, Follower(url).pull(engine), which writes it anew"
        return self._listed_in(HELD, Formats, "Follower writes", advice)

    def _listed_in(self, name: str, kind: type[Listed], written: str, advice: str) -> Listed | None:
        if (data := self.read(name)) is None:
            return None
        try:
            return msgspec.convert(parse(data, self.address(name)), kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.address(name)} is not what a {written} ({error}); {advice}") from error

    def write_json(self, name: str, data: Any) -> None:
        """Write a file that readers see whole or not at all."""
        self.write(name, msgspec.json.encode(data, order="deterministic"))
