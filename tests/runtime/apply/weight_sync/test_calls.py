"""The names of the workers' methods, which mypy checks, are those of the worker's class."""

from __future__ import annotations

from typing import get_args

import pytest

from fp8plan.runtime.apply.engine.base import driven
from fp8plan.runtime.apply.weight_sync.calls import TAKE_TENSORS, Files, Method, rpc

pytest.importorskip("torch")


def test_each_method_of_the_workers_has_its_name_and_no_other() -> None:
    from fp8plan.runtime.apply.worker.extension import Fp8PlanWorker

    methods = {name for name in vars(Fp8PlanWorker) if name.startswith("fp8plan_")}
    assert set(get_args(Method)) == methods
    assert set(TAKE_TENSORS) <= methods


def test_files_are_worked_on_by_whoever_drives() -> None:
    def procedure():  # type: ignore[no-untyped-def]
        found = yield Files(divmod, (7, 2))
        (answer,) = yield from rpc("fp8plan_digests", found)
        return answer

    asked = []
    assert driven(procedure(), lambda call: asked.append(call) or [{"ok": 5}]) == 5  # type: ignore[func-returns-value]
    assert [(call.method, call.arguments) for call in asked] == [("fp8plan_digests", ((3, 1),))]
