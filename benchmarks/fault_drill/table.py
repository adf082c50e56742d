"""All faults of the drill."""

from __future__ import annotations

from typing import Final

from . import on_files, on_links, on_processes, on_tensors
from .fault import PLACES, Fault

FAULTS: Final[tuple[Fault, ...]] = (*on_files.FAULTS, *on_tensors.FAULTS, *on_links.FAULTS, *on_processes.FAULTS)


def at(place: str, word: str = "") -> list[Fault]:
    """The faults of a place whose name or kind has that word, those that end its engine last."""
    assert place in PLACES
    chosen = [fault for fault in FAULTS if place in fault.ways and (word in fault.name or word == fault.kind)]
    return sorted(chosen, key=lambda fault: (fault.ends, fault.ways[place]))
