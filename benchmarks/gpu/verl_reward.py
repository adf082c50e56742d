"""The rule-based reward of benchmarks.gpu.verl_grpo, in the form that verl loads from a file: it needs no download."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of a response's words that are even numbers: "w4 w7" is worth 0.5. The other arguments are verl's."""
    words = [word[1:] for word in solution_str.split() if word[:1] == "w" and word[1:].isdigit()]
    return sum(int(word) % 2 == 0 for word in words) / len(words) if words else 0.0
