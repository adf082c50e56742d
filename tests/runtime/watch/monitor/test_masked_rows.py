"""Rows whose mask has no token are no sequences: they change no figure, no weight and no decision, anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mismatch_batches import ragged

from fp8plan.runtime.measure.probe.probe import compared
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.controller.state import Decision
from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Rejection, Thresholds, correct
from fp8plan.runtime.watch.correction.settings import REJECTIONS
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.metrics import MismatchSums
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.record import Step

torch = pytest.importorskip("torch")

GARBAGE = (0.0, 7.0, -1e30, float("nan"), float("inf"), float("-inf"))
START = Thresholds(2.0, (0.5, 2.0))
RULES = [Rejection(*name.rsplit("_", 1), 1.5) for name in REJECTIONS]  # type: ignore[arg-type]

corrections = st.builds(
    CorrectionSettings,
    level=st.sampled_from(["token", "sequence", "geometric", None]),
    mode=st.sampled_from(["tis", "mis", "icepop"]),
    thresholds=st.just(START),
    reject=st.lists(st.sampled_from(RULES), max_size=2),
    veto=st.sampled_from([None, 1e-2]),
    batch_normalize=st.booleans(),
)


def padded(batch: Any, where: Any, rows: int, seed: int) -> list[Any]:
    """The batch with its rows at `where` among `rows`, of which the others are masked and hold anything."""
    chance = np.random.default_rng(seed)
    train, rollout, mask = (values.new_zeros(rows, values.shape[1]) for values in batch)
    for side in (train, rollout):
        side[:] = torch.as_tensor(chance.choice(GARBAGE, side.shape)).float()
    for values, filled in zip((train, rollout, mask), batch, strict=True):
        values[where] = filled
    return [train, rollout, mask]


def flat(batch: Any, packed: bool) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of `step`: padded, or packed with rows of length 0."""
    train, rollout, mask = batch
    return ([train[mask], rollout[mask]], {"lengths": mask.sum(1)}) if packed else (list(batch), {})


def figures(step: Step) -> dict[str, Any]:
    """All that a step says."""
    metrics = {name: value for name, value in step.metrics.items() if name != "fp8plan/monitor_s"}
    return {
        "metrics": metrics, "thresholds": step.thresholds, "decided": step.decided, "attribution": step.attribution,
        "mismatch": repr(step.mismatch),  # NaN too
    }  # fmt: skip


@settings(max_examples=30, deadline=None, phases=[Phase.generate])  # a seed does not shrink
@given(corrections, st.booleans(), st.booleans(), st.integers(0, 10**6), st.data())
def test_masked_rows_change_nothing(
    some: CorrectionSettings, level_law: bool, packed: bool, seed: int, data: st.DataObject
) -> None:
    tightens = level_law and some.level is not None
    law: Any = (LevelThresholds if tightens else ConstantThresholds)(2.0, (0.5, 2.0))
    plain, other = Monitor(some, law), Monitor(some, law)
    for number in range(2):
        batch = ragged(seed + number, rows=4, length=30, sd=data.draw(st.sampled_from([0.02, 0.5, 2.0])))
        batch = [values[batch[2].any(1)] for values in (batch[0].clamp(max=0.0), *batch[1:])]
        rows = len(batch[2]) + data.draw(st.integers(1, 9))
        where = sorted(data.draw(st.permutations(range(rows)))[: len(batch[2])])
        longer = padded(batch, where, rows, seed)
        versions = np.zeros(rows, np.int64)
        versions[where] = np.arange(len(where)) + 70
        synced = batch[0] - 0.01, longer[0] - 0.01
        found = []
        for monitor, of_them, stale, sampled_by in (
            (plain, batch, synced[0], versions[where]),
            (other, longer, synced[1], versions),
        ):
            arguments, form = flat(of_them, packed)
            scored = stale[of_them[2]] if packed else stale
            by_row = None if packed else sampled_by  # packed, they could be of as many tokens
            found.append(monitor.step(*arguments, versions=by_row, synced_logprobs=scored, **form))
        expected, step = found
        assert figures(step) == figures(expected)
        assert np.array_equal(step.mismatch.sums.values, expected.mismatch.sums.values)
        assert plain.state == other.state
        for mine, theirs in ((step.weights, expected.weights), (step.mask, expected.mask)):
            if mine is None:
                assert theirs is None
                continue
            assert torch.equal(torch.as_tensor(mine if packed else mine[where]), torch.as_tensor(theirs))
            assert packed or not torch.as_tensor(mine)[~longer[2].any(1)].any()


def test_a_batch_or_micro_batch_of_masked_rows_alone_adds_nothing() -> None:
    train, rollout, mask = ragged(0)
    nothing = pack(train, rollout, torch.zeros_like(mask))
    sums = measure(nothing, np.arange(6))
    assert np.array_equal(sums.values, MismatchSums().values)
    assert (sums.smallest, sums.largest) == (np.inf, -np.inf)
    for level in ("token", "sequence", "geometric"):
        every = CorrectionSettings(level, "mis", START, RULES, 1e-2, True)  # type: ignore[arg-type]
        assert not any(moments.count for moments in correct(nothing, every).sums.values())


def test_a_row_of_log_probs_that_are_not_finite_is_no_sequence_but_one_that_is_lost() -> None:
    train, rollout, mask = ragged(0)
    rest = pack(train, rollout, mask)
    train[1], mask[1] = float("nan"), True
    found = pack(train, rollout, mask)
    assert np.array_equal(found.offsets, rest.offsets)
    assert measure(found).metrics().verl_metrics() == measure(rest).metrics().verl_metrics()
    assert correct(found).kept_sequences == pytest.approx(rest.sequences / (rest.sequences + 1))


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_the_law_tightens_as_without_padding(level: Any) -> None:
    """Padding once made two sequences look like a smaller share of the batch, and held C at its bound."""
    chance = np.random.default_rng(0)
    rollout = torch.as_tensor(-chance.exponential(0.7, (8, 40))).float()
    train = rollout + torch.as_tensor(0.3 * chance.standard_normal((8, 40)) - 0.045).float()
    batch = [train, rollout, torch.ones_like(train, dtype=torch.bool)]
    law = replace(LevelThresholds(), level=level, warm_up=0)
    steps = [
        Monitor(CorrectionSettings(level), law).step(*padded(batch, list(range(8)), rows, 0)) for rows in (8, 16, 64)
    ]
    assert {step.decided.decision for step in steps} == {Decision.TIGHTEN}
    assert len({step.thresholds.tis for step in steps}) == 1


def test_a_probe_leaves_out_an_empty_response() -> None:
    chance = np.random.default_rng(0)
    rollout = [-chance.exponential(0.7, length) for length in (5, 9, 3, 7)]
    train = [row + 0.1 * chance.standard_normal(len(row)) for row in rollout]
    prompts = ["a", "a", "b", "b"]
    expected = compared(train, rollout, prompts=prompts)
    empty = np.zeros(0)
    found = compared([empty, *train, empty], [empty, *rollout, empty], prompts=["c", *prompts, "b"])
    assert (found.figures, found.sequences, found.tokens) == (expected.figures, 4, expected.tokens)
