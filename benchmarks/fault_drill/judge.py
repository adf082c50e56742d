"""What an engine does after a fault, by the bits of its weights and by its answers, and whether that is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .fault import MIXED, NEW, OLD, REFUSES, Fault

MOST_MEMORY = 1.5  # times the resident memory before


@dataclass(frozen=True)
class Seen:
    """An engine as it is seen from outside.

    digests: of all parameters, one for each replica that serves
    answers: tokens and log-probs of fixed prompts, one for each replica that serves
    refusal: why it does not generate; "": it does
    """

    digests: Sequence[Any] = ()
    answers: Sequence[Any] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Version:
    """Weights as an engine holds and samples them after a sound sync of everything."""

    digests: Any
    answers: Any


def outcome(seen: Seen, old: Version, new: Version) -> str:
    """REFUSES, OLD or NEW. MIXED for everything else: other bits, other answers, or replicas that differ."""
    if seen.refusal:
        return REFUSES
    for name, version in ((OLD, old), (NEW, new)):
        if is_whole(seen, version):
            return name
    return MIXED


def is_whole(seen: Seen, version: Version) -> bool:
    """Every replica has all of a version's bits, and samples as it does."""
    return (
        not seen.refusal
        and len(seen.digests) == len(seen.answers) > 0
        and all(digests == version.digests for digests in seen.digests)
        and all(answers == version.answers for answers in seen.answers)
    )


def problems(
    fault: Fault,
    result: str,
    said: Sequence[str],
    refusal: str,
    seconds: float,
    memory: tuple[float, float],
    raw: Sequence[str] = (),
    healed: int | None = 1,
    versions: int = 2,
) -> list[str]:
    """What is wrong with an engine after a fault; empty if nothing is.

    result:   its outcome
    said:     errors that fp8plan raised
    refusal:  why it does not generate
    memory:   resident bytes before the fault, and the most since
    raw:      errors that are none of fp8plan's, and what hangs
    healed:   number of good versions after which it served the newest; None: it did not
    versions: the most that may be needed
    """
    wrong = list(raw)
    if result not in fault.expected:
        wrong.append(f"{result}; expected: {' or '.join(fault.expected)}")
    texts = [*said, refusal] if refusal else list(said)
    if fault.says and not _says(fault.says, texts):
        wrong.append(f"nothing says /{fault.says}/")
    if not fault.says and said:
        wrong.append("an error for a fault that passes")
    if seconds > fault.deadline_s:
        wrong.append(f"{seconds:.0f} s; the deadline is {fault.deadline_s:g} s")
    before, most = memory
    if most > MOST_MEMORY * before:
        wrong.append(f"{most / before:.2f} times the memory before")
    if healed is None or healed > versions:
        wrong.append("not healed by good versions")
    return wrong


def _says(pattern: str, texts: Collection[str]) -> bool:
    return any(re.search(pattern, text, re.DOTALL) for text in texts)
