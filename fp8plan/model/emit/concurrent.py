"""The trajectories at once of a plan of turns, in the words of each target that has some."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from fp8plan.model.targets import TARGETS, Unit


def at_once_settings(target: str, number: int, samples: int, replicas: int) -> dict[str, int]:
    """The target's settings for so many trajectories at once, on all replicas; {} if it has none.

    samples: of each prompt
    """
    counted: dict[Unit, int] = {
        "trajectories": number,
        "prompts": max(1, number // samples),
        "trajectories of a replica": ceil(number / replicas),
    }
    return {setting: counted[unit] for setting, unit in TARGETS[target].at_once.items()}


def concurrent_words(number: int, samples: int, replicas: int) -> dict[str, str]:
    """Target -> its words for so many trajectories at once; a target without any is left out."""
    settings = {target: at_once_settings(target, number, samples, replicas) for target in TARGETS}
    return {target: _typed(own) for target, own in settings.items() if own}


def _typed(settings: Mapping[str, int]) -> str:
    return " and ".join(f"{setting}={value}" for setting, value in settings.items())
