"""Pages and pictures of the site that stand elsewhere in the repository, and docstrings laid out for it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Path in the site -> file of the repository.
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "evidence/measurements.md": "profiles/README.md",
    "evidence/cpu.md": "profiles/cpu/vllm-0.30.0/README.md",
    "evidence/mismatch_observations.md": "fp8plan/model/risk/data/README.md",
}
PICTURES = {"plan.png": "examples/plan.png"}
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FIELD = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): +(?=\S)")


def on_files(files: Any, config: Any) -> Any:
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_relinked(text, name, source)))
    for name, source in PICTURES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links that also lead somewhere in a checkout, as they are in the site."""
    name = page.file.src_uri
    return markdown if name in PAGES else _relinked(markdown, name, f"docs/{name}")


def _relinked(text: str, page: str, source: str) -> str:
    """The text with its links, which are relative to `source`, as they are in the site. A link to what the site does
    not have is its words and the path."""
    there = {target: name for name, target in {**PAGES, **PICTURES}.items()}
    folder = posixpath.dirname(page) or "."

    def moved(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = there.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return f"{words} (`{path}`)"
        return f"[{words}]({posixpath.relpath(inside, folder)}{anchor})"

    return LINK.sub(moved, text)


class Fields(griffe.Extension):
    """Our docstrings list fields as `name:   text` in columns; Markdown wants a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _listed(obj.docstring.value)


def _listed(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if found := FIELD.match(line):
            lines += [] if inside else [""]
            lines.append(f"- `{found[1]}`: {line[found.end() :]}")
            inside = True
        elif inside and line.startswith(" "):
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", line] if inside and line.strip() else [line]
            inside = False
    return "\n".join(lines)
