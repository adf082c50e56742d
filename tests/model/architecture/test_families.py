"""Every family against transformers' own model of the same config: what is read has exactly its elements."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from family_configs import INSIDE, WRAPPED, config_of, shape_of

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.families import FAMILIES, REFUSED, SAME_AS
from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention, mixers
from fp8plan.model.configs import find_config

READ = [*(name for name in FAMILIES if name not in INSIDE), *WRAPPED]

# Further options of a family: each changes what its layers hold.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"attention_bias": True}) for name in ("llama", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_next")),
    *((name, {"attention_bias": True}) for name in ("gemma", "gemma2", "gemma3_text", "llama4_text", "granite")),
    *((name, {"attention_bias": True}) for name in ("granitemoe", "granitemoeshared", "granitemoehybrid")),
    *((name, {"attention_bias": True}) for name in ("olmo", "olmo2", "olmo3", "olmoe", "phimoe", "apertus", "arcee")),
    *((name, {"attention_bias": True}) for name in ("smollm3", "cohere", "cohere2", "falcon_h1", "glm4_moe")),
    *((name, {"attention_bias": True}) for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron")),
    *((name, {"attention_bias": True}) for name in ("mimo_v2_flash", "gemma4_text", "qwen3_vl_text")),
    *((name, {"attention_bias": False}) for name in ("glm", "glm4", "seed_oss", "gpt_oss")),
    *((name, {"mlp_bias": True}) for name in ("llama", "granite", "arcee", "smollm3", "seed_oss")),
    *((name, {"mlp_bias": True}) for name in ("nemotron", "falcon_h1")),
    ("cohere", {"use_qk_norm": True}),
    ("ernie4_5", {"use_bias": True}),
    ("exaone_moe", {"first_k_dense_replace": 3, "num_shared_experts": 2}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_d_head": "auto"}),
    ("flex_olmo", {"attention_bias": True, "num_key_value_heads": 8}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "layer_types": ["full_attention", "sliding_attention"] * 15}),
    ("gemma4_text", {"hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": 999, "num_kv_shared_layers": 5}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("gemma4_text", {"num_kv_shared_layers": 12, "use_double_wide_mlp": True}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}),
    ("glm4_moe", {"use_qk_norm": True}),
    ("glm_moe_dsa", {"index_topk_freq": 4}),
    ("granitemoehybrid", {"num_local_experts": 0, "layer_types": ["mamba", "attention"] * 16, "mamba_proj_bias": True}),
    ("granitemoeshared", {"shared_intermediate_size": 512}),
    ("jais2", {"attention_bias": False, "mlp_bias": False}),
    ("lfm2", {"full_attn_idxs": [2, 5], "conv_bias": True}),
    ("llama4_text", {"interleave_moe_layer_step": 2}),
    ("longcat_flash", {"zero_expert_num": 64, "num_layers": 3}),
    ("mistral4", {"first_k_dense_replace": 2, "n_shared_experts": 2, "q_lora_rank": None}),
    ("phimoe", {"lm_head_bias": True}),
    ("qwen2_5_vl", {"tie_word_embeddings": True}),
    ("qwen2_moe", {"mlp_only_layers": [0, 3], "qkv_bias": False}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
]  # fmt: skip


# The names of the text model's tensors in a multimodal one.
IN_TEXT = re.compile(r"(model\.)?language_model\.|model\.(layers|embed_tokens|norm)\.|lm_head\.")


@cache
def as_imported(module: str) -> ModuleType:
    """A module of transformers anew: an engine of OLMo changes its class for good."""
    return importlib.reload(importlib.import_module(module))


def elements_of(config: Any) -> int:
    """Elements of the checkpoint of the text model that transformers builds from a config, tied tensors once.

    A checkpoint also holds buffers, such as the correction of DeepSeek's router. What transformers leaves out, as vLLM
    does when it serves: the layers that predict further tokens (MTP).
    """
    import torch
    import transformers

    text = config.get_text_config()
    if type(text) in transformers.AutoModelForCausalLM._model_mapping:
        built, made = text, transformers.AutoModelForCausalLM._model_mapping[type(text)]
    else:
        built = getattr(config, "thinker_config", config)
        own = type(built).__name__.removesuffix("Config")
        made = getattr(transformers, f"{own}ForConditionalGeneration", None) or getattr(
            transformers, f"{own}ForCausalLM"
        )
    own_class = getattr(as_imported(made.__module__), made.__name__)
    with torch.device("meta"):
        model = own_class._from_config(built)
    tensors = {name: x for name, x in model.state_dict(keep_vars=True).items() if built is text or IN_TEXT.match(name)}
    elements = sum(x.numel() for x in {id(x): x for x in tensors.values()}.values())
    if config.model_type == "longcat_flash":  # transformers has room for one matrix of experts that have no weights
        elements -= config.num_layers * config.zero_expert_num * 2 * config.expert_ffn_hidden_size * config.hidden_size
    return elements


def read(model_type: str, **fields: object) -> ModelShape:
    return ModelShape.from_config({"model_type": model_type, **fields}, "test", "test/config.json")


def test_the_list_is_long() -> None:
    assert len(READ) >= 60
    assert len(set(READ) | set(REFUSED)) >= 65


@pytest.mark.parametrize("name", READ)
def test_a_family_has_the_elements_of_its_model(name: str) -> None:
    config = config_of(name, {})
    assert shape_of(config, name).num_parameters == elements_of(config)


BUNDLED = (
    *("deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-12b-it", "zai-org/GLM-4.5-Air", "nvidia/Nemotron-H-8B-Base-8K"),
    *("ibm-granite/granite-4.0-h-tiny", "allenai/Olmo-3-1025-7B", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    *("Qwen/Qwen3.5-9B", "ByteDance-Seed/Seed-OSS-36B-Instruct", "fp8plan/gpt-oss-20b-bf16"),
    *("fp8plan/gpt-oss-120b-bf16", "fp8plan/DeepSeek-V3-bf16", "fp8plan/MiniMax-M2.5-bf16", "zai-org/GLM-4.5"),
)


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_has_the_elements_of_transformers_model(name: str) -> None:
    fields = {key: value for key, value in find_config(name)[0].items() if not key.startswith("_")}
    config = config_of(fields.pop("model_type"), fields)
    assert ModelShape.from_hf(name).num_parameters == elements_of(config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), OPTIONS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_an_option_has_the_elements_that_it_adds(name: str, changes: dict[str, Any]) -> None:
    wrapped = name == "qwen3_vl_text"
    config = config_of("qwen3_vl", {"text_config": changes}) if wrapped else config_of(name, changes)
    assert shape_of(config, name).num_parameters == elements_of(config)


@pytest.mark.parametrize("name", [*REFUSED, "gemma3n"])
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    part = REFUSED[{"gemma3n": "gemma3n_text"}.get(name, name)]
    with pytest.raises(ConfigError) as error:
        shape_of(config_of(name, {}), name)
    assert part in str(error.value)
    assert "is not modelled" in str(error.value)


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "as_what"), SAME_AS.items())
def test_a_model_type_that_vllm_reads_as_another_is_that(name: str, as_what: str) -> None:
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    fields = config_of(as_what, {}).to_dict() | {"n_routed_experts": 384}
    del fields["model_type"]
    assert read(name, **fields) == read(as_what, **fields)
    assert type(config_of(as_what, {})).__name__ == _CONFIG_REGISTRY[name].__name__


# Published configs as they are on the hub: fields that transformers would fill in are absent. Counts are those of the
# hub's safetensors index, but for gpt-oss, whose is that of its model card (arXiv:2508.10925, table 1, in billions).
GEMMA3_1B = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    "sliding_window_pattern": 6, "max_position_embeddings": 32768, "attention_bias": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "google/gemma-3-1b-it": (GEMMA3_1B, 999_885_952),
    "google/gemma-2-9b": (
        {
            "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
            "sliding_window": 4096, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        9_241_705_984,
    ),
    "microsoft/phi-2": (
        {
            "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 51200, "max_position_embeddings": 2048, "qk_layernorm": False,
            "tie_word_embeddings": False, "num_key_value_heads": 32,
        },
        2_779_683_840,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "vocab_size": 50304, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        },
        6_919_161_856,
    ),
    "microsoft/Phi-3.5-MoE-instruct": (
        {
            "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
            "vocab_size": 32064, "max_position_embeddings": 131072, "attention_bias": True, "lm_head_bias": True,
            "tie_word_embeddings": False, "sliding_window": 131072,
        },
        41_873_153_344,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
            "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
            "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1,
            "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 163840, "tie_word_embeddings": False,
        },
        15_706_484_224,
    ),
    "LiquidAI/LFM2-1.2B": (
        {
            "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": False,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536, "max_position_embeddings": 128000,
        },
        1_170_340_608,
    ),
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_its_published_count(name: str) -> None:
    config, count = PUBLISHED[name]
    assert ModelShape.from_config(config, name, "hub").num_parameters == count


def test_gpt_oss_has_the_count_of_its_model_card() -> None:
    assert round(read(**GPT_OSS_20B).num_parameters / 1e9, 2) == 20.91
    larger = read(**GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None})
    assert round(larger.num_parameters / 1e9, 2) == 116.83


def test_layers_stand_in_their_order() -> None:
    windows = [mixer.window for layer in read(**GEMMA3_1B).layers for mixer in mixers(layer)]  # type: ignore[union-attr]
    assert windows == [0 if i % 6 == 5 else 512 for i in range(26)]
    assert [bool(mixer.window) for layer in read(**GPT_OSS_20B).layers for mixer in mixers(layer)] == [True, False] * 12  # type: ignore[union-attr]


def test_a_multimodal_model_is_its_text_model_and_says_so() -> None:
    # gemma-3-4b leaves the number of heads to its config class.
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    }  # fmt: skip
    shape = read("gemma3", text_config=text, vision_config={"hidden_size": 1152})
    assert "images" in shape.note
    assert shape.tie_word_embeddings
    first = shape.layers[0].mixer
    assert isinstance(first, Attention)
    assert (first.heads, first.kv_heads, first.head_dim) == (8, 4, 256)
    assert read(**GEMMA3_1B).note == ""
    with pytest.raises(ConfigError, match=r"'aria', whose config names a vision tower .* is not modelled"):
        read("aria", text_config=text, vision_config={"depth": 3})


def test_dense_layers_come_first() -> None:
    shape = ModelShape.from_config(PUBLISHED["deepseek-ai/DeepSeek-V2-Lite"][0], "lite", "hub")
    assert [isinstance(layer.mlp, Experts) for layer in shape.layers] == [False] + [True] * 26
    assert all(isinstance(layer.mixer, LatentAttention) for layer in shape.layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (GPT_OSS_20B | {"layer_types": ["full_attention"]}, "a list of 24 words"),
        (GPT_OSS_20B | {"layer_types": ["full_attention", "hash"] * 12}, "hash layers is not modelled"),
        (GEMMA3_1B | {"sliding_window_pattern": 0}, "'sliding_window_pattern' is 0"),
        (GEMMA3_1B | {"sliding_window": "all"}, "'sliding_window' is 'all'"),
        (PUBLISHED["deepseek-ai/DeepSeek-V2-Lite"][0] | {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        (PUBLISHED["deepseek-ai/DeepSeek-V2-Lite"][0] | {"attention_bias": True}, "biases in latent attention"),
        (PUBLISHED["microsoft/phi-2"][0] | {"qk_layernorm": True}, "qk_layernorm"),
        (GPT_OSS_20B | {"kv_lora_rank": 512}, "latent attention .* is not modelled"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_read_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**fields)
