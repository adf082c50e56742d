"""What the fields of a record must be for those who show it. Others, and fields that are not named here, are free."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

Check = Callable[[Any], bool]


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """One that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def whole(value: Any) -> bool:
    return type(value) is int and number(value)


def each(check: Check) -> Check:
    """A list of what passes."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def mapped(check: Check) -> Check:
    """A mapping to what passes, or to null."""
    return lambda value: isinstance(value, dict) and all(x is None or check(x) for x in value.values())


def fields(needed: dict[str, Check] | None = None, /, **free: Check) -> Check:
    """A mapping whose fields pass; those that are not needed may be null, or absent."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        there = all(name in value and passes(value[name]) for name, passes in (needed or {}).items())
        return there and all(value.get(name) is None or passes(value[name]) for name, passes in free.items())

    return check


VERDICT: Final = fields(action=text, reason=text, within=flag, cold=flag, causes=each(fields(sentence=text)))

is_record: Final = fields(
    {"step": whole, "metrics": mapped(number)},
    **dict.fromkeys(("date", "model", "gpu", "precision", "decision", "reason"), text),
    alarms=each(text),
    guard=fields(verdict=VERDICT, state=fields(rung=text), off=text),
    profile=each(fields({"first": whole, "tokens": number}, k3=number)),
)
