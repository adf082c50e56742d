from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape, bundled_models
from fp8plan.model.architecture.parts import Attention, Experts, Mlp
from fp8plan.model.configs.fields import Fields
from fp8plan.model.precision import BF16, FP8_BLOCK, FP8_KV, PRESETS

# Parameter counts as published: the hub's safetensors totals (total_size / 2 of the BF16 index). Where embeddings are
# tied and the checkpoint stores lm_head as well (Qwen3-0.6B, 1.7B), the count of the loaded model (transformers).
PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
}

DENSE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}

bundled = st.sampled_from(bundled_models()).map(ModelShape.from_hf)
one_attention = st.sampled_from(
    [
        name
        for name in bundled_models()
        for shape in [ModelShape.from_hf(name)]
        if {type(x) for x, _ in shape.counted} <= {Attention, Mlp, Experts} and len(shape.parts_of(Attention)) == 1
    ]
).map(ModelShape.from_hf)


def shape(**changes: object) -> ModelShape:
    base = MOE if changes.get("model_type") == "qwen3_moe" else DENSE
    return ModelShape.from_config(base | changes, "test", "test/config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_count(name: str) -> None:
    assert ModelShape.from_hf(name).num_parameters == PUBLISHED[name]


def test_aliases_have_the_parameters_of_their_model() -> None:
    """Counts of other families are held to transformers' own models in test_families."""
    counts = set(PUBLISHED.values())
    assert set(PUBLISHED) <= set(bundled_models())
    published = [ModelShape.from_hf(name) for name in bundled_models() if not name.startswith("fp8plan/")]
    types = {ModelShape.from_hf(name).model_type for name in PUBLISHED}
    assert all(shape.num_parameters in counts for shape in published if shape.model_type in types)
    assert all("config.json" in shape.source for shape in published)


@pytest.mark.parametrize("spelling", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "Qwen3-8B"])
def test_a_bundled_model_is_found_however_it_is_spelt(spelling: str) -> None:
    assert ModelShape.from_hf(spelling).name == "Qwen/Qwen3-8B"


def test_alias_keeps_its_own_context() -> None:
    assert ModelShape.from_hf("Qwen3-8B").max_position_embeddings == 40960
    assert ModelShape.from_hf("Qwen3-8B-Base").max_position_embeddings == 32768


def test_a_folder_and_a_file_give_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    from_folder, from_file = ModelShape.from_hf(tmp_path), ModelShape.from_hf(str(tmp_path / "config.json"))
    assert from_folder == from_file
    assert from_folder.source == str(tmp_path / "config.json")


def fake_hub(download: Callable[[str, str], str], endpoint: str = "", cached: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        constants=SimpleNamespace(HF_HUB_OFFLINE=not endpoint, ENDPOINT=endpoint),
        try_to_load_from_cache=lambda repo, file: cached if file == "config.json" else None,
        hf_hub_download=download,
    )


def refuse(repo: str, file: str) -> str:
    raise OSError("the hub was asked")


def test_a_hub_id_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(lambda repo, file: str(tmp_path / file)))
    found = ModelShape.from_hf("somebody/llama-tiny")
    assert (found.name, found.num_layers) == ("somebody/llama-tiny", 2)


def test_a_cached_hub_id_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(refuse, cached=str(tmp_path / "config.json")))
    assert ModelShape.from_hf("somebody/llama-tiny").num_layers == 2


def test_a_model_the_hub_refuses_offers_the_nearest_bundled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(refuse))
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-9B.*hub was asked.*nearest bundled: .*Qwen/Qwen3-8B"):
        ModelShape.from_hf("Qwen/Qwen3-9B")


def test_an_unreachable_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(refuse, endpoint="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=r"nearest bundled") as error:
        ModelShape.from_hf("Qwen/Qwen3-9B")
    assert "the hub was asked" not in str(error.value)


def test_bare_unknown_name_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"unknown model 'qwen3-9b'; nearest bundled: .*Qwen/Qwen3-8B"):
        ModelShape.from_hf("qwen3-9b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama",', "not valid JSON"),
        ("[1, 2]", "holds a list"),
        ("{}", "'model_type'"),
        (json.dumps({k: v for k, v in DENSE.items() if k != "vocab_size"}), "'vocab_size' is missing"),
        (json.dumps(DENSE | {"num_hidden_layers": -1}), "'num_hidden_layers' is -1"),
        (json.dumps(DENSE | {"hidden_size": "1024"}), "'hidden_size' is '1024'"),
        (json.dumps(DENSE | {"hidden_size": 1024.5}), "'hidden_size' is 1024.5"),
        (json.dumps(DENSE | {"num_key_value_heads": 3}), "'num_key_value_heads' is 3"),
        (json.dumps(DENSE | {"hidden_size": 1001}), "'hidden_size' is 1001"),
        (json.dumps(DENSE | {"tie_word_embeddings": "yes"}), "'tie_word_embeddings' is 'yes'"),
        (json.dumps(MOE | {"num_experts_per_tok": 9}), "'num_experts_per_tok' is 9"),
        (json.dumps(MOE | {"mlp_only_layers": 3}), "'mlp_only_layers' is 3"),
    ],
)
def test_a_broken_config_names_the_file_and_the_field(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        ModelShape.from_hf(tmp_path)
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelShape.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelShape.from_hf("./no-such-folder")


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"model_type": "llama", "kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "sliding window"),
        ({"model_type": "qwen3", "linear_num_key_heads": 16}, "linear attention"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "aria", "vision_config": {"depth": 3}}, "vision"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, object], feature: str) -> None:
    with pytest.raises(ConfigError, match=f"{feature}.*is not modelled; .*model types that are: .*qwen3_moe"):
        shape(**changes)


WINDOW = {"sliding_window": 4096}


def test_a_quantised_checkpoint_points_to_the_bf16_model() -> None:
    with pytest.raises(ConfigError, match="name the BF16 model"):
        shape(model_type="qwen3", quantization_config={"quant_method": "fp8"})


def test_absent_and_null_head_dim_mean_hidden_over_heads() -> None:
    found = [x.head_dim for one in (shape(), shape(head_dim=None)) for x, _ in one.parts_of(Attention)]
    assert found == [128, 128]
    assert shape(head_dim=64).parts_of(Attention)[0][0].head_dim == 64


def test_sparse_step_and_dense_layers_choose_the_moe_layers() -> None:
    assert shape(model_type="qwen3_moe", num_hidden_layers=6).parts_of(Experts)[0][1] == 6
    assert shape(model_type="qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2).parts_of(Experts)[0][1] == 3
    mixed = shape(model_type="qwen3_moe", num_hidden_layers=6, mlp_only_layers=[0, 5])
    assert mixed.parts_of(Experts)[0][1] == 4
    assert {w.name: w.layers for w in mixed.linears()}["gate_up_proj"] == 2
    assert not shape(model_type="qwen3_moe", mlp_only_layers=[0, 1]).parts_of(Experts)


def test_optional_tensors_add_their_elements() -> None:
    # Each line counts by hand what one option adds to the two-layer model with 8 query and 4 KV heads of 128.
    assert shape(model_type="qwen2").num_parameters - shape().num_parameters == 2 * (8 + 2 * 4) * 128
    assert shape(model_type="qwen3").num_parameters - shape().num_parameters == 2 * 2 * 128
    assert shape(model_type="mistral", attention_bias=True).num_parameters == shape().num_parameters
    assert shape(attention_bias=True).num_parameters - shape().num_parameters == 2 * ((8 + 2 * 4) * 128 + 1024)
    assert shape().num_parameters - shape(tie_word_embeddings=True).num_parameters == 1000 * 1024
    shared = shape(model_type="qwen3_moe", shared_expert_intermediate_size=512)
    assert shared.num_parameters - shape(model_type="qwen3_moe").num_parameters == 2 * (3 * 512 * 1024 + 1024)


@given(one_attention, st.data())
def test_the_ranks_together_hold_every_matrix_once(model: ModelShape, data: st.DataObject) -> None:
    kv_heads = model.parts_of(Attention)[0][0].kv_heads
    tp = data.draw(st.sampled_from([t for t in model.allowed_tensor_parallel() if t <= kv_heads]))
    whole = model.linears() + model.expert_linears()
    parts = model.linears(tp) + model.expert_linears(tp)
    for one, rank in zip(whole, parts, strict=True):
        assert (one.name, one.layers) == (rank.name, rank.layers)
        ranks = 1 if one.name == "router" else tp
        assert ranks * rank.n * rank.k == one.n * one.k
    assert tp * model.kv_bytes_per_token(BF16, tp) == model.kv_bytes_per_token(BF16)


@given(one_attention)
def test_more_ranks_than_kv_heads_replicate_them(model: ModelShape) -> None:
    ((attention, _),) = model.parts_of(Attention)
    beyond = [t for t in model.allowed_tensor_parallel() if t > attention.kv_heads]
    one_head = model.kv_bytes_per_token(BF16) // attention.kv_heads
    for tp in beyond:
        assert model.kv_bytes_per_token(BF16, tp) == one_head
        qkv = model.linears(tp)[0]
        assert qkv.n == (attention.heads // tp + 2) * attention.head_dim


@given(bundled)
def test_weights_take_two_bytes_per_parameter_in_bf16_and_at_least_one_in_fp8(model: ModelShape) -> None:
    padding = model.padded_vocab_size - model.vocab_size
    tables = 1 if model.tie_word_embeddings else 2
    bf16 = model.weight_bytes(BF16)
    keys = [(a.kv_heads * a.value_dim, n) for a, n in model.parts_of(Attention) if a.k_is_v]  # vLLM has them twice
    padding += sum(width * n for width, n in keys) // tables
    assert bf16 == 2 * (model.num_parameters + tables * padding * model.hidden_size)
    assert 0.5 < model.weight_bytes(FP8_BLOCK) / bf16 < 1
    assert model.weight_bytes(FP8_KV) == bf16
    assert 2 * model.kv_bytes_per_token(FP8_KV) == model.kv_bytes_per_token(BF16)


@given(bundled, st.sampled_from(sorted(PRESETS)))
def test_cutting_never_saves_more_than_its_share(model: ModelShape, precision: str) -> None:
    preset = PRESETS[precision]
    sizes = [model.weight_bytes(preset, tp) for tp in model.allowed_tensor_parallel(8)]
    assert sizes == sorted(sizes, reverse=True)
    for tp, size in zip(model.allowed_tensor_parallel(8), sizes, strict=True):
        assert tp * size >= sizes[0]  # norms, router and KV heads are replicated, scale blocks are padded


def test_fp8_saves_what_a_published_engine_log_gained() -> None:
    # NeMo-RL PR 1212, Qwen3-8B-Base in vLLM: the KV cache grew from 249,952 to 299,344 tokens with FP8 linears and to
    # 598,672 with FP8 KV as well; everything else was the same.
    model = ModelShape.from_hf("Qwen3-8B-Base")
    saved = model.weight_bytes(BF16) - model.weight_bytes(FP8_BLOCK)
    assert saved / model.kv_bytes_per_token(BF16) == pytest.approx(299_344 - 249_952, rel=0.06)
    assert model.kv_bytes_per_token(BF16) / model.kv_bytes_per_token(FP8_KV) == pytest.approx(
        598_672 / 299_344, rel=1e-4
    )


def test_an_fp8_expert_is_padded_to_whole_scale_blocks_per_rank() -> None:
    # Qwen3-30B-A3B: 768 rows over 8 ranks are 96, which vLLM pads to 128; over 2 ranks they are 384, three blocks.
    model = ModelShape.from_hf("Qwen3-30B-A3B")
    one_row_of_all_experts = 48 * 128 * 3 * 2048
    for tp, rows, padded in ((8, 96, 128), (2, 384, 384)):
        elsewhere = model.weight_bytes(BF16, tp) - 2 * rows * one_row_of_all_experts
        experts = model.weight_bytes(FP8_BLOCK, tp) - elsewhere
        # What is not experts shrinks in FP8 by at most half, so the rest bounds the experts from both sides.
        assert padded * one_row_of_all_experts - elsewhere / 2 <= experts <= 1.001 * padded * one_row_of_all_experts


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("Qwen2.5-7B", 8, "28 attention heads; allowed: 1, 2, 4"),
        ("Qwen3-8B", 3, "32 attention heads; allowed: 1, 2, 4, 8, 16, 32"),
        ("Qwen3-14B", 5, "8 KV heads"),
        ("Qwen3-8B", 0, "at least 1"),
        ("Mixtral-8x7B-v0.1", 16, "8 experts"),
    ],
)
def test_tensor_parallel_that_does_not_divide_names_the_allowed_sizes(name: str, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf(name).check_tensor_parallel(tp)


@given(bundled)
def test_allowed_tensor_parallel_sizes_pass_the_check(model: ModelShape) -> None:
    allowed = model.allowed_tensor_parallel()
    assert allowed[0] == 1
    for tp in allowed:
        model.check_tensor_parallel(tp)


def test_context_beyond_the_model_is_refused() -> None:
    model = ModelShape.from_hf("Qwen2.5-Math-7B")
    model.check_max_model_len(4096)
    with pytest.raises(ConfigError, match=r"4097.*at most 4096"):
        model.check_max_model_len(4097)


def test_a_list_with_the_same_number_for_every_layer_is_that_number() -> None:
    config = {"num_hidden_layers": 3, "moe_topk": [8, 8, 8], "hidden_size": [1024], "num_experts": [4, 4, 8]}
    fields = Fields(config, "config.json")
    assert fields.integer("num_experts_per_tok") == 8  # as Hunyuan-A13B writes it
    for name in ("hidden_size", "num_experts"):
        with pytest.raises(ConfigError, match=rf"field '{name}' is \[.*allowed: a whole number of at least 1"):
            fields.integer(name)
