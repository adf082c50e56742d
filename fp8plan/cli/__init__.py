"""The command line: parse, call, print. Results go to stdout, notes and progress to stderr; bad input exits with 2."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

from fp8plan.cli import measure, plan, run, tune  # noqa: F401  (they add their commands to the app)
from fp8plan.cli.console import UsageError, app, standard_streams
from fp8plan.errors import Fp8PlanError

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes; 130 is 128 + SIGINT


def main() -> None:
    """Entry point. Bad usage and errors raised on purpose are one line on stderr and exit code 2."""
    with standard_streams():
        raise SystemExit(_run(sys.argv[1:] or ["--help"]))


def _run(words: list[str]) -> Any:
    """Run the command and return its exit code."""
    try:
        code = app(words, prog_name="fp8plan", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here at the latest
    except Fp8PlanError as error:
        return _failed(str(error), BAD_INPUT)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "fp8plan"
        problem = f"{error.format_message().rstrip('.')}{_typed(error, words)}"
        return _failed(f"{problem}; for help, type: {command} --help", BAD_INPUT)
    except typer.Abort:
        code = INTERRUPTED
    return _failed("interrupted", code) if code == INTERRUPTED else code  # typer gives it for ctrl-c


def _failed(message: str, code: int) -> int:
    print(f"fp8plan: {' '.join(message.split())}", file=sys.stderr)
    return code


def _typed(error: Any, words: list[str]) -> str:
    """The typed value of the option in an error of usage, which typer does not always name."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = [(*word.partition("="), after) for word, after in pairwise([*words, ""])]
    values = [value if equals else after for name, equals, value, after in pairs if name in names]
    return f" (given: {values[-1]!r})" if values else ""


def _version(shown: bool) -> None:
    if shown:
        from fp8plan.version import __version__

        print(f"fp8plan {__version__}")
        raise typer.Exit


@app.callback()
def fp8plan_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Options of the program itself."""
