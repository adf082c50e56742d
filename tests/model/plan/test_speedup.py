"""A speed-up and its interval: what is printed of it, and how the doubt of a rollout reaches the RL step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.choice import SpeedUp, speed_up
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.profile.profile import GPU_PACE, HOST_PACE
from fp8plan.model.rollout import Rollout, Timeline

PROFILE = replace(datasheet_profile(find_gpu("h200")), model_error=0.1)
SECONDS = st.floats(0.1, 1e4)


@st.composite
def gains(draw: st.DrawFn) -> SpeedUp:
    ratio, factor = draw(st.floats(0.2, 20)), draw(st.floats(1.0001, 3))
    return SpeedUp(ratio, ratio / factor, ratio * factor)


@given(gains())
def test_doubt_is_that_of_the_numbers_that_are_printed(gain: SpeedUp) -> None:
    low, high = gain.cell.partition("(")[2].rstrip(")").split("-")
    assert gain.in_doubt == (float(low) <= 1 <= float(high))


@given(gains())
def test_no_sentence_leaves_out_the_interval_or_says_slower_in_times(gain: SpeedUp) -> None:
    for text in (gain.over("bf16"), gain.percent("bf16")):
        assert " bf16 (90%: " in text
    assert ("slower than bf16" in gain.over("bf16")) == (round(gain.ratio, 2) < 1)


def test_the_words_of_some() -> None:
    assert SpeedUp(1.2, 0.88, 1.64).over("bf16") == "1.20x as fast as bf16 (90%: 0.88 to 1.64)"
    assert SpeedUp(0.99, 0.93, 1.0512).over("bf16") == "1.0% slower than bf16 (90%: 7.0% slower to 5.1% faster)"
    assert SpeedUp(0.8, 0.7, 0.9).percent("bf16") == "20% slower than bf16 (90%: 30% slower to 10% slower)"
    assert SpeedUp(1.0, 1.0, 1.0).cell == "1.00x"
    assert not SpeedUp(1.0, 1.0, 1.0).in_doubt


@given(gains(), st.floats(0.01, 1))
def test_a_step_gains_between_nothing_and_what_its_rollout_gains(gain: SpeedUp, share: float) -> None:
    assert gain.low is not None
    assert gain.high is not None
    step = gain.of_step(share)
    for ours, rollouts in zip(step, gain, strict=True):
        assert ours is not None
        assert rollouts is not None
        assert min(1, rollouts) - 1e-9 <= ours <= max(1, rollouts) + 1e-9
    assert gain.of_step(1.0) == pytest.approx(gain)


EMPTY = np.zeros(1, dtype=np.int64)
ROLLOUT = Rollout(1.0, 0.9, 1.1, 1, 1, 0, 0, 0, 0.0, {}, {}, (), Timeline(np.ones(1), EMPTY, EMPTY, EMPTY, EMPTY))


def run(seconds: float, cut: tuple[int, bool] = (1, False)) -> Rollout:
    return replace(ROLLOUT, makespan_s=seconds, log_gradient={"gemm": 0.5}, cut=cut)


def of_step(bf16: float, other: float, rest: float) -> SpeedUp:
    """The speed-up of an RL step, whose rest takes so many seconds."""
    return speed_up(run(bf16), run(other), PROFILE, (bf16 + rest, other + rest))


@given(SECONDS, SECONDS, SECONDS)
def test_a_step_is_in_less_doubt_than_its_rollout_and_in_none_where_the_rollout_is_nothing(
    bf16: float, other: float, rest: float
) -> None:
    """The rest is known. What both rollouts have in common counts where their shares differ."""
    alone, whole = (of_step(bf16, other, x) for x in (0.0, rest))
    most = 2 * PROFILE.model_error * 1.6449
    assert alone.high is not None
    assert whole.high is not None
    assert whole.ratio == pytest.approx((bf16 + rest) / (other + rest))
    share = max(bf16 / (bf16 + rest), other / (other + rest))
    spread = whole.high / whole.ratio
    assert 1 <= spread <= 2.72 ** (most * share + 1e-9)
    tiny = of_step(bf16, other, 1e7)
    assert tiny.high == pytest.approx(tiny.ratio, rel=1e-2)


def test_two_layouts_share_no_error_of_their_layouts() -> None:
    """So a speed-up over another layout is in more doubt than one on the same."""
    same = speed_up(run(2, (2, False)), run(1, (2, False)), PROFILE)
    across = speed_up(run(2, (2, False)), run(1, (2, True)), PROFILE)
    assert same.high is not None
    assert across.high is not None
    assert PROFILE.layout_error(2) > 0
    assert across.high > same.high
    alone = speed_up(run(2), run(1), PROFILE)
    assert same.high == pytest.approx(alone.high)  # what both have in common cancels


def test_the_pace_of_gpu_and_host_cancels_as_far_as_both_depend_on_it() -> None:
    wide = PROFILE.with_errors(0.2, 0.0)
    bound = {"gpu": {GPU_PACE: 1.0}, "host": {HOST_PACE: 1.0}}
    gpu, host = (replace(ROLLOUT, log_gradient=gradient) for gradient in bound.values())
    assert speed_up(gpu, replace(ROLLOUT, makespan_s=2.0, log_gradient={GPU_PACE: 1.0}), wide) == pytest.approx(
        (0.5, 0.5, 0.5)
    )
    ratio, _, high = speed_up(gpu, host, wide)
    assert high == pytest.approx(ratio * np.exp(1.6449 * 0.2 * 2**0.5))
