from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_oracle import VLLM, Shape, fits, of_ours, plan, specs, token_bytes

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.mixers import Cache
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import plan_kv_cache
from fp8plan.model.memory.kv_specs import KvRules, LayerCache, in_bytes, model_caches
from fp8plan.model.precision import find_precision

# No two of one size in bytes: see _equal_groups.
SHAPES = [Shape(1, 64), Shape(2, 64), Shape(1, 192), Shape(3, 128), Shape(4, 128), Shape(8, 128), Shape(4, 512)]
LATENTS = [Shape(0, 576), Shape(0, 512), Shape(0, 132)]
CHECKPOINTS = ["", "Mamba 2 has a checkpoint block"]


def compare(caches: list[LayerCache], shapes: list[Shape], rules: KvRules, blocks: int, odd_bytes: int) -> None:
    """blocks: more than one request needs, or less"""
    try:
        config, layers = specs(caches, shapes, rules)
        one_request = plan(config, layers, 0)
    except (ValueError, NotImplementedError):
        with pytest.raises(ConfigError):
            plan_kv_cache(caches, rules)
        return
    available = max(0, one_request.request_bytes + blocks * one_request.block_bytes + odd_bytes)
    assert of_ours(plan_kv_cache(caches, rules).within(available)) == plan(config, layers, available)


@st.composite
def layer_lists(draw: st.DrawFn) -> tuple[list[LayerCache], list[Shape]]:
    """Up to four kinds of layers in any order. Beside states all attention layers have one shape, or vLLM's alignment
    would have to guess."""
    kinds = draw(st.lists(st.sampled_from(["full", "sliding", "chunked", "latent", "state"]), min_size=1, max_size=4))
    hybrid = "state" in kinds
    one = draw(st.sampled_from(LATENTS if "latent" in kinds else SHAPES))
    layers = []
    for kind in kinds:
        if hybrid and kind in ("full", "sliding", "chunked") and not one.kv_heads:
            kind = "latent"
        options = LATENTS if kind == "latent" else SHAPES
        shape = one if hybrid else draw(st.sampled_from(options))
        window = draw(st.sampled_from([128, 129, 1000, 8193])) if kind in ("sliding", "chunked") else 0
        if kind == "state":
            size, checkpoint = draw(st.sampled_from([49152, 1_097_728, 2_000_001])), draw(st.sampled_from(CHECKPOINTS))
            cache = LayerCache("state", state_bytes=size, checkpoint=checkpoint)
        else:
            cache = LayerCache(kind, token_bytes(shape, 1), window)
        layers += [(cache, shape)] * draw(st.integers(1, 12))
    layers = draw(st.permutations(layers))
    return [cache for cache, _ in layers], [shape for _, shape in layers]


@st.composite
def rules_of_vllm(draw: st.DrawFn) -> KvRules:
    return KvRules(
        max_model_len=draw(st.integers(1, 200_000)),
        max_num_batched_tokens=draw(st.sampled_from([256, 2048, 16384])),
        block_size=draw(st.sampled_from([16, 32, 48, 128])),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        kernel_block=draw(st.sampled_from([16, 32, 64])),
        vllm=VLLM,
    )


@pytest.mark.vllm
@settings(max_examples=300, deadline=None)
@given(
    layer_lists(),
    rules_of_vllm(),
    st.one_of(st.integers(-2, 2), st.integers(0, 1_000_000)),
    st.integers(-1, 1),
)
def test_any_list_of_caches_is_planned_as_vllm_does(layers, rules: KvRules, blocks: int, odd_bytes: int) -> None:
    compare(*layers, rules, blocks, odd_bytes)


BF16 = 2
WINDOWED = [LayerCache("sliding", 2 * 8 * 64 * BF16, 128), LayerCache("full", 2 * 8 * 64 * BF16)] * 12  # gpt-oss-20b
NEMOTRON = [LayerCache("state", state_bytes=4_255_744)] * 24 + [LayerCache("full", 2 * 8 * 128 * BF16)] * 4


def test_rules_of_limits() -> None:
    limits = EngineLimits(max_num_batched_tokens=8192, enable_prefix_caching=False, async_scheduling=False)
    assert KvRules.of(limits, 4096) == KvRules(4096, 8192, enable_prefix_caching=False, async_scheduling=False)
    assert KvRules.of(replace(limits, max_model_len=9000, block_size=64), 4096).max_model_len == 9000
    assert KvRules.of(replace(limits, block_size=64), 4096).block_size == 64


def test_windows_cost_nothing_at_long_context() -> None:
    plan_ = plan_kv_cache(WINDOWED, KvRules(131072, 8192)).within(1 << 30)
    assert [len(group.layers) for group in plan_.groups] == [12, 12]
    assert [(group.kind, group.window) for group in plan_.groups] == [("sliding", 128), ("full", 0)]
    in_window = (128 - 1 + 2 * 8192 + 15) // 16 + 1  # two steps are in flight, and a window need not start at a block
    assert plan_.request_blocks == in_window + 131072 // 16
    assert plan_.num_blocks == (1 << 30) // (12 * 16 * 2048)
    one_step = replace(plan_.rules, async_scheduling=False)
    assert plan_kv_cache(WINDOWED, one_step).within(1 << 30).request_blocks == plan_.request_blocks - 8192 // 16


def test_blocks_grow_until_one_holds_a_state() -> None:
    """4,255,744 bytes of state are 1,039 tokens of 4,096 bytes."""
    align = plan_kv_cache(NEMOTRON, KvRules(32768, 8192)).within(10 << 30)
    assert align.block_size == 1040
    assert [len(group.layers) for group in align.groups] == [4] * 7
    assert align.request_blocks == 6 * 2 + 32  # two states of each group, and 32,768 tokens
    nothing_shared = plan_kv_cache(NEMOTRON, KvRules(32768, 8192, enable_prefix_caching=False)).within(10 << 30)
    assert nothing_shared.request_blocks == 6 + 32


def test_a_state_has_a_third_block_for_the_end_of_a_prompt() -> None:
    """Mamba 2 has it from 0.32 on; gated delta nets in 0.33, in blocks of whole 64 tokens."""
    caches = [
        cache._replace(checkpoint="Mamba 2 has a checkpoint block" if cache.state_bytes else "") for cache in NEMOTRON
    ]
    for version, states in (("0.26", 2), ("0.31", 2), ("0.32", 3), ("0.33", 3)):
        rules = KvRules(32768, 8192, vllm=version)
        pool = plan_kv_cache(caches, rules).within(10 << 30)
        assert pool.request_blocks == 6 * states + 32
        assert sum(2 + spec.checkpoints for spec in pool.specs if spec.kind == "state") == 6 * states  # in the schedule
        alone = replace(rules, enable_prefix_caching=False)
        assert plan_kv_cache(caches, alone).within(10 << 30).request_blocks == 6 + 32


@pytest.mark.parametrize(
    ("version", "gpu", "states", "block_size"),
    [("0.32", (9, 0), 2, 544), ("0.33", (9, 0), 3, 576), ("0.33", (8, 0), 2, 544), ("0.33", None, 3, 576)],
)
def test_gated_delta_nets_keep_checkpoints_where_flashinfer_fills_prompts(
    version: str, gpu: tuple[int, int] | None, states: int, block_size: int
) -> None:
    """Not on Ampere, and not on a CPU. gpu: compute capability; None: Hopper's"""
    limits = EngineLimits(max_num_batched_tokens=8192, enable_prefix_caching=True, max_model_len=576 * 544)
    shape = ModelShape.from_hf("Qwen/Qwen3-Next-80B-A3B-Instruct")
    caches, rules = model_caches(shape, find_precision("bf16"), limits, 0, capability=gpu, vllm=version)
    plan_ = plan_kv_cache(caches, rules).within(10 << 30)
    assert (plan_.block_size, plan_.request_blocks) == (block_size, 3 * states + rules.max_model_len // block_size)
    on_cpu, rules = model_caches(shape, find_precision("bf16"), limits, 0, on_cpu=True, vllm=version)
    assert plan_kv_cache(on_cpu, rules).within(10 << 30).request_blocks == 3 * 2 + 576


def test_0_30_takes_the_null_block_off_and_0_26_does_not() -> None:
    caches = [LayerCache("full", 4096)] * 36
    rules = KvRules(16 * 100, 8192, vllm="0.26")
    assert fits(plan_kv_cache(caches, rules, num_blocks=100))
    assert not fits(plan_kv_cache(caches, rules, num_blocks=99))
    assert not fits(plan_kv_cache(caches, replace(rules, vllm="0.30"), num_blocks=100))
    assert fits(plan_kv_cache(caches, replace(rules, vllm="0.30"), num_blocks=101))
    assert plan_kv_cache(caches, rules, num_blocks=100).tokens == 1600


def test_blocks_of_windows_alone_are_the_kernels_by_0_26() -> None:
    caches = [LayerCache("sliding", 4096, 4096)] * 32
    rules = KvRules(32768, 8192, block_size=64, vllm="0.26")
    assert plan_kv_cache(caches, rules).within(1 << 30).groups[0].block_size == 16
    assert plan_kv_cache(caches, replace(rules, vllm="0.30")).within(1 << 30).groups[0].block_size == 64


def test_latents_beside_states_come_in_blocks_of_128_by_0_30() -> None:
    caches = [LayerCache("state", state_bytes=2_170_880)] * 20 + [LayerCache("latent", 1152)] * 7
    rules = KvRules(32768, 8192, vllm="0.26")
    assert plan_kv_cache(caches, rules).within(1 << 30).block_size == 1888
    assert plan_kv_cache(caches, replace(rules, vllm="0.30")).within(1 << 30).block_size == 1920


def test_an_fp8_latent_is_larger_with_an_indexer() -> None:
    assert in_bytes(Cache("latent", 576), 1) == LayerCache("latent", 576)
    assert in_bytes(Cache("latent", 576), 1, sparse=True) == LayerCache("latent", 656)
    assert in_bytes(Cache("latent", 576), 2, sparse=True) == LayerCache("latent", 1152)
    assert in_bytes(Cache("state", state_bytes=7), 1) == LayerCache("state", state_bytes=7)


RULES = KvRules(32768, 8192)
STATE, FULL = LayerCache("state", state_bytes=100_000), LayerCache("full", 4096)


@pytest.mark.parametrize(
    ("caches", "rules", "message"),
    [
        ([], RULES, "caches is empty"),
        ([FULL, STATE, LayerCache("full", 2048)], RULES, r"\[2048, 4096\] bytes per token"),
        (
            [LayerCache("latent", 1152), LayerCache("chunked", 4096, 128)],
            replace(RULES, vllm="0.30"),
            "pages of one size",
        ),
    ],
)
def test_what_vllm_does_not_start_with_is_refused(caches, rules: KvRules, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kv_cache(caches, rules)
