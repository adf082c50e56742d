"""The prior of an unknown host comes from the committed records, and holds on hosts that it has not seen."""

from __future__ import annotations

import pytest

from benchmarks import host_loop
from fp8plan.model.profile.library import load_profile
from fp8plan.model.profile.profile import OTHER_HOST_SD, SEEN_LOOP_S
from fp8plan.model.validate.records import read_records

LEAST, MOST = 18, 21  # of 22: more would say that the interval is wider than it needs to be


def test_the_expected_loop_is_that_of_the_committed_records() -> None:
    assert len(host_loop.seen()) >= 19
    assert pytest.approx(SEEN_LOOP_S, rel=0.005) == host_loop.expected_s()


@pytest.mark.slow
def test_the_spread_is_that_of_the_committed_rollouts() -> None:
    hosts = {each.boot for rollouts in host_loop.paced().values() for each in rollouts}
    doubt = host_loop.spread() / (2 * len(hosts)) ** 0.5  # the standard error of a standard deviation
    assert abs(host_loop.spread() - OTHER_HOST_SD) < 0.2 * doubt


@pytest.mark.slow
def test_a_prior_without_the_host_holds_most_of_its_rollouts() -> None:
    profile, held, number = load_profile("h100", host_loop.VERSION)[0], 0, 0
    for record in (record for path in host_loop.ABOVE_GRAPHS for record in read_records(path)):
        boot = record.fields["boot"]
        unknown = profile.on_unknown_host(host_loop.expected_s(boot), host_loop.spread(boot))
        rollout = host_loop.simulated(host_loop.untimed(record), unknown).rollout
        held += rollout.makespan_low_s <= record.seconds <= rollout.makespan_high_s
        number += 1
    assert number == 22
    assert LEAST <= held <= MOST
