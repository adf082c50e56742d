"""Print the size of a tree of fp8plan: modules, folders, and lines of package, tests and benchmarks.

    python tools/size.py [TREE]

Walks are counted by `python -m benchmarks.walks`, words of the documentation by `python tools/words.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median

REPOSITORY = Path(__file__).parent.parent


def lines(folder: Path, *suffixes: str) -> dict[Path, int]:
    """Lines of each file below a folder with one of these suffixes; none: of Python."""
    chosen = [path for path in sorted(folder.rglob("*")) if path.suffix in (suffixes or (".py",))]
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in chosen}


def counts(tree: Path) -> dict[str, int]:
    """Lines of the package's Python and C, of tests and of benchmarks, as the budget in CONTRIBUTING.md names them."""
    python = {name: sum(lines(tree / name).values()) for name in ("fp8plan", "tests", "benchmarks")}
    in_c = sum(lines(tree / "fp8plan", ".c", ".h").values())
    return {"package": python["fp8plan"], "C": in_c, "tests": python["tests"], "benchmarks": python["benchmarks"]}


def main() -> None:
    tree = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    package = lines(tree / "fp8plan")
    filled = [count for count in package.values() if count > 1]  # without empty __init__.py files, and docstrings alone
    longest = max(package, key=lambda path: package[path])
    print(f"modules            {len(package)}, {len(filled)} of more than one line")
    print(f"folders            {len({path.parent for path in package})}")
    print(f"lines of a module  mean {mean(filled):.0f}, median {median(filled):.0f}, {longest.name} {package[longest]}")
    for name, count in counts(tree).items():
        print(f"lines of {name:10} {count:,}")


if __name__ == "__main__":
    main()
