"""A finding of a model of other layers than attention, as a row that the model of mismatch reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.theory import setting_of
from fp8plan.runtime.measure.probe.results import Interval, Probe, Probed
from fp8plan.runtime.measure.probe.sampling import SampleSettings
from tools.observations import append, observations
from tools.risk_report import read_observations

LFM2 = {
    "model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 65536,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096, "full_attn_idxs": [2, 5, 8],
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 65536,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("config", "kv_layers"), [(LFM2, "3"), (QWEN2, "")])
def test_a_row_has_the_setting_of_its_model(config: dict[str, object], kv_layers: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    kl = Interval(2e-3, 1e-3, 4e-3)
    one = Probed("fp8_block+fp8_kv", figures={"kl_k3": kl, "ess_raw": Interval(0.99, 0.98, 1.0)}, facts={"e8m0": False})
    found = Probe(str(tmp_path), "h200", "today", "0.26.0", "a test", SampleSettings(), 1, [one])
    [row] = observations(found.to_dict())
    assert row["kv_layers"] == kv_layers
    assert row["attention_bias"] == str(int(config is QWEN2))
    table = tmp_path / "table.csv"
    append(table, [row])
    [read] = read_observations(table)
    shape = ModelShape.from_hf(tmp_path)
    assert read.setting == setting_of(shape, PRESETS[one.precision], e8m0=False)
