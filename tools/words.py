"""Count the words of README.md and docs/: those written by hand, by page and in total, and all, with tables.

    python tools/words.py [PAGE ...]

All words are those of `wc -w`. Words by hand leave out generated blocks (`<!-- begin NAME -->` to `<!-- end NAME -->`),
fenced code, directives of mkdocstrings and the targets of links.
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


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def counts() -> dict[str, int]:
    """All words, and those written by hand, as the budget in CONTRIBUTING.md names them."""
    texts = [path.read_text(encoding="utf-8") for path in pages()]
    return {"words": sum(len(text.split()) for text in texts), "by hand": sum(words(text) for text in texts)}


def main() -> None:
    named = [Path(name).resolve() for name in sys.argv[1:]]
    total = 0
    for path in named or pages():
        count = words(path.read_text(encoding="utf-8"))
        total += count
        print(f"{count:>7,}  {path.relative_to(ROOT)}")
    print(f"{total:>7,}  in total")
    if not named:
        print(f"{counts()['words']:>7,}  with tables")


if __name__ == "__main__":
    main()
