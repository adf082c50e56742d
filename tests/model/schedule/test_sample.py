"""Batches that are too large to simulate whole: their sample against the schedule of all requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.model import rollout as rollouts
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.step import StepModel
from fp8plan.model.distributions import Fixed, LogNormal, Trace
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan import candidates as evaluate
from fp8plan.model.plan.choice import speed_up
from fp8plan.model.plan.planner import plan
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import Z90
from fp8plan.model.schedule import sample
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.workload import Batch, Workload

H200 = find_gpu("h200")
LIMITS = EngineLimits(max_num_seqs=64)
FEW = EngineLimits(max_num_seqs=16)
LENGTHS = LogNormal(500, 0.9, 2000)
AMPLE, STARVED = 10**9, 2_000
SIZE = 2_000


def simulate(batch: Batch, pool: int = AMPLE) -> Schedule:
    return schedule(batch, pool, LIMITS)


def growing(requests: int) -> Trace:
    """Lengths that double from the first request to the last."""
    lengths = LENGTHS.draw(requests, np.random.default_rng(3)) * np.linspace(1, 2, requests)
    return Trace(tuple(lengths.astype(int).tolist()), "growing")


BATCHES = {
    "ample": (Workload(500, 16, Fixed(200), LENGTHS), AMPLE),
    "starved": (Workload(500, 16, Fixed(200), LENGTHS, seed=1), STARVED),
    "no siblings": (Workload(8000, 1, LogNormal(300, 1, 2000), LENGTHS), STARVED),
    "one prompt": (Workload(1, 8000, Fixed(200), LENGTHS), AMPLE),
    "equal": (Workload(500, 16, Fixed(200), Fixed(400)), AMPLE),
    "growing": (Workload(500, 16, Fixed(200), growing(8000)), AMPLE),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_sample_takes_as_long_as_all_requests_within_its_error(kind: str) -> None:
    workload, pool = BATCHES[kind]
    batch, model = (
        workload.batch(),
        StepModel(ModelShape.from_hf("Qwen/Qwen3-8B"), H200, find_precision("bf16"), LIMITS, load_profile(H200)[0]),
    )
    (of_sample,) = sample.schedules_of([batch], partial(simulate, pool=pool), SIZE)
    whole = simulate(batch, pool)
    assert of_sample.sampled is not None
    assert of_sample.sampled.requests <= 2 * SIZE
    assert of_sample.requests == whole.requests
    assert of_sample.prompt_tokens == whole.prompt_tokens
    estimate, exact = (rollouts.rollout([found], model) for found in (of_sample, whole))
    assert estimate.output_tokens == exact.output_tokens == batch.responses.sum()
    error = np.log(estimate.makespan_s / exact.makespan_s)
    assert abs(error) < max(3 * estimate.sampling_sd, 0.005)
    assert estimate.sampling_sd < 0.05
    assert estimate.cached_tokens == pytest.approx(exact.cached_tokens, rel=0.1, abs=1000)
    assert estimate.makespan_low_s < exact.makespan_s < estimate.makespan_high_s
    assert exact.sampling_sd == 0


def test_the_requests_that_are_simulated_do_not_grow_with_the_batch() -> None:
    sizes, rows = [], []
    for prompts in (2_000, 62_500):
        (found,) = sample.schedules_of([Workload(prompts, 16, Fixed(200), LENGTHS).batch()], simulate, SIZE)
        assert found.sampled is not None
        sizes.append(found.sampled.requests)
        rows.append(len(found.steps))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
    assert rows[1] == pytest.approx(rows[0], rel=0.1)


def test_a_sample_grows_until_few_of_the_first_requests_are_left() -> None:
    """A head of short responses would stand for a middle that long ones, begun before, still occupy."""
    lengths = np.full(40_000, 100)
    lengths[::100] = 20_000
    batch = Workload(40_000, 1, Fixed(50), Trace(tuple(lengths.tolist()), "long")).batch()
    (found,) = sample.schedules_of([batch], simulate, SIZE)
    steps = int(found.steps[: int(np.argmax(found.sampled.repeats > 1))].sum()) if found.sampled else 0
    assert found.sampled is None or (found.sampled.requests > SIZE and steps >= 19_000)


def test_a_batch_that_needs_most_of_itself_is_simulated_whole() -> None:
    batch = Workload(6_000, 1, Fixed(50), LogNormal(300, 3, 200_000)).batch()
    (found,) = sample.schedules_of([batch], simulate, 500)
    assert found.sampled is None
    np.testing.assert_array_equal(found.steps, simulate(batch).steps)


def test_replicas_go_at_one_pace_and_each_makes_its_own_tokens() -> None:
    parts = Workload(1_000, 16, Fixed(200), LENGTHS).batch().split(2)
    found = sample.schedules_of(parts, simulate, SIZE)
    assert found[0].steps is found[1].steps
    for part, one in zip(parts, found, strict=True):
        assert one.total(one.steps * one.sampled_requests) == part.responses.sum()
        assert one.requests == len(part.prompts)
        assert one.waiting[0] > 0.9 * one.requests
        assert one.waiting[-1] == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(100, 1000))
def test_a_sample_keeps_the_head_and_the_end_and_the_order(seed: int, most: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    siblings = rng.integers(1, most + 1, 4 * size // most + 40)
    ids = np.repeat(np.arange(len(siblings)), siblings)
    batch = Batch(ids + 1, rng.integers(1, 1000, len(ids)), ids)  # a prompt's length names it
    if len(ids) < 2 * size:
        return
    found = sample.sample_of(batch, size)
    kept = found.batch.prompts - 1
    assert 0 < found.start < found.end < len(kept)
    np.testing.assert_array_equal(kept[: found.start], ids[: found.start])
    np.testing.assert_array_equal(kept[found.end :], ids[len(ids) - (len(kept) - found.end) :])
    assert (np.diff(kept) >= 0).all()
    assert len(kept) < len(ids)


def sampled_plan(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    monkeypatch.setattr(rollouts, "WHOLE", 1000)
    monkeypatch.setattr(rollouts, "schedules_of", partial(sample.schedules_of, size=700))
    return plan("Qwen/Qwen3-8B", H200, Workload(150, 16, Fixed(100), LogNormal(200, 0.5, 500)), limits=FEW, **settings)


def test_a_plan_says_that_it_is_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan("Qwen/Qwen3-8B", H200, Workload(150, 16, Fixed(100), LogNormal(200, 0.5, 500)), limits=FEW)
    made = sampled_plan(monkeypatch)
    (sentence,) = [reason for reason in made.reasons if reason.startswith("A sample of ")]
    assert "% of the responses was simulated" in sentence
    assert not any(reason.startswith("A sample of ") for reason in whole.reasons)
    for estimate, exact in zip(made.choices, whole.choices, strict=True):
        assert estimate.makespan_s == pytest.approx(exact.makespan_s, rel=0.03)


def test_the_intervals_of_a_sample_have_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, pool = BATCHES["growing"]
    (plans,) = [sample.schedules_of([workload.batch()], partial(simulate, pool=pool), SIZE)]
    bf16, fp8 = (
        StepModel(ModelShape.from_hf("Qwen/Qwen3-8B"), H200, find_precision(name), LIMITS, load_profile(H200)[0])
        for name in ("bf16", "fp8_block")
    )
    made = [rollouts.rollout(plans, model) for model in (bf16, fp8)]
    monkeypatch.setattr(rollouts, "pace_error", lambda *_: 0.0)
    certain = [rollouts.rollout(plans, model) for model in (bf16, fp8)]
    for own, without in zip(made, certain, strict=True):
        assert own.sampling_sd > 0
        ends = [np.log(x.makespan_high_s / x.makespan_s) for x in (own, without)]
        assert ends[0] == pytest.approx(np.hypot(ends[1], Z90 * own.sampling_sd))
    gains = [speed_up(*pair, bf16.profile) for pair in (made, certain)]
    assert gains[0].high - gains[0].low > gains[1].high - gains[1].low


def test_progress_moves_with_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    simulated = evaluate.simulate
    monkeypatch.setattr(evaluate, "simulate", lambda *x, **y: events.append("simulated") or simulated(*x, **y))

    def told(items: Any) -> Any:
        for item in items:
            yield item
            events.append("shown")

    sampled_plan(monkeypatch, progress=told)
    assert events[:4] == ["simulated", "shown", "simulated", "shown"]
