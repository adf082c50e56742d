"""The finding of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The outcome of a check. WARNING: a risk, which need not be a fault. UNKNOWN: what it needs could not be seen."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's finding.

    check: its name
    state: what it came to
    fault: name of the fault, or of what is warned of, such as "kv_scales_unit"; None without one
    says:  what really runs, with the evidence; for UNKNOWN why it could not be seen
    todo:  what to type to mend it, or to see it
    """

    check: str
    state: State
    says: str
    fault: str | None = None
    todo: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"state": self.state.value}


def ok(check: str, says: str) -> Finding:
    return Finding(check, State.OK, says)


def fault(check: str, name: str, says: str, todo: str) -> Finding:
    return Finding(check, State.FAULT, says, name, todo)


def warning(check: str, name: str, says: str, todo: str) -> Finding:
    return Finding(check, State.WARNING, says, name, todo)


def unknown(check: str, why: str) -> Finding:
    """Nothing is known. why: "the reason; type: what to type to see it", or the reason alone"""
    says, _, todo = why.partition("; type: ")
    return Finding(check, State.UNKNOWN, says, None, todo or None)
