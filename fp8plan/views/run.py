"""The terminal view of a run: `fp8plan monitor run.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.model.cost.base import FloatArray
from fp8plan.runtime.watch.monitor.steps import RunReader, Steps
from fp8plan.views import run_columns
from fp8plan.views.text import FREE, Paragraph, Scale, duration, percent, sparkline

NEWS: Final = 5  # events that are shown
LEAST: Final = 6  # least bars of a sparkline; if the other columns leave less room, `against` goes
GAP: Final = 1  # on either side of a rule between two columns
INDENT: Final = 13  # blanks before the texts of the decision, the alarms and the guard
GOOD, BAD, WORST = "green", "yellow", "red"
LOW_ESS: Final = 0.3, 0.5  # verl's documentation: below 0.5 is doubtful, below 0.3 a warning
KL_SCALE: Final = Scale(span=10.0, log=True)
SHARE: Final = Scale(low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the view: a figure now, its standard of comparison, and its last steps."""

    label: str
    now: str
    against: str
    values: FloatArray
    style: str = ""
    scale: Scale = FREE


@dataclass(frozen=True, slots=True)
class RunView:
    """The view of a run, as wide as the console."""

    reader: RunReader
    steps: int | None = None
    trouble: str = ""  # why the file cannot be read now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        steps = self.reader.steps
        if not len(steps):
            yield Paragraph(self.trouble or f"{self.reader.path}: no step yet")
            return
        trouble = [Paragraph(self.trouble, style=WORST)] if self.trouble else []
        table = _table(steps, options.max_width, self.steps)
        yield Group(*_heading(self.reader), *trouble, "", table, "", *_state(steps), *_news(steps))


def begin(reader: RunReader) -> None:
    """Read a run for the first time. Raises ConfigError for a file that cannot be read, or is no run file."""
    reader.read()
    if reader.foreign:
        raise ConfigError(f"{reader.path} has no record of a Monitor; give the run file of one (fp8plan.JsonLines)")


def watch(reader: RunReader, every_s: float, steps: int | None, console: Console) -> None:
    """Show a run and its new steps until ctrl-c. Waits for a file that is not there yet. Raises as `begin` does."""
    seen: RenderableType = ""
    try:
        if not reader.path.exists():
            console.print(f"waiting for {reader.path}, which is not there yet; ctrl-c ends this", highlight=False)
        while not reader.path.exists():
            time.sleep(every_s)
        begin(reader)
        seen = RunView(reader, steps)
        with Live(seen, console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(seen, refresh=True)
                time.sleep(every_s)
                seen = RunView(reader, steps, look(reader))
    except KeyboardInterrupt:
        console.print(seen)  # the last picture stays


def look(reader: RunReader) -> str:
    """Read the new steps. Returns the problem of a file that cannot be read now, or ""."""
    try:
        reader.read()
    except ConfigError as error:
        problem = str(error).partition(";")[0] if reader.path.exists() else f"{reader.path.name} is gone"
        return f"{problem}: this was its last state; it is read again as soon as it is there"
    return ""


def _heading(reader: RunReader) -> list[RenderableType]:
    steps, pace, age = reader.steps, run_columns.pace(reader.steps), run_columns.age(reader.steps)
    late = pace is not None and age > 3 * pace + 10
    last = f"step {steps.numbers[-1]:,}, {duration(age)} ago" + (f"; one every {duration(pace)}" if pace else "")
    lines: list[RenderableType] = [Text.assemble((f"{reader.path.name}  ", "bold"), (last, BAD if late else ""))]
    if title := run_columns.title(steps):
        lines.append(Paragraph(title))
    if reader.replaced:
        lines.append(Paragraph(run_columns.hidden(reader), style=BAD if run_columns.most_hidden(reader) else "dim"))
    if reader.skipped:
        lines.append(Paragraph(f"{run_columns.unread(reader.skipped)} of a Monitor", style=BAD))
    return lines


def _table(steps: Steps, width: int, count: int | None) -> Table:
    """A row for each figure, with a bar for each of the last `count` steps, or for those that fit."""
    figures = lines(steps.last(count or width))
    cells = [[line.label for line in figures], [line.now for line in figures], [line.against for line in figures]]
    sizes = [max(map(len, [*column, name])) for column, name in zip(cells, ("", "now", "against"), strict=True)]
    if width - sum(sizes) - 3 * (GAP + 1) < LEAST:
        sizes.pop()
    room = max(1, width - sum(sizes) - len(sizes) * (GAP + 1))
    steps = steps.last(count or room)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0))
    for name, size in zip(("", "now", "against"), sizes, strict=False):
        table.add_column(name, width=size, justify="right" if name == "now" else "left", no_wrap=True)
    names = (f"last {len(steps):,} steps" if len(steps) > 1 else "last step", f"last {len(steps):,}", "")
    table.add_column(next(name for name in names if len(name) <= room), width=room, no_wrap=True)
    for line in lines(steps):
        bars = sparkline(line.values, room, line.scale)
        against = [Text(line.against, "dim")] if len(sizes) > 2 else []
        table.add_row(line.label, Text(line.now, line.style), *against, Text(bars, line.style))
    return table


def lines(steps: Steps) -> list[Line]:
    """The figures that these records have."""
    rows = [_kl(steps), _news_of_kl(steps), _ess(steps, "ESS", schemas.ESS), _ess(steps, "raw ESS", schemas.ESS_RAW)]
    rows = [_plain(steps, "reward", schemas.REWARD), *rows, _plain(steps, "TIS C", schemas.TIS), _band(steps)]
    rows += [_share(steps, "clipped", schemas.CLIP_FRACTION, "of tokens, ratio above C")]
    rows += [_share(steps, "clipped mass", schemas.CLIPPED_MASS, "of the weight")]
    rows += [_share(steps, "lost", schemas.LOST_TOKENS, "of tokens, weight 0"), _speed(steps)]
    return [line for line in rows if not np.isnan(line.values).all()]


def _kl(steps: Steps) -> Line:
    """k3 against its limit; the robust one where k3 is infinite, or not recorded."""
    values, limit, infinite = (
        run_columns.shown_kl(steps),
        steps.value(schemas.KL_LIMIT),
        bool(run_columns.infinite_kl(steps)[-1]),
    )
    now = None if np.isnan(values[-1]) else float(values[-1])
    robust = steps.value(schemas.K3) is None and steps.value(schemas.K3_ROBUST) is not None
    style, against = "", ""
    if now is not None and limit:
        style = GOOD if now <= limit else BAD
        if now > 3 * limit:
            style = WORST
        against = f"limit {limit:.1e} ({_times(now / limit)})"
    if infinite:
        style, against = WORST, f"k3 infinite; limit {limit:.1e}" if limit else "k3 infinite"
    return Line("KL k3 robust" if robust else "KL k3", _number(now, ".2e"), against, values, style, KL_SCALE)


def _news_of_kl(steps: Steps) -> Line:
    """The KL over its baseline, the median of the batches before."""
    news, baseline = steps.value(schemas.NEWS), steps.value(schemas.BASELINE)
    now = "-" if news is None else f"{news:.2f}x"
    against = "" if baseline is None else f"baseline {baseline:.1e}"
    return Line("KL news", now, against, steps.column(schemas.NEWS), scale=KL_SCALE)


def _share(steps: Steps, label: str, metric: str, against: str = "") -> Line:
    return Line(label, percent(steps.value(metric)), against, steps.column(metric), scale=Scale(low=0.0, span=1e-3))


def _ess(steps: Steps, label: str, metric: str) -> Line:
    now = steps.value(metric)
    style = GOOD
    if now is None:
        style = ""
    elif now < LOW_ESS[0]:
        style = WORST
    elif now < LOW_ESS[1]:
        style = BAD
    return Line(label, percent(now), f"least {percent(_least(steps, metric))}", steps.column(metric), style, SHARE)


def _least(steps: Steps, metric: str) -> float | None:
    values = steps.column(metric)
    return float(np.nanmin(values)) if np.isfinite(values).any() else None


def _plain(steps: Steps, label: str, metric: str) -> Line:
    values = steps.column(metric)
    known = values[np.isfinite(values)]
    against = f"{_short(known.min())} to {_short(known.max())}" if known.size else ""
    now = steps.value(metric)
    return Line(label, "-" if now is None else _short(now), against, values, scale=Scale(span=0.5))


def _short(value: float) -> str:
    """A number with two decimals. A small number has two digits instead, as it is not 0.00."""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def _band(steps: Steps) -> Line:
    low, high = steps.value(schemas.BAND_LOW), steps.value(schemas.BAND_HIGH)
    now = "-" if low is None or high is None else f"{low:.3g} to {high:.3g}"
    return Line("MIS band", now, "bars: its upper end", steps.column(schemas.BAND_HIGH))


def _speed(steps: Steps) -> Line:
    """The speed of the last rollout, on which several steps may train."""
    bars = _speed_bars(steps)
    timed = np.flatnonzero(np.isfinite(steps.column(schemas.TOKENS_PER_S)))
    at = int(timed[-1]) if timed.size else -1  # without any, the last step has none
    names = schemas.TOKENS_PER_S, schemas.PREDICTED, schemas.PREDICTED_LOW, schemas.PREDICTED_HIGH
    now, predicted, low, high = (steps.value(name, at) for name in names)
    style, against = "", ""
    if now is not None and predicted:
        guard = steps.said[at].guard
        verdict = guard.verdict if guard else None
        fine = verdict.as_fast if verdict else low is None or now >= low  # the guard allows for noise
        if fine:
            style = GOOD
        elif fine is not None and not steps.said[at].cold:
            style = BAD
        against = f"predicted {predicted:,.0f} ({_times(now / predicted)})"
        if style == BAD:
            against = f"predicted {low:,.0f}-{high:,.0f}" if high is not None else against
    return Line("tokens/s", _number(now, ",.0f"), against, bars, style, Scale(low=0.0, high=1.0))


def _speed_bars(steps: Steps) -> FloatArray:
    """Shares of the prediction, if there is one: batches differ, so a speed alone is neither good nor bad."""
    of_predicted = run_columns.columns(steps, [])[run_columns.SPEED]
    return of_predicted if np.isfinite(of_predicted).any() else steps.column(schemas.TOKENS_PER_S)


def _state(steps: Steps) -> list[RenderableType]:
    """The decision and the alarms of the last step, and the last verdict of the guard, which needs a rollout."""
    last = steps.said[-1]
    rows = [("decision", f"{last.decision or 'none'}: {last.reason or ''}".rstrip(": "), "")]
    if steps.attribution:
        rows.append(("causes", run_columns.causes(steps), ""))
    rows += [("alarm", f"{alarm}: {run_columns.meaning(alarm)}".rstrip(": "), WORST) for alarm in last.alarms]
    guard = run_columns.last_judged(steps)
    if guard and (verdict := guard.verdict):
        action, cold = verdict.action or "none", bool(verdict.cold)
        as_fast = verdict.as_fast
        fine = action == "none" and (cold or as_fast is not False)
        advice = "" if action == "none" else f"{action}: "
        label, style = ("  advice", "") if fine else ("  cause", BAD)
        rows.append(("guard", f"{advice}{verdict.reason or ''}", GOOD if fine and as_fast else style))
        rows += [(label, cause.sentence or "", style) for cause in verdict.causes or ()]
    if guard and guard.off:
        rows.append(("guard", f"off: {guard.off}", BAD))
    if last.guard and last.guard.state and (last.guard.state.rung or "none") != "none":
        state = last.guard.state
        done = "stepped down" if state.taken in (None, state.rung) else "advised, not done so far"
        rows.append(("guard", f"{done}: {state.rung}", BAD))
    return [Paragraph(f"{label:<{INDENT}}{text}", indent=INDENT, style=style) for label, text, style in rows]


def _news(steps: Steps) -> list[RenderableType]:
    news = run_columns.last_events(steps, NEWS)
    rows = [Paragraph(f"{x.step:>7,}  {x.kind} {x.what}: {x.why}".rstrip(": "), 9, "dim") for x in reversed(news)]
    return ["", Text("last events", "bold"), *rows] if rows else []


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.01 or ratio == 0 else "<0.01x"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
