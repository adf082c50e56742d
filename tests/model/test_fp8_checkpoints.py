"""Checkpoints that are quantised already: each is planned as it is stored, or refused by name, and none as BF16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan import EngineLimits, Fixed, Plan, Workload
from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import LatentAttention
from fp8plan.model.configs import QUANT_FILE, bf16_twin, find_config
from fp8plan.model.hardware import gpus
from fp8plan.model.memory.plan import loaded_weight_bytes
from fp8plan.model.plan.planner import plan
from fp8plan.model.precision import BF16, FP8_BLOCK, PRESETS, STORED_PRESETS, find_precision
from fp8plan.model.profile.library import datasheet_profile
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup
from fp8plan.model.shards import why_not_shardable

Fields = dict[str, Any]
GIB = 1 << 30
SMALL = Workload(8, 2, Fixed(128), Fixed(256))
LAYERS = 4  # of the small models that hypothesis looks at
QWEN3_8B, QWEN3_30B = (ModelShape.from_hf(f"Qwen/Qwen3-{size}") for size in ("8B", "30B-A3B"))

# deepseek-ai/DeepSeek-R1, config.json
R1: Fields = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
}  # fmt: skip

BLOCKS: Fields = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]
}  # fmt: skip
NUMBERS: Fields = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKENS: Fields = NUMBERS | {"strategy": "token", "dynamic": True}


def compressed(weights: Fields | None, inputs: Fields | None, **more: Any) -> Fields:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return method | {"config_groups": {"group_0": group}} | more


def modelopt(algorithm: str | None, **more: Any) -> Fields:
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner | more}


BY = {kind: NUMBERS | {"strategy": kind} for kind in ("tensor", "channel", "block")}
IN_BLOCKS = BY["block"] | {"block_structure": [128, 128]}
GROUPS = NUMBERS | {"strategy": "group", "group_size": 128, "dynamic": True}

# What vLLM loads and the cost model knows -> its format.
PLANNED: list[tuple[Fields, str]] = [
    (BLOCKS, "fp8_block"),
    (BLOCKS | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
     "fp8_block"),  # MiniMax-M2
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}, "fp8_tensor"),
    (compressed(IN_BLOCKS, GROUPS), "fp8_block"),
    (compressed(BY["channel"], TOKENS), "fp8_channel"),
    (compressed(BY["tensor"], BY["tensor"]), "fp8_tensor"),
    (compressed(BY["tensor"], TOKENS) | {"quant_method": "compressed_tensors"}, "fp8_tensor"),
    (modelopt("FP8"), "fp8_tensor"),
    (modelopt("fp8_pb_wo"), "fp8_block"),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]}, "fp8_channel"),
]  # fmt: skip

# What is not planned -> a word by which the error names it.
REFUSED: list[tuple[Fields, str]] = [
    *(({"quant_method": method}, f"'{method}'") for method in (
        "awq", "gptq", "bitsandbytes", "mxfp4", "modelopt_fp4", "modelopt_mixed", "fbgemm_fp8", "quark",
        "torchao", "gguf", "auto-round", "mxfp8", "fp_quant", "experts_int8")),
    ({"bits": 4}, "no quant_method"),
    ({"quant_method": "fp8"}, "activation_scheme"),
    (BLOCKS | {"weight_block_size": [1, 128]}, "weight_block_size"),
    (BLOCKS | {"activation_scheme": "static"}, "static activations"),
    (BLOCKS | {"fmt": "e5m2"}, "e5m2"),
    (BLOCKS | {"modules_to_not_convert": "lm_head"}, "list of modules"),
    ({"quant_method": "compressed-tensors"}, "without config_groups"),
    (compressed(BY["channel"] | {"num_bits": 4, "type": "int"}, None), "4-bit int"),
    (compressed(BY["channel"] | {"type": "int"}, TOKENS | {"type": "int"}), "8-bit int"),
    (compressed(BY["channel"], None), "16-bit activations"),
    (compressed(BY["channel"], TOKENS, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (compressed(IN_BLOCKS | {"block_structure": [64, 64]}, GROUPS), "'block'"),
    (compressed(BY["channel"], TOKENS, kv_cache_scheme=NUMBERS | {"num_bits": 4}), "KV cache"),
    (modelopt("NVFP4"), "NVFP4"),
    (modelopt("MXFP8"), "MXFP8"),
    (modelopt("MIXED_PRECISION"), "MIXED_PRECISION"),
    (modelopt(None), "quant_algo None"),
    (modelopt("FP8", kv_cache_quant_algo="NVFP4"), "NVFP4"),
    (modelopt("FP8", exclude_modules=[]), "lm_head"),
]  # fmt: skip


def in_config(name: str) -> Callable[[Fields, Fields, Path], None]:
    def write(model: Fields, quantised: Fields, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(model | {name: quantised}))

    return write


def beside(model: Fields, quantised: Fields, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(model | {"quantization_config": None}))
    (folder / QUANT_FILE).write_text(json.dumps(quantised))


def nested(name: str) -> Callable[[Fields, Fields, Path], None]:
    """Return a writer of a multimodal model's config, whose `text_config` is quantised by the field `name`."""

    def write(model: Fields, quantised: Fields, folder: Path) -> None:
        text = model | {"model_type": "qwen3_vl_text", name: quantised}
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))

    return write


SPELLINGS = {
    "quantization_config": in_config("quantization_config"),
    "compression_config": in_config("compression_config"),
    QUANT_FILE: beside,
    "text_config.quantization_config": nested("quantization_config"),
    "text_config.compression_config": nested("compression_config"),
}


def config_of(model: str) -> Fields:
    return {name: value for name, value in find_config(model)[0].items() if not name.startswith("_")}


def stored(quantised: Fields, model: str = "Qwen/Qwen3-8B", **more: Any) -> ModelShape:
    config = config_of(model) | {"quantization_config": quantised} | more
    return ModelShape.from_config(config, "Qwen3-8B-FP8", "there/config.json")


def r1() -> ModelShape:
    return ModelShape.from_config(R1 | {"quantization_config": BLOCKS}, "deepseek-ai/DeepSeek-R1", "a test")


def read(tmp: pytest.TempPathFactory, spelling: str, quantised: Any) -> ModelShape:
    folder = tmp.mktemp("model")
    SPELLINGS[spelling](config_of("Qwen/Qwen3-8B") | {"num_hidden_layers": LAYERS}, quantised, folder)
    return ModelShape.from_hf(folder)


@given(st.sampled_from(sorted(SPELLINGS)), st.sampled_from(PLANNED))
def test_each_spelling_of_fp8_has_the_bytes_of_fp8(
    tmp_path_factory: pytest.TempPathFactory, spelling: str, case: tuple[Fields, str]
) -> None:
    quantised, weights = case
    found = read(tmp_path_factory, spelling, quantised)
    assert found.stored is not None
    assert [x.weights for x in found.stored.precisions] == [weights] * 2
    elements = sum(x.elements * x.layers for x in found.linears() if x.name != "lm_head")
    twin = ModelShape.from_config(config_of("Qwen/Qwen3-8B") | {"num_hidden_layers": LAYERS}, "BF16", "a test")
    saved = twin.weight_bytes(BF16) - found.weight_bytes(find_precision(weights))
    assert 0.998 * elements < saved < elements  # a byte each, less the scales


@given(st.sampled_from(sorted(SPELLINGS)), st.sampled_from(REFUSED))
def test_each_spelling_of_another_format_is_refused_by_its_name(
    tmp_path_factory: pytest.TempPathFactory, spelling: str, case: tuple[Fields, str]
) -> None:
    quantised, name = case
    with pytest.raises(ConfigError) as error:
        read(tmp_path_factory, spelling, quantised)
    assert all(word in str(error.value) for word in (spelling, name, "name the BF16 model instead"))
    assert "\n" not in str(error.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    "quant_method activation_scheme weight_block_size fmt config_groups ignore modules_to_not_convert quantization "
    "quant_algo exclude_modules kv_cache_scheme scale_fmt store_dtype".split()
)


@given(st.sampled_from([case for case, _ in PLANNED]), st.dictionaries(KEYS, ANYTHING, max_size=4))
def test_nothing_that_is_quantised_is_planned_as_bf16(quantised: Fields, changes: Fields) -> None:
    """Whatever its fields hold: an error, or the format of its weights."""
    try:
        found = stored(quantised | changes, num_hidden_layers=LAYERS)
    except ConfigError:
        return
    assert found.stored is not None
    assert found.why_not(BF16) is not None


@pytest.mark.parametrize("value", [[], "fp8", False])
def test_what_is_no_field_of_fields_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config: not fields but"):
        stored(value)


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
@pytest.mark.parametrize("nothing", [None, {}])
def test_an_empty_one_is_none(tmp_path_factory: pytest.TempPathFactory, spelling: str, nothing: Any) -> None:
    if nothing is None and spelling == QUANT_FILE:
        return  # a file that holds null is no file of fields
    assert read(tmp_path_factory, spelling, nothing).stored is None


# The linears that a list leaves in BF16


@given(
    st.dictionaries(
        st.sampled_from(["self_attn.o_proj", "mlp.down_proj"]), st.sets(st.integers(0, LAYERS - 1), min_size=1)
    ),
    st.sampled_from(["model", "language_model.model", "model.language_model"]),
    st.booleans(),
)
def test_listed_linears_are_in_bf16_in_just_these_layers(
    listed: dict[str, set[int]], root: str, by_pattern: bool
) -> None:
    names = [f"{root}.layers.{i}.{name}" for name, numbers in listed.items() for i in numbers]
    names = [f"re:{name.replace('.', '[.]')}$" for name in names] if by_pattern else names
    rows, few = compressed(BY["channel"], TOKENS), {"num_hidden_layers": LAYERS}
    found = stored(rows | {"ignore": ["lm_head", *names]}, **few)
    kept = {x.name: x.layers for x in found.left_in_bf16()}
    assert kept == {name.rpartition(".")[2]: len(numbers) for name, numbers in listed.items()}
    fp8 = find_precision("fp8_channel")
    bigger = found.weight_bytes(fp8) - stored(rows, **few).weight_bytes(fp8)
    linears = {x.name: x for x in QWEN3_8B.linears()}
    assert bigger == sum(n * (linears[name].elements - 4 * linears[name].n) for name, n in kept.items())


def test_a_name_stands_for_what_is_below_it_and_other_towers_are_not_the_text_model() -> None:
    others = ["model.visual.layers.3.mlp.down_proj", "vision_tower.encoder.layers.3.self_attn", "mtp.layers.3.mlp"]
    quiet = ["lm_head", "model.layers.3.input_layernorm", "model.layers.99.mlp.down_proj", *others]
    assert not stored(BLOCKS | {"modules_to_not_convert": quiet}).left_in_bf16()
    found = stored(BLOCKS | {"modules_to_not_convert": [*quiet, "model.layers.3.self_attn"]})
    assert {(x.name, x.layers) for x in found.left_in_bf16()} == {("qkv_proj", 1), ("o_proj", 1)}
    wild = stored(modelopt("FP8", exclude_modules=["lm_head", "model.layers.3*"]))
    assert {x.layers for x in wild.left_in_bf16()} == {7}  # and layers 30 to 35: vLLM takes the pattern as it is
    assert len(wild.left_in_bf16()) == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.3.mlp.experts.7.up_proj", "routed experts of layer 3"),
        ("re:.*mlp[.]experts.*", "routed experts of layer 0"),
        ("model.layers.3.mlp.whatever_proj", "layers.3.mlp.whatever_proj, a module that is not known"),
        ("re:(", "no regular expression"),
    ],
)
def test_a_list_that_cannot_be_followed_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"name the BF16 model instead") as error:
        stored(BLOCKS | {"modules_to_not_convert": ["lm_head", name]}, "Qwen/Qwen3-30B-A3B")
    assert text in str(error.value)


def test_the_list_of_qwen3_30b_a3b_fp8_changes_nothing() -> None:
    """Published (xorbitsai/inference issue 4032 shows it): norms and routers of all layers."""
    parts = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    names = ["lm_head", *(f"model.layers.{i}.{part}" for i in range(48) for part in parts)]
    found = stored(BLOCKS | {"modules_to_not_convert": names}, "Qwen/Qwen3-30B-A3B")
    assert not found.left_in_bf16()
    assert found.weight_bytes(FP8_BLOCK) == QWEN3_30B.weight_bytes(FP8_BLOCK)


# Bytes and layouts against public figures


def test_a_rank_of_deepseek_r1_takes_what_was_logged() -> None:
    """79.41 GiB on each of eight ranks: HabanaAI/vllm-fork issue 809, a log of this checkpoint. That backend keeps no
    matrices of MLA in BF16 beside those in FP8, which are 0.24 GiB a rank of ours."""
    shape = r1()
    (latent,) = [part for part, _ in shape.parts_of(LatentAttention)]
    beside_fp8 = 61 * latent.dequantised_elements(8) * 2
    assert (shape.weight_bytes(FP8_BLOCK, 8) - beside_fp8) / GIB == pytest.approx(79.41, rel=3e-3)
    assert shape.num_parameters == 671_026_419_200  # 671B, as its authors say


def test_deepseek_r1_is_refused_on_32_ranks_as_vllm_does() -> None:
    """vllm-project/vllm issue 12256 and sgl-project/sglang issue 3345: 18,432 / 32 = 576 inputs."""
    limits = EngineLimits(tensor_parallel_size=32)
    with pytest.raises(
        ConfigError, match=r"down_proj has 18,432 / 32 = 576 inputs .*multiples of 128; allowed: 1, 2, 4,"
    ):
        plan(r1(), "h100", SMALL, limits=limits)
    assert why_not_shardable(r1(), FP8_BLOCK, 16) is None


def test_experts_cut_inside_of_a_block_are_refused_and_whole_ones_are_not() -> None:
    found = stored(BLOCKS, "Qwen/Qwen3-30B-A3B")
    reason = why_not_shardable(found, FP8_BLOCK, 4)
    assert reason is not None
    assert "768 / 4 = 192 inputs" in reason
    assert "or expert parallelism" in reason
    assert why_not_shardable(found, FP8_BLOCK, 4, expert_parallel=True) is None
    assert why_not_shardable(QWEN3_30B, FP8_BLOCK, 4) is None  # vLLM pads what it quantises itself


def test_narrow_linears_that_the_checkpoint_keeps_in_bf16_are_in_no_ones_way() -> None:
    """Qwen3-Next's in_proj_ba has 32 outputs on a rank of two."""
    names = [f"model.layers.{i}.linear_attn.in_proj_ba" for i in range(48)]
    model = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert why_not_shardable(stored(BLOCKS | {"modules_to_not_convert": names}, model), FP8_BLOCK, 2) is None
    assert "in_proj_ba has 32 outputs" in (why_not_shardable(stored(BLOCKS, model), FP8_BLOCK, 2) or "")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "moonshotai/Moonlight-16B-A3B-Instruct"])
def test_blocks_take_what_vllm_makes_of_the_bf16_twin(model: str) -> None:
    """Its bytes were compared with vLLM's logs, and its kernels were timed."""
    found, twin = stored(BLOCKS, model), ModelShape.from_hf(model)
    assert loaded_weight_bytes(found, FP8_BLOCK) == loaded_weight_bytes(twin, FP8_BLOCK)
    theirs = plan(twin, "h200", SMALL, precisions=["fp8_block"]).choices[0]
    ours = plan(found, "h200", SMALL, precisions=["fp8_block"]).choices[0]
    assert ours.makespan_s == theirs.makespan_s
    assert ours.kl_k3 == theirs.kl_k3


# Plans


def planned(quantised: Fields, **more: Any) -> Plan:
    return plan(stored(quantised), "h200", SMALL, **more)


def test_a_plan_has_the_stored_format_with_both_caches_and_names_the_twin() -> None:
    found = planned(BLOCKS)
    assert [(c.precision, c.available) for c in found.choices] == [
        ("bf16", False), ("fp8_block", True), ("fp8_kv", False), ("fp8_block+fp8_kv", True)
    ]  # fmt: skip
    assert "to compare, plan Qwen/Qwen3-8B too" in str(found.choices[0].reason)
    assert all(c.speedup is None for c in found.choices)
    text = " ".join(found.reasons)
    assert "There is no speed-up to name, as the checkpoint holds its weights in FP8 (fp8, blocks of 128 x 128)" in text
    assert "same weights, so that only activations and KV differ" in text
    assert "bf16 does not fit" not in text
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", ["bf16", "fp8_kv", "fp8_channel"])
def test_a_precision_that_the_checkpoint_does_not_have_is_one_error(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name} was asked for: .* allowed: fp8_block, fp8_block\+fp8_kv; to compare"
    ):
        planned(BLOCKS, precisions=[name])


@pytest.mark.parametrize("name", sorted(STORED_PRESETS))
def test_a_bf16_checkpoint_has_no_formats_of_others(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is a BF16 checkpoint"):
        plan(QWEN3_8B, "h200", SMALL, precisions=[name])
    assert {c.precision for c in plan(QWEN3_8B, "h200", SMALL).choices} == set(PRESETS)


def test_no_engine_of_another_precision_is_simulated() -> None:
    """Such as that of a record which says bf16."""
    with pytest.raises(ConfigError, match=r"bf16: the checkpoint holds its weights in FP8"):
        EngineSetup(stored(BLOCKS), "h200", "bf16").memory(512)


@pytest.mark.parametrize("gpu", ["a100", "cpu"])
def test_a_device_without_fp8_gemms_points_to_the_twin(gpu: str) -> None:
    with pytest.raises(ConfigError, match=r"; plan Qwen/Qwen3-8B, or another GPU"):
        plan(stored(BLOCKS), gpu, SMALL)


@pytest.mark.parametrize("case", [PLANNED[2][0], PLANNED[5][0]], ids=["tensor", "channel"])
def test_gemms_that_were_not_measured_are_said_to_be_so(case: Fields) -> None:
    found = planned(case)
    assert "no GEMM of FP8" in " ".join(found.warnings)
    assert "gemm.fp8: not measured on h200_sxm" in " ".join(found.reasons)
    assert all(c.extrapolated for c in found.choices if c.available)
    with pytest.raises(ProfileError, match=r"--strict allows nothing else"):
        planned(case, strict=True)
    planned(BLOCKS, strict=True)


def test_gemms_without_blocks_have_coefficients_on_every_gpu_and_take_about_as_long() -> None:
    """AIConfigurator's timings of both on an H200 differ by less than a third."""
    for card in (card for card in gpus() if card.has_fp8):
        profile = datasheet_profile(card)
        assert profile.kernel_backends["gemm.fp8"] == "cutlass"
        assert profile.coefficients.keys() > {f"gemm.fp8.{x}" for x in ("launch_seconds", "compute_efficiency")}
    times = [planned(case).choices[1].makespan_s or 0 for case in (BLOCKS, compressed(BY["channel"], TOKENS))]
    assert 0.75 < times[1] / times[0] < 1.33


def test_experts_without_blocks_are_refused_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"experts in FP8 .* are not planned: .*name a checkpoint in blocks of 128 x 128"
    ):
        stored(compressed(BY["channel"], TOKENS), "Qwen/Qwen3-30B-A3B")


# Settings


@pytest.mark.parametrize("case", [PLANNED[i][0] for i in (0, 2, 5, 8)], ids=["blocks", "tensor", "rows", "modelopt"])
def test_vllm_is_not_told_to_quantise_what_is_quantised(tmp_path: Path, case: Fields) -> None:
    in_config("quantization_config")(config_of("Qwen/Qwen3-8B"), case, tmp_path)
    found = plan(str(tmp_path), "h200", SMALL)
    settings = json.loads(found.emit("vllm", choice=1))
    assert not {"quantization", "quantization_config"} & settings["engine_args"].keys()
    assert settings["engine_args"]["kv_cache_dtype"] == "auto"
    e8m0 = settings["env"].get("VLLM_USE_DEEP_GEMM_E8M0")
    assert e8m0 == ("0" if found.choices[1].precision == "fp8_block" else None)
    for trainer in ("verl", "trl"):
        with pytest.raises(ConfigError, match=r"fp8plan syncs BF16 weights, which vLLM quantises; name the BF16 model"):
            found.emit(trainer, choice=1)


def test_risk_and_settings_have_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    """Those of DeepSeek-V3.1 are powers of two, and on Hopper vLLM multiplies with such then."""
    in_config("quantization_config")(config_of("Qwen/Qwen3-8B"), BLOCKS | {"scale_fmt": "ue8m0"}, tmp_path)
    for trainer, alike in (("fp8_block_pow2", True), ("fp8_block", False)):
        remedies = Remedies(trainer_precision=trainer)
        made = plan(str(tmp_path), "h200", SMALL, remedies=remedies, precisions=["fp8_block"])
        assert made.env() == {"VLLM_USE_DEEP_GEMM_E8M0": "1"}
        risk, notes = " ".join(made.reasons), " ".join(json.loads(made.emit("vllm"))["notes"])
        assert ("both roundings add up" not in risk) is alike
        assert ("--trainer-precision fp8_block_pow2 has the rollout's grid" in risk) is not alike
        assert ("plan again with --trainer-precision fp8_block_pow2" in notes) is not alike


@pytest.mark.parametrize(
    "case",
    [compressed(BY["tensor"], BY["tensor"], kv_cache_scheme=NUMBERS), modelopt("FP8", kv_cache_quant_algo="FP8")],
    ids=["compressed-tensors", "modelopt"],
)
def test_a_cache_that_the_checkpoint_asks_for_is_named_and_can_be_declined(tmp_path: Path, case: Fields) -> None:
    """vLLM takes it where kv_cache_dtype is auto (attention.py; resolve_kv_cache_dtype_string)."""
    in_config("quantization_config")(config_of("Qwen/Qwen3-8B"), case, tmp_path)
    found = plan(str(tmp_path), "h200", SMALL, kv_scales_calibrated=False)
    assert "The checkpoint asks for an FP8 KV cache" in " ".join(found.reasons)
    arguments = [json.loads(found.emit("vllm", choice=i))["engine_args"]["kv_cache_dtype"] for i in (1, 3)]
    assert arguments == ["bfloat16", "fp8"]
    assert "K and V scales are those of the checkpoint" in json.loads(found.emit("vllm", choice=3))["notes"]
    assert found.choices[3].unit_kv_scales is None


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("qwen3-8b-awq", "Qwen/Qwen3-8B"),
        ("Qwen3-30B-A3B-FP8-dynamic", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3-8B-quantized.w8a8", "Qwen/Qwen3-8B"),
        ("Qwen3-8B-GPTQ-Int4", "Qwen/Qwen3-8B"),
        ("Qwen3-8B", ""),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("deepseek-ai/DeepSeek-R1", "fp8plan/DeepSeek-R1-bf16"),
        ("somebody/gpt-oss-20b", "fp8plan/gpt-oss-20b-bf16"),
        ("Qwen3-9B-FP8", ""),
    ],
)
def test_the_twin_is_the_bundled_model_of_the_same_name(name: str, twin: str) -> None:
    assert bf16_twin(name) == twin
