"""Count the words of handwritten prose in README.md and docs/, by page and in total.

    python tools/words.py [PAGE ...]

Generated blocks (`<!-- begin NAME -->` to `<!-- end NAME -->`), fenced code, directives of mkdocstrings and the
targets of links do not count.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (
    re.compile(r"<!-- begin ([\w -]+) -->\n.*?<!-- end \1 -->", re.S),
    re.compile(r"^```.*?^```$", re.S | re.M),
    re.compile(r"^:::.*\n(?: {4}.*\n?)*", re.M),
)
LINK = re.compile(r"\]\([^)\s]*\)")


def words(page: str) -> int:
    """The number of words with a letter or digit. The bars of tables and bullets do not count."""
    for pattern in LEFT_OUT:
        page = pattern.sub("", page)
    return sum(any(letter.isalnum() for letter in word) for word in LINK.sub("]", page).split())


def main() -> None:
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    total = 0
    for path in pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        count = words(path.read_text(encoding="utf-8"))
        total += count
        print(f"{count:>7,}  {path.relative_to(ROOT)}")
    print(f"{total:>7,}  in total")


if __name__ == "__main__":
    main()
