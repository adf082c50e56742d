"""The report of `fp8plan tune` on screens of all widths."""

from __future__ import annotations

import pytest
from rich.console import Console

from fp8plan.model.plan.plan import Plan
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.tune.answer import Answer
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Fixed, LogNormal, Workload
from fp8plan.views.tuned import columns, tune_report

WORK = Workload(20, 16, Fixed(64), LogNormal(200, 0.9, 1500))


@pytest.fixture(scope="module")
def tuned() -> tuple[Plan, Answer]:
    found = search("Qwen/Qwen3-0.6B", "h200", WORK, trainer=StepTimes(train_s=3.0, logprob_s=0.5))
    return found.best.plan, Answer.of(found)


@pytest.mark.parametrize("width", [80, 100, 120, 165, 200])
def test_every_value_of_every_lever_is_on_the_screen(tuned: tuple[Plan, Answer], width: int) -> None:
    console = Console(width=width, record=True)
    with console.capture() as captured:
        console.print(tune_report(*tuned))
    text = " ".join(captured.get().split())
    for column in columns(tuned[1]):
        for cell in set(column.cells):
            assert text.count(" ".join(cell.split())) >= column.cells.count(cell), (column.name, cell)
    assert "too narrow" not in text
