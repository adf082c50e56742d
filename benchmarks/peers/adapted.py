"""Parts that the adapters share: fp8plan's correction of a batch, and modules that stand in for a peer's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

import torch

from fp8plan.runtime.watch.correction.correct import Correction, CorrectionSettings, correct
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.metrics import Mismatch

CALLS: Final[list[str]] = []  # names of the answers that the running test has asked for
Given = ParamSpec("Given")
Found = TypeVar("Found")


class CannotBeSaid(Exception):
    """A test asks for something that fp8plan does not have. The text says what."""


def answer(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Note each call of a function that stands in for a peer's."""

    @wraps(function)
    def noted(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        CALLS.append(function.__name__)
        return function(*args, **kwargs)

    return noted


def corrected(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, how: CorrectionSettings) -> Correction:
    """fp8plan's correction of a batch [batch, length]."""
    return correct(pack(train, rollout, mask), how)


def measured(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """fp8plan's figures of the mismatch."""
    return measure(pack(train, rollout, mask)).metrics()


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module with these contents where `import` finds it, and empty packages around it where there are none."""
    made = stand_in_modules(name, **contents)
    sys.modules.update(made)
    return made[name]


def stand_in_modules(name: str, **contents: Any) -> dict[str, ModuleType]:
    """A module with these contents, and empty packages around it that are not imported so far, by their names."""
    parts = name.split(".")
    packages = [".".join(parts[:end]) for end in range(1, len(parts))]
    made = {package: ModuleType(package) for package in packages if package not in sys.modules}
    for package in made.values():
        package.__path__ = []
    made[name] = ModuleType(name)
    vars(made[name]).update(contents)
    return made
