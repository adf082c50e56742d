"""Checks of arguments: each returns the value, or raises a ConfigError with what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any

from fp8plan.errors import ConfigError


def whole(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """Return `value` as an int, or raise a ConfigError if it is not a whole number of at least `least`. numpy's
    integers are allowed; booleans, floats and text are not.

    otherwise: what else is allowed, to end the error with
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number of at least {least}{otherwise}")
    return number


def is_number(value: Any, finite: bool = True) -> bool:
    """True if `value` is a number, numpy's included, and not NaN. Infinity counts only if `finite` is false, text
    never.
    """
    try:
        number = None if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return number is not None and not math.isnan(number) and not (finite and math.isinf(number))


def instance(name: str, value: Any, kind: type[Any], example: str) -> None:
    """Raise ConfigError if `value` is not a `kind`. example: what to type instead"""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; allowed: a {kind.__name__}, such as {example}")
