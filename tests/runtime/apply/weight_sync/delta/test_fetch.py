"""A follower copies files before an engine syncs: which ones, in which thread, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from follower_fakes import FORMATS, Engine, Report
from slow_files import URL, SlowFiles, slow_files, stored

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.engine import async_engine
from fp8plan.runtime.apply.interrupts import Held
from fp8plan.runtime.apply.weight_sync.calls import Call
from fp8plan.runtime.apply.weight_sync.delta import files as store_files
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD, Store
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.state import Event


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> Iterator[type[SlowFiles]]:
    with slow_files(tmp_path / "temporary") as files:
        yield files


@pytest.fixture
def publisher() -> Publisher:
    """A trainer that has published its first version."""
    publisher = Publisher(URL, fp8=[], every=3)
    publisher._store.write_json(HELD, FORMATS)
    publish(publisher)
    return publisher


def publish(publisher: Publisher) -> None:
    latest = publisher._store.latest()
    value = 1.0 if latest is None else latest.newest.version + 1.0
    publisher.publish({"a": torch.full((64, 8), value).bfloat16(), "b": torch.arange(4.0).bfloat16()})


@pytest.fixture
def behind(publisher: Publisher, files: type[SlowFiles]) -> tuple[Engine, Follower]:
    """An engine with the first version, whose follower has the second one before it."""
    engine, follower = Engine(), Follower(URL)
    follower.pull(engine)
    publish(publisher)
    files.opened.clear()
    return engine, follower


class AsyncEngine(Engine):
    async def drive(self, procedure: Any) -> Any:
        async def answer(call: Call) -> None:
            self.answer(call)

        return await async_engine.driven(procedure, answer)


def test_files_are_copied_before_the_engine_is_called(
    publisher: Publisher, files: type[SlowFiles], tmp_path: Path
) -> None:
    engine, follower, before = Engine(), Follower(URL), list[int]()

    def meanwhile() -> None:
        before.append(len(files.opened))
        assert len(list((tmp_path / "temporary").glob("*/*"))) == len(files.opened)
        files.store.clear()  # the sync reads local files only

    assert follower.pull(engine)
    assert follower.pull(engine) is None
    publish(publisher)
    publish(publisher)
    files.opened.clear()
    engine.meanwhile = meanwhile
    assert follower.pull(engine) == Report(engine.state.stamp or "")
    assert files.opened == ["00000002.patches", "00000003.patches"]
    assert before == [2]
    assert engine.written == [(False, ["a", "b"]), (True, ["a", "a"])]
    assert follower.version == 3


def test_a_folder_is_read_where_it_is(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path / "store"), fp8=[])
    publisher._store.write_json(HELD, FORMATS)
    publish(publisher)
    engine = Engine()
    engine.meanwhile = lambda: [folder.rmdir() for folder in (tmp_path / "temporary").iterdir()]  # type: ignore[assignment, return-value]
    assert Follower(str(tmp_path / "store")).pull(engine)


def test_a_link_that_is_deleted_before_its_copy_leads_to_the_newest_whole_version(
    publisher: Publisher, files: type[SlowFiles]
) -> None:
    engine, follower = Engine(), Follower(URL)
    follower.pull(engine)
    for _ in range(4):
        publish(publisher)
    files.opened.clear()
    files.vanishing.append("00000003.patches")
    assert "FileNotFoundError" in follower.pull(engine).healed
    assert files.opened == ["00000002.patches", "00000003.patches", "00000004.whole", "00000005.patches"]
    assert engine.written[1:] == [(False, ["a", "b", "a"])]
    assert follower.version == 5


def test_all_tensors_that_cannot_be_copied_are_an_error(publisher: Publisher, files: type[SlowFiles]) -> None:
    engine, follower = Engine(), Follower(URL)
    files.vanishing.append(".whole")
    failure = (
        r"^copying slow://store/00000001-\w{8}.whole to .*: FileNotFoundError.*\. Nothing was written; the old weights"
    )
    with pytest.raises(SyncError, match=failure):
        follower.pull(engine)
    assert not engine.written


def test_a_disk_that_is_full_is_named_and_does_not_have_all_tensors_copied(
    behind: tuple[Engine, Follower], files: type[SlowFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, follower = behind

    def full() -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(store_files, "let_in", full)
    with pytest.raises(
        SyncError, match=r"00000002-\w{8}.patches to .*\.patches: .*No space left.*Nothing was written; the old weights"
    ):
        follower.pull(engine)
    assert files.opened == ["00000002.patches"]


def test_a_store_that_vanishes_is_no_newest_version(
    behind: tuple[Engine, Follower], files: type[SlowFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, follower = behind
    files.store.pop(stored("00000002.patches"))
    engine.meanwhile = lambda: pytest.fail("written")
    fetch = Store.fetch

    def emptied(self: Store, names: Any, folder: str) -> Any:
        files.store.pop("/store/latest.json", None)
        return fetch(self, names, folder)

    monkeypatch.setattr(Store, "fetch", emptied)
    with pytest.raises(SyncError, match=r"00000002.*has no latest.json any more"):
        follower.pull(engine)


def test_an_engine_that_was_shut_down_meanwhile_has_no_more_copied(
    behind: tuple[Engine, Follower], files: type[SlowFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, follower = behind
    fetch = Store.fetch

    def stopped(self: Store, names: Any, folder: str) -> Any:
        engine.state.note(Event.CLOSE)
        engine.serving, engine.busy = False, True
        return fetch(self, names, folder)

    monkeypatch.setattr(Store, "fetch", stopped)
    with pytest.raises(SyncError, match="requests are running"):
        follower.pull(engine)
    assert files.opened == ["00000002.patches"]


def test_patches_that_an_engine_refuses_are_followed_by_all_tensors(behind: tuple[Engine, Follower]) -> None:
    engine, follower = behind
    engine.refuses_patches = True
    assert follower.pull(engine).healed == "patches of other weights; the old weights serve"
    assert engine.written[1:] == [(False, ["a", "b", "a"])]


def test_an_engine_that_takes_no_sync_now_has_no_more_copied(
    behind: tuple[Engine, Follower], files: type[SlowFiles]
) -> None:
    engine, follower = behind
    engine.busy = True
    with pytest.raises(SyncError, match="1 requests are running"):
        follower.pull(engine)
    assert files.opened == ["00000002.patches"]


@pytest.mark.parametrize("end", ["cut", "flipped"])
def test_a_damaged_copy_is_named_by_its_place_in_the_store(
    publisher: Publisher, files: type[SlowFiles], end: str
) -> None:
    path = stored("00000001.whole")
    data = files.store[path].getvalue()
    files.store[path].seek(0)
    files.store[path].truncate()
    files.store[path].write(data[:-20] if end == "cut" else data[:-30] + b"{" + data[-29:])
    with pytest.raises(SyncError, match=r"slow://store/00000001-\w{8}.whole.*the old weights serve$"):
        Follower(URL).pull(Engine())


async def underway(files: type[SlowFiles], pull: asyncio.Task[Any]) -> None:
    while not files.begun.is_set():
        assert not pull.done()
        await asyncio.sleep(0.01)


def slow(files: type[SlowFiles]) -> None:
    files.begun.clear()
    files.fast.clear()


def test_the_event_loop_goes_on_while_files_are_copied(publisher: Publisher, files: type[SlowFiles]) -> None:
    async def steps() -> None:
        engine, follower = AsyncEngine(), Follower(URL)
        slow(files)
        pull = asyncio.create_task(follower.pull(engine))
        await underway(files, pull)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not pull.done()
        assert not engine.written
        files.fast.set()
        assert await pull
        assert engine.written == [(False, ["a", "b"])]

    asyncio.run(asyncio.wait_for(steps(), 30))


def test_a_pull_that_is_cancelled_ends_its_copy(publisher: Publisher, files: type[SlowFiles], tmp_path: Path) -> None:
    async def steps() -> None:
        engine = AsyncEngine()
        slow(files)
        pull = asyncio.create_task(Follower(URL).pull(engine))
        await underway(files, pull)
        pull.cancel()
        begun = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert time.monotonic() - begun < 1.0  # the whole copy takes longer
        assert list((tmp_path / "temporary").iterdir()) == []
        assert not files.fast.is_set()
        files.fast.set()
        assert await Follower(URL).pull(engine)  # in the same thread, which is not stopped any more

    asyncio.run(asyncio.wait_for(steps(), 30))


def test_other_weights_that_came_meanwhile_are_looked_at_again(publisher: Publisher, files: type[SlowFiles]) -> None:
    """A second pull has brought the newest version, or somebody else other weights."""

    async def steps() -> None:
        engine, follower = AsyncEngine(), Follower(URL)
        slow(files)
        first, second = (asyncio.create_task(follower.pull(engine)) for _ in range(2))
        await underway(files, first)
        files.fast.set()
        assert [await first, await second].count(None) == 1
        assert len(engine.written) == 1
        publish(publisher)
        slow(files)
        pull = asyncio.create_task(follower.pull(engine))
        await underway(files, pull)
        engine.state.stamp = "a trainer's own"
        files.fast.set()
        assert await pull
        assert engine.written[1:] == [(False, ["a", "b", "a"])]

    asyncio.run(asyncio.wait_for(steps(), 30))


def test_ctrl_c_ends_a_copy(publisher: Publisher, files: type[SlowFiles]) -> None:
    """Also under a call that holds it back elsewhere."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    slow(files)
    press = threading.Thread(target=lambda: (files.begun.wait(30), os.kill(os.getpid(), signal.SIGINT)))
    press.start()
    try:
        with pytest.raises(KeyboardInterrupt), Held(lambda: None):
            Follower(URL).pull(Engine())
        assert not files.fast.is_set()
    finally:
        press.join()
        signal.signal(signal.SIGINT, before)
