"""Tensor-parallel sizes that leave whole FP8 blocks: the four layouts that were emitted and could not start, and every
bundled model against vLLM's own layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Linear, ModelShape, bundled_models
from fp8plan.model.architecture.parts import Attention, DeltaNet, Experts, LatentAttention, Mamba2, Mlp, Part, ShortConv
from fp8plan.model.precision import PRESETS
from fp8plan.model.shards import left_in_bf16, outputs_followed, why_not_shardable

FP8 = PRESETS["fp8_block"]
BLOCK = 128
IN_BF16 = [shape for shape in map(ModelShape.from_hf, bundled_models()) if shape.stored is None]
SHAPES = {shape.linears() + shape.expert_linears(): shape for shape in IN_BF16}
ODD = {2: 14784, 4: 7392, 8: 3696, 16: 1848}
LAYOUTS = [(shape, tp) for shape in SHAPES.values() for tp in shape.allowed_tensor_parallel(16)]


GPT_OSS = ModelShape.from_hf("fp8plan/gpt-oss-20b-bf16")


def refused(model: str, target: str) -> dict[int, str]:
    shape = ModelShape.from_hf(model)
    found = {tp: why_not_shardable(shape, FP8, tp, target) for tp in shape.allowed_tensor_parallel(16)}
    return {tp: reason for tp, reason in found.items() if reason is not None}


@pytest.mark.parametrize(
    ("model", "left", "checkpoint"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", ODD, ODD),  # 29568 is 231 blocks
        ("Qwen/Qwen3-4B", {8: 1216, 16: 608}, {8: 1216, 16: 608}),
        ("Qwen/Qwen3-30B-A3B", {}, {4: 192, 8: 96, 16: 48}),
        ("Qwen/Qwen3-235B-A22B", {}, {8: 192, 16: 96}),
        ("Qwen/Qwen3-8B", {}, {}),
    ],
)
def test_a_part_of_a_block_is_left_in_bf16_by_vllm_and_refused_by_verl(
    model: str, left: dict[int, int], checkpoint: dict[int, int]
) -> None:
    assert refused(model, "vllm") == {}
    shape = ModelShape.from_hf(model)
    found = {tp: [x.k for x in shape.left_in_bf16(tp)] for tp in shape.allowed_tensor_parallel(16)}
    assert {tp: sizes for tp, sizes in found.items() if sizes} == {tp: [size] for tp, size in left.items()}
    reasons = refused(model, "verl")
    assert list(reasons) == list(checkpoint)
    for tp, size in checkpoint.items():
        assert f"has {size} inputs on each GPU at tensor_parallel_size {tp}" in reasons[tp]
        assert "with FP8 weights verl takes multiples of 128; allowed: 1" in reasons[tp]


def test_what_stays_in_bf16_is_told_with_its_reason() -> None:
    shape = ModelShape.from_hf("zai-org/GLM-4.5-Air")
    why = ", as vLLM quantises only multiples of 128 inputs"
    assert left_in_bf16(shape, FP8, 1) == f"down_proj of 1 layer (10,944 inputs on each GPU) stays in BF16{why}"
    assert left_in_bf16(shape, FP8, 2) == (
        "down_proj of 1 layer (5,472 inputs on each GPU) and shared_down_proj of 45 layers (704 inputs on each GPU) "
        f"stay in BF16{why}"
    )
    assert left_in_bf16(shape, PRESETS["fp8_kv"], 1) == ""
    assert left_in_bf16(ModelShape.from_hf("Qwen/Qwen3-8B"), FP8, 1) == ""


def test_a_model_with_nothing_left_to_quantise_is_refused_by_name() -> None:
    base = ModelShape.from_hf("Qwen/Qwen3-8B")
    odd = replace(
        base, name="odd", hidden_size=960, layers=(replace(base.layers[0], mixer=Attention(24, 8, 40), mlp=Mlp(2880)),)
    )
    assert why_not_shardable(odd, FP8, 1) == (
        "fp8_block leaves nothing of odd to quantise at tensor_parallel_size 1: vLLM takes inputs in multiples of 128, "
        "and on each GPU there are qkv_proj 960, o_proj 960, gate_up_proj 960, down_proj 2880; allowed: none, use bf16 "
        "weights"
    )
    whole = replace(odd, layers=(replace(odd.layers[0], mlp=Mlp(1024)),))  # down_proj has 8 blocks
    assert [why_not_shardable(whole, FP8, tp) is None for tp in (1, 2, 4, 8)] == [True] * 4
    ended = replace(odd, layers=(replace(odd.layers[0], mlp=Mlp(256)),))
    assert str(why_not_shardable(ended, FP8, 4)).endswith("down_proj 64; allowed: 1, 2")


def test_the_layer_is_named() -> None:
    assert "down_proj has 3696 inputs" in refused("Qwen/Qwen2.5-72B", "verl")[8]
    assert "experts_w2 has 192 inputs" in refused("Qwen/Qwen3-30B-A3B", "verl")[4]
    assert "qkv_proj has 64 outputs of one part" in refused("meta-llama/Llama-3.2-1B", "verl")[8]


def test_bf16_weights_are_cut_anywhere_and_an_unknown_target_is_refused() -> None:
    shape = ModelShape.from_hf("Qwen/Qwen2.5-72B")
    assert why_not_shardable(shape, PRESETS["bf16"], 8, "verl") is None
    assert why_not_shardable(shape, PRESETS["fp8_kv"], 8, "verl") is None
    assert why_not_shardable(shape, PRESETS["fp8_block+fp8_kv"], 8, "verl") is not None
    with pytest.raises(ConfigError, match="target is 'sglang'; allowed: vllm, verl, trl"):
        why_not_shardable(shape, FP8, 1, "sglang")


def test_experts_of_a_padded_width_are_refused() -> None:
    """Engines that fail so: test_vllm_cannot_pad_the_width_of_a_model_with_experts in tests/runtime."""
    for whole in (False, True):
        for tp in GPT_OSS.allowed_tensor_parallel(8, expert_parallel=whole):
            assert why_not_shardable(GPT_OSS, FP8, tp, expert_parallel=whole) == (
                "experts_w13 has 2880 inputs: with FP8 weights vLLM pads them to a multiple of 128, which its routers, "
                "or its loader of gpt-oss, do not take; allowed: none, use bf16 weights"
            )
    assert why_not_shardable(replace(GPT_OSS, hidden_size=2816), FP8, 1) is None  # an expert's own width may be padded


# ------------------------------------------------------------------------------------------------ measured on an H200

ROWS = Path(__file__).parents[2] / "profiles" / "h200_sxm" / "vllm-0.26.0" / "shapes" / "block_shapes.jsonl"
MEASURED = [json.loads(line) for line in ROWS.read_text().splitlines()]


# With random weights a checkpoint's scales are not loaded. verl's rule refuses what they find no place for, too, so
# that of checkpoints only what failed is foreseen.
FORESEEN = [row for row in MEASURED if row["way"] == "online" or not row["started"]]


def config(sizes: dict[str, Any]) -> dict[str, Any]:
    """A config.json of Qwen3's or Qwen3-MoE's architecture with a row's sizes."""
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_hidden_layers": 2,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if sizes["experts"] == 0:
        return fields
    return fields | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": sizes["experts"],
        "num_experts_per_tok": 4,
        "moe_intermediate_size": sizes["intermediate"],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


@pytest.mark.parametrize("row", FORESEEN, ids=lambda row: f"{row['case']}, {row['way']}")
def test_what_a_real_engine_did_with_these_sizes_is_foreseen(row: dict[str, Any]) -> None:
    """vLLM 0.26 on one H200, so each layer's size is a shard's."""
    shape = ModelShape.from_config(config(row), row["case"], "a test")
    if row["way"] == "online":  # with every linear in FP8
        assert row["started"] is (not shape.left_in_bf16())
        assert (why_not_shardable(shape, FP8, 1) is None) is (row["case"] != "moe, hidden 576")
    else:
        assert why_not_shardable(shape, FP8, 1, "verl") is not None


# ------------------------------------------------------------------------------------------------ vLLM's own layers


class NoKernel:
    """Stands in for a Triton kernel, which a CPU does not have; what comes before it is what is tested."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with a number of ranks: vLLM's layers are then cut for the last of them."""
    import torch
    import vllm.model_executor.layers.quantization.fp8 as fp8
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    settings = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(fp8, "get_current_vllm_config", lambda: settings)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)
    monkeypatch.setattr(fp8_utils, "triton", SimpleNamespace(next_power_of_2=lambda size: size))
    monkeypatch.setattr(fp8_utils, "_per_token_group_quant_fp8", NoKernel())

    def of(ranks: int) -> None:
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=ranks, rank_in_group=ranks - 1))

    return of


def inputs_fit(size: int) -> bool:
    """Return whether vLLM quantises activations of this width."""
    import torch
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    try:
        per_token_group_quant_fp8(torch.zeros(1, size, dtype=torch.bfloat16), BLOCK, use_ue8m0=False)
    except AssertionError as error:
        return refusal(error, "must be divisible by `group_size` 128")
    return True


def loads(build: Any, parts: dict[Any, int], width: int) -> bool:
    """Return whether vLLM creates a layer of an FP8 checkpoint and loads its parts.

    parts: name -> rows; each part is quantised whole
    """
    import torch
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[BLOCK, BLOCK])
    try:
        layer = build(bias=False, quant_config=config, params_dtype=torch.bfloat16)
        for part, rows in parts.items():
            weight = torch.zeros(rows, width, dtype=torch.float8_e4m3fn)
            scale = torch.zeros(-(-rows // BLOCK), -(-width // BLOCK))
            for parameter, values in ((layer.weight, weight), (layer.weight_scale_inv, scale)):
                parameter.weight_loader(parameter, values, *(() if part is None else (part,)))
    except (ValueError, RuntimeError, IndexError) as error:
        # vLLM lets a fused layer be created, and its scales then have no place there.
        return refusal(error, "not divisible by weight quantization", "exceeds dimension size", "start out of range")
    return True


def refusal(error: Exception, *expected: str) -> bool:
    """Return False for an error that is expected, and raise any other."""
    if not any(words in str(error) for words in expected):
        raise error
    return False


class NoExpertParallel:
    """FusedMoEParallelConfig with every feature off."""

    def __getattr__(self, name: str) -> bool:
        return False


def checkpoint_faults(shape: ModelShape, tp: int) -> set[str]:
    """Layers of a checkpoint in FP8 blocks that vLLM cannot cut over `tp` ranks."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape_moe

    found, hidden = online_faults(shape, tp), shape.hidden_size
    for part, _ in shape.counted:
        for cut, whole in zip(part.linears(hidden, tp), part.linears(hidden), strict=True):
            if whole.quantisable and not loads_part(part, cut, whole):
                found.add(whole.name)
        if isinstance(part, Experts):
            try:
                validate_fp8_block_shape_moe(part.intermediate_size // tp, [BLOCK, BLOCK])
            except ValueError:
                found.add("experts_w2")
    return found


def loads_part(part: Any, cut: Linear, whole: Linear) -> bool:
    """Return whether vLLM loads one linear of a part, cut for a rank. Widths that do not matter are one block."""
    from functools import partial

    from vllm.model_executor.layers import linear as vllm

    if cut.k < whole.k or whole.all_reduce:
        return loads(partial(vllm.RowParallelLinear, whole.k, BLOCK), {None: BLOCK}, whole.k)
    if isinstance(part, Attention) and whole.parts:
        heads = whole.parts[0] // part.head_dim
        build = partial(vllm.QKVParallelLinear, BLOCK, part.head_dim, heads, part.kv_heads, v_head_size=part.value_dim)
        return loads(build, dict(zip("qkv", whole.parts, strict=True)), BLOCK)
    if whole.parts:
        outputs, shared = list(whole.parts), cut.n < whole.n
        build = partial(vllm.MergedColumnParallelLinear, BLOCK, outputs, disable_tp=not shared)
        return loads(build, dict(enumerate(outputs)), BLOCK)
    build = vllm.ColumnParallelLinear if cut.n < whole.n else vllm.ReplicatedLinear
    return loads(partial(build, BLOCK, whole.n), {None: whole.n}, BLOCK)


def online_faults(shape: ModelShape, tp: int) -> set[str]:
    """Layers whose inputs vLLM cannot quantise. Experts are never among them, because vLLM pads them."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    found = {x.name for x in shape.linears(tp) if x.quantisable and not inputs_fit(x.k)}
    for experts, _ in shape.parts_of(Experts):
        method = Fp8PerBlockOnlineMoEMethod.__new__(Fp8PerBlockOnlineMoEMethod)
        method.weight_block_size = [BLOCK, BLOCK]
        inner = experts.intermediate_size // tp
        padded = method.maybe_roundup_sizes(shape.hidden_size, inner, None, NoExpertParallel())
        assert padded == tuple(-(-size // BLOCK) * BLOCK for size in (shape.hidden_size, inner))
        assert all(inputs_fit(size) for size in padded)
    return found


@pytest.mark.vllm
def test_vllm_itself_has_no_fp8_for_the_same_sizes(rank: Any) -> None:
    for shape, tp in LAYOUTS:
        rank(tp)
        where = f"{shape.name} at TP {tp}"
        assert {x.name for x in shape.left_in_bf16(tp)} == online_faults(shape, tp), where
        assert (why_not_shardable(shape, FP8, tp) is None) == (shape.model_type != GPT_OSS.model_type), where
        faults, reason = checkpoint_faults(shape, tp), why_not_shardable(shape, FP8, tp, "verl")
        assert (reason is None) == (not faults), (where, reason, faults)
        assert reason is None or reason.split()[0] in faults, where


# Fused linears of other mixers -> (the linear's name, its matrices' outputs over all ranks, whether ranks share them).
DELTA = (16, 32, 128, 128, 4)
NARROW = (4, 8, 96, 96, 4)  # heads that are no whole block
MIXERS: list[tuple[Part, str, list[int], bool]] = [
    (LatentAttention(128, 1536, 512, 128, 64, 128), "fused_qkv_a_proj", [1536, 576], False),
    (LatentAttention(128, 1424, 512, 128, 64, 128), "fused_qkv_a_proj", [1424, 576], False),
    (LatentAttention(16, 0, 512, 128, 64, 128), "q_proj", [16 * 192], True),
    (LatentAttention(16, 0, 512, 128, 64, 128), "kv_b_proj", [16 * 256], True),
    (DeltaNet(*DELTA), "in_proj_qkvz", [2048, 2048, 4096, 4096], True),
    (DeltaNet(*DELTA), "in_proj_ba", [32, 32], True),
    (DeltaNet(*DELTA, interleaved=True), "in_proj_qkvz", [12288], True),
    (DeltaNet(*DELTA, interleaved=True), "in_proj_ba", [64], True),
    (DeltaNet(*NARROW), "in_proj_qkvz", [384, 384, 768, 768], True),
    (ShortConv(2048, 3), "in_proj", [2048] * 3, True),
    (Mamba2(128, 64, 8, 128, 4), "in_proj", [8192, 8192, 1024, 1024, 128], True),
    (Mamba2(24, 128, 8, 16, 4), "in_proj", [3072, 3072, 128, 128, 24], True),
    (Mlp(11008, gated=False), "up_proj", [11008], True),
]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("mixer", "name", "outputs", "shared"), MIXERS, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_vllm_itself_refuses_the_same_parts(
    mixer: Any, name: str, outputs: list[int], shared: bool, rank: Callable[[int], None]
) -> None:
    fits = []
    for tp in (1, 2, 4, 8):
        rank(tp)
        linear, whole = (next(x for x in mixer.linears(BLOCK, ranks) if x.name == name) for ranks in (tp, 1))
        assert whole.n == sum(outputs)
        assert (linear.n < whole.n) is (shared and tp > 1)
        fits.append(loads_part(mixer, linear, whole))
        found = [size for size in outputs_followed(linear, cut=linear.n < whole.n) if size.size % BLOCK]
        assert (not found) == fits[-1], (tp, found)


def test_a_recurrent_layer_is_refused_by_the_name_of_its_linear() -> None:
    base = ModelShape.from_hf("Qwen/Qwen3-8B")
    shape = replace(base, layers=(replace(base.layers[0], mixer=DeltaNet(*DELTA)),))
    for tp in (1, 2):
        reason = why_not_shardable(shape, FP8, tp, "verl")
        assert reason is not None
        assert f"in_proj_ba has {32 // tp} outputs of one part on each GPU at tensor_parallel_size {tp}" in reason
        assert why_not_shardable(shape, FP8, tp) is None
