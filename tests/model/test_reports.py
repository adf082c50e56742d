"""Public reports beside fp8plan's figures, and the page that compares them (docs/evidence/accuracy.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.tables.markdown import table

ROOT = Path(reports.__file__).parents[1]
PAGE = (ROOT / "docs/evidence/accuracy.md").read_text(encoding="utf-8")
MEASURED = ROOT / "profiles/h100_sxm/vllm-0.26.0/reports/rollouts.jsonl"


def test_the_memory_of_the_first_report_is_as_much_larger_as_the_page_says() -> None:
    assert "3.0 GiB less than predicted" in PAGE
    memory = reports.SERVED.memory()
    assert memory.available_bytes / 2**30 == pytest.approx(reports.REPORTED_KV_GIB + 3.01, abs=0.005)
    assert memory.kv.block_bytes == 16 * 48_128


def test_the_second_reports_gain_needs_the_responses_that_the_page_names() -> None:
    short, long = (reports.rollout(0.5, tokens) for tokens in (3000, 4000))
    gains = [choices["fp8_block"].speedup or 0.0 for choices in (short, long)]
    assert gains[0] < 1.35 < gains[1]
    assert "a gain of 35% needs mean responses of 3,000 to 4,000 tokens" in " ".join(PAGE.split())
    assert short["fp8_block"].kv_cache_tokens == pytest.approx(3 * short["bf16"].kv_cache_tokens, rel=0.05)


@pytest.mark.parametrize("prompt", [1_024, 16_384])
def test_an_fp8_kv_cache_on_an_a100_takes_about_as_long_as_one_took(prompt: int) -> None:
    (first, rates), (ours, our_rates) = reports.AMPERE[prompt], reports.ampere(prompt)
    assert ours[0] == pytest.approx(first[0], rel=0.08)
    assert ours[1] / ours[0] == pytest.approx(first[1] / first[0], abs=0.045)
    assert our_rates[1] / our_rates[0] == pytest.approx(rates[1] / rates[0], abs=0.055)


def test_the_page_has_the_third_reports_longest_prompts() -> None:
    assert table(reports.ampere_row(16_384), []).splitlines()[0] in PAGE


def test_the_page_has_what_was_measured_of_the_second_report() -> None:
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    for bf16 in (row for row in rows if row["precision"] == "bf16"):
        fp8 = next(x for x in rows if x["precision"] != "bf16" and x["response_lengths"] == bf16["response_lengths"])
        pools = (f"{x['measured_kv_cache_tokens']:,}" for x in (bf16, fp8))
        gain = f"{bf16['seconds'] / fp8['seconds']:.2f}x"
        assert " | ".join((*pools, str(bf16["preemptions"]))) in PAGE
        assert f"| {gain} |" in PAGE
