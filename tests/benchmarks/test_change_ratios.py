"""Predicted beside measured shares of changed values: what the page on them says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import change_ratios
from fp8plan.jsonl import rows


@pytest.fixture(scope="module")
def compared() -> list[change_ratios.Compared]:
    return change_ratios.compared()


def test_layers_of_known_weights_are_nearly_all_within_the_factor(compared: list[change_ratios.Compared]) -> None:
    for optimizer in ("adamw", "muon"):
        assert {x.rate for x in compared if x.policy == f"random-{optimizer}"} == set(change_ratios.RATES)
    ratios = [x.ratio for x in compared if x.group == ("others", "known", "to 1e-4")]
    assert len(ratios) > 100
    assert sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios) / len(ratios) > 0.9


def test_a_summary_counts_every_comparison_once(compared: list[change_ratios.Compared]) -> None:
    lines = change_ratios.summary(compared).splitlines()[2:]
    counts = [line.split("|")[5].split(" of ") for line in lines]
    assert sum(int(total) for _, total in counts) == len(compared)
    assert sum(int(within) for within, _ in counts) == sum(1 / 1.5 <= x.ratio <= 1.5 for x in compared)


def test_a_sample_has_the_spread_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_ratios, "SAMPLES", tmp_path / "samples.jsonl")
    weights = 0.05 * torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    save_file({"model.layers.0.self_attn.o_proj.weight": weights.bfloat16()}, tmp_path / "model.safetensors")
    change_ratios.sample("own", tmp_path)
    (row,) = rows(change_ratios.SAMPLES)
    assert (row["policy"], row["kind"]) == ("own", "o")
    assert change_ratios._weights(row).spread == pytest.approx(0.05, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_random_model_is_measured(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_ratios, "STEPS", 2)
    monkeypatch.setattr(change_ratios, "EVERY", 2)
    monkeypatch.setattr(change_ratios, "TOKENS", (2, 4))
    made = change_ratios._run(optimizer, 1e-4)
    assert {row["kind"] for row in made} == {"embedding", "lm_head", "norm", "q, k, v", "o", "gate and up", "down"}
    layers = [row for row in made if row["kind"] == "o"]
    assert layers[0]["spread"] == pytest.approx(0.02, rel=0.05)
    assert 0 < layers[0]["e4m3"] < layers[0]["bf16"] < layers[0]["values"]


def test_an_observed_step_corrects_what_assumed_weights_foresee(compared: list[change_ratios.Compared]) -> None:
    assumed = [x for x in compared if x.group[:2] == ("others", "assumed")]
    assert len(assumed) == 17
    assert not any(1 / 1.5 <= x.ratio <= 1.5 for x in assumed)
    assert all(1 / 1.5 <= x.corrected <= 1.5 for x in assumed)
