"""The parts of one rank are held to vLLM's own calculators where there are some, and else counted by hand."""

from __future__ import annotations

import math

import pytest
from family_configs import config_of, shape_of
from hypothesis import given
from hypothesis import strategies as st
from uniform_models import resized, uniform

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import (
    Attention,
    Cache,
    DeltaNet,
    Experts,
    Indexer,
    KimiDelta,
    LatentAttention,
    Layer,
    Mamba2,
    Mlp,
    ShortConv,
)
from fp8plan.model.configs.fields import Context
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_KV

MLA = LatentAttention(128, 1536, 512, 128, 64, 128)  # DeepSeek-V3
RANKS = st.sampled_from([1, 2, 4, 8])


def model(*layers: Layer, hidden: int = 1024) -> ModelShape:
    return ModelShape("test", "test", hidden, 64_000, False, Context(4096), layers, "test")


def bytes_of(shapes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> int:
    return sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))


@pytest.mark.vllm
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_states_are_those_that_vllm_allocates(tp: int) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    shapes = utils.MambaStateShapeCalculator
    delta = shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4)
    assert DeltaNet(16, 32, 128, 128, 4).caches(tp) == (Cache("state", state_bytes=bytes_of(delta, (2, 2))),)
    assert DeltaNet(16, 32, 128, 128, 4, 4).caches(tp)[0].state_bytes == bytes_of(delta, (2, 4))
    kimi = shapes.kda_state_shape(tp, 32, 128, conv_kernel_size=4)
    assert KimiDelta(32, 128, 4).caches(tp)[0].state_bytes == bytes_of(kimi, (2, 4))
    for groups in (1, 8):
        mamba = shapes.mamba2_state_shape(tp, 128 * 64, groups, 128, 64, 256, 4)
        assert Mamba2(128, 64, groups, 256, 4).caches(tp)[0].state_bytes == bytes_of(mamba, (2, 2))
    conv = shapes.short_conv_state_shape(tp, 2048, 3)
    assert ShortConv(2048, 3).caches(tp)[0].state_bytes == bytes_of(conv, (2,))


@given(RANKS)
def test_every_rank_keeps_the_whole_latent(tp: int) -> None:
    assert MLA.caches(tp) == (Cache("latent", 512 + 64),)
    sparse = LatentAttention(128, 1536, 512, 128, 64, 128, Indexer(64, 128, 2048))
    assert sparse.caches(tp)[0].index_bytes_per_token == 128 + 4  # FP8 and one scale (deepseek_v2.py, Indexer)
    assert sparse.caches(tp)[0].elements_per_token == 576


@given(RANKS)
def test_what_makes_the_latents_is_on_every_rank(tp: int) -> None:
    names = {linear.name: linear for linear in MLA.linears(7168, tp)}
    assert (names["fused_qkv_a_proj"].n, names["fused_qkv_a_proj"].k) == (1536 + 576, 7168)
    assert names["q_b_proj"].n * tp == 128 * 192
    assert names["o_proj"].k * tp == 128 * 128
    assert [x.name for x in names.values() if x.all_reduce] == ["o_proj"]


def test_an_fp8_latent_layer_keeps_a_bf16_copy_for_decoding() -> None:
    shape = model(Layer(MLA, Mlp(2048)))
    copy = 128 * (128 + 128) * 512 * 2
    scales = sum(-(-x.n // 128) * -(-x.k // 128) * 4 for x in shape.linears() if x.quantised)
    quantised = sum(x.n * x.k for x in shape.linears() if x.quantised)
    assert shape.weight_bytes(FP8_BLOCK) == shape.weight_bytes(BF16) - quantised + scales + copy


def test_caches_of_windows_chunks_and_shared_layers() -> None:
    assert Attention(8, 4, 64).caches(2) == (Cache("full", 2 * 128),)
    assert Attention(8, 4, 64).caches(8) == (Cache("full", 128),)  # a copy of one head on each
    assert Attention(8, 4, 64, window=512).caches() == (Cache("sliding", 4 * 128, 512),)
    assert Attention(8, 4, 64, chunk=8192).caches() == (Cache("chunked", 4 * 128, 8192),)
    assert Attention(8, 4, 64, shares_kv=True).caches() == ()
    assert Attention(8, 4, 64, k_is_v=True).caches() == Attention(8, 4, 64).caches()
    assert Attention(64, 4, 192, v_head_dim=128).caches() == (Cache("full", 4 * 320),)


def test_keys_used_as_values_take_memory_twice_and_parameters_once() -> None:
    plain, shared = (Attention(8, 4, 64, k_is_v=x) for x in (False, True))
    assert plain.linears(512) == shared.linears(512)
    assert plain.parameters(512) - shared.parameters(512) == 4 * 64 * 512


def test_padded_experts_of_gpt_oss() -> None:
    # 2,880 channels are 22.5 blocks of 128: vLLM pads both sides of an expert to 2,944.
    shape = model(Layer(Attention(64, 8, 64), Experts(2, 1, 2880)), hidden=2880)
    wider = model(Layer(Attention(64, 8, 64), Experts(3, 1, 2880)), hidden=2880)
    router = 2880 * 2
    assert wider.weight_bytes(FP8_BLOCK) - shape.weight_bytes(FP8_BLOCK) - router == 3 * (2944**2 + 23**2 * 4)


def test_kv_bytes_are_of_every_layer_that_keeps_tokens() -> None:
    layers = (Layer(Attention(8, 4, 64), Mlp(64)), Layer(DeltaNet(4, 8, 64, 64, 4), Mlp(64)), Layer(MLA, Mlp(64)))
    shape = model(*layers)
    assert [cache.kind for cache in shape.caches()] == ["full", "state", "latent"]
    assert shape.kv_bytes_per_token(BF16) == 2 * (512 + 576)
    assert shape.kv_bytes_per_token(FP8_KV) == 512 + 576


def test_sizes_that_ranks_cannot_share_are_named() -> None:
    with pytest.raises(ConfigError, match="it has 6 state-space heads; allowed: 1, 2"):
        model(Layer(Mamba2(6, 64, 1, 64, 4), Mlp(384))).check_tensor_parallel(4)
    with pytest.raises(ConfigError, match="it has 2 key heads of linear attention; allowed: 1, 2"):
        model(Layer(DeltaNet(2, 8, 64, 64, 4), Mlp(64))).check_tensor_parallel(4)


def test_resized_keeps_what_it_is_not_told() -> None:
    shape = ModelShape.from_hf("Qwen/Qwen3-30B-A3B")
    assert resized(shape) == shape
    small = resized(shape, num_layers=2, num_attention_heads=16)
    assert small.counted == [(Attention(16, 4, 128, qk_norm="head"), 2), (Experts(128, 8, 768), 2)]
    assert resized(shape, num_layers=50).num_layers == 50
    with pytest.raises(TypeError, match="heads; allowed: num_attention_heads"):
        resized(shape, heads=3)
    experts = Experts(8, 2, 64)
    assert uniform(num_layers=3, experts=experts, sparse_layers=2).parts_of(Experts) == [(experts, 2)]


def test_states_of_families_have_their_own_types() -> None:
    # vllm/model_executor/models/config.py: float32 in Nemotron-H unless it says otherwise, the model's in Qwen3-Next.
    nemotron, qwen = shape_of(config_of("nemotron_h", {})), shape_of(config_of("qwen3_next", {}))
    assert nemotron.layers[0].mixer.state_element_bytes == 4  # type: ignore[union-attr]
    assert qwen.layers[0].mixer.state_element_bytes == 2  # type: ignore[union-attr]
