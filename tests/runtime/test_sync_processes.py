"""The same syncs into an engine in a process of its own, which can be killed in the middle of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tiny_models import (
    CALIBRATION,
    Outputs,
    generate,
    started_beside_references,
    weights,
)

from fp8plan.errors import NotServingError, SyncError
from fp8plan.runtime.engine import RolloutEngine
from fp8plan.runtime.transport import staged_bytes

pytestmark = pytest.mark.vllm

CHUNK = 300_000  # bytes: a few modules


class Subject(NamedTuple):
    kind: str
    engine: RolloutEngine
    references: dict[str, Outputs]


CASES = [("dense", "fp8_block"), ("moe", "fp8_block+fp8_kv")]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """References are of engines in this process: a set of weights says the same wherever it runs."""
    with started_beside_references(*request.param, mode="multiprocess", chunk_bytes=CHUNK) as (engine, references):
        yield Subject(request.param[0], engine, references)


def test_syncs_alternate_between_two_sets_of_weights(subject: Subject) -> None:
    for which in "babab":
        report = subject.engine.sync_weights(weights(subject.kind, which), kv_prompts=CALIBRATION)
        assert generate(subject.engine) == subject.references[which]
    assert report.chunks > 1
    assert report.compared > 0
    assert report.weight_error == pytest.approx(0.0265, abs=0.0015)
