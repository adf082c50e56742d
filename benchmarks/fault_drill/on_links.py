"""Faults of the link to a store: an HTTP server that answers wrongly, slowly or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .drill import Scene
from .fault import ENGINE, FLEET, NEW, OLD, OVER_HTTP, Fault

LEFT_OUT: Final = {ENGINE: "no HTTP is between the trainer and this engine"}
ALWAYS: Final = 10_000  # answers
LASTING_S: Final = 60.0  # four tries, of which each may take the store's timeout, and the pauses between them
KEPT: Final = r"http://.*Nothing was written; the old weights serve"


def answering(fault: str, times: int, part: str) -> Callable[[Scene], None]:
    """The next answers for a file whose name has `part` in it."""

    def act(scene: Scene) -> None:
        scene.publish()
        faults = scene.place.link.faults
        scene.undo.callback(faults.set, "", 0)
        faults.set(fault, times, part)
        scene.pull()

    return act


def refusing(scene: Scene) -> None:
    """Nobody listens."""
    scene.publish()
    scene.undo.callback(scene.place.link.open)
    scene.place.link.close()
    scene.pull()


def _passes(name: str, how: str, fault: str, part: str) -> Fault:
    return Fault(name, "link", how, answering(fault, 1, part), OVER_HTTP, (NEW,), "", LEFT_OUT)


def _lasts(name: str, how: str, act: Callable[[Scene], None], says: str = KEPT, fleet: bool = False) -> Fault:
    """fleet: strikes there, too"""
    left_out = LEFT_OUT | ({} if fleet else {FLEET: "a fleet's files are read by the same code as the store's"})
    ways = {place: way for place, way in OVER_HTTP.items() if place not in left_out}
    return Fault(name, "link", how, act, ways, (OLD,), says, left_out, deadline_s=LASTING_S)


FAULTS: Final = (
    _passes("500_once", "status 500, once, for a file of patches", "500", ".patches"),
    _passes("500_once_for_latest", "status 500, once, for latest.json", "500", "latest"),
    _passes("short_once", "a body that is cut off, once", "short", ".patches"),
    _passes("slow_once", "a body that does not come, once", "slow", ".patches"),
    _lasts("500_always", "status 500, always, for a file of patches", answering("500", ALWAYS, ".patches"),
           rf"http://\S*\.patches.*{KEPT.partition('.*')[2]}", fleet=True),
    _lasts("500_always_for_latest", "status 500, always, for latest.json", answering("500", ALWAYS, "latest"),
           rf"http://\S*latest\.json.*{KEPT.partition('.*')[2]}"),
    _lasts("404", "status 404 for a file of patches", answering("404", ALWAYS, ".patches"), fleet=True),
    _lasts("short_always", "a body that is cut off, always", answering("short", ALWAYS, ".patches")),
    _lasts("slow_always", "a body that does not come, always", answering("slow", ALWAYS, ".patches"), fleet=True),
    _lasts("trickle", "a body of which a byte comes each second", answering("trickle", ALWAYS, ".patches")),
    _lasts("page_instead", "a proxy's page with status 200 in the place of latest.json",
           answering("page", ALWAYS, "latest"), fleet=True),
    _lasts("page_for_patches", "a proxy's page with status 200 in the place of patches",
           answering("page", ALWAYS, ".patches")),
    _lasts("refused", "nobody listens at the store's address", refusing, fleet=True),
)  # fmt: skip
