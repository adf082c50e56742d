"""Tables and text by rich that stay readable from 80 columns on, and numbers for a narrow place."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from fp8plan.model.cost.base import FloatArray

T = TypeVar("T")

GAP = 2  # blanks between two columns
MOST_ROWS = 10  # of a table without --all
STYLES = {"low": "green", "moderate": "yellow", "high": "red"}  # cells with a level of risk


class Column(NamedTuple):
    """One column of a table. If two do not fit, the one with the smaller rank is kept."""

    header: str
    cells: list[str]
    rank: int = 0  # 0: never left out
    left: bool = False  # aligned left, not right

    @property
    def name(self) -> str:
        """The header on one line."""
        return re.sub(r"-\n(?!up)", "", self.header).replace("-\n", "-").replace("\n/s", "/s").replace("\n", " ")

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.header, *self.cells) for line in text.split("\n"))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table no wider than the console. Columns that do not fit are named below it; no cell is cut.

    bold:  row of the chosen one
    below: columns that do not fit are a list below the table instead, with one entry a row
    """

    columns: Sequence[Column]
    bold: int | None = None
    below: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept, absent = fitting(self.columns, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for column in kept:
            table.add_column(column.header, justify="left" if column.left else "right", overflow="fold")
        for row, cells in enumerate(zip(*(column.cells for column in kept), strict=True)):
            texts = [Text(cell, STYLES.get(cell, "")) for cell in cells]
            table.add_row(*texts, style="bold" if row == self.bold else "")
        yield table
        if absent and self.below:
            first, left_out = kept[0], [column for column in self.columns if column not in kept]
            for row, name in enumerate(first.cells):
                cells_of_row = "; ".join(f"{column.name}: {column.cells[row]}" for column in left_out)
                yield Paragraph(f"{name.removeprefix('  ')}: {cells_of_row}", indent=2)
        elif absent:
            yield Paragraph(f"too narrow for: {', '.join(absent)} (--json has them)", style="dim")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text wrapped at the console's width, lines after the first indented, no blanks at the end of a line."""

    text: str
    indent: int = 0
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = textwrap.wrap(self.text, options.max_width, subsequent_indent=" " * self.indent, break_on_hyphens=False)
        yield Text("\n".join(lines), self.style)


@dataclass(frozen=True, slots=True)
class Line:
    """Text to copy, on one line. A terminal that is narrower wraps it, without a line feed."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self.text, self.style, no_wrap=True, overflow="ignore")


def counted(number: int, noun: str) -> str:
    """A counted noun, such as "1 prompt" or "1,024 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Column], list[str]]:
    """The columns that fit side by side, and the headers of the others, highest rank first."""
    kept, absent = list(columns), []
    while sum(c.width + GAP for c in kept) - GAP > width and any(c.rank for c in kept):
        least = max(kept, key=lambda c: c.rank)
        kept.remove(least)
        absent.append(least.name)
    return kept, absent


def best_rows(rows: Sequence[T], order: Callable[[T], Any], every: bool = False) -> tuple[list[T], list[str]]:
    """The MOST_ROWS rows that come first in this order, as they stood, and a line on the others if there are any.

    every: leave no row out
    """
    if every or len(rows) <= MOST_ROWS:
        return list(rows), []
    places = sorted(range(len(rows)), key=lambda place: order(rows[place]))[:MOST_ROWS]
    return [rows[place] for place in sorted(places)], [f"{counted(len(rows) - MOST_ROWS, 'more row')}: --all"]


BARS: Final = "▁▂▃▄▅▆▇█"


class Scale(NamedTuple):
    """Scale of a sparkline: its bottom, its top (None: the smallest and the largest value), and the least span.

    The span keeps noise from looking like mountains. On a log scale it is a factor.
    """

    low: float | None = None
    high: float | None = None
    span: float = 0.0
    log: bool = False


FREE: Final = Scale()


def sparkline(values: FloatArray, width: int, scale: Scale = FREE) -> str:
    """Values as bars, with a blank for a missing one.

    If there are more values than columns, a bar is the value farthest from the median, so that no spike is lost.
    """
    known = np.log(np.where(values > 0, values, np.nan)) if scale.log else values
    known = np.where(np.isfinite(known), known, np.nan)
    if not np.isfinite(known).any():
        return " " * min(len(known), width)
    if len(known) > width:
        middle = np.nanmedian(known)
        parts = [part[np.isfinite(part)] for part in np.array_split(known, width)]
        known = np.array([part[np.argmax(abs(part - middle))] if part.size else np.nan for part in parts])
    low = np.nanmin(known) if scale.low is None else scale.low
    high = max(np.nanmax(known), -np.inf if scale.high is None else scale.high)
    least = np.log(scale.span) if scale.log else scale.span
    if high - low < least or high == low:  # the free end takes the missing span, or each end takes half of it
        extra = max(least - (high - low), 1e-9 * max(1.0, abs(high)))
        low, high = (low - extra / 2, high + extra / 2) if scale.low is None else (low, high + extra)
    level = (known - low) / (high - low) * (len(BARS) - 1)
    return "".join(" " if np.isnan(x) else BARS[round(min(max(x, 0.0), len(BARS) - 1))] for x in level.tolist())


def percent(share: float | None) -> str:
    """A share in per cent: three digits, or as many as tell it from 0% and 100%."""
    if share is None:
        return "-"
    if 0 < share < 1e-5:
        return "<0.001%"
    if 1 - 1e-5 < share < 1:
        return ">99.999%"
    return f"{share:.3%}" if share < 0.01 or 0.999 < share < 1 else f"{share:.1%}"


def duration(seconds: float) -> str:
    """A duration such as 12 s, 3 min, 2.5 h or 4 days."""
    for least, length, form, unit in ((172800, 86400, ".0f", "days"), (5400, 3600, ".1f", "h"), (90, 60, ".0f", "min")):
        if seconds >= least:
            return f"{seconds / length:{form}} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def short(count: float | None) -> str:
    """A number with three digits, such as 1.72M or 815k."""
    assert count is not None
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,}"
