"""Workloads: lengths as asked for, the same for the same seed, every request kept by a split, bad rows named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import (
    MOST_TOKENS,
    Distribution,
    Fixed,
    LogNormal,
    Trace,
    parse_both_lengths,
    parse_distribution,
)
from fp8plan.model.workload import Batch, Workload

DATA = Path(__file__).parents[1] / "data"

lengths = st.one_of(
    st.builds(Fixed, st.integers(1, 500)),
    st.builds(LogNormal, st.floats(1, 500), st.floats(0, 2), st.integers(1, 1000)),
    st.builds(Trace, st.lists(st.integers(1, 500), min_size=1, max_size=9).map(tuple), st.just("a test")),
)
workloads = st.builds(Workload, st.integers(1, 9), st.integers(1, 9), lengths, lengths, st.integers(0, 2**32))


def test_a_lognormal_has_its_mean_before_clipping_and_its_sigma() -> None:
    drawn = LogNormal(6000, 0.9, 10**8).draw(200_000, np.random.default_rng(1))
    spread = np.sqrt(np.expm1(0.9**2))  # standard deviation over mean of a lognormal
    assert drawn.mean() == pytest.approx(6000, rel=4 * spread / np.sqrt(200_000))
    assert np.log(drawn).std() == pytest.approx(0.9, rel=0.01)


def test_clipping_lowers_the_mean_and_piles_up_at_the_maximum() -> None:
    drawn = LogNormal(6000, 0.9, 20480).draw(100_000, np.random.default_rng(1))
    assert drawn.max() == 20480
    assert 0.01 < (drawn == 20480).mean() < 0.1
    assert drawn.mean() < 5900


def test_without_spread_every_length_is_the_mean() -> None:
    assert set(LogNormal(70, 0, 100).draw(50, np.random.default_rng(0))) == {70}
    assert set(Fixed(70).draw(50, np.random.default_rng(0))) == {70}


@given(workloads)
def test_a_batch_is_whole_numbers_prompt_by_prompt(work: Workload) -> None:
    batch = work.batch()
    columns = batch.prompts, batch.responses, batch.prompt_ids
    assert {len(column) for column in columns} == {work.prompts * work.samples_per_prompt}
    assert {column.dtype for column in columns} == {np.dtype(np.int64)}
    assert min(batch.prompts.min(), batch.responses.min()) >= 1
    assert np.unique(batch.prompt_ids).tolist() == list(range(work.prompts))
    assert (np.diff(batch.prompt_ids) >= 0).all()
    for prompt in range(work.prompts):
        own = batch.prompts[batch.prompt_ids == prompt]
        assert len(own) == work.samples_per_prompt
        assert len(set(own)) == 1
    assert batch.longest == max(p + r for p, r in zip(batch.prompts, batch.responses, strict=True))


@given(workloads)
def test_the_seed_decides_everything(work: Workload) -> None:
    assert all(np.array_equal(one, two) for one, two in zip(work.batch()[:3], work.batch()[:3], strict=True))


def test_another_seed_gives_other_lengths() -> None:
    one, two = (Workload(4, 4, Fixed(9), LogNormal(500, 1, 9999), seed).batch().responses for seed in (1, 2))
    assert not np.array_equal(one, two)


@given(workloads, st.integers(1, 100))
def test_a_split_keeps_every_request_once_and_in_order(work: Workload, replicas: int) -> None:
    batch = work.batch()
    parts = batch.split(replicas)
    assert len(parts) == min(replicas, len(batch.prompts))
    sizes = [len(part.prompts) for part in parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.concatenate([part.prompts for part in parts]), batch.prompts)
    assert np.array_equal(np.concatenate([part.responses for part in parts]), batch.responses)
    start = 0
    for part in parts:  # the same requests share a prompt, under new numbers from 0
        old = batch.prompt_ids[start : start + len(part.prompts)]
        assert len(set(zip(old, part.prompt_ids, strict=True))) == len(set(old)) == len(set(part.prompt_ids))
        assert sorted(set(part.prompt_ids)) == list(range(len(set(old))))
        start += len(part.prompts)


def test_a_trace_is_used_in_order_when_the_count_matches() -> None:
    responses, prompts = Trace((5, 700, 31, 2, 9, 8), "a test"), Trace((40, 10, 70), "a test")
    batch = Workload(3, 2, prompts, responses).batch()
    assert batch.responses.tolist() == [5, 700, 31, 2, 9, 8]
    assert batch.prompts.tolist() == [40, 40, 10, 10, 70, 70]


@pytest.mark.parametrize("count", [3, 51])
def test_a_trace_of_another_length_is_drawn_from_with_replacement(count: int) -> None:
    seen = tuple(range(1, 51))
    drawn = [Workload(1, count, Fixed(1), Trace(seen, "a test"), seed).batch().responses for seed in range(9)]
    assert all(len(lengths) == count and set(lengths) <= set(seen) for lengths in drawn)
    assert len({tuple(lengths) for lengths in drawn}) == 9  # not simply the first rows
    assert max(map(max, drawn)) > 40
    if count > len(seen):  # one more than there are: without replacement, every row would come
        assert all(len(set(lengths)) < len(seen) for lengths in drawn)


def test_a_jsonl_trace_holds_bare_numbers_or_objects() -> None:
    found = parse_distribution(str(DATA / "lengths.jsonl"), "response_length")
    assert isinstance(found, Trace)
    assert found.values == (812, 44, 20480, 7)
    prompts = parse_distribution(str(DATA / "lengths.jsonl"), "prompt_length")
    assert isinstance(prompts, Trace)
    assert prompts.values == (812, 100, 200, 7)


def test_a_parquet_trace_holds_both_columns(tmp_path: Path) -> None:
    path = tmp_path / "lengths.parquet"
    pd.DataFrame({"prompt_length": [9, 8, 7], "response_length": [500, 20, 3], "reward": [0.1, 0.2, 0.3]}).to_parquet(
        path
    )
    for column, expected in (("prompt_length", (9, 8, 7)), ("response_length", (500, 20, 3))):
        found = parse_distribution(str(path), column)
        assert isinstance(found, Trace)
        assert found.values == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", Fixed(12)), ("fixed:12", Fixed(12)), ("lognormal:mean=60.5,sigma=0.9,max=200", LogNormal(60.5, 0.9, 200)),
     ("lognormal:max=200,mean=60.5,sigma=0.9", LogNormal(60.5, 0.9, 200))],
)  # fmt: skip
def test_lengths_as_they_are_typed(text: str, expected: Distribution) -> None:
    assert parse_distribution(text, "response_length") == expected


@pytest.mark.parametrize(
    "frame",
    [{"response_length": [5, -7]}, {"response_length": [5, None]}, {"response_length": [5.0, 2.5]},
     {"response_length": ["5", "7"]}, {"response_length": []}, {"length": [5]}],
)  # fmt: skip
def test_a_bad_parquet_trace_is_refused_by_name(tmp_path: Path, frame: dict[str, list[object]]) -> None:
    path = tmp_path / "bad.parquet"
    pd.DataFrame(frame).to_parquet(path)
    with pytest.raises(ConfigError, match=r"(row \d of|the trace) .*bad\.parquet"):
        parse_distribution(str(path), "response_length")


def test_a_bad_row_is_named_as_people_count() -> None:
    with pytest.raises(ConfigError, match="row 2 of here is nan"):
        Trace((5, float("nan"), -1), "here")
    with pytest.raises(ConfigError, match="row 3 of here is 0; allowed: a whole number of tokens, 1 to"):
        Workload(1, 1, 5, Trace((5, 6, 0, 1), "here"))


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match="as parquet"):
        parse_distribution(str(tmp_path / "x.parquet"), "response_length")


@pytest.mark.parametrize("tokens", [0, -1, float("nan"), float("inf"), 2.5, True, "7", None, MOST_TOKENS + 1])
def test_senseless_lengths_are_refused(tokens: object) -> None:
    with pytest.raises(ConfigError, match=r"fixed number is .*; allowed: a (finite|whole) number"):
        Workload(1, 1, 1, Fixed(tokens))  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", ["1", None, float("nan"), -1, True])
def test_a_senseless_sigma_is_refused(sigma: object) -> None:
    with pytest.raises(ConfigError, match=r"lognormal sigma is .*; allowed: at least 0, at most 10"):
        LogNormal(5, sigma, 9)  # type: ignore[arg-type]


def test_numpy_whole_numbers_are_lengths() -> None:
    assert Fixed(np.int64(7)).draw(2, np.random.default_rng(0)).tolist() == [7, 7]


@pytest.mark.parametrize("changes", [{"prompts": 0}, {"samples_per_prompt": -1}, {"seed": -1}])
def test_senseless_counts_are_refused_by_name(changes: dict[str, int]) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=f"{name} is"):
        Workload(
            **(
                {"prompts": 1, "samples_per_prompt": 1, "prompt_lengths": Fixed(1), "response_lengths": Fixed(1)}
                | changes
            )
        )  # type: ignore[arg-type]


def test_whole_numbers_are_lengths_of_a_workload() -> None:
    work = Workload(32, 16, 1024, np.int64(2000))  # type: ignore[arg-type]
    assert work == Workload(32, 16, Fixed(1024), Fixed(2000), seed=0)
    assert replace(work, seed=3).response_lengths == Fixed(2000)
    assert work.batch().longest == 3024


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("prompt_lengths", "fixed:12", "a whole number of tokens, fp8plan.Fixed, fp8plan.LogNormal or fp8plan.Trace"),
        ("response_lengths", 2.5, "a whole number of tokens, fp8plan.Fixed"),
        ("response_lengths", [5, 6], "a whole number of tokens, fp8plan.Fixed"),
        ("response_lengths", True, "a whole number of tokens, fp8plan.Fixed"),
        ("response_lengths", None, "a whole number of tokens, fp8plan.Fixed"),
        ("response_lengths", 0, "a whole number of tokens, 1 to "),
        ("prompts", 1.5, "a whole number of at least 1"),
        ("samples_per_prompt", "2", "a whole number of at least 1"),
        ("seed", None, "a whole number of at least 0"),
    ],
)
def test_what_is_no_workload_is_refused_at_once(name: str, value: object, allowed: str) -> None:
    good = {"prompts": 1, "samples_per_prompt": 1, "prompt_lengths": 1, "response_lengths": 1}
    with pytest.raises(ConfigError, match=f"is {re.escape(repr(value))}; allowed: {re.escape(allowed)}"):
        Workload(**(good | {name: value}))  # type: ignore[arg-type]


def both(tmp_path: Path, rows: list[object], prompts: str | None = None) -> tuple[list[int], list[str]]:
    """(prompt lengths, notes) for a trace that is given as the response lengths, as JSON lines and as parquet."""
    lines, table = tmp_path / "t.jsonl", tmp_path / "t.parquet"
    lines.write_text("\n".join(map(json.dumps, rows)))
    found = []
    pd.DataFrame([row if isinstance(row, dict) else {"response_length": row} for row in rows]).to_parquet(table)
    for path in (lines, table):
        prompt_lengths, response_lengths, notes = parse_both_lengths(prompts, str(path))
        assert isinstance(response_lengths, Trace)
        drawn = prompt_lengths.draw(len(rows), np.random.default_rng(0)).tolist()
        found.append((drawn, [note.replace(str(path), "T") for note in notes]))
    assert found[0] == found[1]
    return found[0]


def test_a_trace_of_responses_brings_its_own_prompts(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt_length": 7, "response_length": 70}, {"prompt_length": 9, "response_length": 90}]
    assert both(tmp_path, rows) == ([7, 9], ["prompt lengths are those of T, too"])
    note = "T has prompt_length, too, which is not read: --prompt-lengths fixed:5 goes before it"
    assert both(tmp_path, rows, "fixed:5") == ([5, 5], [note])
    assert parse_both_lengths(str(tmp_path / "t.jsonl"), str(tmp_path / "t.jsonl"))[2] == []
    assert both(tmp_path, [70, 90]) == ([1024, 1024], [])
    assert both(tmp_path, [{"response_length": 70, "reward": 1.0}]) == ([1024], [])
    assert parse_both_lengths(None, "fixed:3") == (Fixed(1024), Fixed(3), [])


@pytest.mark.parametrize("slip", ["prompt_lengths", "promt_length", "prompt_len"])
def test_a_misspelt_column_is_named(tmp_path: Path, slip: str) -> None:
    rows: list[object] = [{slip: 7, "response_length": 70}]
    with pytest.raises(ConfigError, match=rf"has '{slip}', which is not read; call it 'prompt_length', or give --pro"):
        both(tmp_path, rows)
    assert both(tmp_path, rows, "fixed:5") == ([5], [])
    for path in (tmp_path / "t.jsonl", tmp_path / "t.parquet"):
        with pytest.raises(ConfigError, match=rf"it has {slip}, response_length: call '{slip}' 'prompt_length'"):
            parse_distribution(str(path), "prompt_length")


def test_lengths_describe_themselves_in_plain_data() -> None:
    trace = Trace(tuple(range(1, 1001)), "lengths.jsonl")
    for lengths, plain in (
        (trace, {"kind": "trace", "source": "lengths.jsonl", "rows": 1000}),
        (LogNormal(5, 0.5, 10), {"kind": "lognormal", "mean": 5, "sigma": 0.5, "max": 10}),
        (Fixed(7), {"kind": "fixed", "tokens": 7}),
    ):
        assert json.loads(json.dumps(lengths.describe())) == plain
    assert [x.largest for x in (trace, LogNormal(5, 0.5, 10), Fixed(7))] == [1000, 10, 7]


def test_a_trace_with_a_row_per_response_keeps_prompts_and_responses_together() -> None:
    prompts, responses = (Trace(x, "t.jsonl") for x in ((5, 5, 9, 9), (50, 51, 90, 91)))
    batch = Workload(2, 2, prompts, responses).batch()
    assert batch.prompts.tolist() == [5, 5, 9, 9]
    assert batch.responses.tolist() == [50, 51, 90, 91]


def test_a_batch_unpacks_in_the_order_the_scheduler_takes() -> None:
    assert Batch._fields == ("prompts", "responses", "prompt_ids", "turns")
