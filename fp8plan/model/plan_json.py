"""A plan's JSON, read back: every field that this version knows is checked, others are passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

from fp8plan import __version__
from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.mismatch_budget import RiskBudget
from fp8plan.model.plan import SCHEMA_VERSION, Choice, Plan

MAKE_ONE: Final = "`fp8plan plan MODEL --gpu GPU --json plan.json`"


def read(text: str) -> Plan:
    """The Plan behind `Plan.to_json`'s text. Raises ConfigError naming the version, or what is missing or malformed."""
    if not isinstance(text, str | bytes):
        raise ConfigError(f"the plan is a {type(text).__name__}; allowed: text, as Plan.to_json writes it")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a plan: {error}; write one with {MAKE_ONE}") from None
    _check_schema(data)
    build: dict[str, Callable[[Any], Any]] = {
        "limits": lambda x: EngineLimits(**_checked(EngineLimits, x, "limits")),
        "budget": lambda x: RiskBudget(**_checked(RiskBudget, x, "budget", accept=str)),
        "choices": _choices,
        "reasons": lambda x: _sentences(x, "reasons"),
        "warnings": lambda x: _sentences(x, "warnings"),
    }
    return Plan(**_checked(Plan, data, "plan", **build))


def _check_schema(data: Any) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f"plan is a {type(data).__name__}; allowed: an object with named fields")
    version = data.get("schema_version")
    if version is None:
        raise ConfigError(
            "not a plan, or one that was written before plans had a schema_version, and without its risk budget and KV "
            f"scales; make it again with {MAKE_ONE}"
        )
    ours, (major, dot, minor) = SCHEMA_VERSION.partition(".")[0], str(version).partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ConfigError(f"plan.schema_version is {version!r}; allowed: text such as {SCHEMA_VERSION!r}")
    if major != ours:
        raise ConfigError(
            f"the plan has schema {version}, written by fp8plan {data.get('fp8plan_version')}; this is fp8plan "
            f"{__version__}, which reads schema {ours}.x: install the other version, or make the plan again with "
            f"{MAKE_ONE}"
        )


def _checked(cls: type[Any], data: Any, where: str, **build: Callable[[Any], Any]) -> dict[str, Any]:
    """`data` as keyword arguments of dataclass `cls`: all fields there, each of the declared type, others left out."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is a {type(data).__name__}; allowed: an object with named fields")
    names = [f.name for f in fields(cls)]
    if missing := [name for name in names if name not in data]:
        raise ConfigError(f"{where}: missing field {', '.join(map(repr, missing))}; write a plan with {MAKE_ONE}")
    hints = get_type_hints(cls)
    return {n: build[n](data[n]) if n in build else _typed(data[n], hints[n], f"{where}.{n}") for n in names}


def _typed(value: Any, hint: Any, where: str) -> Any:
    kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
    allowed = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
    accepted = (*allowed, int) if float in allowed else allowed
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{where} is {value!r}; allowed: {' or '.join(t.__name__ for t in allowed)}")
    return value


def _sentences(data: Any, where: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(sentence, str) for sentence in data):
        raise ConfigError(f"{where} is {data!r}; allowed: a list of sentences")
    return tuple(data)


def _choices(data: Any) -> tuple[Choice, ...]:
    if not isinstance(data, list):
        raise ConfigError(f"choices is a {type(data).__name__}; allowed: a list of objects")
    return tuple(Choice(**_checked(Choice, row, f"choices[{i}]")) for i, row in enumerate(data))
