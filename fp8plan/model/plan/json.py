"""Reading a plan's JSON: every field that this version knows is checked, and other fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse
from fp8plan.model.risk.budget import LEVELS
from fp8plan.schemas import check_version, checked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")

MAKE_ONE: Final = "fp8plan plan MODEL --gpu GPU --json plan.json"

# Figures of a Choice that only one which cannot run lacks. Speed-ups need BF16 to fit, the RL step a trainer.
PREDICTED: Final = (
    "makespan_s makespan_low_s makespan_high_s output_tokens_per_s kv_cache_tokens preemptions tail_fraction kl_k3 "
    "kl_k3_low kl_k3_high ess_raw clip_fraction seq_reject_fraction risk extrapolated"
).split()


# Fields that plans of schema 1.0 do not have. Their engines had what is the default.
SINCE_1_1: Final = ("limits.enable_expert_parallel", "expert_parallel")


class UnitScales(msgspec.Struct):
    """The figures that a Choice expects with K and V scales left at 1.0."""

    kl_k3: float
    kl_k3_low: float
    kl_k3_high: float
    risk: str | None


def read(text: str, kind: type[P]) -> P:
    """Parse the text that `Plan.to_json` wrote. `kind` is the class Plan.

    Raises ConfigError naming the version, or what is missing or malformed.
    """
    if not isinstance(text, str | bytes):
        raise ConfigError(f"the plan is a {type(text).__name__}; allowed: text, as Plan.to_json writes it")
    try:
        return _read(parse(text, "the plan"), kind)
    except ConfigError as error:
        raise ConfigError(f"{error}; to make one, type: {MAKE_ONE}") from None


def _read(data: Any, kind: type[P]) -> P:
    if isinstance(data, dict) and data.get("schema_version") is None:
        raise ConfigError("not a plan, or one written before plans had a schema_version, a risk budget and KV scales")
    check_version(data, "plan", "the plan")
    plan = checked(data, kind, "the plan")
    _check_complete(fields := asdict(plan), data, "")
    for number, choice in enumerate(fields["choices"]):
        _check_choice(choice, f"the plan: choices[{number}]")
    return plan


def _check_complete(written: Mapping[str, Any], data: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for an absent field, even if its class has a default: the default is not what was planned."""
    for name, value in written.items():
        if name not in data and f"{where}{name}" not in SINCE_1_1:
            raise ConfigError(f"the plan: field {f'{where}{name}'!r} is missing")
        if isinstance(value, dict):
            _check_complete(value, data[name], f"{where}{name}.")


def _check_choice(choice: Mapping[str, Any], where: str) -> None:
    for name, value in choice.items():
        if isinstance(value, float) and not is_number(value):  # 1e999
            raise ConfigError(f"{where}.{name} is {value}; allowed: a finite number")
        if value is None and choice["available"] and name in PREDICTED:
            raise ConfigError(f"{where}.{name} is None, but the choice is available")
    _check_risk(choice["risk"], f"{where}.risk", (*LEVELS, None))
    if choice["unit_kv_scales"] is not None:
        at_one = checked(choice["unit_kv_scales"], UnitScales, f"{where}.unit_kv_scales")
        _check_risk(at_one.risk, f"{where}.unit_kv_scales: risk", LEVELS)


def _check_risk(risk: str | None, where: str, allowed: Sequence[str | None]) -> None:
    if risk not in allowed:
        raise ConfigError(f"{where} is {risk!r}; allowed: {', '.join(map(str, allowed))}")
