"""The two JSON files of a store: which versions there are, and how engines hold the model. They are read with care."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple
from uuid import uuid4

from fp8plan.errors import ConfigError, text_of
from fp8plan.runtime.apply.weight_sync.calls import Call
from fp8plan.runtime.apply.weight_sync.delta.files import Files
from fp8plan.runtime.apply.weight_sync.manifest import SCALE_SUFFIX, Manifest, held_manifest, read_manifest
from fp8plan.runtime.apply.weight_sync.procedure import learn_quantised, prepared
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.schemas import parse

LATEST: Final = "latest.json"
HELD: Final = "engine.json"
STAMP: Final = re.compile(r"[0-9a-f]{32}")  # a part of it names files


class Link(NamedTuple):
    """A version of a chain.

    stamp:   name of its weights, which engines that have them keep, too
    patches: bytes of its file of patches; 0: it has none
    whole:   bytes of its file of all tensors; 0: it has none
    """

    version: int
    stamp: str
    patches: int
    whole: int

    @property
    def files(self) -> dict[str, int]:
        """The bytes of its files, by name. No two writers use one name, even for one version."""
        sizes = {"patches": self.patches, "whole": self.whole}
        return {self.file(kind): nbytes for kind, nbytes in sizes.items() if nbytes}

    def file(self, kind: str) -> str:
        return f"{self.version:08d}-{self.stamp[:8]}.{kind}"


@dataclass(frozen=True, slots=True)
class Writer:
    """The one who may write to a store.

    epoch: how many have taken over so far, this one included
    token: unlike that of any other
    name:  host and process, for people
    since: date of the take-over; "" before it
    """

    epoch: int = 0
    token: str = field(default_factory=lambda: uuid4().hex)
    name: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")
    since: str = ""

    def after(self, other: Writer) -> Writer:
        """Return this writer once it has taken over from another."""
        epoch = 1 + max(self.epoch, other.epoch)
        return Writer(epoch, self.token, self.name, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


@dataclass(frozen=True, slots=True)
class Latest:
    """The versions that are there.

    manifest: entries of all tensors
    chain:    the versions, the oldest first, which is whole
    """

    writer: Writer
    manifest: Manifest
    chain: tuple[Link, ...]

    @property
    def newest(self) -> Link:
        return self.chain[-1]

    def as_json(self) -> dict[str, Any]:
        chain = [link._asdict() for link in self.chain]
        return {"writer": asdict(self.writer), "manifest": self.manifest, "chain": chain}


@dataclass(frozen=True, slots=True)
class Held:
    """How engines hold the model.

    manifest: entries of its tensors in the format that is sent
    fp8:      names of those that a trainer gives in BF16 and engines hold in E4M3
    reloaded: name of each tensor that vLLM must reload -> number of its group
    twins:    groups of names that share one storage, whether engines or a trainer have them (weight_sync.shared)
    """

    manifest: Manifest
    fp8: frozenset[str]
    reloaded: Mapping[str, int]
    twins: tuple[tuple[str, ...], ...] = ()

    @property
    def wide(self) -> frozenset[str]:
        """The names of the tensors that engines keep in FP32."""
        wide = (entry.name for entry in self.manifest if entry.dtype == "float32")
        return frozenset(name for name in wide if not name.endswith(SCALE_SUFFIX))

    def as_json(self) -> dict[str, Any]:
        held = {"manifest": self.manifest, "fp8": sorted(self.fp8), "reloaded": dict(self.reloaded)}
        return held | {"twins": [list(group) for group in self.twins]}


def formats(state: SyncState) -> Generator[Call, Any, Held]:
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
    return Held(held, frozenset(state.quantised or ()), reloaded, tuple(map(tuple, checked.twins)))


class Store(Files):
    """The files of a chain. Raises ConfigError and SyncError as Files, and ConfigError for a JSON file of another
    shape."""

    def latest(self) -> Latest | None:
        """Return the versions that are there; None without any."""
        data, where = self.read(LATEST), self.address(LATEST)
        return None if data is None else latest_of(parse(data, where), where)

    def held(self) -> Held | None:
        """Return how engines hold the model; None if none has followed."""
        data, where = self.read(HELD), self.address(HELD)
        return None if data is None else held_of(parse(data, where), where)

    def write_json(self, name: str, data: Any) -> None:
        """Write a file that readers see whole or not at all."""
        self.write(name, json.dumps(data).encode("utf-8"))


def latest_of(data: Any, where: str) -> Latest:
    """Return what a latest.json holds. Raises ConfigError for anything but what a Publisher writes."""
    try:
        writer, chain = Writer(**data["writer"]), tuple(Link(**link) for link in data["chain"])
        latest = Latest(writer, _manifest(data["manifest"]), chain)
        numbers = [writer.epoch, *(number for link in chain for number in (link.version, link.patches, link.whole))]
        words = [writer.token, writer.name, writer.since, *(link.stamp for link in chain)]
        _refuse_others(numbers, words)
        if not chain or not all(STAMP.fullmatch(link.stamp) and link.files for link in chain):
            raise ValueError("no version, or one without a stamp or a file")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{where} is not what a Publisher writes ({text_of(error)}); delete it to begin a new chain"
        ) from error
    return latest


def held_of(data: Any, where: str) -> Held:
    """Return what an engine.json holds. Raises ConfigError for anything but what a Follower writes."""
    try:
        manifest, fp8, reloaded = _manifest(data["manifest"]), frozenset(data["fp8"]), dict(data["reloaded"])
        held = Held(manifest, fp8, reloaded, tuple(tuple(group) for group in data.get("twins", ())))
        names = [name for group in held.twins for name in group]
        _refuse_others(list(held.reloaded.values()), [*held.fp8, *held.reloaded, *names])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{where} is not what a Follower writes ({text_of(error)}); type, beside the engine, "
            "Follower(url).pull(engine), which writes it anew"
        ) from error
    return held


def _manifest(triples: Any) -> Manifest:
    manifest = read_manifest(triples)
    if any(entry.nbytes < 1 or min(entry.shape, default=1) < 1 for entry in manifest):
        raise ValueError("an empty tensor")
    return manifest


def _refuse_others(numbers: list[Any], words: list[Any]) -> None:
    """Raise TypeError for a number that is not whole and 0 or more, and for a word that is none."""
    if wrong := [x for x in numbers if type(x) is not int or x < 0] + [x for x in words if not isinstance(x, str)]:
        raise TypeError(f"{wrong[0]!r}")
