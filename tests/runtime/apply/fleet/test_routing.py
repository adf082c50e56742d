"""The split of requests between replicas: pure functions, against what is known of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed, LogNormal, Trace
from fp8plan.model.workload import Batch, Workload
from fp8plan.runtime.apply.fleet.rollouts import Requests
from fp8plan.runtime.apply.fleet.routing import (
    BOUND,
    FEW,
    SeenLengths,
    Split,
    consecutive,
    given_lengths,
    given_names,
    largest,
    mean_response,
    returned,
    routed,
)

LOADS = st.lists(st.integers(0, 20_000), min_size=0, max_size=40)
REPLICAS = st.integers(1, 8)


def smallest(loads: list[int], replicas: int) -> float:
    """The largest load of the best split there is, by trying all."""
    splits = product(range(replicas), repeat=len(loads))
    return min(max(np.bincount(split, loads)) for split in splits)


@given(LOADS, REPLICAS)
def test_every_request_has_one_replica(loads: list[int], replicas: int) -> None:
    by_load = returned(loads, replicas, [None] * len(loads))
    for split in (consecutive(len(loads), replicas), by_load, routed(loads, replicas)):
        assert len(split) == replicas
        assert sorted(request for part in split for request in part) == list(range(len(loads)))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_the_largest_load_keeps_grahams_bound(loads: list[int], replicas: int) -> None:
    best = smallest(loads, replicas)
    assert largest(returned(loads, replicas, [None] * len(loads)), loads) <= (4 / 3 - 1 / (3 * replicas)) * best + 1e-9


@given(LOADS, REPLICAS)
def test_routing_never_loads_a_replica_more_than_the_static_split(loads: list[int], replicas: int) -> None:
    assert largest(routed(loads, replicas), loads) <= largest(consecutive(len(loads), replicas), loads)


@given(st.integers(1, 60), st.integers(1, 2000), REPLICAS)
def test_equal_lengths_are_split_statically(requests: int, tokens: int, replicas: int) -> None:
    assert routed([tokens] * requests, replicas) == consecutive(requests, replicas)


@given(LOADS.filter(len), REPLICAS)
def test_a_replica_begins_with_its_longest(loads: list[int], replicas: int) -> None:
    for part in returned(loads, replicas, [None] * len(loads)):
        assert [loads[request] for request in part] == sorted((loads[request] for request in part), reverse=True)


@given(st.integers(1, 100), st.integers(1, 8))
def test_the_static_split_is_the_planners(requests: int, replicas: int) -> None:
    ids = np.arange(requests)
    planned = [len(part.prompts) for part in Batch(ids + 1, ids + 1, ids).split(replicas)]
    ours: Split = consecutive(requests, min(replicas, requests))
    assert [len(part) for part in ours] == planned


@given(st.data(), LOADS.filter(len), REPLICAS)
def test_no_replica_is_overloaded_by_trajectories_that_return(
    data: st.DataObject, loads: list[int], count: int
) -> None:
    homes = data.draw(st.lists(st.none() | st.integers(0, count - 1), min_size=len(loads), max_size=len(loads)))
    split = returned(loads, count, homes)
    assert sorted(request for part in split for request in part) == list(range(len(loads)))
    mean, longest = sum(loads) / count, max(loads)
    assert largest(split, loads) <= max(BOUND * mean, mean + longest, FEW * longest) + 1e-9


def test_trajectories_return_unless_their_replica_is_full() -> None:
    assert returned([9, 1, 1, 9], 2, [1, 0, 1, 0]) == [[3, 1], [0, 2]]
    assert [len(part) for part in returned([5] * 40, 2, [0] * 40)] == [25, 15]  # 1.25 times the mean of 20
    assert [len(part) for part in returned([5] * FEW, 4, [2] * FEW)] == [0, 0, FEW, 0]  # the tail of a rollout
    assert [len(part) for part in returned([5] * (FEW + 1), 4, [2] * (FEW + 1))] == [1, 0, FEW, 0]


def test_new_trajectories_go_to_the_least_loaded_after_those_that_return() -> None:
    assert routed([5, 90, 5, 90], 2, [0, None, 0, None]) == [[0, 2, 3], [1]]
    assert routed([5, 90, 5, 90], 2, [None] * 4) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("names", [["a"], ["a", None], ["a", 1.5]])
def test_names_of_trajectories_that_make_no_sense_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"trajectory_ids has \d entries for 2 prompts; allowed: for each prompt the"):
        given_names(names, 2)


def test_a_long_tail_is_shared_out() -> None:
    loads = [9000, 9000, 100, 100, 100, 100, 100, 100]  # both long ones in the first consecutive part
    assert largest(consecutive(8, 2), loads) == 18_200
    assert largest(routed(loads, 2), loads) == 9_300


def test_lengths_are_expected_as_they_were_seen_last() -> None:
    seen = SeenLengths(otherwise=100.0)
    assert seen.expected(["a", (1, 2)]) == [100.0, 100.0]
    seen.learn(["a", "a", (1, 2)], [10, 30, 7])
    assert seen.expected(["a", (1, 2), "b"]) == [20.0, 7.0, 100.0]
    seen.learn(["a"], [50])
    assert seen.expected(["a"]) == [50.0]


def test_the_oldest_lengths_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8plan.runtime.apply.fleet.routing.MOST_PROMPTS", 2)
    seen = SeenLengths(otherwise=1.0)
    for name in ("a", "b", "a", "c"):
        seen.learn([name], [9])
    assert seen.expected(["a", "b", "c"]) == [9.0, 1.0, 9.0]


@pytest.mark.parametrize(
    ("lengths", "mean"), [(Fixed(300), 300), (LogNormal(600, 0.5, 4000), 600), (Trace((5, 9), "here"), 9)]
)
def test_an_unseen_prompt_gets_the_plans_mean(lengths: Fixed | LogNormal | Trace, mean: float) -> None:
    work = Workload(2, 1, Fixed(8), lengths)
    described = {"response_lengths": lengths.describe(), "max_response_tokens": work.longest_response}
    assert mean_response(described) == mean


@pytest.mark.parametrize("lengths", [[1.0], [1.0, -2.0], [1.0, float("nan")], [1.0, "long"]])
def test_expected_lengths_that_make_no_sense_are_refused(lengths: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"expected_lengths has \d entries for 2 prompts; allowed: for each prompt"):
        given_lengths(lengths, 2)


class Params:
    """vLLM's SamplingParams, as far as routing reads them."""

    def __init__(self, max_tokens: int | None = None, n: int = 1) -> None:
        self.max_tokens, self.n = max_tokens, n


def test_a_requests_load_counts_its_samples_and_ends_at_its_limit() -> None:
    requests = Requests.of(["a", "b"], [Params(50), Params(None, n=4)], {})
    assert requests.loads([200.0, 10.0]) == [50, 40]
    assert Requests.of(["a", "b"], None, {}).loads([200.0, 10.0]) == [200, 10]


def test_prompts_are_told_apart_by_their_text_or_tokens() -> None:
    assert Requests.of({"prompt_token_ids": [1, 2]}, None, {}).names == [(1, 2)]
    assert Requests.of([[1, 2], "x", {"prompt": "y"}], None, {}).names == [(1, 2), "x", "y"]
    assert Requests.of([1, 2], None, {}).names == [(1, 2)]  # one prompt


def test_a_replica_gets_what_belongs_to_its_requests() -> None:
    requests = Requests.of(["a", "b", "c"], ["p", "q", "r"], {"use_tqdm": False})
    assert requests.take([2, 0]) == (["c", "a"], ["r", "p"], {"use_tqdm": False})
    one = Params()
    assert Requests.of(["a", "b"], one, {}).take([1]) == (["b"], one, {})


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 sampling_params for 2 prompts; allowed: one, or one for each"):
        Requests.of(["a", "b"], [Params()], {})
    with pytest.raises(ConfigError, match="priority: a list, which is not dealt out"):
        Requests.of(["a", "b"], None, {"priority": [0, 1]})
