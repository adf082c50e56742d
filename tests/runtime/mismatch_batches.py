"""Batches that the tests of the mismatch share, also in processes that are spawned (they import this file)."""

from __future__ import annotations

from typing import Any

import numpy as np


def ragged(seed: int, rows: int = 6, length: int = 40, sd: float = 0.3) -> tuple[Any, Any, Any]:
    """(train, rollout, mask) [rows, length] float32 and bool tensors: holes, and the second row empty."""
    import torch

    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.7, (rows, length))
    train = rollout + sd * rng.standard_t(3, (rows, length))
    mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))) & (rng.random((rows, length)) < 0.9)
    mask[1:2] = False
    return torch.tensor(train).float(), torch.tensor(rollout).float(), torch.tensor(mask)


def packed(train: Any, rollout: Any, mask: Any) -> tuple[Any, Any, Any]:
    """The same tokens as (train, rollout, lengths), without padding."""
    return train[mask], rollout[mask], mask.sum(1)


def gaussian(sigma: float, tokens: int = 4_000, seed: int = 0) -> Any:
    """[tokens] log ratios of honest importance weights: their mean ratio is 1 but for sampling, k3 is sigma^2 / 2."""
    return sigma * np.random.default_rng(seed).normal(size=tokens) - sigma**2 / 2


def mismatch_of(log_ratio: Any) -> Any:
    """The Mismatch of log ratios [tokens], of one sequence, or [sequences, tokens]."""
    from fp8plan.runtime.watch.mismatch.measure import measure, pack

    log_ratio = np.atleast_2d(np.asarray(log_ratio, np.float32))
    return measure(pack(log_ratio - 3.0, np.full_like(log_ratio, -3.0), np.ones_like(log_ratio, bool))).metrics()


def with_outliers(sigma: float) -> tuple[Any, list[Any]]:
    """The Mismatch of 50 honest sequences of 80 tokens, and the same with one token of four extreme ratios."""
    log_ratio = gaussian(sigma).reshape(50, 80)
    plain, spoiled = mismatch_of(log_ratio), []
    for outlier in (-20.0, 5.0, 20.0, 50.0):
        log_ratio[17, 5] = outlier
        spoiled.append(mismatch_of(log_ratio))
    return plain, spoiled


def after(controller: Any, seen: Any, state: Any = None) -> Any:
    """(thresholds, state, decided) of a controller once it has seen some mismatches."""
    state = state or controller.initial()
    for one in seen:
        thresholds, state, decided = controller.update(state, one)
    return thresholds, state, decided


def one_of_two(rank: int, folder: str) -> None:
    """One of two processes: what ranks measure together is what one process measures of all, and so are the weights."""
    import torch
    from torch.distributed import destroy_process_group, init_process_group

    from fp8plan.runtime.watch.correction.correct import CorrectionSettings, correct
    from fp8plan.runtime.watch.mismatch.measure import measure, pack

    whole = ragged(0)
    versions = torch.tensor([4, 4, 5, 5, 6, 6])
    settings = CorrectionSettings(batch_normalize=True), CorrectionSettings(level="sequence", batch_normalize=True)
    # Before the ranks meet, measure and correct are those of one process.
    alone = measure(pack(*whole), versions)
    weights = [correct(pack(*whole), some).weights for some in settings]
    init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    # Some sequences each; the second has none; the second has rows, all without a token.
    for first in (slice(0, 2), slice(0, 6), None):
        part = slice(0, 6) if first is None else (first, slice(first.stop, 6))[rank]
        data = [tensor[part] for tensor in whole]
        if first is None and rank:
            data[2] = torch.zeros_like(data[2])
        found = measure(pack(*data), versions[part]).reduced()
        np.testing.assert_allclose(found.values, alone.values, rtol=1e-12, atol=1e-12)
        assert (found.smallest, found.largest) == (alone.smallest, alone.largest)
        assert found.metrics().versions.keys() == {4, 5, 6}
        for some, expected in zip(settings, weights, strict=True):
            ours = correct(pack(*data), some).weights
            torch.testing.assert_close(ours, expected[part] * data[2], rtol=1e-6, atol=0)
    destroy_process_group()


def sharing_sequences(rank: int, folder: str) -> None:
    """One of three processes: the first two hold pieces of the same sequences, and the third has whole ones."""
    from datetime import timedelta

    from torch.distributed import destroy_process_group, init_process_group, new_group

    init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    pair, single = new_group([0, 1]), new_group([2])
    if rank < 2:
        _as_one_process(rank, pair)
        _refused_together(rank, pair)
    _with_a_third(rank, pair if rank < 2 else single)
    destroy_process_group()


def _settings() -> list[tuple[Any, Any]]:
    """(settings, law), of every level, mode and kind of rejection."""
    from fp8plan.runtime.watch.controller.laws import LevelThresholds
    from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Rejection, Thresholds

    names = ("token_k1", "seq_sum_k3", "seq_mean_k1", "seq_max_k2")
    start, rules = Thresholds(2.0, (0.5, 2.0)), [Rejection(*name.rsplit("_", 1), 1.5) for name in names]
    every = [
        CorrectionSettings(level, mode, start, reject, veto, normalize)
        for level in ("token", "sequence", "geometric")
        for mode, reject, veto, normalize in (("tis", (), None, True), ("mis", rules, 1e-2, False))
    ]
    return [(settings, LevelThresholds(2.0, (0.5, 2.0))) for settings in every] + [
        (CorrectionSettings(None, reject=rules[:1]), None)
    ]


def _said(step: Any) -> Any:
    """All that a step says, with NaN."""
    metrics = {name: value for name, value in step.metrics.items() if name != "fp8plan/monitor_s"}
    return metrics, step.thresholds, step.decided, step.attribution, repr(step.mismatch)


def _as_one_process(rank: int, pair: Any) -> None:
    """Weights, masks, figures and decisions equal those of one process with the whole sequences, to the last bit."""
    import torch

    from fp8plan.runtime.watch.mismatch.sums import ALONE
    from fp8plan.runtime.watch.monitor.monitor import Monitor

    columns = torch.arange(40)
    for settings, law in _settings():
        alone = Monitor(settings, law, group=ALONE)
        shared = Monitor(settings, law, group=pair, sequence_group=pair)
        for seed, form in enumerate(("slices", "own columns", "packed", "one has nothing")):
            train, rollout, mask = ragged(seed, sd=0.2)
            train = train.clamp(max=0.0)
            if seed == 1:
                train[0, 3] = float("nan")
            versions = torch.tensor([4, 4, 5, 5, 6, 6])
            nearer: dict[str, Any] = {"synced_logprobs": train - 0.01, "replayed_logprobs": train - 0.02}
            expected = alone.step(train, rollout, mask, versions=versions, **nearer)
            first = columns < (40 if form == "one has nothing" else 13)
            mine = first if rank == 0 else ~first
            data, how = [train, rollout, mask & mine], {}
            if form == "packed":
                data, how = [train[data[2]], rollout[data[2]]], {"lengths": data[2].sum(1)}
            elif form != "own columns":
                data = [values[:, mine] for values in (train, rollout, mask)]
            nearer = {"synced_logprobs": data[0] - 0.01, "replayed_logprobs": data[0] - 0.02}
            step = shared.step(*data, versions=versions, **nearer, **how)
            assert _said(step) == _said(expected), (settings, form)
            assert shared.state == alone.state
            for ours, theirs in ((step.weights, expected.weights), (step.mask, expected.mask)):
                if theirs is None:
                    assert ours is None
                elif form == "packed":
                    assert torch.equal(ours, theirs[mask & mine])
                elif form == "own columns":
                    assert torch.equal(ours, theirs * mine)
                else:
                    assert torch.equal(ours, theirs[:, mine])


def _refused_together(rank: int, pair: Any) -> None:
    """Both ranks refuse what one of them refuses, and the next step pairs."""
    import pytest
    import torch

    from fp8plan.errors import ConfigError
    from fp8plan.runtime.watch.correction.correct import CorrectionSettings, correct
    from fp8plan.runtime.watch.mismatch.measure import measure, pack
    from fp8plan.runtime.watch.mismatch.sums import ALONE
    from fp8plan.runtime.watch.monitor.monitor import Monitor

    monitor = Monitor(sequence_group=pair, group=pair)
    train, rollout, mask = ragged(0, sd=0.05)
    train = train.clamp(max=0.0)
    bad = mask.long() * 2 if rank else mask
    fewer = slice(0, 5 if rank else 6)
    faults: list[tuple[Any, dict[str, Any], str]] = [
        ((train, rollout, bad), {}, "neither 0 nor 1"),
        ((train[fewer], rollout[fewer], mask[fewer]), {}, "have 6, 5 rows; allowed: the same sequences on each"),
        (
            (train, rollout, mask),
            {"synced_logprobs": train if rank else None},
            "=None, rank 1 'present'",
        ),
        (
            (train, rollout, mask),
            {"replayed_logprobs": train if rank else None},
            "replayed_logprobs=None, rank 1 'present'",
        ),
        ((train, rollout, mask), {"routing_differs": 0.1 if rank else None}, "routing_differs=None, rank 1 'present'"),
        ((train, rollout, mask), {"routing_differs": 1.5 if rank else 0.1}, "routing_differs is 1.5; allowed: the"),
        ((train, rollout, mask), {"number": "x" if rank else None}, "number is 'x'"),
        ((train.abs(), rollout, mask), {}, "mean above 0"),
        ((train, rollout, mask), {"versions": torch.ones(train.shape)}, r"allowed: \[6\], one per sequence$"),
    ]
    for data, more, says in faults:
        with pytest.raises(ConfigError, match=says):
            monitor.step(*data, **more)
    assert monitor.steps == 0
    assert monitor.step(train, rollout, mask).mismatch.sequences == int(mask.any(1).sum())
    tokens = pack(train, rollout, mask, sequence_group=pair)
    figures = measure(tokens), correct(tokens).sums  # whole on the first rank, nothing on the other
    assert (figures[0]["tokens"] > 0) == (figures[1]["valid"].count > 0) == (rank == 0)
    with pytest.raises(ConfigError, match="group lacks rank 0 of sequence_group"):
        Monitor(sequence_group=pair, group=ALONE)
    with pytest.raises(ConfigError, match="group lacks rank 0 of sequence_group"):
        correct(tokens, CorrectionSettings(batch_normalize=True), ALONE)


def _with_a_third(rank: int, sequence_group: Any) -> None:
    """Figures are those of one process up to the order of its sums, and no sequence counts twice."""
    import pytest
    import torch

    from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Thresholds
    from fp8plan.runtime.watch.mismatch.sums import ALONE
    from fp8plan.runtime.watch.monitor.monitor import Monitor
    from fp8plan.schemas import ROUTING_DIFFERS

    whole = [values.clone() for values in ragged(3, rows=8, sd=0.1)]
    whole[0] = whole[0].clamp(max=0.0)
    rows = slice(0, 5) if rank < 2 else slice(5, 8)
    columns = (slice(0, 17), slice(17, 40), slice(0, 40))[rank]
    for level in ("token", "sequence", "geometric"):
        settings = CorrectionSettings(level, thresholds=Thresholds(1.1))
        expected = Monitor(settings, group=ALONE).step(*whole)
        share = (0.1, 0.4, float("nan"))[rank]
        mine = [values[rows, columns] for values in whole]
        step = Monitor(settings, sequence_group=sequence_group).step(*mine, routing_differs=share)
        first, second = (float(whole[2][:5, part].sum()) for part in (slice(0, 17), slice(17, 40)))
        known = (0.1 * first + 0.4 * second) / (first + second)  # the third rank's is not known
        assert step.metrics[ROUTING_DIFFERS] == pytest.approx(known)
        assert torch.equal(step.weights, expected.weights[rows, columns])
        assert (step.mismatch.sequences, step.mismatch.tokens) == (
            expected.mismatch.sequences, expected.mismatch.tokens
        )  # fmt: skip
        for name, value in expected.metrics.items():
            if name != "fp8plan/monitor_s":
                close = None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)
                assert step.metrics[name] == close, name
