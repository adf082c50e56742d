"""The longest max_model_len of a model against vLLM's own function, and the errors of fields that it is read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_configs import config_of
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.architecture.families import FAMILIES
from fp8plan.model.configs import bundled_configs
from fp8plan.model.configs.fields import Context

NEW, OLD = "0.30.0", "0.26.0"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64,
    "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "max_position_embeddings": 40960}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "sliding_window": 512, "max_position_embeddings": 131072}
OLMO3 = LLAMA | {"model_type": "olmo3", "sliding_window": 512}
PHI3 = LLAMA | {"model_type": "phi3", "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
LONG = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

# Config -> the longest max_model_len of vLLM 0.30, and that of 0.26 to 0.29, whose _get_and_verify_max_len has YaRN's
# original_max_position_embeddings, times its factor.
LONGEST: dict[str, tuple[dict[str, Any], int, int]] = {
    "no scaling": (LLAMA, 4096, 4096),
    "linear": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}, 16384, 16384),
    "linear of Qwen3-8B": (QWEN3 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 81920, 81920),
    "linear in rope_parameters": (
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}, 16384, 16384,
    ),
    "dynamic": (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, 10240, 10240),
    "a part of a token": (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 1.0001}}, 4096, 4096),
    "default": (LLAMA | {"rope_scaling": {"rope_type": "default"}}, 4096, 4096),
    "default with a factor": (LLAMA | {"rope_scaling": {"rope_type": "default", "factor": 3.0}}, 12288, 12288),
    "a factor that is null": (LLAMA | {"rope_scaling": {"rope_type": "default", "factor": None}}, 4096, 4096),
    "llama3": (LLAMA | {"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072, 131072),
    "YaRN beside the old length": (QWEN3 | {"rope_scaling": YARN}, 40960, 131072),
    "YaRN with its new length": (QWEN3 | {"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072, 131072),
    "mrope": (
        QWEN3 | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, 40960, 40960,
    ),
    "longrope": (PHI3 | {"rope_scaling": {"type": "longrope", **LONG}}, 131072, 131072),
    "su": (PHI3 | {"rope_scaling": {"type": "su", "original_max_position_embeddings": 4096, **LONG}}, 131072, 131072),
    "Gemma 3": (GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072, 131072),
    "by kind of layer": (
        OLMO3 | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }},
        16384, 16384,
    ),
    "the smallest of several": (LLAMA | {"seq_length": 2048, "max_seq_len": 8192}, 2048, 2048),
    "model_max_length alone": (LLAMA | {"seq_length": 2048, "model_max_length": 8192}, 8192, 8192),
    "model_max_length and a scaling": (
        LLAMA | {"model_max_length": 8192, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 16384, 16384,
    ),
    "sliding_window": (LLAMA | {"model_type": "mistral", "sliding_window": 512}, 4096, 4096),
}  # fmt: skip


def context_of(config: dict[str, Any]) -> Context:
    return ModelShape.from_config(config, "test", "config.json").context


def verified_by_vllm(folder: Path, config: dict[str, Any], max_model_len: int | None) -> int:
    """The max_model_len with which vLLM starts. Raises ValueError where it refuses."""
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    hf = get_config(str(folder), trust_remote_code=False)
    text = hf.get_text_config()
    arch = ModelArchConfigConvertorBase(hf, text).convert()
    return int(_get_and_verify_max_len(text, arch, None, max_model_len, False, None))


def assert_as_vllm(folder: Path, config: dict[str, Any]) -> None:
    context = context_of(config)
    longest, _ = context.longest(NEW)
    assert verified_by_vllm(folder, config, longest) == longest
    with pytest.raises(ValueError, match="User-specified max_model_len"):
        verified_by_vllm(folder, config, longest + 1)
    assert verified_by_vllm(folder, config, None) == context.derived(NEW)


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_context(name: str) -> None:
    config, new, old = LONGEST[name]
    context = context_of(config)
    assert (context.longest(NEW)[0], context.longest(OLD)[0]) == (new, old)


@pytest.mark.vllm
@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_context_is_vllms(name: str, tmp_path: Path) -> None:
    assert_as_vllm(tmp_path, LONGEST[name][0])


READ = sorted(set(FAMILIES) - {"deepseek_v32"})  # transformers has no config class of that one


@pytest.mark.vllm
@pytest.mark.parametrize("name", READ)
def test_the_context_of_every_family_is_vllms(name: str, tmp_path: Path) -> None:
    assert_as_vllm(tmp_path, config_of(name, {}).to_dict())


@pytest.mark.vllm
@pytest.mark.parametrize("name", bundled_models())
def test_the_context_of_a_bundled_model_is_vllms(name: str, tmp_path: Path) -> None:
    config = {key: value for key, value in bundled_configs()[name].items() if not key.startswith("_")}
    assert_as_vllm(tmp_path, config)


SCALINGS = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn"]),
        "factor": st.integers(1, 64) | st.floats(1, 64),
    },
    optional={"original_max_position_embeddings": st.integers(1, 200_000)},
)
CONFIGS = st.fixed_dictionaries(
    {"max_position_embeddings": st.integers(1, 2_000_000)},
    optional={
        "rope_scaling": SCALINGS,
        "rope_parameters": SCALINGS,
        **dict.fromkeys(("n_positions", "seq_length", "max_seq_len", "model_max_length"), st.integers(1, 2_000_000)),
        "sliding_window": st.integers(1, 4096),
    },
)


@pytest.mark.vllm
@given(changes=CONFIGS, model_type=st.sampled_from(["llama", "qwen3", "gemma3_text", "mistral"]))
def test_any_context_is_vllms(
    changes: dict[str, Any], model_type: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # transformers has a KeyError for a Gemma 3 with both of them, where rope_parameters is not by kind of layer.
    assume(model_type != "gemma3_text" or not {"rope_scaling", "rope_parameters"} <= changes.keys())
    assert_as_vllm(tmp_path_factory.mktemp("model"), LLAMA | {"model_type": model_type} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "linaer", "factor": 4.0}}, "'rope_scaling.rope_type' is 'linaer'; .*linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "'rope_scaling.factor' is '4'"),
        ({"rope_scaling": {"type": "dynamic"}}, "'rope_scaling.factor' is None; .*a scaling of type dynamic needs"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.25}}, "'rope_scaling.factor' is 0.25; .*at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "'rope_scaling.factor' is inf"),
        ({"rope_scaling": [2.0]}, "'rope_scaling' is .2.0.; allowed: a mapping"),
        ({"rope_parameters": {"full_attention": {"rope_type": 4}}}, "'rope_parameters.full_attention.rope_type' is 4"),
        ({"rope_parameters": {"full_attention": {}, "factor": 2}}, "'rope_parameters.factor' is 2; allowed: a mapping"),
        ({"seq_length": -1}, "'seq_length' is -1"),
        ({"model_max_length": "long"}, "'model_max_length' is 'long'"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is missing"),
    ],
)
def test_a_broken_scaling_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        context_of(LLAMA | changes)


def test_an_error_says_what_the_limit_comes_from() -> None:
    linear = ModelShape.from_config(LONGEST["linear of Qwen3-8B"][0], "m", "config.json")
    linear.check_max_model_len(81920)
    with pytest.raises(ConfigError, match=r"at most 81920 \(max_position_embeddings 40960, times 2 by its linear RoPE"):
        linear.check_max_model_len(81921)
    yarn = ModelShape.from_config(LONGEST["YaRN beside the old length"][0], "m", "config.json")
    yarn.check_max_model_len(61_024, OLD)
    with pytest.raises(
        ConfigError, match=r"at most 131072 \(original_max_position_embeddings 32768, times 4 by its yarn"
    ):
        yarn.check_max_model_len(131_073, OLD)
    with pytest.raises(ConfigError, match=r"at most 40960 \(max_position_embeddings\)"):
        yarn.check_max_model_len(61_024, NEW)


def test_longrope_starts_with_its_native_context() -> None:
    context = context_of(LONGEST["longrope"][0])
    assert (context.derived(NEW), context.longest(NEW)[0]) == (4096, 131072)
