"""The common parts of the pages of a plan and of a run. Each page is one file that needs no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.packages import REPORT, package
from fp8plan.views.run_plots import RED

DPI: Final = 130  # of a .png


def document(name: str, title: str, body: str) -> str:
    """The whole page. name: its subject; title: a line below; body: HTML"""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}'
        f"</style></head><body><h1>{escape(name)}</h1><p>{escape(title)}</p>{body}</body></html>\n"
    )


def check_suffix(target: Path) -> None:
    """Raise ConfigError for a name that ends neither in .png nor in .html."""
    if target.suffix not in (".png", ".html"):
        raise ConfigError(f"cannot plot to {target}; allowed: a name that ends in .png or .html")


def write_plot(target: Path, picture: Callable[[], Any], page: Callable[[], str]) -> None:
    """Write a picture or a page, by the name's suffix.

    picture: makes a figure of matplotlib

    Raises OSError for a file that cannot be written: an error should not name a draft. Raises ConfigError for another
    suffix, and without matplotlib.
    """
    check_suffix(target)
    package("matplotlib", "plotting", REPORT)
    if target.suffix == ".png":
        picture().savefig(target, dpi=DPI)
    else:
        text = page()
        target.write_text(text, encoding="utf-8", errors="backslashreplace")  # a folder's name may be no text


def as_svg(figure: Any) -> str:
    """A figure of matplotlib as the SVG element of a page. Its text stays text, and the same figure gives the same."""
    from matplotlib import rc_context

    written = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fp8plan"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    return "".join(f'<p class="{style}">{escape(line)}</p>' for line in lines)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None = None, kinds: str = "") -> str:
    """Cells as text. bold: a row; kinds: a letter for each column, l: left, else right"""
    kinds = kinds or "l" * len(headers)

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{escape(x)}</{tag}>' for kind, x in zip(kinds, texts, strict=True))

    listed = (
        f"<tr{' class=bold' if number == bold else ''}>{cells('td', row)}</tr>" for number, row in enumerate(rows)
    )
    return f"<table><tr>{cells('th', headers)}</tr>{''.join(listed)}</table>"


STYLE: Final = (
    "body{font:14px/1.5 system-ui,sans-serif;color:#222;max-width:1200px;margin:24px auto;padding:0 16px}"
    "h1{font-size:22px;margin:0}h2{font-size:17px;margin:24px 0 8px}p{margin:2px 0}.dim{color:#777}"
    ".tiles{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0}"
    ".tiles div{border:1px solid #ddd;border-radius:6px;padding:8px 14px;color:#666;font-size:12px}"
    ".tiles b{display:block;font-size:19px;color:#222}"
    "table{border-collapse:collapse;margin:8px 0}th,td{text-align:right;padding:4px 16px 4px 0;vertical-align:top}"
    ".l{text-align:left}th{border-bottom:1px solid #999;vertical-align:bottom}td{border-bottom:1px solid #eee}"
    ".bold td{font-weight:600;background:#f4f8fb}details{margin:6px 0}summary{cursor:pointer}"
    "svg{max-width:100%;height:auto}"
    "pre{background:#f6f6f6;border-radius:6px;padding:12px;overflow-x:auto;font-size:12.5px;line-height:1.4}"
    f".alarm{{color:{RED}}}.guard{{color:#B77900}}"
)
