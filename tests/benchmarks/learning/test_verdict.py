"""The rule of evidence/news.md and gates.md, on rewards whose verdict is known."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning.evidence import news
from benchmarks.learning.evidence.news import (
    MISMATCHES,
    NEW,
    SEEDS,
    TRIES,
    best_constant,
    failures,
    margin,
    verdict,
)
from fp8plan import jsonl

Of = dict[str, dict[int, float]]


def rewards(level: dict[str, float], seeds: int = SEEDS) -> Of:
    """Each arm under each mismatch: its level, and a wobble of 0.01 of each seed that differs by arm."""
    return {
        f"{mismatch}-{arm}": {seed: mean + 0.01 * ((seed + len(arm)) % 2) for seed in range(seeds)}
        for mismatch in MISMATCHES
        for arm, mean in level.items()
    }


LEVEL = {"none": 0.3, "tis": 0.5, "tis-1.4": 0.6, "news": 0.6, "news-free": 0.4, "ess": 0.6, "mass": 0.5}


def test_a_law_level_with_the_best_constant_and_ahead_of_the_usual_one_holds() -> None:
    assert list(failures(rewards(LEVEL), "news")) == []
    said = verdict(rewards(LEVEL), TRIES["news.md"]).splitlines()
    assert said[0] == "- `news` holds."
    assert said[1].startswith("- `news-free` does not hold: benign: below tis-1.4 by 0.20")
    said = verdict(rewards(LEVEL), TRIES["gates.md"]).splitlines()
    assert said[0] == "- `ess` holds."
    assert said[1].startswith("- `mass` does not hold: benign: below tis-1.4 by 0.10")


def test_a_law_level_with_the_usual_constant_is_not_ahead_where_the_mismatch_is_new() -> None:
    same = rewards(LEVEL | {"tis": 0.6, "tis-1.4": 0.5})
    assert [x.partition(":")[0] for x in failures(same, "news")] == list(NEW)


def test_a_missing_seed_leaves_the_verdict_open() -> None:
    short = rewards(LEVEL)
    del short["lasting-news"][5]
    assert list(failures(short, "news")) == ["lasting: not all 6 seeds are there"]
    assert len(list(failures({}, "news"))) == len(MISMATCHES)


def test_margins_are_over_the_seeds_that_both_have() -> None:
    mine, other = {s: float(s) for s in range(8)}, {s: s / 2 for s in range(1, 7)}
    found = margin(mine, other)
    assert found is not None
    assert found.difference == 1.75
    assert abs(found.error - 0.3818813) < 1e-6
    assert margin(mine, {0: 1.0}) is None
    assert best_constant(rewards(LEVEL), "benign") == "tis-1.4"


def test_the_command_prints_the_table_and_the_verdict(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    lines = [
        {
            "arm": arm,
            "seed": seed,
            "reward_after": after,
            "kl_k3": [0.1] * 12,
            "clipped_mass": [0.2, None],
            "lost_tokens": [None],
            "ess": [0.5],
            "gradient_error": [{"bias2": 1.0, "variance": 3.0, "norm2": 16.0}],
        }
        for arm, rows in rewards(LEVEL, 2).items()
        for seed, after in rows.items()
    ]
    (tmp_path / "news.jsonl").write_bytes(b"".join(jsonl.line(row) for row in lines))
    news.main([str(tmp_path / "news.jsonl")])
    said = capsys.readouterr().out.splitlines()
    tables = said.index("news.md"), said.index("gates.md")
    for at, law in zip(tables, ("news", "ess"), strict=True):
        assert f"| {law} less best constant |" in said[at + 2]
        assert said[at + 4].startswith("| benign | 2 | 0.30 ± 0.01 | 0.51 ± 0.01 |")
        assert any(x.startswith(f"- `{law}` is not judged: benign: not all 6 seeds are there; ") for x in said[at:])
    for law in ("news", "ess"):
        assert f"| growing | {law} | 2 | 20.0% | - | 50.0% | 0.50 | 0.25 |" in said
