"""Change ratios: counted by kind of layer, in BF16 and in blockwise E4M3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.learning.changes import KINDS, added, changed, kind_of, log_rows, main, table
from fp8plan.jsonl import append, line
from fp8plan.jsonl import rows as read

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {UP: torch.randn(256, 384, generator=chance).bfloat16(), NORM: torch.ones(384).bfloat16()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
        ("model.layers.3.self_attn.q_norm.weight", "norm"),
        ("model.layers.3.self_attn.k_proj.weight", "q, k, v"),
        ("model.layers.3.self_attn.o_proj.weight", "o"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "gate and up"),
        ("model.layers.3.mlp.experts.11.gate_proj.weight", "experts, gate and up"),
        ("model.layers.3.mlp.experts.11.down_proj.weight", "experts, down"),
        ("model.layers.3.mlp.down_proj.weight", "down"),
        ("model.layers.3.mixer.conv.weight", "other"),
    ],
)
def test_a_tensor_has_the_kind_of_its_layer(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert kind in (*KINDS, "other")


def test_equal_weights_have_no_changes() -> None:
    found = changed(weights(), weights())
    assert found["gate and up"]["values"] == 256 * 384
    assert found["gate and up"]["blocks"] == 6
    assert all(counts[name] == 0 for counts in found.values() for name in ("bf16", "e4m3", "scales"))


def test_a_block_whose_largest_value_moves_has_a_new_scale() -> None:
    before, after = weights(), weights()
    after[UP][0, 0] = 100.0  # the scale of the first block of 128 x 128 is 20 times larger now
    found = changed(before, after)["gate and up"]
    assert (found["bf16"], found["scales"]) == (1, 1)
    assert 0.5 * 128 * 128 < found["e4m3"] <= 128 * 128
    assert found["e4m3_where_scale_kept"] == 0


def test_a_value_that_changes_a_little_may_keep_its_code() -> None:
    before, after = weights(), weights()
    inner = torch.zeros(256, 384, dtype=torch.bool)
    inner[::7, ::5] = True
    largest = before[UP].abs().unflatten(0, (2, 128)).unflatten(2, (3, 128)).amax((1, 3))
    inner &= before[UP].abs() < 0.9 * largest.repeat_interleave(128, 0).repeat_interleave(128, 1)
    after[UP][inner] = (before[UP].float() * 1.01).bfloat16()[inner]  # a step of E4M3 is 6 to 12%
    found = changed(before, after)["gate and up"]
    assert found["scales"] == 0
    assert found["bf16"] == int((before[UP] != after[UP]).sum()) > 1000
    assert 0.05 * found["bf16"] < found["e4m3"] < 0.3 * found["bf16"]
    assert found["e4m3_where_scale_kept"] == found["e4m3"]


def test_what_blockwise_fp8_does_not_take_has_bf16_alone() -> None:
    before, after = weights(), weights()
    after[NORM] += 0.5
    assert changed(before, after)["norm"] == {
        "values": 384, "bf16": 384, "e4m3": 0, "blocks": 0, "scales": 0, "e4m3_where_scale_kept": 0
    }  # fmt: skip


def test_the_table_adds_up_steps_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def counts(bf16: int) -> dict[str, int]:
        return {"values": 1000, "bf16": bf16, "e4m3": 5, "blocks": 4, "scales": 1, "e4m3_where_scale_kept": 2}

    rows = [
        row
        for step, bf16 in enumerate((100, 300))
        for row in log_rows({"down": counts(bf16), "o": counts(0)}, policy="p", learning_rate=1e-5, step=step)
    ]
    text = table(rows)
    assert "| p | 1e-05 | down | 2 | 20% | 0.5% | 0.2% | 25% |" in text
    assert text.index("| o |") < text.index("| down |")
    for number, row in enumerate(rows):
        append(tmp_path / f"{number % 2}.jsonl", line(row))
    main([str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")])
    assert capsys.readouterr().out == f"{text}\n"
    output = tmp_path / "added.jsonl"
    main([str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl"), "--output", str(output)])
    assert capsys.readouterr().out == f"{text}\n"
    assert table(read(output)) == text


def test_runs_are_added_up_step_by_step() -> None:
    def counts(bf16: int) -> dict[str, int]:
        return {"values": 1000, "bf16": bf16, "e4m3": 5, "blocks": 4, "scales": 1, "e4m3_where_scale_kept": 2}

    rows = [
        row
        for step, bf16 in ((25, 100), (25, 300), (50, 7))
        for row in log_rows({"down": counts(bf16)}, policy="p", learning_rate=1e-5, step=step)
    ]
    assert [(row["step"], row["runs"], row["values"], row["bf16"]) for row in added(rows)] == [
        (25, 2, 2000, 400),
        (50, 1, 1000, 7),
    ]
    assert table(added(rows)) == table(rows)
