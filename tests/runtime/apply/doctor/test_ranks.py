"""The doctor on an engine of two tensor-parallel ranks, on a CPU, of which one misses a sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import planted
import pytest
from tiny_models import CALIBRATION, started, weights

import fp8plan
from fp8plan.runtime.apply.engine.engine import RolloutEngine

pytestmark = pytest.mark.vllm

KIND, STALE = "dense", 1  # the rank


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    import warm_processes  # noqa: F401 -- it imports vLLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # so that faults can be planted
        with started(KIND, "a", "fp8_block+fp8_kv", mode="multiprocess", tensor_parallel_size=2) as engine:
            yield engine


def synced(engine: RolloutEngine, which: str) -> None:
    engine.sync_weights(weights(KIND, which), kv_prompts=CALIBRATION)


def plant(engine: RolloutEngine, fault: Callable[..., None]) -> None:
    engine.llm.collective_rpc(fault, args=(STALE,))


def found(engine: RolloutEngine, **given: Any) -> dict[str | None, str]:
    return {one.fault: one.says for one in fp8plan.doctor(engine, **given).faults}


@pytest.mark.slow
def test_weights_that_one_rank_did_not_get(engine: RolloutEngine) -> None:
    synced(engine, "a")
    assert found(engine, weights=weights(KIND, "a")) == {}
    plant(engine, planted.remember)
    synced(engine, "b")
    plant(engine, planted.go_back)
    said = found(engine, weights=weights(KIND, "b"))
    assert said["stale_weights"].startswith(f"rank {STALE} serves other weights than the trainer's")
    synced(engine, "b")
    assert found(engine, weights=weights(KIND, "b")) == {}


def test_a_rank_that_did_not_hear_that_a_sync_ended(engine: RolloutEngine) -> None:
    synced(engine, "a")
    plant(engine, planted.lose_the_next_commit)
    synced(engine, "b")
    version = engine.state.version
    assert found(engine)["stale_weights"] == f"rank {STALE} serves {version - 1}; weights {version} should serve"
