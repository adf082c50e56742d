"""Faults of who writes: trainers that are killed or started twice, full disks, dead engines, foreign writes, and
updates that nobody ends."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import planted

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher

from .drill import EVERY, Scene
from .fault import (
    DIRECT,
    ENGINE,
    FLEET,
    FROM_A_TRAINER,
    NEW,
    NO_FILES,
    OLD,
    OVER_HTTP,
    REFUSES,
    SERVER,
    STORE,
    THROUGH_A_STORE,
    Fault,
)
from .on_tensors import HEAD

ROOT: Final = Path(__file__).resolve().parents[2]
NORM: Final = "model.layers.1.input_layernorm.weight"
MATRIX: Final = "model.layers.1.mlp.down_proj.weight"
NO_STORE: Final = {ENGINE: NO_FILES}
ON_SERVER: Final = dict.fromkeys((STORE, ENGINE, FLEET), "only a server's updates are calls that may stay away")
SMALL: Final = 50_000  # bytes that fit on a full disk
NEXT: Final = "The next publish writes all changes since the last version"


# --- trainers --------------------------------------------------------------------------------------------------------


def killed(stage: str) -> Callable[[Scene], None]:
    """A trainer in a process of its own takes the store over, and dies. Then another one starts."""

    def act(scene: Scene) -> None:
        from safetensors.torch import save_file

        tensors = scene.folder.parent / "sent.safetensors"
        save_file(scene.tensors(), tensors)
        module = "benchmarks.fault_drill.preempted"
        done = subprocess.run(
            [sys.executable, "-m", module, str(scene.folder), str(tensors), stage], cwd=ROOT, check=False
        )
        assert done.returncode == -signal.SIGKILL, done
        scene.pull()
        scene.undo.callback(scene.place.new_trainer)

    return act


def older_publishes(scene: Scene) -> None:
    """A trainer starts while the one before it lives. Both publish."""
    older = scene.place.publisher
    scene.place.new_trainer()
    scene.publish()
    scene.attempt(older.publish, scene.place.tensors(scene.old))
    scene.pull()


def at_once(scene: Scene) -> None:
    """A newer trainer publishes while an older one writes its patches."""
    older = scene.place.publisher
    write = older._store.write_blocks

    def meanwhile(*arguments: Any) -> Any:
        scene.place.new_trainer()
        scene.publish()
        return write(*arguments)

    older._store.write_blocks = meanwhile
    scene.attempt(older.publish, scene.place.tensors(scene.old))
    scene.pull()


def at_the_same_moment(scene: Scene) -> None:
    """The older one has looked who writes, and moves its latest.json over the newer one's. The next publish tells."""
    older = scene.place.publisher
    write = older._store._replace

    def meanwhile(*arguments: Any) -> None:
        older._store._replace = write
        scene.place.new_trainer()
        scene.publish()
        write(*arguments)

    older._store._replace = meanwhile
    scene.attempt(older.publish, scene.place.tensors(scene.old))
    scene.pull()
    scene.publish()
    scene.attempt(older.publish, scene.place.tensors(scene.old))
    scene.pull()


def started_again(scene: Scene) -> None:
    """A trainer ends, and the next one takes over in order."""
    scene.place.new_trainer()
    scene.publish()
    scene.pull()


def swapped_back(scene: Scene) -> None:
    """A trainer takes over twice from another, which does in its turn."""
    older = scene.place.publisher
    newer = Publisher(str(scene.folder), every=EVERY)
    newer.publish(scene.place.tensors(scene.old))
    scene.attempt(older.publish, scene.place.tensors(scene.old))
    scene.place.new_trainer()
    scene.publish()
    scene.attempt(newer.publish, scene.place.tensors(scene.old))
    scene.pull()


# --- disks -----------------------------------------------------------------------------------------------------------


def limited(scene: Scene, pid: int, room: int) -> None:
    """Let files of a process be no longer than that: `write` fails then as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    scene.undo.callback(resource.prlimit, pid, resource.RLIMIT_FSIZE, before)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, before[1]))


def full_at_trainer(whole: bool) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        if whole:
            scene.place.new_trainer()
        limited(scene, 0, SMALL)
        scene.publish()
        scene.undo.close()
        scene.pull()

    return act


def full_for_latest(scene: Scene) -> None:
    """The disk is full once the patches are written."""
    store = scene.place.publisher._store
    write = store._replace

    def replace(*arguments: Any) -> None:
        limited(scene, 0, 20)
        write(*arguments)

    store._replace = replace
    scene.publish()
    store._replace = write
    scene.undo.close()
    scene.pull()


def full_at_cache(scene: Scene) -> None:
    """Where a pull copies its files."""
    scene.publish()
    limited(scene, scene.place.puller, SMALL)
    scene.pull()


# --- the engine's memory and process ---------------------------------------------------------------------------------


def overwritten(name: str, again: bool) -> Callable[[Scene], None]:
    """Something writes to the engine's memory. again: the trainer sends the same weights, else new ones"""

    def act(scene: Scene) -> None:
        scene.place.inside(planted.overwrite, name)
        if not again:
            scene.send(scene.tensors())
        for _ in range(EVERY if again else 0):
            scene.send(scene.place.tensors(scene.old))

    return act


def dies_in_sync(scene: Scene) -> None:
    scene.send(_killing(scene, breaks_off=False))


def dies_in_bad_sync(scene: Scene) -> None:
    """The trainer's iterator breaks off, too, so that the replicas that live are half written."""
    scene.send(_killing(scene, breaks_off=True))


def _killing(scene: Scene, breaks_off: bool) -> Iterator[tuple[str, Any]]:
    """Yield the trainer's tensors but for the tied head, which a bare iterator does not announce."""
    tensors = {name: tensor for name, tensor in scene.tensors().items() if name != HEAD}
    for number, pair in enumerate(tensors.items()):
        if number == 24:
            scene.place.kill()
        if number == 30 and breaks_off:
            raise ConfigError("the trainer's own gather has failed")
        yield pair


def dies_idle(scene: Scene) -> None:
    scene.place.kill()


def dies_before_a_sync(scene: Scene) -> None:
    scene.place.kill()
    scene.send(scene.tensors())


def dies_in_pull(scene: Scene) -> None:
    """The server must end with an error, so that whoever runs it starts another."""
    scene.publish()
    scene.place.link.faults.set("slow", 1, ".patches")
    scene.undo.callback(scene.place.link.faults.set, "", 0)
    scene.place.kill_in(scene.pull)
    scene.said.append(scene.place.wait_for_end())


def server_dies_idle(scene: Scene) -> None:
    scene.place.kill()
    scene.said.append(scene.place.wait_for_end())


# --- updates of a server ---------------------------------------------------------------------------------------------


def refusal(scene: Scene) -> None:
    """Keep the words with which the server refuses meanwhile."""
    scene.said.append(scene.place.look().refusal)


def opened(scene: Scene) -> None:
    scene.attempt(scene.place.client.start_weight_update)
    refusal(scene)
    scene.place.wait_for_no_update()


def opened_in_pause(scene: Scene) -> None:
    scene.place.post("/pause?mode=keep")
    scene.attempt(scene.place.client.start_weight_update)
    scene.place.wait_for_no_update()
    scene.said.append(str(scene.place.status()["last_failure"]))


def announced(scene: Scene) -> None:
    """The workers wait for a broadcast that does not come. The next trainer connects anew."""
    tensors = scene.tensors()
    scene.undo.callback(scene.place.connect)
    scene.attempt(scene.place.client.start_weight_update)
    scene.attempt(scene.place.client.update_weights, scene.place.announcement(tensors))
    scene.place.wait_for_no_update()


def half_sent(scene: Scene) -> None:
    """All tensors but those of the last layer have come."""
    some = {name: tensor for name, tensor in scene.tensors().items() if "layers.2" not in name}
    scene.attempt(scene.place.client.start_weight_update)
    scene.attempt(scene.place.send_part, some)
    scene.place.wait_for_no_update()
    scene.said.append(str(scene.place.status()["last_failure"]))


def finished_alone(scene: Scene) -> None:
    """An update is finished that nobody has begun."""
    scene.attempt(scene.place.client.finish_weight_update)


def mistyped(path: str, body: bytes) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.said.append(scene.place.post(path, body, fails=True))

    return act


def _store(
    name: str, how: str, act: Callable[[Scene], None], expected: str, says: str = "", kind: str = "", **more: Any
) -> Fault:
    return Fault(name, kind, how, act, more.get("ways", THROUGH_A_STORE), (expected,), says, NO_STORE)


def _killed(name: str, how: str, stage: str, expected: str) -> Fault:
    """Who reads sees the same at all stages, so that two strike outside of the store's place."""
    elsewhere = stage in ("file", "cleaned")
    ways = THROUGH_A_STORE if elsewhere else {STORE: THROUGH_A_STORE[STORE]}
    seen = {} if elsewhere else dict.fromkeys((SERVER, FLEET), "who reads sees what it sees after killed_in_file")
    return Fault(name, "writers", how, killed(stage), ways, (expected,), "", NO_STORE | seen, deadline_s=60.0)


def _memory(name: str, tensor: str, again: bool) -> Fault:
    how = f"something writes 0.5 over all of {tensor}, and the trainer sends {'the same' if again else 'new'} weights"
    ways = {place: FROM_A_TRAINER[place] for place in (STORE, ENGINE, FLEET)}
    left_out = {SERVER: "no call of the server writes there; its workers are those of the other places"}
    return Fault(name, "memory", how, overwritten(tensor, again), ways, (OLD if again else NEW,), "", left_out)


def _death(name: str, how: str, act: Callable[[Scene], None], place: str, expected: str, says: str) -> Fault:
    others = {STORE: "its engine is the drill's own process"}
    others |= {other: "a fault of its own" for other in (SERVER, ENGINE, FLEET) if other != place}
    way = {SERVER: "link"}.get(place, DIRECT)
    return Fault(name, "death", how, act, {place: way}, (expected,), says, others, deadline_s=60.0, ends=True)


def _update(name: str, how: str, act: Callable[[Scene], None], says: str, *expected: str) -> Fault:
    return Fault(name, "update", how, act, {SERVER: DIRECT}, expected or (OLD,), says, ON_SERVER)


FAULTS: Final = (
    _killed("killed_in_file", "kill -9 of a trainer in the middle of a file", "file", OLD),
    _killed("killed_before_latest", "kill -9 of a trainer before latest.json", "listed", OLD),
    _killed("killed_in_latest", "kill -9 of a trainer before latest.json is in its place", "moved", OLD),
    _killed("killed_after_latest", "kill -9 of a trainer before older files are deleted", "cleaned", NEW),
    _store("two_alive", "a trainer is started twice, and both publish", older_publishes, NEW,
           "has taken over .* at ", kind="writers"),
    _store("two_at_once", "a trainer takes over while another writes its patches", at_once, NEW,
           "has taken over .* at ", kind="writers"),
    _store("two_in_a_moment", "two trainers write latest.json at the same moment", at_the_same_moment, NEW,
           "has taken over .* at ", kind="writers"),
    _store("three_in_turn", "three trainers, of which each takes over", swapped_back, NEW,
           "has taken over .* at ", kind="writers"),
    _store("hand_over", "a trainer ends, and another goes on", started_again, NEW, kind="writers"),
    _store("disk_full_for_patches", "the store's disk is full for patches", full_at_trainer(False), OLD,
           rf"writing \S+\.patches: OSError.*{NEXT}", kind="disk"),
    _store("disk_full_for_whole", "the store's disk is full for a whole version", full_at_trainer(True), OLD,
           rf"writing \S+\.whole: OSError.*{NEXT}", kind="disk"),
    _store("disk_full_for_latest", "the store's disk is full for latest.json", full_for_latest, OLD,
           rf"writing \S+latest\.json: OSError.*{NEXT}", kind="disk"),
    _store("disk_full_for_copy", "the puller's disk is full", full_at_cache, OLD,
           r"copying http://\S+\.patches to \S+: OSError.*the old weights serve", kind="disk", ways=OVER_HTTP),
    _memory("norm_overwritten", NORM, again=False),
    _memory("embedding_overwritten", "model.embed_tokens.weight", again=False),
    _memory("norm_overwritten_unchanged", NORM, again=True),
    _memory("matrix_overwritten_unchanged", MATRIX, again=True),
    _memory("embedding_overwritten_unchanged", "model.embed_tokens.weight", again=True),
    _update("opened", "a trainer begins an update and is gone", opened, "an update of the weights is "),
    _update("opened_in_pause", "a trainer pauses, begins an update and is gone", opened_in_pause,
            "its trainer was silent"),
    _update("announced", "a trainer announces tensors and sends none", announced, "sen[dt]|silent|came", OLD, REFUSES),
    _update("half_sent", "a trainer sends all layers but one and is gone", half_sent, "its trainer was silent",
            OLD, REFUSES),
    _update("finished_alone", "an update is finished that nobody began", finished_alone,
            "finish_weight_update answers 4"),
    _update("field_mistyped", "a field of /start_weight_update is misspelt",
            mistyped("/start_weight_update", b'{"is_checkpoint_fromat": true}'), "is_checkpoint_fromat"),
    _update("body_no_json", "the body of /start_weight_update is no JSON", mistyped("/start_weight_update", b"{true"),
            "/start_weight_update is no JSON"),
    _update("body_a_list", "the body of /finish_weight_update is a list", mistyped("/finish_weight_update", b"[1]"),
            "/finish_weight_update is"),
    _update("name_mistyped", "/pause?mod=keep, which would abort all requests", mistyped("/pause?mod=keep", b""),
            "mod="),
    _update("pull_mistyped", "/fp8plan/pull with a field that it does not read",
            mistyped("/fp8plan/pull", b'{"version": 3}'), "version"),
    _death("engine_killed", "kill -9 of the engine's process", dies_idle, ENGINE, REFUSES, "the engine has died"),
    _death("engine_killed_in_sync", "kill -9 of the engine's process in the middle of a sync", dies_in_sync, ENGINE,
           REFUSES, "the engine has died"),
    _death("replica_killed", "kill -9 of a replica before a sync", dies_before_a_sync, FLEET, NEW, ""),
    _death("replica_killed_in_sync", "kill -9 of a replica in the middle of a sync", dies_in_sync, FLEET, NEW, ""),
    _death("replica_killed_in_bad_sync", "kill -9 of a replica in a sync that then breaks off", dies_in_bad_sync,
           FLEET, REFUSES, "the trainer's own gather has failed"),
    _death("server_engine_killed", "kill -9 of the server's engine", server_dies_idle, SERVER, REFUSES, "code 1"),
    _death("server_engine_killed_in_pull", "kill -9 of the server's engine during a pull", dies_in_pull, SERVER,
           REFUSES, "code 1"),
)  # fmt: skip
