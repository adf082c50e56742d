"""The command line: parse, call, print. Results go to stdout, notes and progress to stderr; bad input exits with 2."""

from __future__ import annotations

import atexit
import gc
import inspect
import re
import sys
from contextlib import suppress
from copy import copy
from ctypes import CDLL
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.models import CommandInfo

from fp8plan.checks import number_hint
from fp8plan.cli import measure, plan, run, tune  # noqa: F401  (they add their commands to the app)
from fp8plan.cli.console import standard_streams
from fp8plan.cli.program import UsageError, app
from fp8plan.errors import Fp8PlanError

# Options of vLLM and of trainers -> what to type here.
ELSEWHERE: Final = {
    **dict.fromkeys(("--tp", "--tp-size"), "type --tensor-parallel-size"),
    **dict.fromkeys(("--dp", "--dp-size"), "type --data-parallel-size"),
    **dict.fromkeys(("--ep", "--enable-expert-parallel"), "type --expert-parallel"),
    **dict.fromkeys(("--num-gpus", "--n-gpus"), "type --gpus"),
    **dict.fromkeys(("--dtype", "--quantization", "--kv-cache-dtype"), "type --precision bf16, fp8_block, ..."),
    **dict.fromkeys(("--n", "--num-generations", "--group-size"), "type --samples"),
    **dict.fromkeys(("--batch-size", "--train-batch-size"), "type --prompts, and --samples for each of them"),
    **dict.fromkeys(("--max-prompt-length", "--input-len"), "type --prompt-lengths TOKENS"),
    **dict.fromkeys(
        ("--max-tokens", "--max-new-tokens", "--max-response-length", "--max-completion-length", "--output-len"),
        "type --response-lengths lognormal:mean=TOKENS,sigma=S,max=TOKENS",
    ),
    "--model": "the model stands alone: fp8plan plan MODEL --gpu GPU",
    "--enable-prefix-caching": "type --prefix-caching",
}

# Settings of glibc's malloc: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, and bytes.
KEEP_FREED: Final = ((-1, 256 << 20), (-3, 32 << 20))

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes; 130 is 128 + SIGINT


def main() -> None:
    """Entry point. Bad usage and errors raised on purpose are one line on stderr and exit code 2."""
    _keep_freed_memory()
    gc.set_threshold(100_000)  # imports make many objects and hardly any garbage
    atexit.register(gc.freeze)  # at its end Python would search all objects for garbage, for a tenth of a second
    with standard_streams():
        raise SystemExit(_run(sys.argv[1:] or ["--help"]))


def _keep_freed_memory() -> None:
    """Let malloc keep freed memory where the C library is glibc.

    A plan makes arrays of a megabyte thousands of times. The kernel would take each back, and clear its pages anew.
    """
    with suppress(OSError, TypeError, AttributeError):  # another C library
        library = CDLL(None)
        for parameter, value in KEEP_FREED:
            library.mallopt(parameter, value)


@cache
def program(word: str = "") -> Any:
    """The program. typer takes a millisecond to make a command, and plan's options load the planner.

    word: the command to run, the only one then. With any other word all commands are `Listed`. "": all are made
    """
    whole = copy(app)
    mine = [command for command in app.registered_commands if command.name == word]
    if mine:
        whole.registered_commands, whole.registered_groups = mine, []
    elif word:
        whole.registered_commands = [_listed(command) for command in app.registered_commands]
    return typer.main.get_command(whole)


class Listed(TyperCommand):
    """A command in the list of all, without its options. It is made with them when it runs or is completed."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return program(self.name).commands[self.name].make_context(info_name, args, parent, **extra)


def _listed(command: CommandInfo) -> CommandInfo:
    listed = copy(command)
    listed.cls, listed.help, listed.callback = Listed, inspect.getdoc(command.callback), lambda: None
    return listed


def _run(words: list[str]) -> Any:
    """Run the command and return its exit code."""
    try:
        code = program(words[0])(words, prog_name="fp8plan", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here at the latest
    except Fp8PlanError as error:
        return _failed(str(error), BAD_INPUT)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "fp8plan"
        return _failed(f"{_problem(error, words)}; for help, type: {command} --help", BAD_INPUT)
    except (typer.Abort, KeyboardInterrupt):  # the second where the commands are not made yet
        code = INTERRUPTED
    return _failed("interrupted", code) if code == INTERRUPTED else code  # typer gives it for ctrl-c


def _failed(message: str, code: int) -> int:
    print(f"fp8plan: {' '.join(message.split())}", file=sys.stderr)
    return code


def _problem(error: Any, words: list[str]) -> str:
    """The message for an error of usage. It has the typed value, and what to type instead."""
    here = ELSEWHERE.get(getattr(error, "option_name", ""), "")
    known = {name for parameter in error.ctx.command.params for name in parameter.opts} if error.ctx else set()
    named = set(re.findall(r"--[a-z-]+", here))  # the options that the advice names
    if here and named <= known:
        return f"No such option: {error.option_name}; {here}"
    typed = _typed(error, words)
    value = f" (given: {typed!r})" if typed else ""
    return f"{error.format_message().rstrip('.')}{value}; {number_hint(typed)}".removesuffix("; ")


def _typed(error: Any, words: list[str]) -> str:
    """The typed value of the option in an error of usage; "" if it is not known."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = [(*word.partition("="), after) for word, after in pairwise([*words, ""])]
    values = [value if equals else after for name, equals, value, after in pairs if name in names]
    return values[-1] if values else ""


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
