"""README.md as package indexes show it: its relative links lead to the files of the released version.

A build that is no release knows no address, and keeps the links. Hatchling runs this when it builds the package.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCE = "FP8PLAN_SOURCE"
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
    """The readme of the package's metadata, and its addresses, if FP8PLAN_SOURCE names the repository of a release."""

    def update(self, metadata: dict[str, Any]) -> None:
        page, source = (Path(self.root) / "README.md").read_text(encoding="utf-8"), os.environ.get(SOURCE)
        metadata["urls"] = {}
        if source:
            page = with_absolute_links(page, source, f"v{metadata['version']}")
            metadata["urls"] = {"Source": source, "Issues": f"{source}/issues"}
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
