"""One setting in the grammar of each kind of configuration, and words of a command line to paste."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from typing import Any, Final

_PLAIN_TEXT: Final = re.compile(r"[A-Za-z/][\w./-]*")  # Hydra's grammar takes it without quotes
_RESERVED: Final = {"null", "true", "false", "inf", "nan"}


def hydra(key: str, value: Any) -> list[str]:
    """A setting as an override of Hydra, in its own grammar."""
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    elif isinstance(value, list):
        text = f"[{','.join(map(_hydra_text, value))}]"
    else:
        text = _hydra_text(value) if isinstance(value, str) else repr(value)
    return [f"{key}={text}"]


def _hydra_text(text: str) -> str:
    if _PLAIN_TEXT.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    # A backslash is only special before a quote, where it doubles; "${" would start an interpolation.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text).replace("${", "\\${")
    return f"'{escaped}'"


def yaml(key: str, value: Any) -> list[str]:
    """A setting with its value in YAML, as OmegaConf reads a command line. JSON is YAML."""
    plain = isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _RESERVED
    text = value if plain else json.dumps(value)
    return [f"{key}={text}".replace("${", "\\${")]


def toml(key: str, value: Any) -> str:
    """A setting as a line of TOML."""
    text = json.dumps(value)  # text, lists, numbers and booleans are spelled alike
    if isinstance(value, dict):
        text = f"{{ {', '.join(toml(name, item) for name, item in value.items())} }}"
    return f"{key} = {text}"


def flags(name: str, value: Any) -> list[str]:
    """A setting as words for argparse. A switch that is off has none."""
    if isinstance(value, bool):
        return [name] if value else []
    return [name, *map(str, value if isinstance(value, list) else [value])]


def pasted(settings: Iterable[Iterable[str]], notes: Iterable[str]) -> str:
    """The words of each setting for a shell, on a line of its own, with notes as comments below.

    Each line but the last ends in a continuation. The comments come last, as bash would drop any words after them.
    """
    return with_comments(" \\\n".join(map(shlex.join, settings)), notes)


def with_comments(text: str, notes: Iterable[str]) -> str:
    """Text with each note as a comment below it."""
    return "\n".join([text, *(f"# {' '.join(note.split())}" for note in notes)])
