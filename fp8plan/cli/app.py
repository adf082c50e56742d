"""The program that the commands belong to, the groups of their help, and how they print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand

T = TypeVar("T")

# typer's errors of usage. Which package they come from depends on its version: click, or a copy inside typer.
UsageError: Any = typer.BadParameter.__mro__[1]

# Help is plain text: rich's boxes break long option names at 80 columns, and rich takes [aic] for markup.
app = typer.Typer(
    name="fp8plan",
    help="Predict what each rollout precision (BF16, blockwise FP8, FP8 KV cache, both) gains and risks in LLM RL.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

WORKLOAD, ENGINE, TRAINER, OUTPUT = "Workload", "Engine (vLLM's names)", "RL step", "Output"


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups, by `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or plain, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def print_notes(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)


def progress(what: str) -> Callable[[Iterable[T]], Iterable[T]]:
    """A progress bar on a terminal, shown only for work that lasts."""

    def bar(items: Iterable[T]) -> Iterable[T]:
        if not sys.stderr.isatty():
            return items
        from tqdm import tqdm

        shown: Iterable[T] = tqdm(items, desc=what, leave=False, delay=0.5, file=sys.stderr)
        return shown

    return bar


def byte_progress(what: str) -> Callable[[int, int], None]:
    """A progress bar of bytes on a terminal, which is given those that are done and all of them."""
    bars: list[Any] = []

    def show_bytes(done: int, total: int) -> None:
        if not bars and sys.stderr.isatty():
            from tqdm import tqdm

            scale = {"unit": "B", "unit_scale": True}
            bars.append(tqdm(total=total, desc=what, leave=False, delay=0.5, file=sys.stderr, **scale))
        for bar in bars:
            bar.update(done - bar.n)
            if done >= total:
                bar.close()

    return show_bytes


def show(report: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width: keep every row on one line
        console = Console(width=200)
    console.print(report)
