"""A chain of patches in a folder or an object store, for a trainer and engines without a fast link between them.

    URL/engine.json         how engines hold the model: the first one that follows writes it
    URL/<version>.patches   what a version changed since the one before
    URL/<version>.whole     all tensors of the first version, and of one version in `every`
    URL/latest.json         the versions that are there; written last, so that it names complete files only

An engine that has a version of the chain replays what follows. Another one takes the newest whole version first. A file
is its patches, one after the other, each compressed by zstd if the trainer says so; then an index in JSON, and the
index's length in 8 bytes. Each patch carries its own checksum (runtime.weight_sync.delta.patch).

URLs are fsspec's: a path, s3://..., gs://..., memory://... Some need a package that fsspec names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from fp8plan.checks import instance
from fp8plan.checks import whole as whole_number
from fp8plan.errors import ConfigError, SyncError, text_of
from fp8plan.jsonl import parse
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.weight_sync.delta.base import Base, Chain
from fp8plan.runtime.weight_sync.delta.patch import packed, whole
from fp8plan.runtime.weight_sync.delta.top_k import for_each_matrix
from fp8plan.runtime.weight_sync.manifest import entry_of, pairs_of, plain, read_manifest
from fp8plan.runtime.weight_sync.procedure import formats
from fp8plan.runtime.weight_sync.state import Call, Scored, SyncReport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EVERY: Final = 20
CODECS: Final = (None, "zstd")
HELD: Final = "engine.json"
LENGTH: Final = 8  # bytes of the index's length


class Published(NamedTuple):
    """A version that was written.

    nbytes:      of its patches
    whole_bytes: of all tensors; 0 if they were not written
    residual:    as SyncReport.residual
    """

    version: int
    nbytes: int
    whole_bytes: int
    residual: float


class Store:
    """The files of a chain. Raises ConfigError for a URL that fsspec does not know."""

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(str(url))
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url!r}: {error}; allowed: a folder, or a URL of an fsspec file system") from error
        self.url = str(url)
        self._files.makedirs(self._root, exist_ok=True)

    def path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def read_json(self, name: str) -> Any:
        """Return a file's data; None if it is not there. Raises ConfigError for a file that is no JSON."""
        try:
            data = self._files.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        return parse(data.decode("utf-8"), f"{self.url}/{name}")

    def write_json(self, name: str, data: Any) -> None:
        """Write a file that readers see whole or not at all."""
        part = self.path(f"{name}.{uuid4().hex}.part")
        self._files.pipe_file(part, json.dumps(data).encode("utf-8"))
        self._files.mv(part, self.path(name))

    def write_patches(self, name: str, patches: Iterable[tuple[str, Tensor]], codec: str | None) -> int:
        """Write a file of patches, and return its bytes."""
        index: list[list[Any]] = []
        try:
            with self._files.open(self.path(name), "wb") as file:
                for tensor, patch in patches:
                    data = patch.cpu().numpy().tobytes()
                    stored = _compressed(data) if codec else data
                    file.write(stored)
                    index.append([tensor, len(stored), len(data)])
                text = json.dumps({"codec": codec, "patches": index}).encode("utf-8")
                file.write(text)
                file.write(len(text).to_bytes(LENGTH, "little"))
        except BaseException:
            self.delete([name])  # a part of a file serves nobody
            raise
        return int(sum(stored for _, stored, _ in index)) + len(text) + LENGTH

    def patches(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the patches of a file. Raises ConfigError for a file that is missing or damaged."""
        import torch

        where = f"{self.url}/{name}"
        try:
            with self._files.open(self.path(name), "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - LENGTH, 0))
                length = int.from_bytes(file.read(LENGTH), "little")
                if not 0 < length <= size - LENGTH:
                    raise ConfigError(f"{where} is cut off or damaged")
                file.seek(size - LENGTH - length)
                index = parse(file.read(length).decode("utf-8", "replace"), where)
                file.seek(0)
                for tensor, stored, nbytes in index["patches"]:
                    data = file.read(stored)
                    data = _expanded(data, nbytes, where) if index["codec"] else data
                    yield tensor, torch.frombuffer(bytearray(data), dtype=torch.uint8)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {text_of(error)}") from error

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._files.rm_file(self.path(name))


class Publisher:
    """A trainer's end of a chain: every `publish` adds a version.

    url:    of the store; an engine must have followed it once (Follower), unless `fp8` is given
    fp8:    names of the tensors that engines hold in FP8; None: as engine.json says
    every:  one in so many versions is also written whole, for engines that come late
    device: place of the trainer's copy of the last version, "cpu" or "cuda"
    codec:  "zstd" or None
    top_k:  writes the most useful changes only; None: all of them

    A new Publisher begins with a whole version. Only one may write to a store at a time.
    """

    def __init__(
        self,
        url: str,
        *,
        fp8: Collection[str] | None = None,
        every: int = EVERY,
        device: str = "cpu",
        codec: str | None = None,
        top_k: TopK | None = None,
    ) -> None:
        if codec not in CODECS:
            raise ConfigError(f"codec is {codec!r}; allowed: None, 'zstd'")
        if top_k is not None:
            instance("top_k", top_k, TopK, "TopK(share=1e-4)")
        self._every = whole_number("every", every, 1)
        self._store, self._device, self._codec, self._top_k = Store(url), device, codec, top_k
        held = self._store.read_json(HELD) or {}
        if fp8 is None and not held:
            raise ConfigError(
                f"no engine has followed {url} yet; type, beside the engine, Follower(url).pull(engine), or give fp8, "
                "the names of the tensors that engines hold in FP8"
            )
        self._fp8 = frozenset(held.get("fp8", ()) if fp8 is None else fp8)
        self._base: Base | None = None
        self._latest = self._store.read_json("latest.json") or {"version": 0}

    def publish(self, tensors: Any) -> Published:
        """Write the next version. tensors: as RolloutEngine.sync_weights takes them.

        Raises ConfigError for tensors that are missing or other than in the version before; the store then stays as it
        was.
        """
        pairs, version, stamp = pairs_of(tensors), int(self._latest["version"]) + 1, uuid4().hex
        base, nbytes, latest, old = self._base, 0, self._latest, []
        if base is None:
            base = Base((), self._device, self._fp8, self._top_k)
            base.manifest = tuple(entry_of(name, tensor) for name, tensor in base.recorded(pairs))
            if self._top_k is not None:
                for_each_matrix(self._top_k, base.manifest)  # raises ConfigError for too few bytes
            old = self._latest.get("chain", [])
            latest = {"manifest": plain(base.manifest), "chain": [], "first": version}
        else:
            reloaded = (self._store.read_json(HELD) or {}).get("reloaded", {})
            patches = base.patches(pairs, reloaded)
            nbytes = self._store.write_patches(f"{version:08d}.patches", patches, self._codec)
        whole_bytes = 0
        if (version - latest["first"]) % self._every == 0:
            everything = ((name, packed([whole(tensor)], [tensor])[0]) for name, tensor in base.pairs())
            whole_bytes = self._store.write_patches(f"{version:08d}.whole", everything, self._codec)
        chain = [*latest["chain"], {"version": version, "stamp": stamp, "whole": bool(whole_bytes)}]
        kept = _kept(chain)
        latest = latest | {"version": version, "chain": kept}
        self._store.write_json("latest.json", latest)
        base.commit(stamp)  # only now: a version that nobody can read must not be a base
        self._base, self._latest = base, latest
        gone = [link["version"] for link in (*old, *chain[: len(chain) - len(kept)])]
        self._store.delete(f"{number:08d}.{kind}" for number in gone for kind in ("patches", "whole"))
        return Published(version, nbytes, whole_bytes, base.residual.relative)


def _kept(chain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the links from the last whole version but one on: a reader may be in the middle of that."""
    wholes = [at for at, link in enumerate(chain) if link["whole"]]
    return chain[wholes[-2] if len(wholes) > 1 else 0 :]


class Follower:
    """An engine's end of a chain.

    url:     of the store
    version: number of the version that was pulled last; None before the first
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self.version: int | None = None

    def pull(self, engine: Any, kv_amax: Any = None, kv_prompts: Any = None, scored: Scored | None = None) -> Any:
        """Bring an engine, or a fleet, to the newest version, and return the SyncReport; None if nothing is new.

        engine: one that takes E4M3 (SyncSettings.weights_in="fp8_block"). Under asyncio this returns a coroutine
        kv_amax, kv_prompts, scored: as for `sync_weights`

        What the engine has is patched. If it cannot be, it gets the newest whole version. Raises SyncError as
        `sync_weights` does.
        """
        return engine._drive(self.pulling(engine, kv_amax, kv_prompts, scored))

    def pulling(self, engine: Any, *settings: Any) -> Generator[Call, Any, SyncReport | None]:
        """Pull as a procedure. engine: an EngineBase, or a server's LifecycleFront; settings: as `pull` takes them"""
        if self._store.read_json(HELD) is None:  # the trainer needs it, and no other engine has written it
            quantised, reloaded = yield from engine._asked(formats(engine.state))
            self._store.write_json(HELD, {"fp8": sorted(quantised), "reloaded": dict(reloaded)})
        latest = self._store.read_json("latest.json")
        if latest is None or (latest["chain"][-1]["stamp"] == engine.state.stamp and engine.serving):
            return None
        report: SyncReport | None = None
        at = [number for number, link in enumerate(latest["chain"]) if link["stamp"] == engine.state.stamp]
        if at and engine.serving:
            with suppress(SyncError):
                report = yield from engine._sync(self._chain(latest, at[0], engine.state.stamp), None, *settings)
        if report is None:
            latest = self._store.read_json("latest.json") or latest  # files of an old one may be gone
            wholes = [number for number, link in enumerate(latest["chain"]) if link["whole"]]
            report = yield from engine._sync(self._chain(latest, wholes[-1], None), None, *settings)
        self.version = latest["version"]
        return report

    def _chain(self, latest: dict[str, Any], at: int, base: str | None) -> Chain:
        """Return the link at that place of the chain, unless it is the base, and all that follow."""
        links, manifest = latest["chain"][at:], read_manifest(latest["manifest"])

        def patches() -> Iterator[tuple[str, torch.Tensor]]:
            first, *others = links
            if base is None:
                yield from self._store.patches(f"{first['version']:08d}.whole")
            for link in others:
                yield from self._store.patches(f"{link['version']:08d}.patches")

        return Chain(manifest, base, links[-1]["stamp"], patches)


def _compressed(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def _expanded(data: bytes, nbytes: int, where: str) -> bytes:
    import pyarrow

    try:
        return bytes(pyarrow.decompress(data, decompressed_size=nbytes, codec="zstd", asbytes=True))
    except OSError as error:
        raise ConfigError(f"{where} is damaged: {error}") from error
