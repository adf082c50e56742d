"""Properties of a model on which the mismatch depends, in families whose parts differ from layer to layer."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from family_configs import config_of, shape_of
from uniform_models import uniform

from benchmarks.tables import probe
from fp8plan import jsonl
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.architecture.parts import Attention, LatentAttention
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_BLOCK_KV, FP8_KV, PRESETS, Precision
from fp8plan.model.risk import theory as setting
from fp8plan.model.risk.expected import committed_fit, mismatch_risk, predicted_kl
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.risk.theory import (
    SMALL,
    SMALL_LANGUAGE,
    SMALL_LANGUAGE_FACTOR,
    SMALL_SD,
    SMALLEST_FITTED,
    Setting,
    setting_of,
    unmeasured_parts,
)
from tools.risk_report import read_observations

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = [2000.0] * 8
ALIKE = [
    name
    for name in bundled_models()
    if ModelShape.from_hf(name).model_type in ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral")
]


def of(name: str, **changes: Any) -> ModelShape:
    return shape_of(config_of(name, changes), name)


def quantisation_kl(shape: ModelShape, precision: Precision, tp: int = 1) -> float:
    """The KL of quantisation alone, without routing, which grows as the square root of the rest."""
    fitted = committed_fit()
    setting = setting_of(shape, precision, True, tp, Remedies(router_replay=True))
    return predicted_kl(setting, np.array(fitted.coefficients), fitted.errors)[1]


@pytest.fixture
def whatever_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model counts as small: those of these tests are, but for their parts."""
    monkeypatch.setattr(setting, "SMALLEST_FITTED", 0)


@pytest.mark.parametrize("name", ALIKE)
def test_layers_alike_are_counted_as_they_are(name: str) -> None:
    shape = ModelShape.from_hf(name)
    layers, moe = float(shape.num_layers), any(x.name == "router" for x in shape.linears())
    norm = shape.parts_of(Attention)[0][0].qk_norm == "head"
    assert setting_of(shape, BF16) == Setting(layers, layers, layers, layers * moe, norm, "bf16", False)
    assert setting_of(shape, FP8_BLOCK_KV, False).quantised_layers == layers
    assert unmeasured_parts(shape) == (() if shape.num_parameters > SMALLEST_FITTED else (SMALL,))


@pytest.mark.parametrize(
    ("name", "layers", "kv_layers"),
    [
        ("qwen3_next", 48, 12),  # one in four has attention
        ("gpt_oss", 36, 36),  # windows hold FP8 too
        ("gemma4_text", 30, 30),
        ("deepseek_v3", 61, 61),
        ("falcon_h1", 32, 32),  # attention beside the state-space part
    ],
)
def test_recurrent_layers_have_no_fp8_keys(name: str, layers: float, kv_layers: float) -> None:
    setting = setting_of(of(name), FP8_KV)
    assert (setting.layers, setting.kv_layers) == (layers, kv_layers)


def test_a_layer_that_shares_keys_reads_them_all_the_same() -> None:
    shape = of("gemma4_text", num_kv_shared_layers=12)
    assert len(shape.caches()) == 18
    assert setting_of(shape, FP8_KV).kv_layers == 30


def test_a_layer_of_one_part_is_half_a_layer() -> None:
    shape = of("nemotron_h", moe_shared_expert_intermediate_size=7680)  # whole blocks
    kinds = [layer.mixer is None for layer in shape.layers]
    assert any(kinds)
    assert not all(kinds)
    setting = setting_of(shape, FP8_BLOCK_KV)
    assert setting.layers == setting.quantised_layers == len(kinds) / 2
    assert setting.kv_layers == sum(isinstance(layer.mixer, Attention) for layer in shape.layers)


def test_linears_that_stay_in_bf16_count_as_such() -> None:
    # GLM-4.5-Air: one of the two linears of the first MLP, and where ranks cut it also one of two of shared experts.
    shape = ModelShape.from_hf("zai-org/GLM-4.5-Air")
    found = {tp: setting_of(shape, FP8_BLOCK, tensor_parallel_size=tp).quantised_layers for tp in (1, 2)}
    assert found == {1: 46 - 1 / 4, 2: 46 - 1 / 4 - 45 / 8}
    risks = [quantisation_kl(shape, FP8_BLOCK, tp) for tp in (1, 2)]
    assert risks[1] < risks[0]
    assert risks[1] / risks[0] == pytest.approx(found[2] / found[1])


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "lfm2"])
def test_few_layers_of_attention_add_less_by_an_fp8_cache_than_all_would(name: str) -> None:
    shape = of(name)
    [(attention, number)] = shape.parts_of(Attention)
    whole = replace(shape, layers=tuple(replace(layer, mixer=attention, parallel=()) for layer in shape.layers))
    few, all_layers = (quantisation_kl(x, FP8_KV) for x in (shape, whole))
    assert few / all_layers == pytest.approx(number / shape.num_layers)


def test_a_latent_has_no_qk_norm_and_no_clipped_keys() -> None:
    shape = of("deepseek_v3")
    assert shape.parts_of(LatentAttention)
    assert not setting_of(shape, FP8_KV).qk_norm
    calibrated, unit = (mismatch_risk(shape, FP8_KV, LENGTHS, kv_scales_calibrated=x) for x in (True, False))
    assert unit.kl_k3 == calibrated.kl_k3
    assert any("latents" in reason for reason in calibrated.reasons)
    assert calibrated.level != "low"


@pytest.mark.usefixtures("whatever_size")
def test_one_layer_of_clipped_keys_is_enough() -> None:
    clean = uniform(num_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=128, qk_norm=True)
    biased = replace(clean.layers[0], mixer=Attention(8, 8, 128, qkv_bias=True))
    mixed = replace(clean, layers=(biased, *clean.layers[1:]))
    assert mismatch_risk(clean, FP8_KV, LENGTHS).level == "low"
    risk = mismatch_risk(mixed, FP8_KV, LENGTHS)
    assert risk.level == "high"
    assert not setting_of(mixed, FP8_KV).qk_norm


@pytest.mark.parametrize("precision", PRESETS.values())
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gpt_oss", ("attention over a window", "attention of another kind than Qwen3's")),
        ("olmo2", ("attention of another kind than Qwen3's",)),  # a norm over all heads together
        ("qwen3_next", ("recurrent layers", "attention of another kind than Qwen3's")),
        ("deepseek_v3", ("latent attention",)),
        ("granitemoehybrid", ("state-space layers",)),
    ],
)
@pytest.mark.usefixtures("whatever_size")
def test_what_nobody_measured_is_wider_and_said(name: str, parts: tuple[str, ...], precision: Any) -> None:
    shape = of(name)
    assert unmeasured_parts(shape) == parts
    risk = mismatch_risk(shape, precision, LENGTHS)
    assert any(all(part in reason for part in parts) for reason in risk.reasons)
    plain = uniform(num_layers=shape.num_layers, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    known = mismatch_risk(plain, BF16, LENGTHS)
    widths = [x.kl_k3_high / x.kl_k3_low for x in (mismatch_risk(shape, BF16, LENGTHS), known)]
    assert widths[0] > 1.5 * widths[1]


def test_the_published_runs_with_state_space_layers_are_within_their_range() -> None:
    """Nemotron 3 Nano has 52 layers of one part, and experts. Neither run is fitted."""
    shape = of("granitemoehybrid", num_hidden_layers=26, layer_types=["mamba"] * 23 + ["attention"] * 3)
    rows = [row for row in read_observations() if row.setting.layers == 26 and row.weight == 0 and row.kl]
    assert len(rows) == 2
    for row in rows:
        assert row.setting.moe
        risk = mismatch_risk(shape, BF16 if row.setting.rollout == "bf16" else FP8_BLOCK, LENGTHS)
        assert risk.kl_k3_low < row.kl < risk.kl_k3_high  # type: ignore[operator]


MEASURED = [  # config, record of the KL at the start of a run
    *(("structured", name, f"profiles/h200_sxm/vllm-0.26.0/probe/{name}.json") for name in PRESETS),
    ("qk_norm", "bf16", "benchmarks/learning/gpus/h200.jsonl"),
    ("qk_norm", "fp8_block+fp8_kv", "benchmarks/learning/gpus/h200.jsonl"),
    ("smollm2", "bf16", "benchmarks/learning/cpu/smollm2_probe.json"),
    *(("smollm2", name, f"profiles/h200_sxm/vllm-0.26.0/probe/smollm2/{name}.json") for name in PRESETS),
    *(("gemma", name, f"profiles/h200_sxm/vllm-0.26.0/probe/gemma/{name}.json") for name in PRESETS),
]
SIZES = {
    "structured": {"vocab_size": 16_384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16,
                   "num_attention_heads": 6, "num_key_value_heads": 2},
    "qk_norm": {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
                "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


LEVELS = {
    ("structured", "bf16"): "low",
    ("structured", "fp8_kv"): "high",
    ("structured", "fp8_block+fp8_kv"): "high",
    ("qk_norm", "bf16"): "low",
    ("smollm2", "fp8_kv"): "high",
    ("smollm2", "fp8_block+fp8_kv"): "high",
    ("gemma", "fp8_kv"): "high",
    ("gemma", "fp8_block"): "high",
    ("gemma", "fp8_block+fp8_kv"): "high",
}
COMMON = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False}
LANGUAGE = {folder.name: folder for folder in probe.SMALL.values()}


def small_shape(model: str) -> ModelShape:
    if model in LANGUAGE:
        return probe.shape_of(LANGUAGE[model])
    return ModelShape.from_config(COMMON | SIZES[model], model, "a test")


@pytest.mark.parametrize(("model", "precision", "record"), MEASURED)
def test_what_was_measured_of_small_models_is_within_their_range(model: str, precision: str, record: str) -> None:
    """Their spread was taken from these records, except for language models in FP8: the range holds them."""
    path = ROOT / record
    if path.suffix == ".jsonl":
        arm = "bf16" if precision == "bf16" else "fp8"
        run = next(row for row in jsonl.rows(path) if (row["policy"], row["arm"], row["seed"]) == ("qk-norm", arm, 0))
        seen = run["kl_first"]
    else:
        seen = json.loads(path.read_text())["precisions"][0]["figures"]["kl_k3"]["value"]
    shape = small_shape(model)
    assert shape.num_parameters < SMALLEST_FITTED
    risk = mismatch_risk(shape, PRESETS[precision], LENGTHS, e8m0=False)
    assert risk.kl_k3_low < seen < risk.kl_k3_high
    small = SMALL_LANGUAGE if model in LANGUAGE else SMALL
    assert any(f"of {small}" in reason for reason in risk.reasons)
    assert any("times the theory's" in reason for reason in risk.reasons) == (small == SMALL_LANGUAGE)
    assert risk.level == LEVELS.get((model, precision), "moderate")


def test_the_factor_of_small_language_models_is_what_the_two_measured_ones_earn() -> None:
    errors = [probe.log_errors(folder).values() for folder in probe.SMALL.values()]
    means = [fmean(of) for of in errors]
    assert log(SMALL_LANGUAGE_FACTOR) == pytest.approx(fmean(means), abs=0.01)
    left_out = [error - other for of, other in zip(errors, reversed(means), strict=True) for error in of]
    further = (fmean(x**2 for x in left_out) - committed_fit().noise_sd ** 2) ** 0.5
    assert exp(further) == pytest.approx(1.65, abs=0.05)
    assert further < SMALL_SD[SMALL_LANGUAGE]
    shape = small_shape("smollm2")
    widths = [
        risk.kl_k3_high / risk.kl_k3
        for risk in (mismatch_risk(x, BF16, LENGTHS) for x in (shape, replace(shape, vocab_size=16_384)))
    ]
    assert widths == pytest.approx([4.2, 18.8], rel=0.03)
    assert exp(max(map(abs, left_out))) < widths[0]
