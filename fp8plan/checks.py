"""Checks of arguments: they return the value, or raise a ConfigError that says what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any

from fp8plan.errors import ConfigError


def whole(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """`value` as an int. numpy's integers are whole numbers; booleans, floats and text are none.

    otherwise: ends the error: what else is allowed
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number of at least {least}{otherwise}")
    return number


def is_number(value: Any, finite: bool = True) -> bool:
    """Whether `value` is a number, numpy's included, and neither NaN nor, if `finite`, infinite; text is none."""
    try:
        number = None if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return number is not None and not math.isnan(number) and not (finite and math.isinf(number))


def instance(name: str, value: Any, kind: type[Any], example: str) -> None:
    """Refuse a value that is not a `kind`. example: what to type instead"""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; allowed: a {kind.__name__}, such as {example}")
