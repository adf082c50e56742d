"""An engine's end of a chain of versions (apply.weight_sync.delta.store): what it has is patched, or all is read."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Protocol

from fp8plan.errors import ConfigError, Fp8PlanError, LostEngineError, NotServingError, SyncError
from fp8plan.runtime.apply.weight_sync.calls import Call, Files, Procedure
from fp8plan.runtime.apply.weight_sync.delta.archive import Archive
from fp8plan.runtime.apply.weight_sync.delta.base import Chain
from fp8plan.runtime.apply.weight_sync.delta.files import UnreadableError
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD, LATEST, Latest, Link, Store, formats
from fp8plan.runtime.apply.weight_sync.manifest import Manifest, quantised_manifest, refuse
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.state import SyncState

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS: Final = 3  # newest versions that one pull tries, while the trainer deletes the files of older ones


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


class Following(Protocol):
    """The part of an engine, a fleet or a server's front end that a Follower uses.

    state: the state of its weights
    """

    state: SyncState

    @property
    def serving(self) -> bool:
        """Return whether the weights may be used."""
        ...

    def drive(self, procedure: Procedure) -> Any:
        """Run a procedure to its end, and return what it returns; under asyncio, a coroutine that does."""
        ...

    def asking(self, procedure: Procedure) -> Procedure:
        """Return the procedure, made to run while nobody else uses the engine. It changes nothing in it."""
        ...

    def syncing(
        self, source: Any, manifest: Any, kv_amax: Any, kv_prompts: Any, scored: Scored | None, /
    ) -> Generator[Call, Any, SyncReport]:
        """Return the procedure that makes new weights serve, as `sync_weights` takes its arguments."""
        ...


class Follower:
    """An engine's end of a chain.

    url:     of the store
    version: number of the version that was pulled last; None before the first
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self.version: int | None = None

    def pull(self, engine: Following, kv_amax: Any = None, kv_prompts: Any = None, scored: Scored | None = None) -> Any:
        """Bring an engine, or a fleet, to the newest version, and return the SyncReport; None if nothing is new.

        engine: one that takes E4M3 (SyncSettings.weights_in="fp8_block"). Under asyncio this returns a coroutine, and
                requests may run until the files are here
        kv_amax, kv_prompts, scored: as for `sync_weights`

        What the engine has is patched. If it cannot be, it gets the newest whole version. Raises SyncError as
        `sync_weights` does, and for a store that cannot be read, or files that are damaged: all are checked before the
        engine is written to, so that the old weights serve on.
        """
        return engine.drive(self._pulling(engine, kv_amax, kv_prompts, scored))

    def _pulling(
        self, engine: Following, kv_amax: Any, kv_prompts: Any, scored: Scored | None
    ) -> Generator[Call, Any, SyncReport | None]:
        yield from self.announcing(engine)
        refused: str | None = None
        while True:
            with TemporaryDirectory(prefix="fp8plan-") as folder:
                fetched = yield from self.fetching(engine, folder, refused)
                if fetched is None:
                    return None
                report, refused = yield from self.writing(engine, fetched, kv_amax, kv_prompts, scored)
                if report is not None:
                    return report

    def announcing(self, engine: Following) -> Procedure:
        """Write what the trainer needs to know of the engine, unless another engine has."""
        with _nothing_written(engine):
            try:
                held = yield Files(self._store.held)
            except ConfigError:
                held = None  # of no use to anybody
            if held is None:
                held = yield from engine.asking(formats(engine.state))
                yield Files(self._store.write_json, (HELD, held))

    def fetching(self, engine: Following, folder: str, refused: str | None) -> Generator[Call, Any, Fetched | None]:
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
                latest = yield Files(self._store.latest)
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
                        paths = yield Files(self._fetched, (links, base, latest.manifest, folder))
                    except UnreadableError as error:  # the files of another way may be sound
                        unreadable.add(error.where)
                        refused = refused or str(error)
                    else:
                        return Fetched(links, latest.manifest, base, since, paths, refused)
            raise SyncError(refused or f"{self._store.url} has no whole version")

    def writing(
        self,
        engine: Following,
        fetched: Fetched,
        kv_amax: Any = None,
        kv_prompts: Any = None,
        scored: Scored | None = None,
    ) -> Generator[Call, Any, tuple[SyncReport | None, str | None]]:
        """Sync local files. Returns the SyncReport; or None, and why the engine needs all tensors.

        Both are None if the engine's weights have changed since the files were asked for; then ask again.
        kv_amax, kv_prompts, scored: as `pull` takes them
        """
        state = engine.state
        if fetched.since != _weights_of(engine) and not (state.shut_down or state.asleep):  # these `syncing` refuses
            return None, None
        try:
            with fetched.opened:
                report = yield from engine.syncing(self._chain(fetched), None, kv_amax, kv_prompts, scored)
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
            with closing(archive):
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
            archives = [fetched.opened.enter_context(closing(archive)) for archive in opened]
            return (pair for archive in archives for pair in archive.patches())

        return Chain(fetched.manifest, fetched.base, fetched.links[-1].stamp, patches)


@contextmanager
def _nothing_written(engine: Following) -> Iterator[None]:
    """Turn errors before a write into a SyncError that says which weights serve."""
    try:
        yield
    except (NotServingError, LostEngineError):
        raise
    except Fp8PlanError as error:
        serve = "the old weights serve" if engine.serving else "the engine still refuses to generate"
        raise SyncError(f"{error}. Nothing was written; {serve}") from error


def _refuse_other_model(manifest: Manifest, expected: Manifest | None) -> None:
    if expected is not None:
        codes = [entry.name for entry in manifest if entry.dtype == "float8_e4m3fn"]
        refuse(manifest, quantised_manifest(expected, codes), "fp8_block")


def _weights_of(engine: Following) -> str | None:
    """Return the stamp of the weights that an engine serves; None if it serves none, or the checkpoint's."""
    return engine.state.stamp if engine.serving else None


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
