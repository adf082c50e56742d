"""Mutation testing: a list of changes to a module that its tests do not notice.

    python tools/mutants.py                          every module of tools/mutants.toml
    python tools/mutants.py runtime/watch/guard/fallback   those whose path contains this text
    python tools/mutants.py controller/laws --names _at_reach,_said --sample 40 --seed 1

tools/mutants.toml has the modules, the tests that belong to each, and the mutants that change no behaviour with the
reason. Nothing is written to the repository: each mutant lives in a forked process, whose import system compiles it in
place of the module. A mutant runs only the tests that execute its line, the fastest first, up to the first failure.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
NO_ENGINES = "not vllm and not verl and not trl and not slow"
GOAL = 0.95

COMPARED: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}  # fmt: skip
COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
OPPOSITES = {
    "min": "max", "minimum": "maximum", "any": "all", "logical_and_": "logical_or_", "amin": "amax",
    "bisect_left": "bisect_right", "floor": "ceil",
}  # fmt: skip
OPPOSITES |= {other: name for name, other in OPPOSITES.items()}


class Mutant(NamedTuple):
    """A module with one change, which concerns the lines from `line` to `end`."""

    tree: ast.Module
    line: int
    end: int
    key: str  # "function: before -> after (number so far)", which stays the same when lines move


def changes(node: ast.AST, rebound: set[str]) -> Iterator[ast.AST]:
    """The nodes that replace a node, one at a time. rebound: names that would have a value without it."""

    def changed(**values: Any) -> ast.AST:
        new = copy.deepcopy(node)
        for name, value in values.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for other in COMPARED[type(op)]:
                    yield changed(ops=[*ops[:place], other(), *ops[place + 1 :]])
        case ast.BoolOp(op=op):
            yield changed(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in COMPUTED:
            yield changed(op=COMPUTED[type(op)]())
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value)):
            yield changed(value=value + 1)
        case ast.Constant(value=float(value)):
            yield from (changed(value=other) for other in ([2 * value, value / 2] if value else [1.0]))
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITES:
            yield changed(func=ast.Name(OPPOSITES[name], ast.Load()))
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in OPPOSITES:
            yield changed(func=ast.Attribute(owner, OPPOSITES[name], ast.Load()))
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, (ast.Compare, ast.UnaryOp)):
                yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield changed(value=ast.Constant(None))
    if isinstance(node, (ast.Raise, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and all(not isinstance(x, ast.Name) or x.id in rebound for x in node.targets):
        yield ast.Pass()


def mutants(source: str, names: set[str]) -> list[Mutant]:
    """All mutants of a module, or of the functions, classes and constants with these names."""
    tree, made, keys = ast.parse(source), [], Counter[str]()

    def enter(node: ast.AST, put: Callable[[ast.AST], None], path: tuple[str, ...], rebound: set[str]) -> None:
        """Add the mutants of a node and of its children. put: puts another node in its place."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            path = (*path, node.name)
            bound = [x.arg for x in ast.walk(node) if isinstance(x, ast.arg)] + stored(node)
            rebound = {name for name in bound if bound.count(name) > 1}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not path:
            path = tuple(stored(node))
        if path and (not names or names & set(path)):
            for new in changes(node, rebound):
                put(new)
                changed = ast.fix_missing_locations(copy.deepcopy(tree))
                put(node)
                key = f"{'.'.join(path)}: {told(node)} -> {told(new)}"
                keys[key] += 1
                key += f" ({keys[key]})" * (keys[key] > 1)
                made.append(Mutant(changed, node.lineno, node.end_lineno, key))  # type: ignore[attr-defined]
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or (name == "body" and only_for_types(node)):
                continue
            for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not (isinstance(child, ast.Expr) and is_text(child.value)):
                    at = partial(setattr, node, name) if place is None else partial(value.__setitem__, place)
                    enter(child, at, path, rebound)

    enter(tree, lambda _: None, (), set())
    return made


def stored(node: ast.AST) -> list[str]:
    """The names that a node gives a value, each as often as it does."""
    return [x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def told(node: ast.AST) -> str:
    """The first line of a node's source, without its blocks."""
    return ast.unparse(node).splitlines()[0] if not isinstance(node, ast.Pass) else "nothing"


class Import(SourceFileLoader):
    """An importer that compiles a mutant wherever its module is imported."""

    def __init__(self, path: Path, tree: ast.Module | None) -> None:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        super().__init__(name, str(path))
        self.tree = tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.tree, self.path, "exec") if self.tree else super().get_code(fullname)


class Watch:
    """A pytest plugin that notes the lines of a module that each test executes, and how long the test takes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.lines: dict[str, set[int]] = {}
        self.seconds: dict[str, float] = {}
        self.now: set[int] = set()

    def trace(self, frame: Any, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self.path:
            return None
        self.now.add(frame.f_lineno)
        return self.trace

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.lines.setdefault(report.nodeid, set()).update(self.now)
        self.now.clear()

    def pytest_collection_finish(self) -> None:
        self.now.clear()  # as lines that an import executes belong to no test
        threading.settrace(self.trace)
        sys.settrace(self.trace)


class Chosen:
    """A pytest plugin that runs these tests only, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.rank = {test: rank for rank, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=lambda item: self.rank[item.nodeid])


def forked(path: Path, tree: ast.Module | None, tests: list[str], plugin: Any, limit_s: int, log: Path) -> bool:
    """Run tests in a process of its own, in which the module is `tree`; return true if they pass in time."""
    child = os.fork()
    if not child:
        signal.alarm(limit_s)  # an endless loop ends here
        os.setsid()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        sys.meta_path.insert(0, Import(path, tree))
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", NO_ENGINES]
        status = pytest.main([*options, *tests], plugins=[plugin])
        sys.settrace(None)
        if isinstance(plugin, Watch):
            lines = {test: sorted(numbers) for test, numbers in plugin.lines.items()}
            log.write_text(json.dumps({"lines": lines, "seconds": plugin.seconds}))
        os._exit(int(status))
    return os.waitpid(child, 0)[1] == 0


def judged(entry: dict[str, Any], names: set[str], sample: int | None, seed: int, jobs: int) -> bool:
    """Run a module's mutants, print their fates, and return true if enough of them were noticed."""
    path, begun = ROOT / entry["path"], time.monotonic()
    equivalent = entry.get("equivalent", {})
    made = mutants(path.read_text(), names or set(entry.get("names", ())))
    unknown = set(equivalent) - {mutant.key for mutant in made} if not names else set()
    if sample is not None and sample < len(made):
        made = random.Random(seed).sample(made, sample)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.json"
        if not forked(path, None, entry["tests"], Watch(path), 900, log):
            sys.exit(f"the tests of {entry['path']} fail without a mutant, or take too long")
        seen = json.loads(log.read_text())
        seconds = seen["seconds"]
        covering = [(set(lines), test) for test, lines in seen["lines"].items() if lines]

        def survives(mutant: Mutant) -> bool:
            block = set(range(mutant.line, mutant.end + 1))
            tests = [test for lines, test in covering if lines & block] or [test for _, test in covering]
            limit_s = 20 + int(5 * sum(seconds[test] for test in tests))
            chosen = Chosen(sorted(tests, key=seconds.__getitem__))
            files = sorted({test.partition("::")[0] for test in tests})
            return forked(path, mutant.tree, files, chosen, limit_s, log)

        survived: list[str] = []
        with ThreadPoolExecutor(jobs) as pool:
            for mutant, lives in zip(made, pool.map(survives, made), strict=True):
                survived += [mutant.key] * lives
                if lives and mutant.key not in equivalent:
                    print(f"  survived, line {mutant.line}: {mutant.key}", flush=True)
    missed = sum(key not in equivalent for key in survived)
    changing = len(made) - len(survived) + missed
    rate = 1 - missed / max(changing, 1)
    print(
        f"{entry['path']}: {len(made)} mutants, {len(survived) - missed} equivalent, {changing - missed} of {changing} "
        f"others killed ({rate:.1%}), {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    killed = {mutant.key for mutant in made} & set(equivalent) - set(survived)
    for key in sorted(killed | unknown):
        print(f"  listed as equivalent, but {'a test notices it' if key in killed else 'no such mutant'}: {key}")
    return rate >= GOAL and not killed and not unknown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("module", nargs="*", help="text in the paths of the modules to take; default: all")
    parser.add_argument("--names", default="", help="functions, classes and constants to stay within, a,b,c")
    parser.add_argument("--sample", type=int, help="number of mutants of each module; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ.update(OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    for library in ("hypothesis", "numpy", "pandas", "pytest", "scipy", "torch"):
        importlib.import_module(library)  # once, for all processes that are forked

    table = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())["module"]
    wanted = [entry for entry in table if not options.module or any(text in entry["path"] for text in options.module)]
    names = set(filter(None, options.names.split(",")))
    fine = [judged(entry, names, options.sample, options.seed, options.jobs) for entry in wanted]
    sys.exit(not (fine and all(fine)))


if __name__ == "__main__":
    main()
