"""The fp8plan commands that README.md and docs/ show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
# What a command needs beside a checkout: a machine, an extra or a run of the user's own.
NEEDS = (
    "--gpu auto",
    "fp8plan calibrate",
    "fp8plan doctor",
    "fp8plan probe",
    "run.jsonl",
    "MODEL",
    "./my-model",
)


def commands(page: Path) -> list[str]:
    """Every fp8plan command that a page shows with its arguments, in a block or in a sentence, in order."""
    text = page.read_text()
    text = re.sub(r"^<!-- begin help .*?^<!-- end help", "", text, flags=re.S | re.M)  # usage, not commands
    lines = "".join(body for _, body in BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    typed = [line for line in lines if line.startswith("fp8plan ")]
    return typed + [code for code in inline if re.match(r"fp8plan (?!--)\w+ \S", code)]


def run_as_pasted(pages: Iterable[Path], needs: tuple[str, ...] = NEEDS) -> list[str]:
    """The commands of some pages that need nothing of `needs`, each once."""
    shown = dict.fromkeys(command.split("  #")[0].strip() for page in pages for command in commands(page))
    return [command for command in shown if not any(need in command for need in needs)]
