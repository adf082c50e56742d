"""The rule of evidence/news.md, gates.md and mix.md, on rewards whose verdict is known."""

from __future__ import annotations

from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from benchmarks.learning.arms import BANDS, MASKED
from benchmarks.learning.evidence import news
from benchmarks.learning.evidence.corrections import whole_runs
from benchmarks.learning.evidence.news import (
    BEST,
    JUDGED,
    LAWS,
    MISMATCHES,
    NEW,
    SEEDS,
    TRIES,
    best_constant,
    failures,
    margin,
    margins,
    missing,
    pooled,
    verdict,
)
from benchmarks.learning.evidence.places import NEWS
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
    assert said[1].startswith("- `news-free` does not hold: lasting: below C = 1.4 by 0.20")
    said = verdict(rewards(LEVEL), TRIES["gates.md"]).splitlines()
    assert said[0] == "- `ess` holds."
    assert said[1].startswith("- `mass` does not hold: lasting: below C = 1.4 by 0.10")


def test_a_law_level_with_the_usual_constant_is_not_ahead_where_the_mismatch_is_new() -> None:
    same = rewards(LEVEL | {"tis": 0.6, "tis-1.4": 0.5})
    assert [x.partition(":")[0] for x in failures(same, "news")] == list(NEW)


def test_a_missing_seed_leaves_the_verdict_open() -> None:
    short = rewards(LEVEL)
    del short["lasting-news"][5]
    assert list(failures(short, "news")) == []
    assert verdict(short, ["news"]) == "- `news` is not judged: lasting has 5 of 6 seeds."
    assert list(missing({}, "news")) == [f"{mismatch} has 0 of 6 seeds" for mismatch in MISMATCHES]


@pytest.mark.parametrize("lacking", ["benign-news", "benign-tis", "benign-tis-1.4"])
def test_missing_seeds_do_not_mend_a_condition_that_is_broken_with_all_seeds(lacking: str) -> None:
    short = rewards(LEVEL | {"news": 0.5})
    short[lacking] = dict.fromkeys(range(2), 0.9)
    said = verdict(short, ["news"])
    assert said.startswith("- `news` does not hold: lasting: below C = 1.4 by 0.10")
    assert said.endswith(". Missing: benign has 2 of 6 seeds.")
    assert "benign: " not in said
    for arm in [arm for arm in short if not arm.startswith("benign-")]:
        del short[arm][5]  # no condition is broken with all seeds
    assert verdict(short, ["news"]).startswith("- `news` is not judged: lasting has 5 of 6 seeds; ")


def test_the_committed_runs_break_the_rule_for_all_laws() -> None:
    """No run is missing. Under growth, spikes and staler rollouts none is ahead of C = 2, and three are also below."""
    runs = whole_runs(NEWS).rewards
    for law in LAWS:
        assert list(missing(runs, law)) == []
        failed = list(failures(runs, law))
        behind = [x.partition(":")[0] for x in failed if "not ahead" in x]
        assert behind == ["growing", "spiking", "staler"]
        below = {"news-free": ["growing"], "ess": ["broken"], "mix": ["spiking", "staler"]}
        assert [x.partition(":")[0] for x in failed if "below" in x] == below.get(law, [])


def test_masks_are_below_token_tis_in_the_committed_runs_and_tightening_one_does_not_help() -> None:
    runs = whole_runs(NEWS).rewards
    for mask in BANDS:
        below, tightened = (pooled(runs, *pair, MASKED) for pair in ((mask, "tis"), (f"{mask}-news", mask)))
        assert below is not None
        assert tightened is not None
        assert below.difference < -below.error
        assert tightened.difference < tightened.error


def test_a_pooled_margin_is_of_means_of_seeds() -> None:
    """The differences of mismatches cancel within a seed, so that the seeds alone make its error."""
    of: Of = {}
    for at, mismatch in enumerate(JUDGED):
        of |= {f"{mismatch}-tis": dict.fromkeys(range(SEEDS), 0.5), f"{mismatch}-tis-1.4": {0: 0.1}}
        of[f"{mismatch}-news"] = {seed: 0.6 + 0.1 * (at - 2) + 0.02 * (seed % 2) for seed in range(SEEDS)}
    for other in ("tis", BEST):
        found = pooled(of, "news", other)
        assert found is not None
        assert found.difference == pytest.approx(0.11)
        assert found.error == pytest.approx(stdev([0.0, 0.02] * 3) / 6**0.5)
    assert "| news less the better constant | -0.090 ± 0.004 |" in margins(of, [("news", BEST)])
    del of["staler-news"][3]
    assert pooled(of, "news", "tis") is None


def test_a_few_steps_with_large_gradients_do_not_decide_the_error() -> None:
    ordinary = [1.0, 3.0, 16.0]  # bias2, variance, norm2
    rows: list[dict[str, Any]] = [{"seed": seed, "gradient_error": [ordinary] * 10} for seed in range(6)]
    rows[2]["gradient_error"] = [*[ordinary] * 9, [-50.0, 0.0, -900.0]]
    assert news._errors(rows) == ("0.25 ± 0.00", "0.06 ± 0.00")
    assert news._errors(rows[:1]) == ("-", "-")
    assert news._errors([{"seed": seed, "gradient_error": []} for seed in range(6)]) == ("-", "-")


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
            "policy": "tiny-qk-norm",
            "reward_after": after,
            "kl_late": 0.1,
            "clipped_mass": 0.2,
            "lost_tokens": None,
            "ess": 0.5,
            "steps": 4,
            "bf16_steps": 1,
            "gradient_error": [[1.0, 3.0, 16.0]],
        }
        for arm, rows in rewards(LEVEL, 2).items()
        for seed, after in rows.items()
    ]
    (tmp_path / "news.jsonl").write_bytes(b"".join(jsonl.line(row) for row in lines))
    news.main([str(tmp_path / "news.jsonl")])
    said = capsys.readouterr().out.splitlines()
    assert "| C = 2 | " + " | ".join(["0.51 ± 0.01 (2)"] * 6) + " |" in said
    for plan, law in (("news.md", "news"), ("gates.md", "ess")):
        assert said[said.index(plan) + 2].startswith(f"- `{law}` is not judged: lasting has 2 of 6 seeds; ")
        assert f"| growing-{law} | 2 | 20.0% | - | 50.0% | 0.25 ± 0.00 | 0.06 ± 0.00 | 25% |" in said
