"""Tables and text by rich that stay readable from 80 columns on."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

GAP = 2  # blanks between two columns
STYLES = {"low": "green", "moderate": "yellow", "high": "red"}  # cells that are a risk


class Column(NamedTuple):
    """One column of a table, whatever its width; of two that do not fit, the one with the smaller rank is kept."""

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
    """A table no wider than the console: columns that do not fit are left out and named below, no cell is cut."""

    columns: Sequence[Column]
    bold: int | None = None  # row of the chosen one

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept, left_out = fitting(self.columns, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for column in kept:
            table.add_column(column.header, justify="left" if column.left else "right", overflow="fold")
        for row, cells in enumerate(zip(*(column.cells for column in kept), strict=True)):
            texts = [Text(cell, STYLES.get(cell, "")) for cell in cells]
            table.add_row(*texts, style="bold" if row == self.bold else "")
        yield table
        if left_out:
            yield Paragraph(f"too narrow for: {', '.join(left_out)} (--json has them)", style="dim")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text wrapped at the console's width, lines after the first indented, no blanks at the end of a line."""

    text: str
    indent: int = 0
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = textwrap.wrap(self.text, options.max_width, subsequent_indent=" " * self.indent, break_on_hyphens=False)
        yield Text("\n".join(lines), self.style)


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 prompt" or "1,024 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Column], list[str]]:
    """The columns that fit side by side, and the headers of those left out, highest rank first."""
    kept, left_out = list(columns), []
    while sum(c.width + GAP for c in kept) - GAP > width and any(c.rank for c in kept):
        least = max(kept, key=lambda c: c.rank)
        kept.remove(least)
        left_out.append(least.name)
    return kept, left_out
