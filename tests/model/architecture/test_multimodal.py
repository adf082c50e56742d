"""Multimodal models are read as their text model, wherever the config keeps it; others name the nearest one known."""

from __future__ import annotations

from typing import Any

import pytest
from family_configs import config_of, shape_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.families import FAMILIES, REFUSED, WRAPPERS
from fp8plan.model.architecture.reading import FLAT, NESTED_DEFAULTS, TIED_BY_TEXT

WITHOUT_CLASS = ("internvl_chat", "kimi_vl")  # published with code of their own
KNOWN = [name for name, text in WRAPPERS.items() if text not in REFUSED]
TOWERS = {"vision_config": {"depth": 32, "hidden_size": 1280}, "audio_config": {"d_model": 1280}}

# config.json of Qwen/Qwen2.5-VL-7B-Instruct as published in 2025, with the text model's fields at the top.
QWEN2_5_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 128000, "max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False,
    "tie_word_embeddings": False, "vocab_size": 152064, "vision_config": {"depth": 32, "model_type": "qwen2_5_vl"},
}  # fmt: skip


def read(config: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(config, "test", "test/config.json")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        read(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("model_type", "architectures", *TOWERS)}


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in WITHOUT_CLASS])
def test_a_multimodal_type_has_the_layers_of_its_text_model(name: str) -> None:
    config = config_of(name, {})
    text = config.get_text_config()
    shape, alone = shape_of(config, name), shape_of(text, name)
    assert shape.layers == alone.layers
    assert (shape.vocab_size, shape.hidden_size) == (text.vocab_size, text.hidden_size)
    assert "The text model alone" in shape.note


def test_qwen2_5_vl_is_qwen2_5_in_its_old_and_its_new_spelling() -> None:
    qwen = ModelShape.from_hf("Qwen/Qwen2.5-7B")
    nested = {"model_type": "qwen2_5_vl", "text_config": text_of(QWEN2_5_VL_7B), **TOWERS}
    for config in (QWEN2_5_VL_7B, nested):
        shape = read(config)
        assert shape.layers == qwen.layers
        assert shape.num_parameters == qwen.num_parameters == 7_615_616_512
        assert shape.max_position_embeddings == 128_000


PLACES = [("text_config",), ("llm_config",), ("thinker_config", "text_config")]
DENSE = [name for name, text in WRAPPERS.items() if text in ("llama", "qwen2", "qwen2_5_vl_text", "qwen3", "mistral")]


@given(
    place=st.tuples(st.sampled_from(DENSE), st.sampled_from(PLACES)) | st.tuples(st.sampled_from(FLAT), st.just(())),
    text_type=st.sampled_from([None, "llama", "qwen2", "qwen3"]),
    heads=st.integers(1, 4).map(lambda x: 2**x),
    layers=st.integers(1, 5),
    tied=st.sampled_from([None, True, False]),
)
def test_the_text_model_is_found_at_every_place(
    place: tuple[str, tuple[str, ...]], text_type: str | None, heads: int, layers: int, tied: bool | None
) -> None:
    wrapper, keys = place
    text: dict[str, Any] = {
        "hidden_size": 64 * heads, "intermediate_size": 256, "num_hidden_layers": layers, "vocab_size": 1000,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 4096,
        "sliding_window": None,
    }  # fmt: skip
    own_type = text_type if text_type and keys else WRAPPERS[wrapper]
    config = {**text, **({"model_type": text_type} if text_type and keys else {})}
    for key in reversed(keys):
        config = {key: config}
    whole = {**config, **TOWERS, "model_type": wrapper} | ({} if tied is None else {"tie_word_embeddings": tied})
    alone = {**text, "model_type": own_type} | ({} if tied is None else {"tie_word_embeddings": tied})
    assert read(whole).layers == read(alone).layers
    assert read(whole).num_parameters == read(alone).num_parameters


@pytest.mark.parametrize("wrapper", [name for name in KNOWN if name not in FLAT])
def test_fields_at_the_top_are_not_taken_for_a_text_model_that_has_none_there(wrapper: str) -> None:
    message = refusal(QWEN2_5_VL_7B | {"model_type": wrapper})
    assert "field 'text_config' is missing; fp8plan plans the text model" in message


@pytest.mark.parametrize(
    ("wrapper", "outer", "inner", "tied"),
    [
        ("llava", None, True, True),
        ("llava", False, True, False),  # vLLM: VllmConfig.with_hf_config
        ("llava", True, False, True),
        ("llava", None, None, False),
        *((name, False, True, True) for name in TIED_BY_TEXT),
        *((name, False, False, False) for name in TIED_BY_TEXT),
    ],
)
def test_the_wrapper_says_whether_embeddings_are_tied(
    wrapper: str, outer: bool | None, inner: bool | None, tied: bool
) -> None:
    text = text_of(QWEN2_5_VL_7B) | {"tie_word_embeddings": inner, "model_type": "qwen2"}
    assert read({"model_type": wrapper, "text_config": text, "tie_word_embeddings": outer}).tie_word_embeddings is tied


@pytest.mark.parametrize("name", NESTED_DEFAULTS)
def test_what_a_nested_config_leaves_out_is_the_default_of_transformers(name: str) -> None:
    config = config_of(name, {})
    assert {key: getattr(config, key) for key in NESTED_DEFAULTS[name]} == NESTED_DEFAULTS[name]


def test_llava_leaves_all_sizes_to_llama_and_a_text_model_may_not() -> None:
    # llava-hf/llava-1.5-7b-hf
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    shape = read({"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}})
    assert shape.num_layers == 32
    assert shape.hidden_size == 4096
    assert "'hidden_size' is missing" in refusal(text)


@pytest.mark.parametrize("model_type", [["qwen2"], {"a": 1}, 3, True])
def test_a_text_model_whose_type_is_no_word_is_an_error(model_type: object) -> None:
    message = refusal({"model_type": "llava", "text_config": {"model_type": model_type}})
    assert "field 'text_config.model_type' is" in message
    assert "allowed: a word" in message


def test_a_known_multimodal_type_with_an_unknown_text_model_names_that() -> None:
    text = text_of(QWEN2_5_VL_7B) | {"model_type": "internlm2"}
    message = refusal({"model_type": "internvl_chat", "llm_config": text, **TOWERS})
    assert "model_type 'internlm2' (the text model of this internvl_chat) is not modelled" in message
    assert "model types that are: " in message


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.sampled_from(
            ["hidden_size", "num_attention_heads", "num_hidden_layers", "layer_types", "text_config", "num_experts"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3),
            lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["text_config", "model_type"]), x),
        ),
    )
)
def test_whatever_an_unknown_config_holds_is_one_line(config: dict[str, Any]) -> None:
    assert "'unheard_of'" in refusal({**config, "model_type": "unheard_of"})


def test_every_text_type_of_a_wrapper_is_a_family() -> None:
    assert {*WRAPPERS.values()} <= {*FAMILIES, *REFUSED}
