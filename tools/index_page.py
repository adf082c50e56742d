"""README.md as package indexes show it: its relative links lead to the files of the released version.

Hatchling runs this when it builds the package.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")


def with_absolute_links(page: str, source: str, tag: str) -> str:
    """Return the page with links into the repository `source` at a tag. Pictures are linked as they are."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        kind = "raw" if picture else "blob"
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}[{words}]({source}/{kind}/{tag}/{path})"

    return LINK.sub(absolute, page)


class IndexPage(MetadataHookInterface):
    """The readme of the package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        page = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(page, metadata["urls"]["Source"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
