"""Mixers with a state: what bounds them, and that the context does not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8plan.model.architecture.parts import DeltaNet, KimiDelta, Mamba2, ShortConv
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.mixers import Recurrent, recurrent_cost, scan_flops, state_bytes
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile

H200 = find_gpu("h200")
PROFILE = datasheet_profile(H200)
MIXERS: list[Recurrent] = [
    DeltaNet(16, 32, 128, 128, 4),  # Qwen3-Next
    KimiDelta(32, 128, 4),
    Mamba2(128, 64, 8, 128, 4),  # Nemotron-H-8B
    ShortConv(2048, 3),
]
by_name = pytest.mark.parametrize("mixer", MIXERS, ids=lambda x: type(x).__name__)


def seconds(mixer: Recurrent, requests: float = 0, context: float = 0, tokens: float = 0, tp: int = 1) -> float:
    values = (requests, requests * context, tokens, 1 if tokens else 0, tokens, tokens**2 / 2, requests)
    batch = StepBatch(*(np.array([float(x)]) for x in values))
    return float(recurrent_cost(batch, mixer, tp, H200, PROFILE).seconds.item())


@by_name
def test_decode_moves_the_states_whatever_the_context(mixer: Recurrent) -> None:
    assert seconds(mixer, 100, 10) == seconds(mixer, 100, 10_000)
    assert seconds(mixer, 100, 10) > 2 * 100 * state_bytes(mixer, 1) / H200.memory_bandwidth
    assert seconds(mixer) == 0
    assert seconds(mixer, 1) < seconds(mixer, 2) < seconds(mixer, 200)


@by_name
def test_ranks_share_the_work(mixer: Recurrent) -> None:
    assert state_bytes(mixer, 1) == 2 * state_bytes(mixer, 2)
    assert seconds(mixer, 300, tokens=4000, tp=2) < seconds(mixer, 300, tokens=4000)


def test_a_delta_net_of_qwen3_next_keeps_a_megabyte_for_each_request() -> None:
    """32 heads of 128 x 128 in BF16, and three inputs of 8,192 channels of its convolution."""
    assert state_bytes(MIXERS[0], 1) == 2 * (32 * 128 * 128 + 3 * 8192)


@pytest.mark.parametrize("mixer", MIXERS[:3], ids=lambda x: type(x).__name__)
def test_prefill_is_above_its_flops_and_even_in_its_tokens(mixer: DeltaNet | KimiDelta | Mamba2) -> None:
    one, two = seconds(mixer, tokens=4000), seconds(mixer, tokens=8000)
    assert one > 4000 * scan_flops(mixer, 1) / H200.bf16_flops
    assert two - one == pytest.approx(4000 * scan_flops(mixer, 1) / H200.bf16_flops / _efficiency(mixer))


def _efficiency(mixer: Recurrent) -> float:
    kernel = "mamba2" if isinstance(mixer, Mamba2) else "delta_net"
    return PROFILE.coefficients[f"{kernel}.compute_efficiency"]


@by_name
def test_partials_are_the_derivatives(mixer: Recurrent) -> None:
    batch = StepBatch(*(np.array([float(x)]) for x in (50, 5000, 3000, 2, 4000, 4e6, 52)))
    base, step = recurrent_cost(batch, mixer, 1, H200, PROFILE), -1e-6
    assert base.partials
    for name, partial in base.partials.items():
        moved = replace(PROFILE, coefficients=PROFILE.coefficients | {name: PROFILE.coefficients[name] * (1 + step)})
        change = recurrent_cost(batch, mixer, 1, H200, moved).seconds - base.seconds
        np.testing.assert_allclose(change / step, partial, rtol=1e-3, atol=1e-5 * base.seconds.item())
