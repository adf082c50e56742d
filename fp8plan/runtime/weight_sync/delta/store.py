"""A chain of patches in a folder or an object store, for a trainer and engines without a fast link between them.

    URL/engine.json         how engines hold the model: the first one that follows writes it
    URL/<version>.patches   what a version changed since the one before
    URL/<version>.whole     all tensors of the first version, and of one version in `every`
    URL/latest.json         the versions that are there; written last, so that it names complete files only

An engine that has a version of the chain replays what follows. Another one takes the newest whole version first. It
copies these files to a temporary folder before it syncs, unless the store is a folder itself.

A file is its patches, one after the other, each compressed by zstd if the trainer says so; then an index in JSON, and
the index's length in 8 bytes. Each patch carries its own checksum (runtime.weight_sync.delta.patch).

URLs are fsspec's: a path, s3://..., gs://..., memory://... Some need a package that fsspec names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from fp8plan.checks import instance
from fp8plan.checks import whole as whole_number
from fp8plan.errors import ConfigError, SyncError, text_of
from fp8plan.jsonl import parse
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.interrupts import let_in
from fp8plan.runtime.weight_sync.delta.base import Base, Chain
from fp8plan.runtime.weight_sync.delta.patch import packed, whole
from fp8plan.runtime.weight_sync.delta.top_k import for_each_matrix
from fp8plan.runtime.weight_sync.manifest import entry_of, pairs_of, plain, read_manifest
from fp8plan.runtime.weight_sync.procedure import formats
from fp8plan.runtime.weight_sync.state import Call, Procedure, Scored, SyncReport

if TYPE_CHECKING:
    from torch import Tensor

EVERY: Final = 20
CODECS: Final = (None, "zstd")
HELD: Final = "engine.json"
LENGTH: Final = 8  # bytes of the index's length
BLOCK: Final = 1 << 22  # bytes that are copied at once


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

    def fetch(self, names: Iterable[str], folder: str) -> dict[str, str]:
        """Return name -> local path of files: their own in a store that is a folder, else that of a copy.

        folder: for the copies. Raises ConfigError for a file that cannot be read
        """
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._files, LocalFileSystem):
            return {name: self.path(name) for name in names}
        paths = {name: f"{folder}/{name}" for name in names}
        for name, path in paths.items():
            try:
                with self._files.open(self.path(name), "rb") as file, open(path, "wb") as copy:
                    while data := file.read(BLOCK):  # fsspec's own get_file cannot be broken off
                        copy.write(data)
                        let_in()
            except Exception as error:  # each file system has its own
                raise ConfigError(f"copying {self.url}/{name} to {path}: {text_of(error)}") from error
        return paths

    def patches(self, name: str, path: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the patches of a file. Raises ConfigError for a file that is missing or damaged.

        path: its local path, from `fetch`
        """
        import torch

        where = f"{self.url}/{name}"
        try:
            with open(path, "rb") as file:
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


@dataclass(slots=True)
class Fetched:
    """Local files that lead an engine to a version.

    links:    of the chain, the one that they start from included
    manifest: entries of all tensors, as plain data
    base:     stamp of the weights that are patched; None: the first link's file holds all tensors
    since:    stamp of the weights that served when the files were asked for; None: the engine did not serve
    paths:    name -> path
    refused:  why patches could not be used; None: they were not tried
    read:     True once a sync has begun to read the files
    """

    links: list[dict[str, Any]]
    manifest: Any
    base: str | None
    since: str | None
    paths: dict[str, str]
    refused: str | None
    read: bool = False


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

        engine: one that takes E4M3 (SyncSettings.weights_in="fp8_block"). Under asyncio this returns a coroutine, and
                requests may run until the files are here
        kv_amax, kv_prompts, scored: as for `sync_weights`

        What the engine has is patched. If it cannot be, it gets the newest whole version. Raises SyncError as
        `sync_weights` does.
        """
        return engine._drive(self._pulling(engine, kv_amax, kv_prompts, scored))

    def _pulling(self, engine: Any, *settings: Any) -> Generator[Call, Any, SyncReport | None]:
        yield from self.announcing(engine)
        refused: str | None = None
        while True:
            with TemporaryDirectory(prefix="fp8plan-") as folder:
                fetched = yield from self.fetching(engine, folder, refused)
                if fetched is None:
                    return None
                report, refused = yield from self.writing(engine, fetched, *settings)
                if report is not None:
                    return report

    # Procedures, whose `engine` is an EngineBase or a server's LifecycleFront.

    def announcing(self, engine: Any) -> Procedure:
        """Write what the trainer needs to know of the engine, unless another engine has."""
        if (yield Call("files", (self._store.read_json, HELD))) is None:
            quantised, reloaded = yield from engine._asked(formats(engine.state))
            held = {"fp8": sorted(quantised), "reloaded": dict(reloaded)}
            yield Call("files", (self._store.write_json, HELD, held))

    def fetching(self, engine: Any, folder: str, refused: str | None) -> Generator[Call, Any, Fetched | None]:
        """Return the files that bring the engine to the newest version; None if it has that. The engine may serve.

        folder:  for copies of the files
        refused: why the engine has not taken patches, so that it needs all tensors; None: it has not

        Raises SyncError if a file cannot be copied. Only a patch may be missing, as the trainer deletes old ones.
        """
        since = _weights_of(engine)
        while True:
            latest = yield Call("files", (self._store.read_json, "latest.json"))
            if latest is None and refused is not None:
                raise SyncError(f"{refused}; and {self._store.url} has no latest.json any more. Nothing was written")
            if latest is None or (refused is None and latest["chain"][-1]["stamp"] == since):
                return None
            chain = latest["chain"]
            at = [number for number, link in enumerate(chain) if link["stamp"] == since and refused is None]
            base = since if at else None
            links = chain[(at or [number for number, link in enumerate(chain) if link["whole"]])[-1] :]
            try:
                paths = yield Call("files", (self._store.fetch, _names(links, base), folder))
            except ConfigError as error:
                if base is None or not isinstance(error.__cause__, FileNotFoundError):
                    raise SyncError(f"{error}. Nothing was written") from error
                refused = str(error)
            else:
                return Fetched(links, latest["manifest"], base, since, paths, refused)

    def writing(
        self, engine: Any, fetched: Fetched, *settings: Any
    ) -> Generator[Call, Any, tuple[SyncReport | None, str | None]]:
        """Sync local files. Returns the SyncReport; or None, and why the engine needs all tensors.

        Without a report and a reason the engine has other weights than when the files were asked for.
        settings: as `pull` takes them
        """
        state = engine.state
        if fetched.since != _weights_of(engine) and not (state.shut_down or state.asleep):  # these `_sync` refuses
            return None, None
        try:
            report: SyncReport = yield from engine._sync(self._chain(fetched), None, *settings)
        except SyncError as error:
            if fetched.base is None or not fetched.read:  # the engine takes no sync now
                raise
            return None, str(error)
        self.version = fetched.links[-1]["version"]
        return (report if fetched.refused is None else replace(report, healed=fetched.refused)), None

    def _chain(self, fetched: Fetched) -> Chain:
        def patches() -> Iterator[tuple[str, Tensor]]:
            fetched.read = True
            return (pair for name, path in fetched.paths.items() for pair in self._store.patches(name, path))

        return Chain(read_manifest(fetched.manifest), fetched.base, fetched.links[-1]["stamp"], patches)


def _weights_of(engine: Any) -> str | None:
    """Return the stamp of the weights that an engine serves; None if it serves none, or the checkpoint's."""
    stamp: str | None = engine.state.stamp if engine.serving else None
    return stamp


def _names(links: list[dict[str, Any]], base: str | None) -> list[str]:
    """Return the files that lead from a base, or from none, over links of a chain."""
    first, *others = (f"{link['version']:08d}" for link in links)
    return [*([] if base else [f"{first}.whole"]), *(f"{number}.patches" for number in others)]


def _compressed(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def _expanded(data: bytes, nbytes: int, where: str) -> bytes:
    import pyarrow

    try:
        return bytes(pyarrow.decompress(data, decompressed_size=nbytes, codec="zstd", asbytes=True))
    except OSError as error:
        raise ConfigError(f"{where} is damaged: {error}") from error
