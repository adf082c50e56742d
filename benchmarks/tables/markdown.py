"""Markdown of tables, as the pages of docs/ and the commands of this folder show them."""

from __future__ import annotations

from collections.abc import Iterable


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are text already. Raises ValueError for a row of another length than heads."""
    heads = list(heads)
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for row in rows:
        cells = list(row)
        if len(cells) != len(heads):
            raise ValueError(f"a row of {len(cells)} cells under {len(heads)} heads: {cells}")
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
