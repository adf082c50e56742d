"""A chain of versions in a folder or an object store, for a trainer and engines without a fast link between them.

    URL/engine.json               how engines hold the model: the first one that follows writes it
    URL/<version>-<stamp>.patches what a version changed since the one before
    URL/<version>-<stamp>.whole   all tensors of the first version, and of one version in `every`
    URL/latest.json               the versions that are there, and who writes them; written last, so that it names
                                  complete files only

An engine that has a version of the chain replays what follows. Another one takes the newest whole version first. It
copies these files to a temporary folder, unless the store is a folder itself, and checks them to the last bit before it
syncs (runtime.apply.weight_sync.delta.archive).

One Publisher writes. A new one takes over with a whole version under a new epoch, and the one before then refuses to
publish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from msgspec.structs import replace

from fp8plan.checks import instance
from fp8plan.checks import whole as whole_number
from fp8plan.errors import ConfigError, Fp8PlanError, SyncError, warn
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.apply.weight_sync.delta.archive import CODECS, blocks, zstd
from fp8plan.runtime.apply.weight_sync.delta.base import Base
from fp8plan.runtime.apply.weight_sync.delta.listing import LATEST, Latest, Link, Store, Writer
from fp8plan.runtime.apply.weight_sync.delta.patch import packed, refuse_values, whole
from fp8plan.runtime.apply.weight_sync.delta.top_k import for_each_matrix, refuse_codes
from fp8plan.runtime.apply.weight_sync.manifest import (
    as_held,
    dtype_name,
    entry_of,
    gathered,
    is_matrix,
    pair_of,
    pairs_of,
    refuse,
    rounding,
)

if TYPE_CHECKING:
    from torch import Tensor

EVERY: Final = 20
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
        codec: str | None = None,
        top_k: TopK | None = None,
    ) -> None:
        if codec not in CODECS:
            raise ConfigError(f"codec is {codec!r}; allowed: None, 'zstd'")
        if codec is not None:
            zstd()
        if top_k is not None:
            instance("top_k", top_k, TopK, "TopK(share=1e-4)")
        self._every = whole_number("every", every, 1)
        self._store, self._codec, self._top_k = Store(url), codec, top_k
        self._held = self._store.held()
        if fp8 is None and self._held is None:
            raise ConfigError(
                f"no engine has followed {url} yet; type, beside the engine, Follower(url).pull(engine), or give fp8, "
                "the names of the tensors that engines hold in FP8"
            )
        self._fp8 = None if fp8 is None else frozenset(fp8)
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
        link = Link(1 if latest is None else latest.newest.version + 1, uuid4().hex)
        try:
            if chain:
                link = replace(link, patches=self._write(link, "patches", lambda: patches))
            wholes = [at for at, each in enumerate(chain) if each.whole]
            if not wholes or len(chain) - wholes[-1] >= self._every:
                link = replace(link, whole=self._write(link, "whole", lambda: _whole(base)))
            kept = _kept((*chain, link))
            writer = self._taking(self._store.latest())  # another may have taken over meanwhile
            self._store.write_json(LATEST, Latest(writer, base.manifest, kept))
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
        yield from as_held(self._sound(pairs_of(tensors)), self._wide, rounded)
        if rounded and not self._said_rounded:
            self._said_rounded = True
            warn(rounding(rounded))

    def _sound(self, pairs: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield a trainer's pairs, gathered. Raises ConfigError for a tensor that engines would refuse."""
        stream = iter(pairs)
        for item in stream:
            name, tensor = pair_of(item)
            tensor = gathered(tensor)
            try:
                refuse((entry_of(name, tensor),), None, "fp8_block")
                if self._top_k is not None:
                    refuse_codes(name, dtype_name(tensor.dtype))
                refuse_values(name, tensor, is_matrix(tensor.shape))
            except ConfigError:
                for rest in stream:  # the trainer's other ranks gather, too
                    gathered(pair_of(rest)[1])
                raise
            yield name, tensor

    def _first(self, tensors: Any) -> Base:
        """Return a copy of all tensors, which begins a chain. Raises ConfigError for other ones than engines hold."""
        held = self._held
        self._wide = frozenset() if held is None else held.wide
        fp8 = held.fp8 if held is not None and self._fp8 is None else self._fp8 or frozenset()
        twins = () if held is None else held.twins
        base = Base((), "cpu", fp8, self._top_k, twins, self._every)
        base.manifest = tuple(entry_of(name, tensor) for name, tensor in base.recorded(self._pairs(tensors)))
        refuse(base.manifest, None if held is None else held.manifest, "fp8_block")
        if self._top_k is not None:
            for_each_matrix(self._top_k, base.manifest)  # raises ConfigError for too few bytes
        return base

    def _write(self, link: Link, kind: str, patches: Callable[[], Iterable[tuple[str, Tensor]]]) -> int:
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
    return ((name, packed([name], [whole(tensor)], [tensor])[0]) for name, tensor in base.pairs())


def _kept(chain: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return the links from the last whole version but one on: a reader may be in the middle of that."""
    wholes = [at for at, link in enumerate(chain) if link.whole]
    return chain[wholes[-2] if len(wholes) > 1 else 0 :]
