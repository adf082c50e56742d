"""Print the size of a tree of fp8plan: modules, folders, and lines of package, tests and benchmarks.

    python tools/size.py [TREE]

Walks are counted by `python -m benchmarks.walks`, words of the documentation by `python tools/words.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median

REPOSITORY = Path(__file__).parent.parent


def lines(folder: Path) -> dict[Path, int]:
    """Lines of each Python file below a folder."""
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(folder.rglob("*.py"))}


def main() -> None:
    tree = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    package = lines(tree / "fp8plan")
    counts = [count for count in package.values() if count > 1]  # without empty __init__.py files, and docstrings alone
    longest = max(package, key=lambda path: package[path])
    print(f"modules            {len(package)}, {len(counts)} of more than one line")
    print(f"folders            {len({path.parent for path in package})}")
    print(f"lines of a module  mean {mean(counts):.0f}, median {median(counts):.0f}, {longest.name} {package[longest]}")
    for name in ("fp8plan", "tests", "benchmarks"):
        print(f"lines of {name:9} {sum(lines(tree / name).values()):,}")


if __name__ == "__main__":
    main()
