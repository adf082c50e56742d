"""The measurements' calls of vLLM fit the installed one: names and number of arguments.

They run on GPUs alone, where nobody sees a changed argument before a lease.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fp8plan.runtime.measure

pytestmark = pytest.mark.vllm

FOLDER = Path(fp8plan.runtime.measure.__file__).parent
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py"))


class Use(NamedTuple):
    """A call of an imported name, or of an attribute of it. partly: further arguments follow elsewhere"""

    module: str
    path: tuple[str, ...]
    line: int
    positional: int
    keywords: tuple[str, ...]
    partly: bool


def uses(source: str) -> Iterator[Use]:
    """The calls of names that a function imports from vLLM, without methods of those that it asks with `hasattr`."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            yield from _uses(list(ast.walk(function)))


def _uses(nodes: Sequence[ast.AST]) -> Iterator[Use]:
    modules = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    asked = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "hasattr"]
    optional = {name for argument in asked for name in _names(argument)}
    for call in calls:
        function, arguments = call.func, call.args
        partly = isinstance(function, ast.Name) and function.id == "partial"
        if partly:
            function, *arguments = arguments
        names = list(_names(function))
        if not names or names[0] not in modules or (len(names) > 1 and names[0] in optional):
            continue
        positional = [x for x in arguments if not isinstance(x, ast.Starred)]
        keywords = tuple(x.arg for x in call.keywords if x.arg is not None)
        open_ended = len(positional) < len(arguments) or len(keywords) < len(call.keywords)
        module, first = modules[names[0]]
        yield Use(module, (first, *names[1:]), call.lineno, len(positional), keywords, partly or open_ended)


def _names(function: ast.expr) -> Iterator[str]:
    """The names of `a.b.c`; none for another expression."""
    if isinstance(function, ast.Attribute) and (before := list(_names(function.value))):
        yield from (*before, function.attr)
    elif isinstance(function, ast.Name):
        yield function.id


def misfit(use: Use) -> str | None:
    """The reason why the installed vLLM cannot be called like that; None if it can, or lacks the name as on a CPU."""
    first, *rest = use.path
    try:
        module = import_module(use.module)
        named: Any = getattr(module, first, None) or import_module(f"{use.module}.{first}")
    except ImportError:
        return None
    try:
        signature = inspect.signature(reduce(getattr, rest, named))
        bind = signature.bind_partial if use.partly else signature.bind
        bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
    except (AttributeError, TypeError) as error:
        return f"line {use.line}, {'.'.join(use.path)}: {error}"
    return None


@pytest.mark.parametrize("file", FILES)
def test_calls_of_vllm_fit_the_installed_one(file: str) -> None:
    faults = [misfit(use) for use in uses((FOLDER / file).read_text(encoding="utf-8"))]
    assert not [fault for fault in faults if fault]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("SamplingParams(max_tokens=1)", None),
        ("SamplingParams(no_such_argument=1)", "no_such_argument"),
        ("partial(SamplingParams, no_such_argument=1)", "no_such_argument"),
        ("SamplingParams.no_such_method()", "no_such_method"),
        ("SamplingParams(**anything)", None),
    ],
)
def test_a_call_that_does_not_fit_is_found(call: str, fault: str | None) -> None:
    (use,) = uses(f"def function():\n    from vllm import SamplingParams\n    {call}")
    reason = misfit(use)
    assert (reason is None) if fault is None else (fault in str(reason))
