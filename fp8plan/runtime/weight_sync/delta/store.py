"""A chain of versions in a folder or an object store, for a trainer and engines without a fast link between them.

    URL/engine.json               how engines hold the model: the first one that follows writes it
    URL/<version>-<stamp>.patches what a version changed since the one before
    URL/<version>-<stamp>.whole   all tensors of the first version, and of one version in `every`
    URL/latest.json               the versions that are there, and who writes them; written last, so that it names
                                  complete files only

An engine that has a version of the chain replays what follows. Another one takes the newest whole version first. It
copies these files to a temporary folder, unless the store is a folder itself, and checks them to the last bit before it
syncs (runtime.weight_sync.delta.archive).

One Publisher writes. A new one takes over with a whole version under a new epoch, and the one before then refuses to
publish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from fp8plan.checks import instance
from fp8plan.checks import whole as whole_number
from fp8plan.errors import ConfigError, Fp8PlanError, LostEngineError, NotServingError, SyncError, warn
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.weight_sync import manifest as manifests
from fp8plan.runtime.weight_sync.delta.archive import CODECS, Archive, blocks
from fp8plan.runtime.weight_sync.delta.base import Base, Chain
from fp8plan.runtime.weight_sync.delta.files import UnreadableError
from fp8plan.runtime.weight_sync.delta.listing import HELD, LATEST, Latest, Link, Store, Writer, formats
from fp8plan.runtime.weight_sync.delta.patch import packed, refuse_values, whole
from fp8plan.runtime.weight_sync.delta.top_k import for_each_matrix, refuse_codes
from fp8plan.runtime.weight_sync.manifest import Manifest, dtype_name, entry_of, gathered, pair_of, pairs_of
from fp8plan.runtime.weight_sync.state import Call, Procedure, Scored, SyncReport

if TYPE_CHECKING:
    from torch import Tensor

EVERY: Final = 20
ROUNDS: Final = 3  # newest versions that one pull tries, while the trainer deletes the files of older ones
LEFT_BEHIND: Final = re.compile(r"\d{8}-[0-9a-f]{8}\.(patches|whole)|latest\.json\.[0-9a-f]{32}\.part")


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


class Publisher:
    """A trainer's end of a chain: every `publish` adds a version.

    url:    of the store; an engine must have followed it once (Follower), unless `fp8` is given
    fp8:    names of the tensors that engines hold in FP8; None: as engine.json says
    every:  one in so many versions is also written whole, for engines that come late
    device: place of the trainer's copy of the last version, "cpu" or "cuda"
    codec:  "zstd" or None
    top_k:  writes the most useful changes only; None: all of them

    Its first `publish` takes the store over from the Publisher before it, by a whole version. Raises SyncError for a
    store that cannot be used, ConfigError for arguments, and for files that no Publisher or Follower wrote.
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
        self._held = self._store.held()
        if fp8 is None and self._held is None:
            raise ConfigError(
                f"no engine has followed {url} yet; type, beside the engine, Follower(url).pull(engine), or give fp8, "
                "the names of the tensors that engines hold in FP8"
            )
        self._given = None if fp8 is None else frozenset(fp8)
        self._base: Base | None = None
        self._wide: frozenset[str] = frozenset()  # names of the tensors that this chain has in FP32
        self._said_rounded = False
        latest = self._store.latest()
        self._writer = Writer()
        self._before = "" if latest is None else latest.writer.token  # of the Publisher that it takes over from

    def publish(self, tensors: Any) -> Published:
        """Write the next version. tensors: as RolloutEngine.sync_weights takes them.

        Raises ConfigError for tensors that engines would refuse: NaN, Inf, other names, shapes or dtypes than theirs,
        and two that share one storage and differ; and if another Publisher has taken over. Raises SyncError for a store
        that cannot be read or written. The store then stays as it was, and the next `publish` writes what has changed
        since the last version.
        """
        latest = self._store.latest()
        self._taking(latest)
        self._held = self._held or self._store.held()
        chain: tuple[Link, ...] = ()
        patches: list[tuple[str, Tensor]] = []
        if self._base is not None and latest is not None and latest.newest.stamp == self._base.stamp:
            base, chain = self._base, latest.chain
            patches = list(base.patches(self._pairs(tensors), self._held.reloaded if self._held else {}))
        else:
            base = self._first(tensors)
        link = Link(1 if latest is None else latest.newest.version + 1, uuid4().hex, 0, 0)
        try:
            if chain:
                link = link._replace(patches=self._write(link, "patches", lambda: patches))
            if _whole_due(chain, self._every):
                link = link._replace(whole=self._write(link, "whole", lambda: _whole(base)))
            kept = _kept((*chain, link))
            writer = self._taking(self._store.latest())  # another may have taken over meanwhile
            self._store.write_json(LATEST, Latest(writer, base.manifest, kept).as_json())
        except SyncError as error:
            if not self._arrived(link):
                raise SyncError(f"{error}. The next publish writes all changes since the last version") from error
        except BaseException:
            self._arrived(link)
            raise
        base.commit(link.stamp)  # only now: a version that nobody can read must not be a base
        self._base, self._writer, self._before = base, writer, ""
        self._clean(kept, () if latest is None else latest.chain, sweep=not chain)
        return Published(link.version, link.patches, link.whole, base.residual.relative)

    def _taking(self, latest: Latest | None) -> Writer:
        """Return the writer of the next version: this Publisher, which takes the store over if it was another's.

        Raises ConfigError if another has taken over since this one was made, or has published.
        """
        other = Writer(token="") if latest is None else latest.writer
        if other.token == self._writer.token:
            return self._writer
        if other.token != self._before and other.epoch >= self._writer.epoch:
            raise ConfigError(
                f"another Publisher ({other.name}) has taken over {self._store.url} at {other.since}, and this one no "
                "longer writes; end this trainer, or make a new Publisher, which takes over in its turn"
            )
        return self._writer.after(other)

    def _pairs(self, tensors: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version as engines hold them. Says once that FP32 is rounded."""
        rounded: list[str] = []
        yield from manifests.as_held(self._sound(pairs_of(tensors)), self._wide, rounded)
        if rounded and not self._said_rounded:
            self._said_rounded = True
            warn(manifests.rounding(rounded))

    def _sound(self, pairs: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield a trainer's pairs, gathered. Raises ConfigError for a tensor that engines would refuse."""
        stream = iter(pairs)
        for item in stream:
            name, tensor = pair_of(item)
            tensor = gathered(tensor)
            try:
                manifests.refuse((entry_of(name, tensor),), None, "fp8_block")
                if self._top_k is not None:
                    refuse_codes(name, dtype_name(tensor.dtype))
                refuse_values(name, tensor, manifests.is_matrix(tensor.shape))
            except ConfigError:
                for rest in stream:  # the trainer's other ranks gather, too
                    gathered(pair_of(rest)[1])
                raise
            yield name, tensor

    def _first(self, tensors: Any) -> Base:
        """Return a copy of all tensors, which begins a chain. Raises ConfigError for other ones than engines hold."""
        held = self._held
        self._wide = frozenset() if held is None else held.wide
        fp8 = held.fp8 if held is not None and self._given is None else self._given or frozenset()
        base = Base((), self._device, fp8, self._top_k)
        base.twins, base.look_every = () if held is None else held.twins, self._every
        base.manifest = tuple(entry_of(name, tensor) for name, tensor in base.recorded(self._pairs(tensors)))
        manifests.refuse(base.manifest, None if held is None else held.manifest, "fp8_block")
        if self._top_k is not None:
            for_each_matrix(self._top_k, base.manifest)  # raises ConfigError for too few bytes
        return base

    def _write(self, link: Link, kind: str, patches: Callable[[], Iterable[tuple[str, Tensor]]]) -> int:
        """Write a file of a version, and return its bytes."""
        return self._store.write_blocks(link.file(kind), lambda: blocks(patches(), self._codec, link.stamp))

    def _arrived(self, link: Link) -> bool:
        """Return True if a version is in the store although writing it has failed. Else its files are deleted.

        Raises ConfigError if another Publisher has taken over, which may be why.
        """
        try:
            latest = self._store.latest()
        except Fp8PlanError:
            return False  # not known; the next version is whole then
        if latest is not None and latest.newest.stamp == link.stamp:
            return True
        self._deleted([link.file(kind) for kind in ("patches", "whole")])
        self._taking(latest)
        return False

    def _clean(self, kept: Iterable[Link], before: Iterable[Link], sweep: bool) -> None:
        """Delete files that no reader needs. sweep: also those of writers that were killed"""
        names = {name for link in before for name in link.files}
        if sweep:
            try:
                names |= {name for name in self._store.names() if LEFT_BEHIND.fullmatch(name)}
            except SyncError as error:
                warn(f"files of earlier trainers may be left: {error}")
        self._deleted(sorted(names - {name for link in kept for name in link.files}))

    def _deleted(self, names: Iterable[str]) -> None:
        """Delete files. One that cannot be is left to the next Publisher."""
        for name in names:
            try:
                self._store.delete([name])
            except SyncError as error:
                warn(str(error))
                return


def _whole(base: Base) -> Iterator[tuple[str, Tensor]]:
    """Yield a patch of each tensor with all its values."""
    return ((name, packed([name], [whole(tensor)], [tensor])[0]) for name, tensor in base.pairs())


def _whole_due(chain: tuple[Link, ...], every: int) -> bool:
    """Return True if the version after these is to be written whole."""
    wholes = [at for at, link in enumerate(chain) if link.whole]
    return not wholes or len(chain) - wholes[-1] >= every


def _kept(chain: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return the links from the last whole version but one on: a reader may be in the middle of that."""
    wholes = [at for at, link in enumerate(chain) if link.whole]
    return chain[wholes[-2] if len(wholes) > 1 else 0 :]


@dataclass(slots=True)
class Fetched:
    """Local files that lead an engine to a version, and are sound.

    links:    of the chain, the one that they start from included
    manifest: entries of all tensors
    base:     stamp of the weights that are patched; None: the first link's file holds all tensors
    since:    stamp of the weights that served when the files were asked for; None: the engine did not serve
    paths:    name -> path
    refused:  why patches could not be used; None: they were not tried
    read:     True once a sync has begun to read the files
    opened:   the files, from then on
    """

    links: tuple[Link, ...]
    manifest: Manifest
    base: str | None
    since: str | None
    paths: dict[str, str]
    refused: str | None
    read: bool = False
    opened: ExitStack = field(default_factory=ExitStack)


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
        `sync_weights` does, and for a store that cannot be read, or files that are damaged: all are checked before the
        engine is written to, so that the old weights serve on.
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
        with _nothing_written(engine):
            try:
                held = yield Call("files", (self._store.held,))
            except ConfigError:
                held = None  # of no use to anybody
            if held is None:
                held = yield from engine._asked(formats(engine.state))
                yield Call("files", (self._store.write_json, HELD, held.as_json()))

    def fetching(self, engine: Any, folder: str, refused: str | None) -> Generator[Call, Any, Fetched | None]:
        """Return the files that bring the engine to the newest version; None if it has that. The engine may serve.

        folder:  for copies of the files
        refused: why the engine has not taken patches, so that it needs all tensors; None: it has not

        Raises SyncError if no files lead there: some are damaged or missing, or the store cannot be read.
        """
        since = _weights_of(engine)
        with _nothing_written(engine):
            tried: Latest | None = None
            unreadable: set[str] = set()
            for _ in range(ROUNDS):
                latest = yield Call("files", (self._store.latest,))
                if latest is None and refused is not None:
                    raise SyncError(f"{refused}; and {self._store.url} has no {LATEST} any more")
                if latest is None or (refused is None and latest.newest.stamp == since):
                    return None
                if tried is not None and latest.newest == tried.newest:
                    break
                tried = latest
                _refuse_other_model(latest.manifest, engine.state.expected)
                for base, links in _ways(latest.chain, since if refused is None else None):
                    if not unreadable.isdisjoint(self._store.address(name) for name, _ in _files(links, base)):
                        continue
                    try:
                        paths = yield Call("files", (self._fetched, links, base, latest.manifest, folder))
                    except UnreadableError as error:  # the files of another way may be sound
                        unreadable.add(error.where)
                        refused = refused or str(error)
                    else:
                        return Fetched(links, latest.manifest, base, since, paths, refused)
            raise SyncError(refused or f"{self._store.url} has no whole version")

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
            with fetched.opened:
                report: SyncReport = yield from engine._sync(self._chain(fetched), None, *settings)
        except SyncError as error:
            if fetched.base is None or not fetched.read:  # the engine takes no sync now
                raise
            return None, str(error)
        self.version = fetched.links[-1].version
        return (report if fetched.refused is None else replace(report, healed=fetched.refused)), None

    def _fetched(self, links: tuple[Link, ...], base: str | None, manifest: Manifest, folder: str) -> dict[str, str]:
        """Return name -> local path of the files that lead over links, once they are here and sound."""
        paths = self._store.fetch({name: link.files[name] for name, link in _files(links, base)}, folder)
        for archive in self._opened(links, base, manifest, paths):
            with archive:
                archive.check()
        return paths

    def _opened(
        self, links: tuple[Link, ...], base: str | None, manifest: Manifest, paths: dict[str, str]
    ) -> Iterator[Archive]:
        for name, link in _files(links, base):
            where = self._store.address(name)
            yield Archive(paths[name], where, link.stamp, link.files[name], manifest, name.endswith(".whole"))

    def _chain(self, fetched: Fetched) -> Chain:
        def patches() -> Iterator[tuple[str, Tensor]]:
            """All files are opened before the first is read, as their writer may delete them meanwhile."""
            fetched.read = True
            opened = self._opened(fetched.links, fetched.base, fetched.manifest, fetched.paths)
            archives = [fetched.opened.enter_context(archive) for archive in opened]
            return (pair for archive in archives for pair in archive.patches())

        return Chain(fetched.manifest, fetched.base, fetched.links[-1].stamp, patches)


@contextmanager
def _nothing_written(engine: Any) -> Iterator[None]:
    """Turn errors before a write into a SyncError that says which weights serve."""
    try:
        yield
    except (NotServingError, LostEngineError):
        raise
    except Fp8PlanError as error:
        serve = "the old weights serve" if engine.serving else "the engine still refuses to generate"
        raise SyncError(f"{error}. Nothing was written; {serve}") from error


def _refuse_other_model(manifest: Manifest, expected: Manifest | None) -> None:
    """Raise ConfigError for versions of another model than the engine's. expected: its checkpoint's; None: not known"""
    if expected is not None:
        codes = [entry.name for entry in manifest if entry.dtype == "float8_e4m3fn"]
        manifests.refuse(manifest, manifests.quantised_manifest(expected, codes), "fp8_block")


def _weights_of(engine: Any) -> str | None:
    """Return the stamp of the weights that an engine serves; None if it serves none, or the checkpoint's."""
    stamp: str | None = engine.state.stamp if engine.serving else None
    return stamp


def _ways(chain: tuple[Link, ...], since: str | None) -> Iterator[tuple[str | None, tuple[Link, ...]]]:
    """Yield the ways to the newest version, the shortest first: a base or None, and the links that lead on from it.

    since: stamp of the weights that may be patched; None: none may be
    """
    for at, link in enumerate(chain):
        if since is not None and link.stamp == since:
            yield since, chain[at:]
    for at in reversed(range(len(chain))):
        if chain[at].whole:
            yield None, chain[at:]


def _files(links: tuple[Link, ...], base: str | None) -> list[tuple[str, Link]]:
    """Return the files that lead from a base, or from none, over links of a chain, each with its link."""
    first, *others = links
    whole = [] if base else [(first.file("whole"), first)]
    return [*whole, *((link.file("patches"), link) for link in others)]
