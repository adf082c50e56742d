"""The report of a fleet's rollout: its requests by replica, beside the static split."""

from __future__ import annotations

import json
from dataclasses import replace

from fp8plan.runtime.apply.fleet.report import Routing
from fp8plan.runtime.apply.fleet.routing import consecutive
from fp8plan.runtime.watch.guard.guard import Judged
from fp8plan.runtime.watch.guard.observation import Observation
from fp8plan.runtime.watch.mismatch.sampling import Sampling

LONG = (9000, 8000)
RESPONSES = (*LONG, *[200] * 14)  # both long ones in the first half


def finished(parts: dict[int, list[int]]) -> Routing:
    rows = len(RESPONSES)
    seen = Observation(60.0, [100] * rows, RESPONSES, list(range(rows)))
    return Routing(2, seen, parts, RESPONSES, [200.0] * rows, {0: 59.0, 1: 60.0}, 0)


APART = {0: [0, *range(2, 9)], 1: [1, *range(9, 16)]}


def test_two_long_responses_apart_have_fewer_tokens_than_together() -> None:
    routing = finished(APART)
    assert routing.replicas == [0, 1, *[0] * 7, *[1] * 7]
    assert (routing.routed_tokens, routing.static_tokens) == (9000 + 7 * 200, 17_000 + 6 * 200)
    assert json.loads(json.dumps(routing.to_dict()))["tokens"] == list(RESPONSES)
    assert str(routing).endswith("10,400 routed, 18,200 split statically")


def test_a_split_that_is_the_static_one_gains_nothing() -> None:
    routing = finished(dict(enumerate(consecutive(16, 2))))
    assert routing.routed_tokens == routing.static_tokens


def test_the_observation_adds_up_what_the_replicas_saw() -> None:
    def seen(preemptions: int) -> Judged:
        how = Sampling(top_p=1 - preemptions / 10) if preemptions < 10 else None
        one = Observation(1.0, [1], [1], preemptions=preemptions, kv_cache_tokens=640, compiled_files=1, sampling=how)
        return Judged(replace(one, prefix_cache_queries=100, prefix_cache_hits=10 * preemptions), None, None)

    whole = finished(APART).judged({0: seen(2), 1: seen(3), 5: seen(100)}).observation  # 5 took no part
    assert (whole.preemptions, whole.kv_cache_tokens, whole.compiled_files) == (5, 640, 2)
    assert (whole.prefix_cache_queries, whole.prefix_cache_hits) == (200, 50)
    assert (whole.seconds, whole.sampling) == (60.0, Sampling(top_p=0.7))
