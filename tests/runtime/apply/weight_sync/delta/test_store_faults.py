"""Faults of a store and of who writes to it: each is refused before an engine is written to, by an error that names it,
and the next good version heals."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from follower_fakes import FORMATS, Engine
from http_files import Faults, http_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.weight_sync.delta import files as store_files
from fp8plan.runtime.apply.weight_sync.delta.archive import TAIL, Archive
from fp8plan.runtime.apply.weight_sync.delta.files import UnreadableError
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD, Formats, Store
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.manifest import Entry

Tensors = dict[str, torch.Tensor]
HARMLESS = r"Nothing was written; the old weights serve"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_files, "PAUSES_S", (0.01, 0.02))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder with an engine's formats."""
    folder = tmp_path / "store"
    Store(str(folder)).write_json(HELD, FORMATS)
    return folder


def tensors(value: float = 1.0) -> Tensors:
    return {"a": torch.full((64, 8), value).bfloat16(), "b": torch.arange(1.0, 5.0).bfloat16()}


def publish(publisher: Publisher, value: float) -> None:
    """Change one value of a matrix, so that the patch has places."""
    new = tensors()
    new["a"][3, 5] = value
    publisher.publish(new)


def one(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# --- what a trainer publishes ---------------------------------------------------------------------------------------


def with_value(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def changed(x: Tensors) -> Tensors:
        x[name].view(-1)[1] = value
        return x

    return changed


REFUSED: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "NaN": (with_value("a", float("nan")), "not finite: a; allowed: no NaN, no Inf"),
    "infinity in a vector": (with_value("b", float("-inf")), "not finite: b"),
    "a matrix of zeros": (lambda x: x | {"a": x["a"] * 0}, "all zeros: a; allowed: the policy's weights"),
    "float16": (lambda x: x | {"b": x["b"].half()}, "b is float16; allowed: bfloat16"),
    "integers": (lambda x: x | {"b": x["b"].long()}, "b is int64; allowed: bfloat16"),
    "another shape": (lambda x: x | {"a": x["a"][:60]}, r"a (has shape|is .*) \[60, 8\]"),
    "another name": (lambda x: x | {"c": x["b"]}, "unknown: c|c was not announced"),
    "a tensor less": (lambda x: {"a": x["a"]}, "missing: b|announced and not sent: b"),
    "E4M3 for BF16": (lambda x: x | {"a": x["a"].to(torch.float8_e4m3fn)}, "a is (torch.)?float8_e4m3fn"),
    "no tensor": (lambda x: [("a", x["a"]), ("b", None)], "b is of type NoneType"),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.parametrize("versions", [0, 1], ids=["first", "later"])
def test_tensors_that_engines_would_refuse_do_not_touch_the_store(store: Path, fault: str, versions: int) -> None:
    spoil, error = REFUSED[fault]
    publisher = Publisher(str(store))
    for number in range(versions):
        publisher.publish(tensors(1.0 + number))
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    with pytest.raises(ConfigError, match=error):
        publisher.publish(spoil(tensors(5.0)))
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before
    engine, follower = Engine(), Follower(str(store))
    publisher.publish(tensors(6.0))
    assert follower.pull(engine)
    assert follower.version == versions + 1


def test_fp32_is_rounded_where_engines_hold_bf16_and_said_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("fp8plan.runtime.apply.weight_sync.delta.store.warn", said.append)
    wide = FORMATS | {"manifest": [["a", "bfloat16", [64, 8]], ["b", "float32", [4]]]}
    Store(str(store)).write_json(HELD, wide)
    publisher = Publisher(str(store))
    third = torch.tensor([1 / 3, 2 / 3, 4 / 3, 5 / 3])
    for value in (1 / 3, 1 / 7):
        publisher.publish({"a": torch.full((64, 8), value), "b": third})
        assert publisher._base is not None
        held = dict(publisher._base.pairs())
        assert torch.equal(held["a"], torch.full((64, 8), value).bfloat16())
        assert torch.equal(held["b"], third)  # kept bit for bit
    assert len(said) == 1
    assert "rounded: a" in said[0]
    publisher.publish({"a": torch.full((64, 8), 1.0).bfloat16(), "b": third.bfloat16()})  # widened, as it was announced
    assert publisher._base.manifest[1].dtype == "float32"


# --- damaged files --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), kind=st.sampled_from(["patches", "whole"]))
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_no_bit_of_a_file_can_flip_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, codec: str | None, where: float, bit: int, kind: str
) -> None:
    folder = FOLDERS.get(codec)
    if folder is None:
        folder = FOLDERS[codec] = tmp_path_factory.mktemp("bits")
        publisher = Publisher(str(folder), fp8=[], codec=codec)
        publisher.publish(tensors())
        publish(publisher, 7.0)
    latest = Store(str(folder)).latest()
    assert latest is not None
    link = latest.chain[kind == "patches"]
    data = bytearray((folder / link.file(kind)).read_bytes())
    damaged = folder / "damaged"
    for flip in (0, 1 << bit):
        data[int(where * len(data))] ^= flip
        damaged.write_bytes(data)

        def read() -> list[tuple[str, bytes]]:
            with closing(
                Archive(str(damaged), "there", link.stamp, len(data), latest.manifest, kind == "whole")
            ) as archive:
                archive.check()
                return [(name, patch.numpy().tobytes()) for name, patch in archive.patches()]

        if not flip:
            written = read()
            continue
        try:
            readable = read()
        except UnreadableError as error:
            assert error.args[0].startswith("there")  # noqa: PT017
            continue
        # zstd ignores one bit of a frame's descriptor (RFC 8878, 3.1.1.1.1: unused bit).
        assert (codec, readable) == ("zstd", written)


FOLDERS: dict[str | None, Path] = {}


def reindexed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A file with another index, which has the right checksum: of a writer with a fault."""
    _, length = TAIL.unpack(data[-TAIL.size :])
    begin = len(data) - TAIL.size - length
    index = json.loads(data[begin : begin + length])
    change(index)
    text = json.dumps(index).encode()
    return data[:begin] + text + TAIL.pack(crc32(text), len(text))


ABSURD: dict[str, Callable[[dict[str, Any]], None]] = {
    "3 GiB for 1 kB": lambda index: index["patches"][0].__setitem__(2, 3 << 30),
    "a negative size": lambda index: index["patches"][0].__setitem__(1, -5),
    "more than the file": lambda index: index["patches"][0].__setitem__(1, 1 << 40),
    "no number": lambda index: index["patches"][0].__setitem__(2, "many"),
    "beyond all numbers": lambda index: index["patches"][0].__setitem__(2, 1e300),
    "two names exchanged": lambda index: index["patches"].reverse(),
    "an unknown name": lambda index: index["patches"][0].__setitem__(0, "c"),
    "one name twice": lambda index: index["patches"].append(index["patches"][0]),
    "a name that is a list": lambda index: index["patches"][0].__setitem__(0, []),
    "a tensor less": lambda index: index["patches"].pop(),
    "another codec": lambda index: index.__setitem__("codec", "gzip"),
    "another version's": lambda index: index.__setitem__("stamp", "0" * 32),
    "no patches": lambda index: index.pop("patches"),
}


@pytest.mark.parametrize("fault", ABSURD)
def test_an_absurd_index_is_refused_before_memory_is_taken(store: Path, fault: str) -> None:
    publisher = Publisher(str(store))
    publisher.publish(tensors())
    path = one(store, "*.whole")
    data = reindexed(path.read_bytes(), ABSURD[fault])
    path.write_bytes(data)
    listed = json.loads((store / "latest.json").read_text())
    listed["chain"][0]["whole"] = len(data)
    (store / "latest.json").write_text(json.dumps(listed))
    engine, follower = Engine(), Follower(str(store))
    tracemalloc.start()
    try:
        with pytest.raises(SyncError, match=rf"{path.name}.*{HARMLESS}"):
            follower.pull(engine)
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
    assert not engine.written
    Publisher(str(store)).publish(tensors(2.0))
    assert follower.pull(engine)


def test_versions_of_another_model_are_refused(store: Path) -> None:
    from fp8plan.runtime.apply.weight_sync.manifest import Entry

    Publisher(str(store)).publish(tensors())
    engine = Engine()
    engine.state.expected = (Entry("a", "bfloat16", (64, 9)), Entry("b", "bfloat16", (4,)))
    with pytest.raises(SyncError, match=rf"a has shape \[64, 8\]; allowed: \[64, 9\].*{HARMLESS}"):
        Follower(str(store)).pull(engine)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "another's"])
def test_where_one_file_is_damaged_another_way_is_taken(store: Path, damage: str) -> None:
    """An engine that is behind a whole version does without the patches before it."""
    publisher = Publisher(str(store), every=3)
    publish(publisher, 2.0)
    engine, follower = Engine(), Follower(str(store))
    follower.pull(engine)
    for value in (3.0, 4.0):
        publish(publisher, value)
    path = one(store, "00000002-*")
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "another's":
        path.write_bytes(one(store, "00000003-*").read_bytes())
    else:
        data[40] ^= 1
        path.write_bytes(data[:-3] if damage == "cut" else data)
    stamp = engine.state.stamp
    with pytest.raises(SyncError, match=rf"{path.name}.*{HARMLESS}"):
        follower.pull(engine)
    assert (len(engine.written), engine.state.stamp) == (1, stamp)
    publish(publisher, 5.0)  # whole
    assert path.name in follower.pull(engine).healed
    assert engine.written[1:] == [(False, ["a", "b"])]
    assert follower.version == 4


def test_a_file_that_is_deleted_during_a_write_is_read_all_the_same(store: Path) -> None:
    """In a folder it is not copied. A Publisher that takes over deletes the files before it."""
    publisher = Publisher(str(store))
    publisher.publish(tensors())
    engine, follower = Engine(), Follower(str(store))
    opened = follower._opened

    def vanish(*arguments: Any) -> Iterator[Archive]:
        yield from opened(*arguments)
        for path in store.glob("*.whole"):
            path.unlink()

    publish(publisher, 2.0)
    engine.meanwhile = lambda: setattr(follower, "_opened", vanish)
    assert follower.pull(engine)
    assert follower.version == 2
    assert not list(store.glob("*.whole"))


# --- JSON of another shape ------------------------------------------------------------------------------------------

SHAPES: list[Any] = [[], {}, 3, "x", None, {"chain": []}, {"writer": {}, "manifest": [], "chain": []}]


def spoilt(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def done(data: dict[str, Any]) -> Any:
        change(data)
        return data

    return done


WRONG_LATEST: list[Callable[[dict[str, Any]], Any]] = [
    *(lambda _, shape=shape: shape for shape in SHAPES),
    spoilt(lambda data: data["chain"].clear()),
    spoilt(lambda data: data["chain"][0].update(version=-1)),
    spoilt(lambda data: data["chain"][0].update(whole=0)),
    spoilt(lambda data: data["chain"][0].update(stamp="../../x")),
    spoilt(lambda data: data["chain"][0].update(more=1)),
    spoilt(lambda data: data.update(manifest=[["a", "bfloat16", [-1]]])),
    spoilt(lambda data: data.update(manifest=[["a", "zeros", [1]]])),
    spoilt(lambda data: data.update(manifest=[["a", "bfloat16", [1e999]]])),
]


@pytest.mark.parametrize("number", range(len(WRONG_LATEST)))
def test_a_latest_json_of_another_shape_is_named(store: Path, number: int) -> None:
    publisher = Publisher(str(store))
    publisher.publish(tensors())
    path = store / "latest.json"
    good = path.read_text()
    path.write_text(json.dumps(WRONG_LATEST[number](json.loads(good))))
    engine = Engine()
    with pytest.raises(SyncError, match=rf"{path} is not .*{HARMLESS}"):
        Follower(str(store)).pull(engine)
    for write in (lambda: Publisher(str(store)), lambda: publisher.publish(tensors(2.0))):
        with pytest.raises(ConfigError, match=f"{path} is not "):
            write()
    path.write_text(good)
    publisher.publish(tensors(2.0))
    assert Follower(str(store)).pull(engine)


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b'{"chain": "\xff"}'], ids=["empty", "deep", "no UTF-8"])
def test_a_latest_json_that_cannot_be_parsed_is_named(store: Path, text: bytes) -> None:
    Publisher(str(store)).publish(tensors())
    (store / "latest.json").write_bytes(text)
    with pytest.raises(SyncError, match=rf"latest\.json.*{HARMLESS}"):
        Follower(str(store)).pull(Engine())


def test_a_tensor_without_values_in_an_engines_checkpoint_is_named() -> None:
    with pytest.raises(ConfigError, match=r"w has shape \[0, 4\]; allowed: tensors with values"):
        Formats((Entry("w", "bfloat16", (0, 4)),), frozenset(), {})


@pytest.mark.parametrize(
    "shape", [*SHAPES, {"manifest": [], "fp8": 3, "reloaded": {}}, FORMATS | {"reloaded": {"a": "x"}}]
)
def test_an_engine_json_of_another_shape_is_named_and_written_anew(store: Path, shape: Any) -> None:
    path = store / HELD
    path.write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match=f"{path} is not what a Follower writes .*which writes it anew"):
        Publisher(str(store))
    engine = Engine()
    assert Follower(str(store)).pull(engine) is None
    assert Publisher(str(store)).publish(tensors()).version == 1


# --- a store in trouble ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(store: Path) -> Iterator[tuple[str, Faults, Publisher]]:
    pytest.importorskip("aiohttp")
    publisher = Publisher(str(store))
    publish(publisher, 2.0)
    with http_files(store) as (url, faults):
        yield url, faults, publisher


@pytest.mark.parametrize("part", ["latest.json", ".whole", HELD])
@pytest.mark.parametrize("fault", ["500", "short", "slow"])
def test_a_fault_that_passes_is_tried_again_and_one_that_stays_is_named(
    served: tuple[str, Faults, Publisher], fault: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, faults, publisher = served
    monkeypatch.setenv(store_files.TIMEOUT, "0.3")
    engine, follower = Engine(), Follower(url)
    faults.set(fault, 2, part)
    assert follower.pull(engine)
    publish(publisher, 3.0)
    faults.set(fault, 99, part if part != ".whole" else ".patches")
    begun, stamp = time.monotonic(), engine.state.stamp
    with pytest.raises(SyncError, match=rf"{url}/.*{HARMLESS}"):
        follower.pull(engine)
    assert time.monotonic() - begun < 5
    assert engine.state.stamp == stamp
    faults.set("", 0)
    assert follower.pull(engine)
    assert follower.version == 2


def test_a_block_that_comes_in_small_pieces_has_its_deadline(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec takes a proxy's page for a part of a file, again and again: each read gives that many bytes."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv(store_files.TIMEOUT, "0.3")
    (store / "a.patches").write_bytes(bytes(2_000_000))
    with http_files(store) as (url, faults):
        faults.set("page", 100_000, ".patches")
        begun = time.monotonic()
        with pytest.raises(SyncError, match=rf"copying {url}/a.patches.*no block for 0.3 s"):
            Store(url).fetch({"a.patches": 2_000_000}, str(store.parent))
        assert time.monotonic() - begun < 5


def test_an_address_that_nobody_answers_is_named() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(SyncError, match=rf"reading http://127.0.0.1:9/{HELD}: .*{HARMLESS}"):
        Follower("http://127.0.0.1:9").pull(Engine())


@pytest.mark.parametrize(("room", "file"), [(60, r"0.*\.patches"), (300, r"latest\.json")])
def test_a_disk_that_is_full_is_named_and_the_next_version_has_all_changes(store: Path, room: int, file: str) -> None:
    publisher = Publisher(str(store), every=2)
    publisher.publish(tensors())
    engine, follower = Engine(), Follower(str(store))
    follower.pull(engine)
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # as on a disk that is full, OSError from write
    try:
        with pytest.raises(SyncError, match=rf"writing {store}/{file}: OSError.*The next publish writes all changes"):
            publish(publisher, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before
    assert follower.pull(engine) is None
    publish(publisher, 3.0)
    assert follower.pull(engine)
    assert engine.written[1:] == [(True, ["a"])]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match=f"opening {tmp_path}/file/store/: .*Error"):
        Publisher(str(tmp_path / "file" / "store"), fp8=[])


def test_a_folder_that_is_gone_is_named(store: Path) -> None:
    publisher = Publisher(str(store))
    publish(publisher, 2.0)
    shutil.rmtree(store)
    with pytest.raises(SyncError, match=f"writing {store}/0.*: FileNotFoundError"):
        publish(publisher, 3.0)
    store.mkdir()
    publish(publisher, 4.0)
    assert Follower(str(store)).pull(Engine())


def test_a_version_is_out_although_old_files_cannot_be_deleted(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(str(store), every=1)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "_delete", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
        for value in (1.0, 2.0, 3.0):
            publisher.publish(tensors(value))
    assert len(list(store.glob("*.whole"))) == 3
    Publisher(str(store)).publish(tensors(4.0))
    assert len(list(store.iterdir())) == 3  # and nothing of the one before


def test_an_answer_that_is_lost_does_not_lose_the_version(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has written latest.json, and says that it has not."""
    publisher = Publisher(str(store))
    publisher.publish(tensors())
    engine, follower = Engine(), Follower(str(store))
    follower.pull(engine)
    write = Store.write_json
    with monkeypatch.context() as broken:

        def lost(self: Store, name: str, data: Any) -> None:
            write(self, name, data)
            raise SyncError("no answer")

        broken.setattr(Store, "write_json", lost)
        publish(publisher, 2.0)
    assert follower.pull(engine)
    publish(publisher, 3.0)
    assert follower.pull(engine)
    assert [patched for patched, _ in engine.written] == [False, True, True]


def test_a_time_limit_is_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(store_files.TIMEOUT, "soon")
    with pytest.raises(
        ConfigError, match="FP8PLAN_STORE_TIMEOUT_S is 'soon'; allowed: seconds above 0, 120 without it"
    ):
        Follower(str(tmp_path))


# --- two writers ----------------------------------------------------------------------------------------------------

TAKEN = r"another Publisher \(process \d+ on .*\) has taken over .* at 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def test_a_hand_over_in_order_begins_a_new_epoch_with_a_whole_version(store: Path) -> None:
    first, second = Publisher(str(store)), None
    engine, follower = Engine(), Follower(str(store))
    publish(first, 2.0)
    follower.pull(engine)
    second = Publisher(str(store))
    publish(first, 3.0)  # the second has not written so far
    made = second.publish(tensors(4.0))
    assert (made.version, made.nbytes, made.whole_bytes > 0) == (3, 0, True)
    latest = Store(str(store)).latest()
    assert latest is not None
    assert latest.writer.epoch == 2
    follower.pull(engine)
    assert [patched for patched, _ in engine.written] == [False, False]
    publish(second, 5.0)
    follower.pull(engine)
    assert engine.written[-1] == (True, ["a"])


def test_of_two_writers_that_live_the_older_one_is_told_who_has_taken_over(store: Path) -> None:
    older, newer = Publisher(str(store)), Publisher(str(store))
    publish(older, 2.0)
    with pytest.raises(ConfigError, match=TAKEN):  # two that were started at once
        publish(newer, 3.0)
    newer = Publisher(str(store))
    publish(newer, 3.0)
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    for _ in range(2):
        with pytest.raises(ConfigError, match=TAKEN):
            publish(older, 4.0)
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before
    publish(newer, 5.0)
    engine, follower = Engine(), Follower(str(store))
    follower.pull(engine)
    assert follower.version == 3


@pytest.mark.parametrize("when", ["files", "latest.json"])
def test_a_take_over_in_the_middle_of_a_publish_mixes_nothing(
    store: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, engine, follower = Publisher(str(store), every=1), Engine(), Follower(str(store))
    publish(older, 2.0)
    follower.pull(engine)
    newer = Publisher(str(store), every=1)
    method = "write_blocks" if when == "files" else "write_json"
    act = getattr(Store, method)

    def overtaken(self: Store, *arguments: Any) -> Any:
        if self is older._store and not overtook:
            overtook.append(1)
            publish(newer, 3.0)
        return act(self, *arguments)

    overtook: list[int] = []
    monkeypatch.setattr(Store, method, overtaken)
    if when == "files":
        with pytest.raises(ConfigError, match=TAKEN):
            publish(older, 4.0)
        follower.pull(engine)
    else:
        publish(older, 4.0)  # it has written last, and names files that the newer one has deleted
        with pytest.raises(SyncError, match=HARMLESS):
            follower.pull(engine)
    publish(newer, 5.0)
    assert follower.pull(engine)
    with pytest.raises(ConfigError, match=TAKEN):
        publish(older, 6.0)
    latest = Store(str(store)).latest()
    assert latest is not None
    assert engine.state.stamp == latest.newest.stamp
    assert latest.writer.token == newer._writer.token


KILLED = """
import sys, time, torch
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.delta.listing import Store
publisher = Publisher(sys.argv[1])
tensors = {"a": torch.full((64, 8), 1.0).bfloat16(), "b": torch.arange(1.0, 5.0).bfloat16()}
publisher.publish(tensors)
write = Store.write_json
def stuck(self, name, data):
    self._system.pipe_file(self.path(name + ".0123456789abcdef0123456789abcdef.part"), b"{")
    print("stuck", flush=True)
    time.sleep(60)
Store.write_json = stuck
publisher.publish(tensors | {"a": tensors["a"] * 2})
"""


def test_a_killed_trainer_and_its_restart_leave_one_chain_and_no_rest(store: Path) -> None:
    """kill -9 between the files of a version and latest.json."""
    command = [sys.executable, "-c", KILLED, str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "stuck\n"
        trainer.send_signal(signal.SIGKILL)
    assert len(list(store.iterdir())) == 5  # two files that no latest.json names
    engine, follower = Engine(), Follower(str(store))
    assert follower.pull(engine)
    restarted = Publisher(str(store))
    publish(restarted, 3.0)
    assert follower.pull(engine)
    publish(restarted, 4.0)
    assert follower.pull(engine)
    assert [patched for patched, _ in engine.written] == [False, False, True]
    names = sorted(re.sub("-[0-9a-f]{8}", "", path.name) for path in store.iterdir())
    assert names == ["00000002.whole", "00000003.patches", HELD, "latest.json"]
