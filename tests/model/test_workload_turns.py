"""Trajectories of turns: drawn as they are described, the same for the same seed, and kept whole by a split."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import SECONDS, Fixed, LogNormal, Trace, parse_distribution
from fp8plan.model.turn_table import Turn, TurnTable
from fp8plan.model.workload import MOST_REQUESTS, Batch, Workload
from fp8plan.model.workload_turns import LoggedTurns, Turns, parse_turns

EIGHT: dict[str, Any] = {"turns": 8, "turn_tokens": 300, "tool_tokens": 900, "tool_s": 2.5}

lengths = st.one_of(
    st.builds(Fixed, st.integers(1, 50)),
    st.builds(LogNormal, st.floats(1, 50), st.floats(0, 2), st.integers(1, 100)),
    st.builds(Trace, st.lists(st.integers(1, 50), min_size=1, max_size=9).map(tuple), st.just("a test")),
)
seconds = st.one_of(
    st.builds(Fixed, st.floats(0, 60)),
    st.builds(LogNormal, st.floats(0.1, 10), st.floats(0, 2), st.floats(0.1, 60)),
    st.builds(Trace, st.lists(st.floats(0, 60), min_size=1, max_size=9).map(tuple), st.just("a test")),
)
described = st.builds(Turns, lengths, lengths, lengths, seconds, st.none(), st.floats(0, 0.9))
workloads = st.builds(Workload, st.integers(1, 6), st.integers(1, 4), lengths, turns=described, seed=st.integers(0, 99))
logged = st.lists(
    st.lists(st.builds(Turn, st.integers(1, 99), st.integers(0, 99), st.floats(0, 60)), min_size=1, max_size=5),
    min_size=1,
    max_size=9,
)


def turns_of(batch: Batch) -> TurnTable:
    assert batch.turns is not None
    return batch.turns


@given(workloads)
def test_a_batch_of_turns_holds_together(work: Workload) -> None:
    batch = work.batch()
    turns = turns_of(batch)
    last = turns.first[1:] - 1
    assert len(turns.first) == len(batch.prompts) + 1 == work.prompts * work.samples_per_prompt + 1
    assert (np.diff(turns.first) >= 1).all()
    assert turns.generated.min() >= 1
    assert {column.dtype for column in (*turns[:3], turns.dropped)} == {np.dtype(np.int64)}
    assert turns.wait_s.dtype == np.float64
    for column in (turns.tool, turns.wait_s, turns.dropped):
        assert not column[last].any()
        assert (column >= 0).all()
    assert (turns.dropped < turns.generated).all()
    sums = [turns.generated[a:b].sum() for a, b in zip(turns.first[:-1], turns.first[1:], strict=True)]
    assert batch.responses.tolist() == sums


@given(workloads)
def test_the_seed_decides_every_turn(work: Workload) -> None:
    one, two = turns_of(work.batch()), turns_of(work.batch())
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@given(workloads, st.integers(1, 9))
def test_the_longest_context_is_that_of_the_requests(work: Workload, replicas: int) -> None:
    """Token by token: the prompt of a turn is what was there before, less what the template drops."""
    batch = work.batch()
    turns, longest = turns_of(batch), 0
    for row, prompt in enumerate(batch.prompts.tolist()):
        context = prompt
        for turn in range(turns.first[row], turns.first[row + 1]):
            context += int(turns.generated[turn])
            longest = max(longest, context)
            context += int(turns.tool[turn] - turns.dropped[turn])
    assert batch.longest == longest
    assert max(part.longest for part in batch.split(replicas)) == longest
    assert work.longest_response == turns.added.max()


@given(workloads, st.integers(1, 9))
def test_a_split_keeps_every_turn_in_order(work: Workload, replicas: int) -> None:
    batch = work.batch()
    parts = [turns_of(part) for part in batch.split(replicas)]
    for column in range(1, 5):
        assert np.array_equal(np.concatenate([part[column] for part in parts]), turns_of(batch)[column])
    assert np.array_equal(np.concatenate([np.diff(part.first) for part in parts]), np.diff(turns_of(batch).first))


def test_a_share_of_reasoning_is_dropped_from_all_but_the_last_turn() -> None:
    turns = turns_of(Workload(1, 2, 10, turns=Turns(3, 100, 7, 0.5, reasoning_share=0.25)).batch())
    assert turns.dropped.tolist() == [25, 25, 0] * 2
    assert turns.added.tolist() == [75 + 7 + 75 + 7 + 100] * 2


def test_numbers_have_the_distributions_that_are_described() -> None:
    described = Turns(
        LogNormal(6, 0.5, 50), LogNormal(400, 1, 10**6), LogNormal(900, 0.8, 10**6), LogNormal(2, 1, 10**4)
    )
    turns = turns_of(Workload(2000, 2, 10, turns=described).batch())
    between = np.ones(len(turns.tool), dtype=bool)
    between[turns.first[1:] - 1] = False
    assert np.diff(turns.first).mean() == pytest.approx(6, rel=0.05)
    assert turns.generated.mean() == pytest.approx(400, rel=0.05)
    assert turns.tool[between].mean() == pytest.approx(900, rel=0.05)
    assert turns.wait_s[between].mean() == pytest.approx(2, rel=0.05)
    assert (turns.wait_s[between] % 1 != 0).any()


def test_other_waits_leave_the_tokens_as_they_were() -> None:
    drawn = LogNormal(300, 1, 4000)
    one, two = (
        turns_of(Workload(4, 2, 10, turns=Turns(LogNormal(5, 1, 20), drawn, drawn, tool_s)).batch())
        for tool_s in (1.0, LogNormal(2, 1, 60))
    )
    assert np.array_equal(one.generated, two.generated)
    assert np.array_equal(one.tool, two.tool)
    assert not np.array_equal(one.wait_s, two.wait_s)


@given(logged)
def test_logged_turns_come_back_in_order(trajectories: list[list[Turn]]) -> None:
    turns = turns_of(Workload(len(trajectories), 1, 10, turns=LoggedTurns(TurnTable.of(trajectories), "here")).batch())
    rows = list(zip(turns.generated.tolist(), turns.tool.tolist(), turns.wait_s.tolist(), strict=True))
    ended = [[*turns[:-1], Turn(turns[-1].generated, 0, 0.0)] for turns in trajectories]
    assert rows == [turn for turns in ended for turn in turns]


def test_turns_describe_themselves_in_plain_data() -> None:
    assert Turns(**EIGHT, concurrent=256).describe() == {
        "turns": {"kind": "fixed", "turns": 8},
        "turn_tokens": {"kind": "fixed", "tokens": 300},
        "tool_tokens": {"kind": "fixed", "tokens": 900},
        "tool_s": {"kind": "fixed", "seconds": 2.5},
        "concurrent": 256,
        "reasoning_share": 0.0,
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"turns": 0}, "turns is 0; allowed: a whole number of turns, 1 to 10,000"),
        ({"turns": 2.5}, "turns is 2.5; allowed: a whole number of turns, fp8plan.Fixed"),
        ({"turns": LogNormal(0.5, 1, 9)}, "turns: lognormal mean is 0.5; allowed: a finite number of turns, 1 to"),
        ({"turn_tokens": Fixed(0)}, "turn_tokens: fixed number is 0; allowed: a whole number of tokens, 1 to"),
        ({"turn_tokens": "many"}, "turn_tokens is 'many'; allowed: a whole number of tokens, fp8plan.Fixed"),
        ({"tool_tokens": Trace((3, -1), "here")}, "tool_tokens: the number in row 2 of here is -1; allowed: a whole"),
        ({"tool_s": -0.5}, "tool_s is -0.5; allowed: a finite number of seconds, 0 to 86,400"),
        ({"tool_s": float("nan")}, "tool_s is nan; allowed: a finite number of seconds"),
        ({"tool_s": None}, "tool_s is None; allowed: a number of seconds, fp8plan.Fixed"),
        ({"tool_s": True}, "tool_s is True; allowed: a number of seconds"),
        ({"concurrent": 0}, "concurrent is 0; allowed: a whole number of at least 1, or None for all"),
        ({"reasoning_share": 1}, "reasoning_share is 1; allowed: a share of each answer, from 0 to below 1"),
    ],
)
def test_senseless_turns_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Turns(**EIGHT | changes)


def test_a_lognormal_of_seconds_has_a_mean_above_0() -> None:
    with pytest.raises(ConfigError, match="lognormal mean is 0; allowed: a number above 0"):
        LogNormal(0, 1, 60)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"turns": Turns(**EIGHT), "response_lengths": 9}, "response_lengths is 9, and the turns have lengths of"),
        ({"turns": 8}, "turns is 8; allowed: fp8plan.Turns, or None"),
        ({}, "response_lengths is None; allowed: a whole number of tokens"),
        ({"turns": Turns(**EIGHT | {"turns": 10_000}), "prompts": 2000}, f"at most {MOST_REQUESTS:,} turns in all"),
    ],
)
def test_a_workload_has_lengths_or_turns(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Workload(**{"prompts": 1, "samples_per_prompt": 1, "prompt_lengths": 5} | fields)


def test_turns_as_they_are_typed() -> None:
    typed: dict[str, Any] = {
        "turns": "8",
        "turn_tokens": "fixed:300",
        "tool_tokens": "lognormal:mean=600,sigma=1,max=4000",
        "tool_s": "lognormal:mean=0.5,sigma=1,max=60.5",
    }
    expected = Turns(8, 300, LogNormal(600, 1, 4000), LogNormal(0.5, 1, 60.5), 9, 0.5)
    assert parse_turns(typed | {"concurrent": 9, "reasoning_share": 0.5}) == expected
    assert parse_turns(typed | {"turns": "lognormal:mean=8,sigma=1,max=50"}).turns == LogNormal(8, 1, 50)
    assert parse_turns(dict.fromkeys(typed, "8")) == Turns(8, 8, 8, 8)
    assert parse_turns({"turns": "1", "turn_tokens": "300"}) == Turns(1, 300, 0, 0)
    with pytest.raises(ConfigError, match="turns need --turn-tokens, --tool-s, too; type: --turns 8"):
        parse_turns({"turns": "8", "tool_tokens": "fixed:3"})
    with pytest.raises(ConfigError, match=r"turns: cannot read '2\.5'; allowed: TURNS or fixed:TURNS"):
        parse_turns(typed | {"turns": "2.5"})
    with pytest.raises(ConfigError, match=r"tool_s: cannot read '2s'.*allowed: SECONDS or fixed:SECONDS"):
        parse_turns(typed | {"tool_s": "2s"})


def test_a_trace_of_waits_has_fractions(tmp_path: Any) -> None:
    (tmp_path / "waits.jsonl").write_text('{"tool_s": 0.25}\n{"tool_s": 3}\n1.5\n')
    waits = parse_distribution(str(tmp_path / "waits.jsonl"), "tool_s", SECONDS)
    assert waits.draw(3, np.random.default_rng(0), SECONDS).tolist() == [0.25, 3.0, 1.5]
