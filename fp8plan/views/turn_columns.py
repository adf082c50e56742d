"""The columns of a plan's table on trajectories with several turns, and their legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fp8plan.views.text import Column, short

TURN_LEGEND: Final = (
    "prefix hits: of the tokens of prompts. computed again: tokens in full blocks of earlier turns that the cache has "
    "not. tools: time in which the slowest replica is idle, because all its trajectories wait for tools. limit: what "
    "would save most of the time, and how much: tools that answer at once, an endless cache, or no tail; compute, if "
    "none of them saves a tenth."
)


def turn_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns. rows: `turns` of each choice"""
    return [
        Column("prefix\nhits", [f"{turns['hit_share']:.1%}" for turns in rows]),
        Column("com-\nputed\nagain", [short(turns["again_tokens"]) for turns in rows], rank=5),
        Column("tools", [f"{turns['tool_share']:.0%}" for turns in rows], rank=6),
        Column("limit", [_limit(turns) for turns in rows], rank=7, left=True),
    ]


def _limit(turns: Mapping[str, Any]) -> str:
    limit = turns["limit"]
    return limit if limit == "compute" else f"{limit} {turns['saves'][limit]:.0%}"
