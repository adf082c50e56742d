"""The gain of routing over the static split: by the cost model, on the lengths that came."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import PACES
from fp8plan.model.rollout import simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.fleet.report import Finished, makespans
from fp8plan.runtime.apply.fleet.routing import consecutive
from fp8plan.runtime.watch.guard.guard import Judged
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation
from fp8plan.runtime.watch.mismatch.sampling import Sampling

LIMITS = EngineLimits(max_model_len=16_384, max_num_seqs=64, max_num_batched_tokens=8192, gpu_memory_utilization=0.9)
FACTS = EngineFacts("Qwen/Qwen3-8B", "h200_sxm", "0.26.0", "bf16", LIMITS)
LONG = (9000, 8000)
RESPONSES = (*LONG, *[200] * 14)  # both long ones in the first half


def finished(parts: dict[int, list[int]], samples: int = 1) -> Finished:
    rows = len(RESPONSES)
    seen = Observation(60.0, [100] * rows, RESPONSES, list(range(rows)))
    requests = rows // samples
    return Finished(seen, parts, [samples] * requests, [200.0] * requests, {0: 59.0, 1: 60.0}, 0)


APART = {0: [0, *range(2, 9)], 1: [1, *range(9, 16)]}


def test_the_static_split_is_predicted_as_the_planner_does() -> None:
    batch = finished(APART).observation.batch
    setup = EngineSetup(FACTS.model, FACTS.gpu, "bf16", EngineLimits(**(vars_of(LIMITS) | {"data_parallel_size": 2})))
    profile, _ = load_profile(setup.gpu, FACTS.engine_version)
    planned = simulate(setup.holding(batch.longest), batch, profile).rollout.makespan_s
    rows = [np.array(part) for part in consecutive(16, 2)]
    (found,) = makespans(FACTS, finished(APART).observation, [rows])
    assert found == pytest.approx(planned, rel=1e-9)


def test_two_long_responses_apart_take_less_than_together() -> None:
    routing = finished(APART).routing(FACTS, 2)
    assert routing.replicas == [0, 1, *[0] * 7, *[1] * 7]
    assert (routing.routed_tokens, routing.static_tokens) == (9000 + 7 * 200, 17_000 + 6 * 200)
    assert routing.predicted_routed_s is not None
    assert routing.predicted_static_s is not None
    assert routing.predicted_routed_s < routing.predicted_static_s
    assert routing.off is None
    assert json.loads(json.dumps(routing.to_dict()))["tokens"] == list(RESPONSES)
    assert "10,400 routed, 18,200 split statically; predicted " in str(routing)


def test_the_anchor_of_a_plan_corrects_both_splits() -> None:
    alone = finished(APART).routing(FACTS, 2)
    slower = finished(APART).routing(FACTS, 2, Anchor(dict.fromkeys(PACES, math.log(1.3)), (), ()))
    for name in ("predicted_routed_s", "predicted_static_s"):
        assert getattr(slower, name) == pytest.approx(1.3 * getattr(alone, name), rel=0.01)


def test_a_split_that_is_the_static_one_gains_nothing() -> None:
    routing = finished(dict(enumerate(consecutive(16, 2)))).routing(FACTS, 2)
    assert routing.routed_tokens == routing.static_tokens
    assert routing.predicted_routed_s == routing.predicted_static_s


def test_samples_of_a_request_go_together() -> None:
    routing = finished({0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}, samples=2).routing(FACTS, 2)
    assert routing.tokens == [17_000, *[400] * 7]
    assert routing.predicted_routed_s == routing.predicted_static_s


def test_an_engine_that_cannot_be_predicted_still_counts_tokens() -> None:
    routing = finished(APART).routing(EngineFacts("nobody/knows-it", "h200_sxm", "0.26.0", "bf16", LIMITS), 2)
    assert (routing.routed_tokens, routing.static_tokens) == (10_400, 18_200)
    assert routing.predicted_routed_s is None
    assert "nobody/knows-it" in (routing.off or "")


def test_the_observation_adds_up_what_the_replicas_saw() -> None:
    def seen(preemptions: int) -> Judged:
        how = Sampling(top_p=1 - preemptions / 10) if preemptions < 10 else None
        one = Observation(1.0, [1], [1], preemptions=preemptions, kv_cache_tokens=640, compiled_files=1, sampling=how)
        return Judged(one, None, None)

    whole = finished(APART).judged({0: seen(2), 1: seen(3), 5: seen(100)}).observation  # 5 took no part
    assert (whole.preemptions, whole.kv_cache_tokens, whole.compiled_files) == (5, 640, 2)
    assert (whole.seconds, whole.sampling) == (60.0, Sampling(top_p=0.7))


def vars_of(limits: EngineLimits) -> dict[str, object]:
    return {name: getattr(limits, name) for name in limits.__dataclass_fields__}
