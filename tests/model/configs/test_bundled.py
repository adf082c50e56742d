"""The bundled models by the names that people type: variants, FP8 checkpoints, and BF16 copies of quantised models."""

from __future__ import annotations

import sys

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.configs import bf16_twin, bundled_configs, find_config
from fp8plan.model.precision import is_planned

# Parameters in billions, and the rounding of the source: model cards of DeepSeek-V3 (671B), Kimi-K2 (1T), MiniMax-M2
# (230B) and GLM-4.6 (355B), and table 1 of arXiv:2508.10925 for gpt-oss. test_families counts them exactly.
PUBLISHED_BILLIONS = {
    "deepseek-ai/DeepSeek-V3": (671.0, 0.5),
    "deepseek-ai/DeepSeek-R1": (671.0, 0.5),
    "moonshotai/Kimi-K2-Instruct": (1000.0, 50.0),
    "fp8plan/gpt-oss-120b-bf16": (116.83, 0.005),
    "fp8plan/gpt-oss-20b-bf16": (20.91, 0.005),
    "MiniMaxAI/MiniMax-M2": (230.0, 2.0),
    "MiniMaxAI/MiniMax-M2.5": (230.0, 2.0),
    "zai-org/GLM-4.6": (355.0, 5.0),
}
SAME_TEXT_MODEL = {
    "Qwen/Qwen3-VL-2B-Instruct": "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-VL-4B-Instruct": "Qwen/Qwen3-4B",
    "Qwen/Qwen3-VL-8B-Instruct": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-VL-32B-Thinking": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-VL-235B-A22B-Thinking": "Qwen/Qwen3-235B-A22B",
}
QUANTISED = [name for name, config in bundled_configs().items() if config.get("quantization_config")]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_large_models_have_their_published_parameters(name: str) -> None:
    published, error = PUBLISHED_BILLIONS[name]
    assert ModelShape.from_hf(name).num_parameters / 1e9 == pytest.approx(published, abs=error)


@pytest.mark.parametrize(("name", "text"), SAME_TEXT_MODEL.items())
def test_a_multimodal_model_has_the_layers_of_its_text_model(name: str, text: str) -> None:
    assert ModelShape.from_hf(name).layers == ModelShape.from_hf(text).layers
    assert ModelShape.from_hf(name).num_parameters == ModelShape.from_hf(text).num_parameters
    assert "The text model alone is modelled" in ModelShape.from_hf(name).note


@pytest.mark.parametrize("name", [name for name in bundled_models() if "_note" in bundled_configs()[name]])
def test_a_variant_names_the_config_that_it_has_and_the_fields_that_differ(name: str) -> None:
    shape, config = ModelShape.from_hf(name), bundled_configs()[name]
    sentence, _, advice = shape.note.partition("bundled one of ")[2].removesuffix(".").partition(". ")
    assert advice.startswith("The hub has no such id") == name.endswith("-bf16")
    other, _, differs = sentence.partition(", but for ")
    known = bundled_configs()[other]
    changed = {field for field in config.keys() | known.keys() if config.get(field) != known.get(field)}
    assert {field for field in changed if not field.startswith("_")} == set(filter(None, differs.split(" and ")))
    if "num_hidden_layers" not in changed:
        text = known | {"quantization_config": None}
        assert shape.num_parameters == ModelShape.from_config(text, other, "bundled").num_parameters


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_model_has_a_bundled_copy_in_bf16(name: str) -> None:
    copy = ModelShape.from_hf(bf16_twin(name))
    assert copy.stored is None
    if is_planned(bundled_configs()[name]):
        stored = ModelShape.from_hf(name).stored
        assert stored is not None
        assert stored.weights == "fp8_block"
        assert stored.bf16_model == copy.name
    else:
        with pytest.raises(ConfigError, match=f"mxfp4.*name the BF16 model instead .{copy.name}."):
            ModelShape.from_hf(name)


def test_the_gates_that_a_moe_checkpoint_lists_are_in_bf16_without_the_list() -> None:
    """The FP8 checkpoints of Qwen3-30B-A3B list lm_head, norms and routers, and the bundled configs do not."""
    name = "Qwen/Qwen3-30B-A3B-FP8"
    config = bundled_configs()[name]
    listed = [f"model.layers.{layer}.{part}" for layer in range(48) for part in ("mlp.gate", "input_layernorm")]
    quantised = config["quantization_config"] | {"modules_to_not_convert": ["lm_head", *listed]}
    with_list = ModelShape.from_config(config | {"quantization_config": quantised}, name, "a test")
    assert with_list.layers == ModelShape.from_hf(name).layers


@pytest.mark.parametrize(
    ("name", "bundled"),
    [
        ("unsloth/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen/Qwen3-8B"),
        ("unsloth/gpt-oss-20b-BF16", "fp8plan/gpt-oss-20b-bf16"),
        ("nvidia/DeepSeek-R1-FP4", "deepseek-ai/DeepSeek-R1"),
        ("unsloth/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_a_copy_that_cannot_be_read_names_the_bundled_model_to_type(name: str, bundled: str) -> None:
    with pytest.raises(ConfigError, match=f"; {bundled} is bundled: type that if this is a copy of it"):
        find_config(name)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "Qwen/QwQ-32B", "Qwen/Qwen3-9B-FP8"])
def test_a_name_of_another_shape_is_not_taken_for_a_bundled_one(name: str) -> None:
    with pytest.raises(ConfigError, match="is not bundled") as error:
        find_config(name)
    assert "type that" not in str(error.value)
