"""The program, its commands, and their options and help."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import cache, cached_property
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand

from fp8plan.cli.console import STDOUT
from fp8plan.errors import ConfigError
from fp8plan.options import OF_TRAINER, Option, Words, declared

# typer's errors of usage. They come from click, or in other versions from a copy inside typer.
UsageError: Any = typer.BadParameter.__mro__[1]


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups, by `rich_help_panel`. It refuses an option with one
    value that is given twice.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or plain, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._refuse_repeated(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_repeated(self, ctx: Any, args: list[str]) -> None:
        """Raise ConfigError for an option with one value that is given several times. The parser would take the last.

        Options that are meant to repeat have `multiple`. A flag counts only if it has an opposite, such as --no-NAME.
        """
        parser, single = self.make_parser(ctx), []
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option" and not parameter.multiple and _has_value(parameter):
                collecting = copy(parameter)
                collecting.multiple = True
                collecting.add_to_parser(parser, ctx)
                single.append(collecting)
        typed = parser.parse_args(list(args))[0]
        for parameter in single:
            if len(values := typed.get(parameter.name, [])) > 1:
                words = " and ".join(_as_typed(parameter, value) for value in values)
                name = _longest(parameter.opts)
                raise ConfigError(f"{words} are given; allowed: one of them, as {name} has one value")


class PlanCommand(GroupedCommand):
    """A command whose `--json` prints if it stands alone. typer knows options with a value, or without one.

    The next word is its file only if it ends in .json; else it may be the model.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            f"--json={STDOUT}" if word == "--json" and not (after == STDOUT or after.endswith(".json")) else word
            for word, after in pairwise([*args, ""])
        ]
        try:
            return super().parse_args(ctx, words)
        except UsageError as error:
            behind = [after for word, after in pairwise(args) if word == "--json" and not after.startswith("-")]
            if behind and "unexpected extra argument" in error.format_message():
                allowed = "a name that ends in .json, or none, which prints"
                raise ConfigError(f"--json is {behind[0]!r}; allowed: {allowed}; type: --json plan.json") from None
            raise


class ConfiguredCommand(PlanCommand):
    """A PlanCommand that needs neither a model nor a GPU beside a trainer's configuration, which may name them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parameters = self.get_params(ctx)
        groups = {name: getattr(each, "rich_help_panel", None) for each in parameters for name in each.opts}
        configured = any(groups.get(word.partition("=")[0]) == OF_TRAINER for word in args)
        for parameter in parameters:
            if parameter.name in ("model", "gpu"):
                parameter.required = not configured
        return super().parse_args(ctx, args)


def _has_value(parameter: Any) -> bool:
    return not parameter.is_flag or bool(parameter.secondary_opts)


def _as_typed(parameter: Any, value: Any) -> str:
    """An option as it is typed for a value."""
    if parameter.is_flag:
        return _longest(parameter.opts if value else parameter.secondary_opts)
    return f"{_longest(parameter.opts)} {shlex.quote(str(value))}"


def _longest(names: Sequence[str]) -> str:
    return max(names, key=len)


class Program(typer.Typer):
    """A program, or a part of one, whose commands are GroupedCommands."""

    def command(  # type: ignore[override]
        self, name: str, cls: type[TyperCommand] = GroupedCommand
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that adds a function as a command."""
        return super().command(name, cls=cls)


# Help is plain text: rich's boxes break long option names at 80 columns, and rich takes [aic] for markup.
app = Program(
    name="fp8plan",
    help="Predict what each rollout precision (BF16, blockwise FP8, FP8 KV cache, both) gains and risks in LLM RL.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def option(
    panel: str | None, text: str | None = None, default: str | None = None, flag: str = "", metavar: str | None = None
) -> Any:
    """An option of a command.

    panel:   its group in the help
    text:    its help
    default: the words for its default in the help; None: the value itself
    flag:    its name, if that is not its parameter's
    """
    names = (flag,) if flag else ()
    return typer.Option(*names, help=text, show_default=default or True, metavar=metavar, rich_help_panel=panel)


class Options(NamedTuple):
    """The options of a command: those of dataclasses, and of the groups in them.

    without:  fields that are left out
    defaults: field -> the words for its default in the help of this command
    """

    declaring: Sequence[type]
    without: Sequence[str] = ()
    defaults: Mapping[str, str] = {}


class Declared:
    """A command with the options of dataclasses. typer asks for its signature when it makes the command.

    load: imports the dataclasses. So a list of all commands, and any other command, needs none of them
    """

    def __init__(self, command: Callable[[Words], None], load: Callable[[], Options]) -> None:
        self.__doc__, self.__annotations__ = command.__doc__, {}  # typer reads both
        self._command, self._load = command, load

    @cached_property
    def _options(self) -> Options:
        return self._load()

    @cached_property
    def _declared(self) -> list[tuple[type, str, Option]]:
        """Each option: the dataclass that has it, its field, the option."""
        every = (option for kind in self._options.declaring for option in declared(kind))
        return [(owner, name, entry) for owner, name, entry in every if name not in self._options.without]

    @cached_property
    def __signature__(self) -> Signature:
        defaults = self._options.defaults
        context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        return Signature([context, *(_parameter(*each, words=defaults.get(each[1])) for each in self._declared)])

    def __call__(self, context: Any, **values: Any) -> None:
        words: dict[type, dict[str, Any]] = {owner: {} for owner, *_ in self._declared}
        for owner, name, entry in self._declared:
            if context.get_parameter_source(name).name != "DEFAULT":
                words[owner][name] = values[name] if entry.read is None else entry.read(values[name])
        self._command(words)


_hints = cache(get_type_hints)


def _parameter(owner: type, name: str, entry: Option, words: str | None) -> Parameter:
    """An option as the parameter of a function, which typer reads. words: for its default; None: the option's"""
    (default,) = (field.default for field in fields(owner) if field.name == name)
    words = words or entry.default
    if entry.required:
        default = Parameter.empty
    elif words is not None or not isinstance(default, (str, int, float)):
        default = None
    kind = entry.kind or _hints(owner)[name]
    if default is None:
        kind = kind | None
    if entry.argument:
        info = typer.Argument(help=entry.help)
    else:
        info = option(entry.panel, entry.help, words, entry.name, entry.metavar)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def not_none(**options: Any) -> dict[str, Any]:
    """The options that were set on the command line."""
    return {name: value for name, value in options.items() if value is not None}
