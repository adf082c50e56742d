"""One fault in one place: the engine is brought to a version, the fault strikes, and good versions follow."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from fp8plan.errors import Fp8PlanError, text_of

from . import judge, memory
from .fault import DIRECT, NOT_SEEN, Fault

EVERY: Final = 2  # one version in so many is whole, so that a chain heals within as many
VERSIONS: Final = 3
HEAL_S: Final = 120.0  # an engine that died is started again meanwhile
MOST_SAID: Final = 400  # characters of an error in a row
Tensors = dict[str, Any]


class Place(Protocol):
    """Weights on their way from a trainer to an engine. A version is a number."""

    name: str
    now: int
    versions: Sequence[judge.Version]

    def settle(self, way: str) -> None:
        """Have the engine serve version `now` by this way, with the next version of a store to be patches only."""

    def deliver(self, version: int, way: str) -> None:
        """One good version."""

    def look(self) -> judge.Seen: ...

    def processes(self) -> list[int]: ...

    def mend(self) -> None:
        """Start what has died."""


class Hung(BaseException):
    """A call that is not over by its deadline."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Hung in this process's main thread after some seconds. What hangs all the same ends the process later."""

    def late(*_: object) -> None:
        raise Hung(f"hangs: not over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 120, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


class Scene:
    """What a fault acts on.

    place: a Place, with all that it has beside the Protocol
    way:   in which the weights come
    old, new: versions that serve, and that the trainer is about to send
    said:  errors of fp8plan's so far
    undo:  callbacks that end the fault
    """

    def __init__(self, place: Any, way: str, new: int) -> None:
        self.place, self.way, self.old, self.new = place, way, place.now, new
        self.said: list[str] = []
        self.undo = ExitStack()

    def attempt(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do what fp8plan may refuse, and keep its words. Any other error is a fault of fp8plan's."""
        try:
            return act(*arguments)
        except Fp8PlanError as error:
            self.said.append(f"{type(error).__name__}: {text_of(error)}")
        return None

    def tensors(self) -> Tensors:
        """The trainer's new ones, fresh."""
        tensors: Tensors = self.place.tensors(self.new)
        return tensors

    def publish(self, tensors: Any = None) -> Any:
        return self.attempt(self.place.publisher.publish, self.tensors() if tensors is None else tensors)

    def pull(self) -> Any:
        return self.attempt(self.place.pull, self.way)

    def send(self, tensors: Any) -> Any:
        """From the trainer to the engine, or into the store and from there."""
        if self.way == DIRECT:
            return self.attempt(self.place.send, tensors)
        self.publish(tensors)
        return self.pull()

    @property
    def folder(self) -> Path:
        folder: Path = self.place.folder
        return folder


def row(place: Place, fault: Fault) -> dict[str, Any]:
    """One line of results: the outcome, and what is wrong with it."""
    way = fault.ways[place.name]
    place.settle(way)
    pids = place.processes()
    before = memory.resident(pids)
    memory.reset(pids)
    old, new, good = place.now, (place.now + 1) % VERSIONS, (place.now + 2) % VERSIONS
    scene, raw = Scene(place, way, new), list[str]()
    seen = judge.Seen()
    begun = time.monotonic()
    try:
        with deadline(fault.deadline_s):
            fault.act(scene)
            seen = place.look()
    except (Exception, Hung) as error:
        raw.append(_raw(error))
    seconds = time.monotonic() - begun
    outcome = NOT_SEEN if raw else judge.outcome(seen, place.versions[old], place.versions[new])
    most = memory.most({*pids, *place.processes()})
    begun = time.monotonic()
    healed, refused = None, list[str]()
    try:
        with deadline(HEAL_S):
            scene.undo.close()
            healed = _healed(place, way, good, refused)
    except (Exception, Hung) as error:
        raw.append(f"while it heals: {_raw(error)}")
    heals = time.monotonic() - begun
    if healed is not None:
        place.now = good
    said, refusal = (_short(text) for text in (" | ".join(scene.said), seen.refusal))
    wrong = judge.problems(fault, outcome, scene.said, seen.refusal, seconds, (before, most), raw, healed, EVERY)
    return {
        "place": place.name,
        "fault": fault.name,
        "kind": fault.kind,
        "way": way,
        "outcome": outcome,
        "said": said,
        "refusal": refusal,
        "seconds": round(seconds, 2),
        "deadline_s": fault.deadline_s,
        "healed_by": healed,
        "heal_seconds": round(heals, 2),
        "heal_said": _short(" | ".join(refused)),
        "rss_before": before,
        "rss_most": None if fault.ends else most,  # a process that has ended takes none
        "wrong": wrong,
    }


def _healed(place: Place, way: str, good: int, refused: list[str]) -> int | None:
    """Deliver a good version until it serves; return how many times that took. None: it never did.

    refused: gets the errors until then, as a chain may still be broken
    """
    place.mend()
    for number in range(1, EVERY + 1):
        try:
            place.deliver(good, way)
        except Fp8PlanError as error:
            refused.append(text_of(error))
            continue
        if judge.is_whole(place.look(), place.versions[good]):
            return number
    return None


def _raw(error: BaseException) -> str:
    return str(error) if isinstance(error, Hung) else f"not an error of fp8plan's: {_short(text_of(error))}"


def _short(text: str) -> str:
    return " ".join(text.split())[:MOST_SAID]
