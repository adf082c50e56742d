"""Facts of each layer, indices of layers, flags and head sizes: what is out of range or of another kind is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Experts, Mlp, ShortConv
from fp8plan.model.configs.fields import Fields

LAYERS = 6
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
MOE = DENSE | EXPERTS | {"model_type": "qwen3_moe"}
MIMO = DENSE | EXPERTS | {"model_type": "mimo_v2_flash", "sliding_window": 128, "hybrid_layer_pattern": [0, 1] * 3}
LFM2 = DENSE | {"model_type": "lfm2"}
LLAMA4 = DENSE | EXPERTS | {"model_type": "llama4_text", "intermediate_size_mlp": 4096, "attention_chunk_size": 64}
ERNIE = DENSE | EXPERTS | {"model_type": "ernie4_5_moe", "moe_layer_start_index": 1, "moe_layer_interval": 1}
KIMI = DENSE | EXPERTS | {
    "model_type": "kimi_linear", "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "linear_attn_config": {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "full_attn_layers": [4]},
}  # fmt: skip
GLM5 = KIMI | {
    "model_type": "glm_moe_dsa", "linear_attn_config": None, "q_lora_rank": 64, "index_topk": 16, "index_n_heads": 2,
    "index_head_dim": 128,
}  # fmt: skip
GRANITE = DENSE | {
    "model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 512, "mamba_n_heads": 32,
    "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
}  # fmt: skip
GEMMA4 = DENSE | {"model_type": "gemma4_text", "sliding_window": 128, "layer_types": ["full_attention"] * LAYERS}


def shape(config: dict[str, Any], **changes: Any) -> ModelShape:
    return ModelShape.from_config(config | changes, "test", "test/config.json")


def number_of(part: type, config: dict[str, Any], **changes: Any) -> int:
    return sum(number for _, number in shape(config, **changes).parts_of(part))


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # a fact of each layer
    (MIMO, {"moe_layer_freq": [0, 1]}, "'moe_layer_freq' is .0, 1.; allowed: a list of 6 marks, .*, which has 2"),
    (MIMO, {"moe_layer_freq": [1] * 7}, "'moe_layer_freq' is .*; allowed: a list of 6 marks, .*, which has 7"),
    (MIMO, {"moe_layer_freq": ["0"] * 6}, "'moe_layer_freq' is '0'; allowed: in the list: 0 and 1"),
    (MIMO, {"moe_layer_freq": [2] * 6}, "'moe_layer_freq' is 2"),
    (MIMO, {"moe_layer_freq": [0.0] * 6}, "'moe_layer_freq' is 0.0"),
    (MIMO, {"moe_layer_freq": 2}, "'moe_layer_freq' is 2; allowed: 1, or a list of 0 and 1"),
    (MIMO, {"moe_layer_freq": "1"}, "'moe_layer_freq' is '1'"),
    (MIMO, {"hybrid_layer_pattern": [0, 1]}, "'hybrid_layer_pattern' is .0, 1.; allowed: a list of 6"),
    (MIMO, {"hybrid_layer_pattern": [0, 3] * 3}, "'hybrid_layer_pattern' is 3"),
    (MIMO, {"mlp_layer_types": ["dense"] * 5 + ["spare"]}, "'mlp_layer_types' is 'spare'; .*dense or sparse"),
    (DENSE, {"layer_types": ["full_attention"] * 5}, "'layer_types' is .*a list of 6 words"),
    (DENSE, {"layer_types": ["full_attention"] * 5 + [None]}, "'layer_types' is None"),
    (DENSE, {"layer_types": ["a\nb"] * 6}, "'a.nb' layers is not modelled"),
    (LLAMA4, {"no_rope_layers": [1, 1]}, "'no_rope_layers' is .1, 1.; allowed: a list of 6"),
    (GLM5, {"indexer_types": ["full"]}, "'indexer_types' is .*a list of 6"),
    (GLM5, {"indexer_types": ["none"] * 6}, "'indexer_types' is 'none'"),
    (GLM5, {"index_topk_pattern": "FS"}, "'index_topk_pattern' is 'FS'; allowed: 6 of the letters F S"),
    (GLM5, {"index_topk_pattern": 4}, "'index_topk_pattern' is 4"),
    # numbers of layers
    (MOE, {"mlp_only_layers": [3, 6]}, "'mlp_only_layers' is 6; allowed: in the list: layer numbers from 0 to 5"),
    (MOE, {"mlp_only_layers": [-1]}, "'mlp_only_layers' is -1"),
    (MOE, {"mlp_only_layers": [True]}, "'mlp_only_layers' is .True.; allowed: a list of layer numbers"),
    (LFM2, {"full_attn_idxs": [40]}, "'full_attn_idxs' is 40; allowed: in the list: layer numbers from 0 to 5"),
    (LFM2, {"full_attn_idxs": "2"}, "'full_attn_idxs' is '2'"),
    (LLAMA4, {"moe_layers": [6]}, "'moe_layers' is 6"),
    (ERNIE, {"moe_layer_end_index": 6}, "'moe_layer_end_index' is 6; allowed: at most 5"),
    (GEMMA4, {"num_kv_shared_layers": 6}, "'num_kv_shared_layers' is 6; allowed: at most 5"),
    (GEMMA4, {"per_layer_config": {"6": {}}}, "'per_layer_config' is '6'; allowed: as its keys: layer numbers"),
    (GEMMA4, {"per_layer_config": {"full": {}}}, "'per_layer_config' is 'full'"),
    (GEMMA4, {"per_layer_config": {"5": {"head_dim": 7}}}, "'per_layer_config.5.head_dim' is 7"),
    # numbers, words and mappings
    (DENSE, {"sliding_window": -1, "use_sliding_window": True}, "'sliding_window' is -1"),
    (DENSE, {"use_sliding_window": "false"}, "'use_sliding_window' is 'false'; allowed: true or false"),
    (DENSE, {"tie_word_embeddings": 1.0}, "'tie_word_embeddings' is 1.0"),
    (DENSE, {"hidden_act": ["silu"]}, "'hidden_act' is ..silu..; allowed: a word"),
    (DENSE, {"hidden_size": float("inf")}, "'hidden_size' is inf"),
    (DENSE, {"hidden_size": 112, "head_dim": None}, "'head_dim' is 7; .* .it is absent, and follows from others.$"),
    (DENSE, {"anything": {"deep": [[{"down": float("nan")}]]}}, "'down' is NaN"),
    (MOE, {"num_experts": 10**9}, "'num_experts' is 1000000000; allowed: at most 100,000"),
    (LFM2, {"intermediate_size": 1}, "'intermediate_size' is 1; allowed: a width of which"),
    (LFM2, {"block_ffn_dim_multiplier": float("inf")}, "'block_ffn_dim_multiplier' is inf"),
    (GRANITE, {"mamba_n_heads": 3000}, "'mamba_n_heads' is 3000"),
    (GRANITE, {"mamba_d_head": 16}, "'mamba_n_heads' is 32; .*gives 2048 channels"),
    (GRANITE, {"mamba_n_groups": 3}, "'mamba_n_groups' is 3; allowed: a divisor of the 32 state-space heads"),
    (KIMI, {"linear_attn_config": [4]}, "'linear_attn_config' is .4.; allowed: a mapping"),
    (KIMI, {"linear_attn_config": {"full_attn_layers": [7]}}, "'linear_attn_config.full_attn_layers' is 7; .* to 6"),
    (KIMI, {"linear_attn_config": {"num_heads": 0}}, "'linear_attn_config.num_heads' is 0"),
    ({"model_type": "qwen3_5"}, {"text_config": ["x"]}, "'text_config' is ..x..; allowed: a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "message"), WRONG)
def test_what_is_wrong_is_named(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        shape(config, **changes)
    assert str(error.value).startswith("test/config.json: ")
    assert "\n" not in str(error.value)


def test_what_is_right_counts_in_its_layer() -> None:
    assert number_of(Experts, MIMO, moe_layer_freq=[0, 1, 1, 0, 1, 1]) == 4
    assert number_of(Experts, MIMO, moe_layer_freq=[False, True, True, False, True, True]) == 4
    assert number_of(Mlp, MIMO, mlp_layer_types=["dense"] * 5 + ["sparse"]) == 5
    assert number_of(Experts, MOE, mlp_only_layers=[0, 5]) == 4
    assert number_of(ShortConv, LFM2, full_attn_idxs=[2, 5]) == 4
    assert number_of(Experts, LLAMA4, moe_layers=[5]) == 1
    assert number_of(Experts, ERNIE, moe_layer_end_index=3) == 3
    mixers = [layer.mixer for layer in shape(GEMMA4, per_layer_config={"05": {"head_dim": 128}}).layers]
    assert [x.head_dim for x in mixers if isinstance(x, Attention)] == [64] * 5 + [128]
    assert shape(GLM5, index_topk_pattern="FSFSFS") == shape(GLM5, indexer_types=["full", "shared"] * 3)
    assert shape(DENSE, use_sliding_window=0, sliding_window=64) == shape(DENSE)


def test_infinity_is_allowed_where_nobody_reads_it() -> None:
    # Published configs of Mamba 2 have "time_step_limit": [0.0, Infinity].
    assert shape(DENSE, time_step_limit=[0.0, float("inf")]) == shape(DENSE)


def test_an_error_is_short_however_long_the_value() -> None:
    for value in (["x"] * 10**6, "x" * 10**6, 10**5000, [[["x"] * 1000] * 1000]):
        with pytest.raises(ConfigError, match="field 'hidden_size' is ") as error:
            Fields({"hidden_size": value}, "config.json").integer("hidden_size")
        assert len(str(error.value)) < 400


@given(st.integers(-2, 600))
def test_a_head_size_is_one_that_attention_takes(size: int) -> None:
    taken = 8 <= size <= 512 and (size % 8 == 0 or (size >= 32 and size % 2 == 0))
    if taken:
        assert shape(DENSE, head_dim=size).parts_of(Attention)[0][0].head_dim == size
    else:
        with pytest.raises(ConfigError, match=f"'head_dim' is {size}; allowed"):
            shape(DENSE, head_dim=size)


@pytest.mark.vllm
def test_head_sizes_are_those_of_vllms_attention() -> None:
    """FlexAttention, which claims any size, is left out: its speed is not modelled, and no FP8 KV cache is for it."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    for size in range(2, 257, 2):
        takes = any(x.supports_head_size(size) for x in (FlashAttentionBackend, TritonAttentionBackend))
        try:
            shape(DENSE, head_dim=size)
        except ConfigError:
            assert not takes, size
        else:
            assert takes, size
