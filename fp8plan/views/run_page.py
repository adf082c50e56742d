"""The page of a run: `fp8plan report run.jsonl -o report.html`. It stands alone and needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.packages import REPORT, package
from fp8plan.runtime.watch.monitor.steps import RunReader, Steps
from fp8plan.views import run_columns
from fp8plan.views.axes import MOST, SPANS
from fp8plan.views.page import document, paragraphs, table
from fp8plan.views.run_columns import Event
from fp8plan.views.run_plots import MARKED, by_position, figure
from fp8plan.views.text import duration, percent

LISTED: Final = 200  # events in the table


def write_report(source: Path, target: Path) -> None:
    """Write the page of a run file. Raises ConfigError for files that cannot be read or written, or without plotly."""
    if target.suffix != ".html":
        raise ConfigError(f"cannot write the report to {target}; allowed: a name that ends in .html")
    reader = RunReader(source)
    reader.read()
    if not len(reader.steps):
        raise ConfigError(
            f"{source} has no record of a Monitor; for a page of a plan type: fp8plan plan ... --plot FILE.html"
        )
    package("plotly", "the report", REPORT)
    try:
        text = page(reader)
        target.write_text(text, encoding="utf-8", errors="backslashreplace")  # the names of files may be no text
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; give a file that can be written") from None


def page(reader: RunReader) -> str:
    steps, events = reader.steps, run_columns.events(reader.steps)
    plots = _html([figure(steps, events), *filter(None, [by_position(steps)])])
    tiles = "".join(f"<div><b>{escape(value)}</b>{escape(label)}</div>" for label, value in summary(steps))
    head = f'<p class="dim">{escape(_span(reader))}</p><div class="tiles">{tiles}</div>'
    legend = f'<p class="dim">{" ".join(_legend(len(steps), events))}</p>'
    return document(
        reader.path.name, run_columns.title(steps), f"{head}{_advice(steps)}{legend}{plots}{_table(events)}"
    )


def _html(figures: Sequence[Any]) -> str:
    options = {"full_html": False, "config": {"displaylogo": False}}
    return "".join(made.to_html(include_plotlyjs=not number, **options) for number, made in enumerate(figures))


def _advice(steps: Steps) -> str:
    """The last step's KL by cause, and the guard's last verdict: causes, and levers with their gain."""
    guard = run_columns.last_judged(steps)
    causes = guard.verdict.causes or () if guard and guard.verdict else ()
    kl = run_columns.causes(steps)
    sentences = [f"Last step: {kl}."] if kl else []
    return paragraphs([*sentences, *(f"Last rollout: {cause.sentence}." for cause in causes if cause.sentence)])


def summary(steps: Steps) -> list[tuple[str, str]]:
    """Pairs of (label, figure) for the whole run."""
    k3, over, infinite = run_columns.shown_kl(steps), run_columns.over_limit(steps), run_columns.infinite_kl(steps)
    tiles = [("steps", f"{len(steps):,}"), *_rewards(steps)]
    if not np.isnan(k3).all():
        tiles.append(("KL k3, median", f"{np.nanmedian(k3):.2e}"))
    if infinite.any():
        tiles.append(("steps with infinite k3, counted as the robust one", f"{infinite.sum():,}"))
    if over.size:
        tiles.append(("steps over the KL limit", percent(float(over.mean()))))
    ess, lost = steps.column(schemas.ESS_RAW), steps.column(schemas.LOST_TOKENS)
    if np.isfinite(ess).any():
        tiles.append(("raw ESS, least", percent(float(np.nanmin(ess)))))
    if np.isfinite(lost).any():
        tiles.append(("tokens lost, mean", percent(float(np.nanmean(lost)))))
    achieved, share = (
        steps.column(schemas.TOKENS_PER_S),
        run_columns.columns(steps, [])[run_columns.SPEED][run_columns.warm(steps)],
    )
    if np.isfinite(achieved).any():
        tiles.append(("tokens/s, median", f"{np.nanmedian(achieved):,.0f}"))
    if np.isfinite(share).any():
        tiles.append(("of the predicted speed, median", f"{np.nanmedian(share):.2f}x"))
    return tiles


def _rewards(steps: Steps) -> list[tuple[str, str]]:
    """The reward of the first and of the last tenth of the steps, if it is recorded."""
    rewards = steps.column(schemas.REWARD)
    rewards = rewards[np.isfinite(rewards)]
    tenth = max(1, rewards.size // 10)
    first, last = (f"{part.mean():.3g}" if part.size else "" for part in (rewards[:tenth], rewards[-tenth:]))
    return [("mean reward, first and last tenth of the steps", f"{first} → {last}")] if rewards.size else []


def _span(reader: RunReader) -> str:
    steps = reader.steps
    first, final = (f"{steps.when(at):%Y-%m-%d %H:%M:%S}" for at in (0, -1))
    text = f"steps {steps.numbers[0]:,} to {steps.numbers[-1]:,}, {first} to {final} UTC"
    if pace := run_columns.pace(steps):
        text += f", one every {duration(pace)}"
    if reader.replaced:
        text += f". {run_columns.hidden(reader)}"
    return text + (f". {run_columns.unread(reader.skipped)}" if reader.skipped else "")


def _table(events: Sequence[Event]) -> str:
    if not events:
        return "<h2>Events</h2><p>None: no threshold moved, nothing was alarming.</p>"
    rows = [[f"{x.step:,}", x.kind, x.what, x.why] for x in reversed(events[-LISTED:])]
    left_out = f"<p class='dim'>the last {LISTED} of {len(events):,}</p>" if len(events) > LISTED else ""
    return f"<h2>Events</h2>{left_out}{table(['step', 'kind', 'what', 'why'], rows, kinds='rlll')}"


def _legend(steps: int, events: Sequence[Event]) -> list[str]:
    """Sentences of HTML that explain the pictures."""
    marks = sum(event.kind != "decision" for event in events)
    some = f", the last {MARKED} of {marks:,}" if marks > MARKED else ""
    alarm = '<span class="alarm">an alarm begins</span>'
    guard = '<span class="guard">the guard advises to step down</span>'
    sentences = [f"Dotted lines{some}: {alarm}, {guard}. Drag to zoom, double-click to go back."]
    sentences.append("Point at a threshold for its reason.")
    if steps > MOST:
        sentences.append(
            f"Of {steps:,} steps a curve shows the first, least, greatest and last value in each of {SPANS:,} spans: "
            "no spike is lost, but zooming shows no more steps."
        )
    return sentences
