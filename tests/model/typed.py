"""Words of a small plan, typed after `fp8plan`."""

from __future__ import annotations

from collections.abc import Sequence

MODEL = "Qwen/Qwen3-0.6B"
SMALL = ["--prompts", "2", "--samples", "2", "--prompt-lengths", "fixed:16", "--response-lengths", "fixed:32"]
PLAN = ["plan", MODEL, "--gpu", "h200", *SMALL]


def replacing(words: Sequence[str]) -> list[str]:
    """The words, without the options of PLAN that later words give again: the program refuses an option given twice."""
    kept = list(words)
    for option, value in zip(PLAN[2::2], PLAN[3::2], strict=True):
        names = [word.partition("=")[0] for word in kept]
        if names.count(option) > 1 and kept[names.index(option) + 1] == value:
            del kept[names.index(option) : names.index(option) + 2]
    return kept
