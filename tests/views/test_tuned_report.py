"""The report of `fp8plan tune` on screens of all widths."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from fp8plan.cli import console
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.plan.plan import Plan
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.tune.answer import Answer
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload
from fp8plan.views.tuned import columns, tune_report

WORK = Workload(20, 16, Fixed(64), LogNormal(200, 0.9, 1500))


@pytest.fixture(scope="module")
def tuned() -> tuple[Plan, Answer]:
    times = StepTimes(train_s=3.0, logprob_s=0.5)
    found = search(
        TuneRequest("Qwen/Qwen3-0.6B", "h200", WORK, trainer=times, host_loop_s=2.6e-4)
    )  # fast enough for FP8 to gain
    return found.best.plan, Answer.of(found)


def test_the_table_has_ten_levers_with_those_in_the_plan(tuned: tuple[Plan, Answer]) -> None:
    plan, answer = tuned
    one = answer.levers[0]
    levers = tuple(replace(one, name=f"lever {number:02d}", in_plan=number in (0, 11)) for number in range(12))
    for every, named in ((False, [*range(9), 11]), (True, [*range(12)])):
        screen = Console(width=200, record=True)
        with screen.capture() as captured:
            screen.print(tune_report(plan, replace(answer, levers=levers), every=every))
        lines = captured.get().splitlines()
        rows = [line for line in lines if line[:8] in ("  lever ", "* lever ") and line[10] == " "]
        assert [int(line[8:10]) for line in rows] == named
        assert lines.count("2 more rows: --all") == (not every)


@pytest.mark.parametrize("width", [80, 100, 120, 165, 200])
def test_every_value_of_every_lever_is_on_the_screen(tuned: tuple[Plan, Answer], width: int) -> None:
    screen = Console(width=width, record=True)
    with screen.capture() as captured:
        screen.print(tune_report(*tuned, every=True))
    text = " ".join(captured.get().split())
    for column in columns(tuned[1].levers):
        for cell in set(column.cells):
            assert text.count(" ".join(cell.split())) >= column.cells.count(cell), (column.name, cell)
    assert "too narrow" not in text


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_the_words_of_every_setting_stand_on_one_line(
    tuned: tuple[Plan, Answer], width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(console, "Console", partial(Console, file=printed, force_terminal=terminal, no_color=True))
    monkeypatch.setenv("COLUMNS", str(width))
    console.show(tune_report(*tuned))
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in printed.getvalue().splitlines()]
    words = [f"  {program}: {word}" for lever in tuned[1].levers for program, word in lever.words.items()]
    assert max(map(len, words)) > 200  # the JSON of --quantization-config
    assert set(words) <= set(lines)
    assert max(len(line) for line in lines if line not in words) <= 200
