"""A fault of the drill, and the four places in which it may strike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Places: what takes the weights.
STORE, SERVER, ENGINE, FLEET = PLACES = ("store", "server", "engine", "fleet")
PLACE_NAMES: Final = {
    STORE: "a RolloutEngine that follows a store",
    SERVER: "`vllm serve` that follows a store over HTTP",
    ENGINE: "a RolloutEngine in a process of its own, whose trainer holds it",
    FLEET: "a RolloutFleet of two",
}

# Ways in which weights come.
FOLDER, LINK, DIRECT = ("folder", "link", "direct")

# What an engine may do after a fault.
OLD, NEW, REFUSES, MIXED = ("old weights", "new weights", "refuses", "mixed weights")
NOT_SEEN: Final = "not seen"  # it hung, or something raised an error of another kind

NO_FILES: Final = "its trainer holds the engine: there are no files between them"

# The ways of faults between a trainer's publish and an engine's pull.
THROUGH_A_STORE: Final = {STORE: FOLDER, SERVER: LINK, FLEET: FOLDER}
OVER_HTTP: Final = {STORE: LINK, SERVER: LINK, FLEET: LINK}
FROM_A_TRAINER: Final = {STORE: FOLDER, SERVER: DIRECT, ENGINE: DIRECT, FLEET: DIRECT}


@dataclass(frozen=True)
class Fault:
    """One fault of the drill.

    name:       of the fault
    kind:       group of faults that are alike
    how:        what is broken, in words
    act:        breaks it in a Scene, and has the weights synced
    ways:       place -> the way in which the weights come there; it strikes in these places only
    expected:   what the engine may do then
    says:       regular expression that an error or refusal must match; "": the fault passes without one
    left_out:   place -> why it means nothing there
    deadline_s: seconds until the engine has answered
    ends:       the engine's process dies, so it comes last in its place
    """

    name: str
    kind: str
    how: str
    act: Callable[[Any], None]
    ways: Mapping[str, str]
    expected: tuple[str, ...]
    says: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 30.0
    ends: bool = False
