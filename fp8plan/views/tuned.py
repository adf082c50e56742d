"""The report of `fp8plan tune`: one table of levers, and the sentences around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType

from fp8plan.model.plan.choice import seconds
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.scene import Lever
from fp8plan.model.tune.answer import Answer
from fp8plan.views.report import plan_text
from fp8plan.views.text import Column, Fitted, Line, Paragraph, best_rows

LEGEND = (
    "saves: seconds of the rollout, or of the RL step where it says so, with their 90% interval; where that holds 0, "
    "perhaps nothing. *: in the plan, against the plan without it. The others are alone on top of the plan. measured: "
    "no, if nobody has timed rollouts with and without it beside their predictions. mismatch: what a lever adds to "
    "that of the precision."
)


def tune_report(plan: Plan, answer: Answer, every: bool = False) -> RenderableType:
    """The title, the choice, the levers, what limits the rollout, and the settings of each lever.

    every: every lever; else those in the plan and the best others
    """
    text = plan_text(plan)
    levers, more = best_rows(answer.levers, lambda lever: not lever.in_plan, every)
    return Group(
        *(Paragraph(line) for line in text.title),
        "",
        *(Paragraph(line) for line in choice(plan, answer)),
        "",
        Fitted(columns(levers), below=True),
        *(Paragraph(line) for line in more),
        Paragraph(LEGEND, style="dim"),
        "",
        *(Paragraph("- " + sentence, indent=2) for sentence in answer.sentences),
        "",
        *_lines_of(words(levers)),
        Paragraph(text.settings, style="dim"),
    )


def choice(plan: Plan, answer: Answer) -> list[str]:
    """The sentences on the choice and its limits."""
    own = [reason for reason in plan.reasons if reason not in answer.tuned.best.plan.reasons]
    return [*plan.reasons[:1], *own]


def columns(rows: Sequence[Lever]) -> list[Column]:
    saved = [lever.saved_s for lever in rows]
    return [
        Column("lever", [("* " if lever.in_plan else "  ") + lever.name for lever in rows], left=True),
        Column("saves, s\n(90%)", [_spread(*x) + " (step)" * r.step for x, r in zip(saved, rows, strict=True)]),
        Column("gain", [f"{lever.gain.ratio:.2f}x" for lever in rows]),
        Column("measured", ["yes" if lever.measured else "no" for lever in rows], left=True),
        Column("price", [lever.price for lever in rows], rank=1, left=True),
        Column("mismatch", [lever.mismatch for lever in rows], rank=2, left=True),
    ]


def _spread(saved: float, low: float, high: float) -> str:
    return f"{_signed(saved)} ({_signed(low)} to {_signed(high)})"


def _signed(value: float) -> str:
    return f"-{seconds(-value)}" if value < 0 else seconds(value)


def words(levers: Sequence[Lever]) -> dict[str, list[str]]:
    """The setting of each lever, and below it a line for each program that has words for it."""
    return {
        f"{lever.name}: {lever.setting}": [f"{program}: {word}" for program, word in lever.words.items()]
        for lever in levers
    }


def _lines_of(settings: Mapping[str, Sequence[str]]) -> Iterator[RenderableType]:
    for setting, programs in settings.items():
        yield Paragraph(setting, indent=2, style="dim")
        for line in programs:
            yield Line(f"  {line}", style="dim")
