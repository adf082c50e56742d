"""The sequences that an engine keeps to calibrate with."""

from __future__ import annotations

from types import SimpleNamespace

from fp8plan.runtime.engine.base import CALIBRATION_SEQUENCES
from fp8plan.runtime.engine.engine import RolloutEngine


def output(token: int) -> SimpleNamespace:
    return SimpleNamespace(prompt_token_ids=[1], outputs=[SimpleNamespace(token_ids=[token], cumulative_logprob=-1.0)])


class Remembering(RolloutEngine):
    """An engine that remembers and does nothing else."""

    _longest = 64

    def __init__(self) -> None:
        self._rollout, self.state = [], SimpleNamespace(soiled=False)  # type: ignore[assignment]


def test_a_rollout_takes_the_place_of_the_last_and_single_requests_add_up() -> None:
    engine = Remembering()
    engine._remember([output(token) for token in range(64)])
    assert len(engine.last_sequences) == CALIBRATION_SEQUENCES
    engine._remember([output(7)])
    assert engine.last_sequences == [[1, 7]]
    for token in range(40):
        engine._remember([output(token)], more=True)
    assert engine.last_sequences == [[1, token] for token in range(40 - CALIBRATION_SEQUENCES, 40)]
    engine._remember([], more=True)
    assert len(engine.last_sequences) == CALIBRATION_SEQUENCES
