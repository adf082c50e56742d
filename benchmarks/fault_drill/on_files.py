"""Faults of the files of a store: flipped bits, other sizes, other JSON, other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from fp8plan.runtime.apply.weight_sync.delta.archive import TAIL
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD, LATEST, Store

from .drill import Scene
from .fault import ENGINE, NEW, NO_FILES, OLD, SERVER, THROUGH_A_STORE, Fault

LEFT_OUT: Final = {ENGINE: NO_FILES}
KEPT: Final = r"Nothing was written; the old weights serve"
Damage = Callable[[Path], None]


def file_of(scene: Scene, kind: str) -> Path:
    """The newest version's file. kind: "patches" or "whole" """
    latest = Store(str(scene.folder)).latest()
    assert latest is not None
    return scene.folder / latest.newest.file(kind)


def damaged(kind: str, damage: Damage) -> Callable[[Scene], None]:
    """A version of patches, or a whole one of a trainer that has started again, whose file is damaged before a pull."""

    def act(scene: Scene) -> None:
        if kind == "whole":
            scene.place.new_trainer()
        scene.publish()
        damage(file_of(scene, kind))
        scene.pull()

    return act


def flipped(place: Callable[[int], int], bit: int = 4) -> Damage:
    """place: of a byte, by the file's size"""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place(len(data))] ^= 1 << bit
        path.write_bytes(data)

    return damage


def resized(size: Callable[[int], int]) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes((data + bytes(size(len(data))))[: size(len(data))])

    return damage


def forged(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Another index, with the right checksum and the right size in latest.json: of a writer with a fault."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        _, length = TAIL.unpack(data[-TAIL.size :])
        begin = len(data) - TAIL.size - length
        index = json.loads(data[begin : begin + length])
        change(index)
        text = json.dumps(index).encode()
        path.write_bytes(data[:begin] + text + TAIL.pack(crc32(text), len(text)))
        kind = path.suffix.removeprefix(".")
        relisted(lambda latest: latest["chain"][-1].update({kind: path.stat().st_size}))(path.parent)

    return damage


def relisted(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Another latest.json of a folder."""

    def damage(folder: Path) -> None:
        latest = json.loads((folder / LATEST).read_text())
        change(latest)
        (folder / LATEST).write_text(json.dumps(latest))

    return damage


def listing(damage: Callable[[Path], object], deleted: bool = True) -> Callable[[Scene], None]:
    """A new version whose latest.json is damaged. damage: gets the folder; deleted: later, as its error advises"""

    def act(scene: Scene) -> None:
        scene.publish()
        damage(scene.folder)
        if deleted:
            scene.undo.callback((scene.folder / LATEST).unlink)
        scene.pull()

    return act


def rewritten(text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / LATEST).write_bytes(text)


def exchanged(index: dict[str, Any]) -> None:
    """Two names of one shape, in each other's place. Bytes and sizes stay with their places."""
    rows = index["patches"]
    this, other = (next(row for row in rows if row[0] == f"model.layers.{n}.mlp.up_proj.weight") for n in (0, 1))
    this[0], other[0] = other[0], this[0]


def of_another_version(path: Path) -> None:
    """The patches of the version before, or of the whole one before that, under this one's name."""
    older = sorted(set(path.parent.glob("*.whole")) - {path})[-1]
    data = older.read_bytes()
    path.write_bytes(data)
    relisted(lambda latest: latest["chain"][-1].update(patches=len(data)))(path.parent)


def engine_json(scene: Scene) -> None:
    """A new trainer refuses it. A Follower writes it anew in a folder, which HTTP does not let it."""
    path = scene.folder / HELD
    good = path.read_bytes()
    flipped(lambda size: size // 2, bit=7)(path)
    scene.undo.callback(lambda: path.write_bytes(good))
    scene.attempt(scene.place.new_trainer)
    scene.pull()
    if scene.way != "link":
        scene.place.new_trainer()
        scene.publish()
        scene.pull()


def gone(scene: Scene) -> None:
    """Nothing is new for an engine then, and the next version begins a chain."""
    scene.publish()
    (scene.folder / LATEST).unlink()
    scene.pull()


def _fault(name: str, how: str, act: Callable[[Scene], None], says: str = "", *expected: str) -> Fault:
    return Fault(name, "files", how, act, THROUGH_A_STORE, expected or (OLD,), says, LEFT_OUT)


def _file(name: str, how: str, kind: str, damage: Damage) -> Fault:
    return _fault(name, how, damaged(kind, damage), rf"\d{{8}}-[0-9a-f]{{8}}\.{kind}.*{KEPT}")


def _size(name: str, how: str, kind: str, damage: Damage) -> Fault:
    """A copy that has another size than latest.json says is one case over HTTP, where each takes four tries."""
    fault = _file(name, how, kind, damage)
    ways = {place: way for place, way in fault.ways.items() if place != SERVER}
    why = "a copy of another size, as after patches_cut_off, whole_cut_off and latest_says_1_pib"
    return replace(fault, ways=ways, left_out=LEFT_OUT | {SERVER: why})


def _latest(name: str, how: str, damage: Callable[[Path], object]) -> Fault:
    return _fault(name, how, listing(damage), rf"latest\.json.*{KEPT}")


def _set(row: int, column: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["patches"][row].__setitem__(column, value)


FAULTS: Final = (
    _file("bit_in_patch", "a bit in the middle of a file of patches", "patches", flipped(lambda size: size // 3)),
    _file("bit_in_patch_header", "a bit of the first patch's header", "patches", flipped(lambda size: 1)),
    _file("bit_in_index", "a bit of the index of patches", "patches", flipped(lambda size: size - TAIL.size - 9)),
    _file("bit_in_tail", "a bit of the index's checksum", "patches", flipped(lambda size: size - TAIL.size)),
    _file("bit_in_index_length", "a bit of the index's length", "patches", flipped(lambda size: size - 1)),
    _file("bit_in_whole", "a bit in the middle of a whole version", "whole", flipped(lambda size: size // 2)),
    _file("bit_in_whole_index", "a bit of its index", "whole", flipped(lambda size: size - TAIL.size - 9)),
    _latest("bit_in_latest", "a bit of latest.json, which is no UTF-8 then",
            lambda folder: flipped(lambda size: size // 2, bit=7)(folder / LATEST)),
    _file("bit_in_stamp", "a digit of the newest stamp in latest.json", "patches", lambda path: relisted(
        lambda latest: latest["chain"][-1].update(stamp=turned(latest["chain"][-1]["stamp"])))(path.parent)),
    _fault("bit_in_engine_json", "a bit of engine.json", engine_json, r"engine\.json", NEW, OLD),
    _file("patches_cut_off", "a file of patches without its end", "patches", resized(lambda size: size * 2 // 3)),
    _size("patches_empty", "a file of patches of no bytes", "patches", resized(lambda size: 0)),
    _size("patches_longer", "a file of patches with 4 kB behind it", "patches", resized(lambda size: size + 4096)),
    _file("patches_gone", "a file of patches that was deleted", "patches", Path.unlink),
    _file("whole_cut_off", "a whole version without its last byte", "whole", resized(lambda size: size - 1)),
    _size("whole_longer", "a whole version with a byte behind it", "whole", resized(lambda size: size + 1)),
    _file("whole_gone", "a whole version that was deleted", "whole", Path.unlink),
    _fault("latest_gone", "latest.json was deleted", gone),
    _file("index_of_3_gib", "an index that says 3 GiB for a small patch", "patches", forged(_set(0, 2, 3 << 30))),
    _file("index_below_zero", "an index with a negative size", "patches", forged(_set(0, 1, -5))),
    _file("index_beyond_numbers", "an index with a size of 1e300", "whole", forged(_set(0, 2, 1e300))),
    _file("latest_says_1_pib", "latest.json says 1 PiB for a file of patches", "patches",
          lambda path: relisted(lambda latest: latest["chain"][-1].update(patches=1 << 50))(path.parent)),
    _fault("manifest_of_2_tib", "latest.json has a tensor of 2 TiB", listing(
        relisted(lambda latest: latest["manifest"][0].__setitem__(2, [1 << 20, 1 << 20])), deleted=False), KEPT),
    _latest("latest_a_list", "latest.json is []", rewritten(b"[]")),
    _latest("latest_empty", "latest.json has no bytes", rewritten(b"")),
    _latest("latest_deep", "latest.json is 100,000 lists deep", rewritten(b"[" * 100_000)),
    _latest("latest_without_writer", "latest.json names no writer", relisted(lambda latest: latest.pop("writer"))),
    _latest("latest_of_other_types", "a version's number in latest.json is text",
            relisted(lambda latest: latest["chain"][-1].update(version="2"))),
    _latest("latest_leads_outside", "a stamp in latest.json is a path to elsewhere",
            relisted(lambda latest: latest["chain"][-1].update(stamp="../../../../etc"))),
    _file("names_exchanged", "two names of one shape are exchanged in an index", "patches", forged(exchanged)),
    _file("names_exchanged_in_whole", "the same in the index of a whole version", "whole", forged(exchanged)),
    _file("name_unknown", "an index of patches has a name that the model has not", "patches", forged(_set(0, 0, "x"))),
    _file("name_missing", "a whole index lacks a tensor", "whole", forged(lambda index: index["patches"].pop())),
    _file("name_twice", "an index of patches has a name twice", "patches",
          forged(lambda index: index["patches"].append(index["patches"][0]))),
    _file("of_another_version", "the bytes of another version under this one's name", "patches", of_another_version),
)  # fmt: skip


def turned(stamp: str) -> str:
    """The stamp with another last digit, which is in no file's name."""
    return stamp[:-1] + ("0" if stamp[-1] != "0" else "1")
