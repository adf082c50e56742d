"""Options of the command line, declared at the fields of a dataclass. fp8plan.cli.program makes commands of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final, NamedTuple

# Groups of options in the help.
WORKLOAD, ENGINE, TRAINER = "Workload", "Engine (vLLM's names)", "RL step"
DRAFTS, OUTPUT = "Speculative decoding", "Output"
PREFIX_CACHING: Final = "--prefix-caching/--no-prefix-caching"

OPTION: Final = "option"  # key in the metadata of a field: its Option
GROUP: Final = "group"  # likewise: the Group of the dataclass that is its value


class Option(NamedTuple):
    """One option of a command.

    panel:    its group in the help; None: "Options", or "Arguments"
    help:     its help
    default:  words for its default in the help; the command gets None if the option is left out. None: the field's own
              default
    name:     its name as it is typed, if that is not the field's
    metavar:  the word for its value in the help
    kind:     type of the typed value, if that is not the field's
    read:     typed value -> value of the field; None: they are the same, or the command reads it
    required: it has to be typed
    argument: it is typed without its name
    """

    panel: str | None = None
    help: str | None = None
    default: str | None = None
    name: str = ""
    metavar: str | None = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    required: bool = False
    argument: bool = False

    @property
    def metadata(self) -> dict[str, Option]:
        """The metadata of the field."""
        return {OPTION: self}


class Group(NamedTuple):
    """A dataclass with options: the options by the names of its fields."""

    kind: type
    options: Mapping[str, Option]

    @property
    def metadata(self) -> dict[str, Group]:
        """The metadata of a field with such a value."""
        return {GROUP: self}


def group_of(kind: type) -> Group:
    """The options that the fields of a dataclass declare, those of fields that are such dataclasses left out."""
    return Group(kind, {field.name: field.metadata[OPTION] for field in fields(kind) if OPTION in field.metadata})


def declared(kind: type) -> Iterator[tuple[type, str, Option]]:
    """Yield each option of a dataclass and its groups, in order: the dataclass that has it, its field, the option."""
    for field in fields(kind):
        if OPTION in field.metadata:
            yield kind, field.name, field.metadata[OPTION]
        if GROUP in field.metadata:
            owner, those = field.metadata[GROUP]
            yield from ((owner, name, option) for name, option in those.items())
