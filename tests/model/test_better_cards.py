"""A card that is better in every row of its datasheet is never predicted slower."""

from __future__ import annotations

from itertools import permutations

import pytest

from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import Gpu, gpus
from fp8plan.model.plan.planner import plan
from fp8plan.model.workload import Workload

ROWS = (
    "memory_bytes", "memory_bandwidth", "bf16_flops", "fp8_flops", "sm_count", "l2_bytes", "nvlink_bandwidth",
    "pcie_bandwidth", "power_limit_watts",
)  # fmt: skip
LONG, SHORT = Workload(64, 1, Fixed(8000), Fixed(500)), Workload(256, 1, Fixed(64), Fixed(64))
ROUNDING = 1.0005
# Pairs of which one card has a profile of its own and the other has not: their difference is the profiles' error.
OTHER_PROFILE = {("a100_sxm", "a800_sxm"): 1.015, ("l40s", "l40"): 1.05}


def better(card: Gpu, other: Gpu) -> bool:
    """True if no row of `other` is above that of `card`, and both power limits are known."""
    rows = [(getattr(card, name) or 0, getattr(other, name) or 0) for name in ROWS]
    known = card.power_limit_watts is not None and other.power_limit_watts is not None
    return known and all(ours >= theirs for ours, theirs in rows)


PAIRS = [
    (card, other)
    for card, other in permutations(gpus(), 2)
    if card.compute_capability == other.compute_capability and better(card, other)
]


def test_the_pair_that_contradicted_itself_is_among_them() -> None:
    assert ("h100_nvl", "h100_pcie") in [(card.name, other.name) for card, other in PAIRS]


@pytest.mark.parametrize("workload", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"])
def test_a_better_card_is_not_slower(model: str, workload: Workload) -> None:
    cards = {card.name: card for pair in PAIRS for card in pair}
    seconds = {
        name: {choice.precision: choice.makespan_s for choice in plan(model, card, workload).choices}
        for name, card in cards.items()
    }
    slower = [
        (card.name, other.name, precision, round(own / seconds[other.name][precision], 3))
        for card, other in PAIRS
        for precision, own in seconds[card.name].items()
        if own is not None
        and (seconds[other.name][precision] or own) * OTHER_PROFILE.get((card.name, other.name), ROUNDING) < own
    ]
    assert slower == []
