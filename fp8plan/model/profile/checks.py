"""Checks of profile files: every message names the file and the field, and says what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ProfileError

KINDS = ("datasheet", "calibrated", "imported")


def parse(text: str, path: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ProfileError(f"{path} holds {type(raw).__name__}; allowed: a JSON object, as Profile.to_json writes it")
    return raw


def check_fields(
    raw: Mapping[str, Any], path: str, types: Mapping[str, tuple[type, ...]], optional: Sequence[str] = ()
) -> None:
    for name, kinds in types.items():
        if name not in raw:
            if name in optional:
                continue
            raise ProfileError(f"{path}: field {name!r} is missing")
        if not isinstance(raw[name], kinds):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ProfileError(f"{path}: field {name!r} is {raw[name]!r}; allowed: {allowed}")
    unknown = sorted(set(raw) - set(types))
    if unknown:
        raise ProfileError(f"{path}: unknown field {unknown[0]!r}; allowed: {', '.join(types)}")


def check_facts(facts: Mapping[str, Any], path: str) -> None:
    for name, fact in facts.items():
        if not isinstance(fact, dict) or set(fact) != {"value", "log_sd", "source"}:
            raise ProfileError(f"{path}: coefficient {name!r} is {fact!r}; allowed: value, log_sd and source")


def hull_ranges(raw: Any, path: str) -> dict[str, dict[str, tuple[float, float]]] | None:
    """The field `hull` as JSON holds it, with its pairs as tuples; raises ProfileError naming the entry."""
    if raw is None:
        return None
    hull: dict[str, dict[str, tuple[float, float]]] = {}
    for kernel, row in raw.items():
        if not isinstance(row, dict):
            raise ProfileError(f"{path}: field 'hull.{kernel}' is {row!r}; allowed: an object of [lowest, highest]")
        hull[kernel] = {quantity: _range(value, path, f"hull.{kernel}.{quantity}") for quantity, value in row.items()}
    return hull


def _range(value: Any, path: str, name: str) -> tuple[float, float]:
    if not (isinstance(value, list) and len(value) == 2 and all(is_number(x) for x in value) and value[0] <= value[1]):
        raise ProfileError(f"{path}: field {name!r} is {value!r}; allowed: [lowest, highest]")
    return value[0], value[1]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def problem(
    kind: str,
    model_error: float,
    coefficients: Mapping[str, float],
    log_covariance: Mapping[str, Mapping[str, float]],
    layers: Mapping[str, Any],
) -> str | None:
    """What makes a profile unusable, naming the field; None when nothing does."""
    if kind not in KINDS:
        return f"kind is {kind!r}; allowed: {', '.join(KINDS)}"
    if not is_number(model_error) or model_error < 0:
        return f"model_error is {model_error!r}; allowed: a number of at least 0"
    for name, value in coefficients.items():
        if not is_number(value) or value <= 0:
            return f"coefficients[{name!r}] is {value!r}; allowed: a number above 0"
        if name.endswith("_efficiency") and value > 1:
            return f"coefficients[{name!r}] is {value!r}; allowed: at most 1, it is a fraction of the datasheet's peak"
    return _covariance_problem(coefficients, log_covariance) or _layers_problem(layers)


def _layers_problem(layers: Mapping[str, Any]) -> str | None:
    for kernel, shapes in layers.items():
        for shape, timed in shapes.items() if isinstance(shapes, Mapping) else [("", shapes)]:
            good = isinstance(timed, list) and len(timed) == 2 and all(isinstance(x, list) for x in timed)
            good = good and 0 < len(timed[0]) == len(timed[1]) and all(is_number(x) for row in timed for x in row)
            if not good or timed[0][0] < 1 or any(b <= a for a, b in pairwise(timed[0])):
                return f"layers[{kernel!r}][{shape!r}] is not [rising numbers of rows, as many log ratios]"
    return None


def _covariance_problem(coefficients: Mapping[str, float], table: Mapping[str, Mapping[str, float]]) -> str | None:
    for a, row in table.items():
        if not isinstance(row, Mapping):
            return f"log_covariance[{a!r}] is {row!r}; allowed: an object of numbers"
        for b, value in row.items():
            if not is_number(value) or a not in coefficients or b not in coefficients:
                return f"log_covariance[{a!r}][{b!r}] is {value!r}; allowed: a number, between two coefficients"
            if table.get(b, {}).get(a) != value:
                return f"log_covariance[{a!r}][{b!r}] is {value!r}, but not so for {b!r} and {a!r}"
    matrix = covariance_matrix(table, sorted(table))
    if matrix.size and float(np.linalg.eigvalsh(matrix)[0]) < -1e-9 * float(np.max(np.abs(matrix))):
        return "log_covariance is not positive semidefinite"
    return None


def covariance_matrix(table: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> NDArray[Any]:
    """The sparse symmetric `table` for `names`, shape (names, names); zero where it has no entry."""
    rows = [[table.get(a, {}).get(b, 0.0) for b in names] for a in names]
    return np.array(rows, dtype=float).reshape(len(names), len(names))
