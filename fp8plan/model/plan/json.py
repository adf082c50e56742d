"""A plan's JSON, read back: every field that this version knows is checked, others are passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, Final, TypeVar, get_args, get_type_hints

from fp8plan import __version__
from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import Choice
from fp8plan.model.risk.budget import LEVELS, RiskBudget

MAKE_ONE: Final = "`fp8plan plan MODEL --gpu GPU --json plan.json`"

# Figures of a Choice that only one which cannot run lacks. Speed-ups need BF16 to fit, the RL step a trainer.
PREDICTED: Final = (
    "makespan_s",
    "makespan_low_s",
    "makespan_high_s",
    "output_tokens_per_s",
    "kv_cache_tokens",
    "preemptions",
    "tail_fraction",
    "kl_k3",
    "kl_k3_low",
    "kl_k3_high",
    "ess_raw",
    "clip_fraction",
    "seq_reject_fraction",
    "risk",
    "extrapolated",
)


Plan = TypeVar("Plan")


def read(text: str, plan: type[Plan], schema_version: str) -> Plan:
    """The Plan behind `Plan.to_json`'s text. plan: the class itself, which imports this module.

    Raises ConfigError naming the version, or what is missing or malformed.
    """
    if not isinstance(text, str | bytes):
        raise ConfigError(f"the plan is a {type(text).__name__}; allowed: text, as Plan.to_json writes it")
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a plan: {error}; write one with {MAKE_ONE}") from None
    _check_schema(data, schema_version)
    build: dict[str, Callable[[Any], Any]] = {
        "limits": lambda x: EngineLimits(**_checked(EngineLimits, x, "limits")),
        "budget": lambda x: RiskBudget(**_checked(RiskBudget, x, "budget", accept=str)),
        "choices": _choices,
        "reasons": lambda x: _sentences(x, "reasons"),
        "warnings": lambda x: _sentences(x, "warnings"),
    }
    return plan(**_checked(plan, data, "plan", **build))


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _check_schema(data: Any, ours: str) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f"plan is a {type(data).__name__}; allowed: an object with named fields")
    version = data.get("schema_version")
    if version is None:
        raise ConfigError(
            "not a plan, or one that was written before plans had a schema_version, and without its risk budget and KV "
            f"scales; make it again with {MAKE_ONE}"
        )
    major, dot, minor = str(version).partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ConfigError(f"plan.schema_version is {version!r}; allowed: text such as {ours!r}")
    ours = ours.partition(".")[0]
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
    fits = isinstance(value, accepted) and (bool in allowed or not isinstance(value, bool))
    if not fits or (float in allowed and value is not None and not is_number(value)):  # 1e999 is infinite
        raise ConfigError(f"{where} is {value!r}; allowed: {' or '.join(t.__name__ for t in allowed)}")
    return value


def _sentences(data: Any, where: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(sentence, str) for sentence in data):
        raise ConfigError(f"{where} is {data!r}; allowed: a list of sentences")
    return tuple(data)


def _choices(data: Any) -> tuple[Choice, ...]:
    if not isinstance(data, list):
        raise ConfigError(f"choices is a {type(data).__name__}; allowed: a list of objects")
    return tuple(_choice(row, f"choices[{number}]") for number, row in enumerate(data))


def _choice(data: Any, where: str) -> Choice:
    choice = Choice(**_checked(Choice, data, where))
    if choice.available and (absent := [name for name in PREDICTED if getattr(choice, name) is None]):
        raise ConfigError(f"{where}.{absent[0]} is None, but the choice is available; write a plan with {MAKE_ONE}")
    _check_risk(choice.risk, f"{where}.risk", (*LEVELS, None))
    if choice.unit_kv_scales is not None:
        _check_unit_kv_scales(choice.unit_kv_scales, f"{where}.unit_kv_scales")
    return choice


def _check_unit_kv_scales(data: Mapping[str, Any], where: str) -> None:
    for name in ("kl_k3", "kl_k3_low", "kl_k3_high"):
        if not is_number(data.get(name)):
            raise ConfigError(f"{where}[{name!r}] is {data.get(name)!r}; allowed: a number")
    _check_risk(data.get("risk"), f"{where}['risk']", LEVELS)


def _check_risk(risk: Any, where: str, allowed: tuple[str | None, ...]) -> None:
    if risk not in allowed:
        raise ConfigError(f"{where} is {risk!r}; allowed: {', '.join(map(str, allowed))}")
