"""The sequences that an engine keeps to calibrate with."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.remembered import Remembered
from fp8plan.runtime.apply.weight_sync.kv_calibration import CALIBRATION_SEQUENCES


def output(token: int) -> SimpleNamespace:
    return SimpleNamespace(prompt_token_ids=[1], outputs=[SimpleNamespace(token_ids=[token], cumulative_logprob=-1.0)])


class Remembering(RolloutEngine):
    """An engine that remembers and does nothing else."""

    _longest = 64

    def __init__(self) -> None:
        self._remembered = Remembered()
        self.state = SimpleNamespace(soiled=False, version=0)  # type: ignore[assignment]


def test_a_rollout_takes_the_place_of_the_last_and_single_requests_add_up() -> None:
    engine = Remembering()
    engine._remember([output(token) for token in range(64)], "alone")
    assert len(engine.last_sequences) == CALIBRATION_SEQUENCES
    engine._remember([output(7)], "alone")
    assert engine.last_sequences == [[1, 7]]
    for token in range(40):
        engine._remember([output(token)], "alone", more=True)
    assert engine.last_sequences == [[1, token] for token in range(40 - CALIBRATION_SEQUENCES, 40)]
    engine._remember([], "alone", more=True)
    assert len(engine.last_sequences) == CALIBRATION_SEQUENCES


@pytest.mark.parametrize("calls", [1, 2, 5, 40, 1000])
def test_sequences_are_spread_over_all_calls_of_the_rollouts_since_a_sync(calls: int) -> None:
    engine = Remembering()
    engine._remember([output(5)], "alone")
    for call in range(calls):
        engine._remember([output(2 * call), output(2 * call + 1)], "open")
        engine._remember([output(9999)] * 8, "beside")  # an evaluation
    tokens = [sequence[1] for sequence in engine.last_sequences]
    assert len(tokens) == min(2 * calls, CALIBRATION_SEQUENCES)
    assert tokens == sorted(set(tokens))
    gaps = [after - before for before, after in pairwise([0, *tokens, 2 * calls])]
    assert max(gaps) <= 2 * calls / CALIBRATION_SEQUENCES * 2 + 1  # no part of the rollout is left out
    engine.state.version += 1
    engine._remember([output(3)], "open")
    assert engine.last_sequences == [[1, 3]]
