"""Options of the command line, in the annotations of dataclasses. fp8plan.cli.program makes commands of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, get_type_hints

# Groups of options in the help.
WORKLOAD, TURNS = "Workload", "Turns of agents"
ENGINE, TRAINER = "Engine (vLLM's names)", "RL step"
REMEDIES, DRAFTS, OUTPUT = "Remedies of the mismatch", "Speculative decoding", "Output"
PREFIX_CACHING: Final = "--prefix-caching/--no-prefix-caching"
OF_TRAINER: Final = "A trainer's configuration"

Words = Mapping[type, Mapping[str, Any]]  # dataclass -> field -> the value that somebody has set


class Option(NamedTuple):
    """One option of a command.

    panel:    its group in the help; None: "Options", or "Arguments"
    help:     its help
    default:  words for its default in the help; None: the field's own default
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


class Group(NamedTuple):
    """The options of another dataclass, by its fields. It annotates a field whose value is of that dataclass."""

    kind: type
    options: Mapping[str, Option]


def group_of(kind: type) -> Group:
    """The options in a dataclass's own annotations, without those of its groups."""
    return Group(kind, {name: option for owner, name, option in declared(kind) if owner is kind})


def declared(kind: type) -> Iterator[tuple[type, str, Option]]:
    """Yield (dataclass, field, Option) for each option of a dataclass and of its groups, in order."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for beside in getattr(hint, "__metadata__", ()):
            if isinstance(beside, Option):
                yield kind, name, beside
            elif isinstance(beside, Group):
                yield from ((beside.kind, inner, option) for inner, option in beside.options.items())
