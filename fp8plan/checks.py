"""Checks of arguments. A ConfigError names the given value, and the allowed ones."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from fp8plan.errors import ConfigError

MOST_NAMED: Final = 40  # names that an error lists
Range = tuple[Callable[[float], bool], str]  # True for an allowed number, and the allowed numbers in words
# Pattern of a number with its unit, and the unit. `k` has two.
THOUSANDS: Final = (1000, 1024)
IN_THOUSANDS: Final = r"(?<![\w.])(\d+(?:\.\d+)?) ?k\b"
UNITS: Final = (
    (r"(?<![\w.])(\d+(?:\.\d+)?) ?%", 0.01),
    (r"(?<![\w.])(\d+(?:\.\d+)?) ?s(?:ec)?\b", 1),
    (r"(?<![\w.])(\d+(?:\.\d+)?) ?min\b", 60),
    (r"(?<![\w.])(\d+(?:\.\d+)?) ?h\b", 3600),
)


def whole(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """`value` as an int. Raises ConfigError unless it is a whole number of at least `least`. numpy's integers are
    allowed. Booleans, floats and text are not.

    otherwise: the end of the error, which names another allowed value
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number of at least {least}{otherwise}")
    return number


def seconds_in(variable: str, default: float) -> float:
    """The seconds in a variable of the environment, or the default. Raises ConfigError unless they are above 0."""
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{variable} is {text!r}; allowed: seconds above 0, {default:g} without it")
    return seconds


def is_number(value: Any, finite: bool = True, nan: bool = False) -> bool:
    """True for a number, numpy's included. finite: infinity does not count; nan: NaN counts"""
    try:
        number = None if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return number is not None and (nan or not math.isnan(number)) and not (finite and math.isinf(number))


def in_range(owner: object, ranges: Mapping[str, Range], where: str = "") -> None:
    """Raise ConfigError for a field of `owner` that is not a number in its range.

    ranges: field -> range; words that end in "or None" allow None
    where:  the start of the error
    """
    for name, (fits, allowed) in ranges.items():
        value = getattr(owner, name)
        if value is None and allowed.endswith("or None"):
            continue
        if not (is_number(value, finite=False) and fits(float(value))):
            raise ConfigError(f"{where}{name} is {value!r}; allowed: {allowed}")


def instance(name: str, value: Any, kind: type[Any], example: str) -> None:
    """Raise ConfigError if `value` is not a `kind`. example: a value of this kind, as it is typed"""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(f"{name} is {value!r}; allowed: {article} {kind.__name__}, such as {example}")


def kinds(owner: Any) -> None:
    """Raise ConfigError for a field of a dataclass whose value is not of a kind in its annotation.

    A whole number is at least 1. Fields of floats are not checked here.
    """
    kind: Any = type(owner)
    for name, allowed in _kinds(kind).items():
        value = getattr(owner, name)
        if float in allowed or (value is None and NoneType in allowed):
            continue
        if int in allowed:
            whole(name, value, otherwise=", or leave it out" if NoneType in allowed else "")
        elif not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            words = " or ".join("None" if kind is NoneType else kind.__name__ for kind in allowed)
            raise ConfigError(f"{name} is {value!r}; allowed: {words}")


@cache
def _kinds(owner: type) -> dict[str, tuple[type, ...]]:
    """The classes that each field of a dataclass may have."""
    hints = get_type_hints(owner)
    unions = {field.name: hints[field.name] for field in fields(owner)}
    each = {name: get_args(hint) if get_origin(hint) is UnionType else (hint,) for name, hint in unions.items()}
    return {name: tuple(get_origin(kind) or kind for kind in those) for name, those in each.items()}


def refuse_names(where: str, names: Iterable[str], allowed: Collection[str], beside: Collection[str] = ()) -> None:
    """Raise ConfigError for names that are not allowed, each with the nearest allowed one.

    where:  the subject of the error
    beside: names that are allowed at another place, which may have been meant
    """
    unknown = [name for name in map(str, names) if name not in allowed]
    if not unknown:
        return
    wrong = ", ".join(with_nearest(unknown, [*allowed, *beside])[:5])
    every = ", ".join(allowed) if len(allowed) <= MOST_NAMED else "names that it has"
    raise ConfigError(f"{where} takes no {wrong}; allowed: {every}")


def with_nearest(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Unknown names, each with the nearest known one, if there is any."""
    near = ((name, nearest(name, known)) for name in names)
    return [name + (f" (did you mean {other}?)" if other else "") for name, other in near]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelt most like `name`, if any is near."""
    return next(iter(get_close_matches(name, list(known), 1, cutoff)), None)


def nearest_hint(
    name: str, known: Mapping[str, Any], most: int = 1, cutoff: float = 0.6, label: str = "nearest"
) -> str:
    """The start of an advice, such as "nearest: h100_sxm, h200_sxm; "; "" if no spelling is near.

    known: spelling -> name
    """
    near = dict.fromkeys(known[match] for match in get_close_matches(name, known, most, cutoff))
    return f"{label}: {', '.join(map(str, near))}; " if near else ""


def number_hint(text: str) -> str:
    """Advice for numbers with a unit, such as "type 8000 or 8192; " for 8k; "" for other text."""
    plain = re.sub(r"(?<=\d)[,_](?=\d{3}\b)", "", text)
    spellings = []
    for thousand in THOUSANDS:
        spelling = plain
        for pattern, factor in ((IN_THOUSANDS, thousand), *UNITS):
            spelling = re.sub(pattern, partial(_without_unit, factor), spelling, flags=re.IGNORECASE)
        spellings.append(spelling)
    without_units = [spelling for spelling in dict.fromkeys(spellings) if spelling != text]
    return f"type {' or '.join(without_units)}; " if without_units else ""


def _without_unit(factor: float, written: re.Match[str]) -> str:
    return f"{float(written[1]) * factor:.12g}"
