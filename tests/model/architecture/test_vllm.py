"""The linears of families as vLLM itself builds them: the same sizes, fused alike, and FP8 in the same places."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from family_configs import INSIDE, config_of, shape_of

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.families import FAMILIES
from fp8plan.model.architecture.kept import Kept
from fp8plan.model.configs import QUANT_FILE
from fp8plan.model.emit.vllm import ignored
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup

SCRIPT = Path(__file__).with_name("vllm_linears.py")
# What vLLM does not build here, and why; it builds all others.
NOT_BUILT = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", *INSIDE), "with its tower only"),
    "mistral4": "read from params.json, and built as deepseek_v3",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "sparse attention: no CPU code"),
    **dict.fromkeys(("kimi_linear", "apertus"), "CUDA streams and copies while it is built"),
    "nemotron_h": "experts without a gate: no CPU code",
    **dict.fromkeys(
        ("glm4_moe_lite", "minimax_m2", "exaone_moe", "lfm2", "mimo_v2_flash"),
        "wants a field that transformers' config class has dropped",
    ),
}
FIRST = "qwen3_moe"  # it has experts: see the script
NAMES = (FIRST, *(name for name in FAMILIES if name not in (FIRST, *NOT_BUILT)))


# Checkpoints name another class than transformers' own, and vLLM goes by the name.
ARCHITECTURES = {"phimoe": "PhiMoEForCausalLM"}


FIELDS: dict[str, dict[str, Any]] = {
    "flex_olmo": {"num_hidden_layers": 4},  # vLLM traces each layer, which takes a second
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},  # of published configs; read from 0.32 on
}

# Sizes that leave linears in BF16: what a family has beside COMMON_ODD.
COMMON_ODD = {"hidden_size": 960, "intermediate_size": 1472, "num_attention_heads": 30, "num_key_value_heads": 10}
ODD: dict[str, dict[str, Any]] = {
    "qwen3_next": {"shared_expert_intermediate_size": 320},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "longcat_flash": {"ffn_hidden_size": 1472, "expert_ffn_hidden_size": 320},
    "llama4_text": {"intermediate_size_mlp": 1088, "interleave_moe_layer_step": 2},
    "granitemoehybrid": {"shared_intermediate_size": 320, "mamba_expand": 2, "mamba_n_heads": 30},
    "falcon_h1": {"mamba_d_ssm": 960, "mamba_n_heads": 30, "mamba_d_head": 32, "mamba_n_groups": 1},
    # phi.py makes it four times the width, and has as many KV heads as heads, whatever the config says.
    "phi": {"intermediate_size": 3840, "num_key_value_heads": 30},
}


def padded(size: int) -> int:
    """FP8 experts are padded to whole blocks on both sides (fused_moe, maybe_roundup_sizes)."""
    return -(-size // 128) * 128


def has_outputs(shape: ModelShape) -> bool:
    return any(linear.name == "o_proj" for linear in shape.linears())


def folder_of(name: str, odd: bool, kept: Kept, parent: Path) -> tuple[Path, Counter[tuple[int, int, bool]]]:
    """Write what the script reads of a family, and count its linears as fp8plan has them."""
    from transformers import AutoModelForCausalLM

    config = config_of(name, FIELDS.get(name, {}) | (COMMON_ODD | ODD.get(name, {}) if odd else {}))
    own = AutoModelForCausalLM._model_mapping[type(config)].__name__
    config.architectures = [ARCHITECTURES.get(name, own)]
    folder = parent / f"{name}{'_odd' * odd}{'_kept' * any(kept)}"
    config.save_pretrained(folder)
    plain, found = shape_of(config, name), Counter[tuple[int, int, bool]]()
    remedies = Remedies(keep_bf16=kept if has_outputs(plain) else (0, 0))
    setup = EngineSetup(plain, "h200", "fp8_block", remedies=remedies)
    (folder / "ignored.json").write_text(json.dumps(ignored(setup)))
    shape = setup.shape
    assert bool(shape.left_in_bf16()) or not odd
    for linear in (x for x in shape.linears() if x.name != "lm_head"):
        found[linear.n, linear.k, linear.quantised] += linear.layers
    if experts := shape.expert_linears():
        w13, w2 = experts
        found[w13.n // w2.k * padded(w2.k), padded(w13.k), w13.quantised] += w13.layers
        found[padded(w2.n), padded(w2.k), w2.quantised] += w2.layers
    return folder, found


@pytest.mark.vllm
@pytest.mark.parametrize("names", [(FIRST, "qwen3"), pytest.param(NAMES, marks=pytest.mark.slow)], ids=["two", "all"])
def test_vllm_builds_the_same_linears(names: tuple[str, ...], tmp_path: Path) -> None:
    """As published, with sizes that leave most linears in BF16, and with attention outputs kept, by the patterns that a
    plan emits. In one process for all, as to import vLLM takes longer than to build them.
    """
    pytest.importorskip("vllm")
    kinds: list[tuple[bool, Kept]] = [(False, (0, 0)), (True, (0, 0)), (False, (0, 0, "o_proj"))]
    expected = dict(folder_of(name, odd, kept, tmp_path) for odd, kept in kinds for name in names)
    assert built(expected, tmp_path) == {x.name: y for x, y in expected.items()}


def built(folders: Iterable[Path], tmp_path: Path) -> dict[str, Counter[tuple[int, int, bool]]]:
    """The linears that vLLM builds of each folder."""
    import vllm_linears
    import warm_processes

    names, result = [str(folder) for folder in folders], tmp_path / "linears.jsonl"
    code, said = warm_processes.output(vllm_linears.main, str(result), *names, log=tmp_path / "log")
    assert code == 0, said[-2000:]
    return {
        Path(name).name: Counter({(n, k, fp8): x for n, k, fp8, x in json.loads(line)})
        for name, line in zip(names, result.read_text().splitlines(), strict=True)
    }


# A checkpoint whose linears all differ in size, so that each can be told from the others.
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 12,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 512, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": NUMBERS,
            "input_activations": NUMBERS | {"dynamic": True, "strategy": "token"},
        }
    },
}
QKV = [f"model.layers.3.self_attn.{x}_proj" for x in "qkv"]
STORED: dict[str, dict[str, Any]] = {
    "blocks": {"quantization_config": BLOCKS | {"modules_to_not_convert": ["lm_head", *QKV]}},
    "rows": {"quantization_config": ROWS | {"ignore": ["lm_head", "re:.*layers[.]1[.]self_attn.*", "re:.*down_proj$"]}},
    "old": {"compression_config": ROWS | {"ignore": ["lm_head", "model.layers.2.mlp.down_proj", *QKV]}},
    "beside": {
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.1*", "*.3.mlp.down_proj"]},
        "producer": {"name": "modelopt"},
    },
    "nothing": {"quantization_config": {}},
}


@pytest.mark.vllm
def test_vllm_reads_the_same_format_of_a_checkpoint_and_leaves_the_same_linears_in_bf16(tmp_path: Path) -> None:
    """Wherever the config says it, and however its list names modules."""
    pytest.importorskip("vllm")
    expected = {}
    for name, fields in STORED.items():
        folder = tmp_path / name
        folder.mkdir()
        is_beside = name == "beside"
        (folder / "config.json").write_text(json.dumps(DENSE | ({} if is_beside else fields)))
        if is_beside:
            (folder / QUANT_FILE).write_text(json.dumps(fields))
        shape = ModelShape.from_hf(folder)
        expected[folder] = Counter[tuple[int, int, bool]]()
        for linear in (x for x in shape.linears() if x.name != "lm_head"):
            fp8 = shape.stored is not None and linear.quantised
            expected[folder][linear.n, linear.k, fp8] += linear.layers
    assert len({str(x) for x in expected.values()}) == len(STORED)
    assert built(expected, tmp_path) == {folder.name: linears for folder, linears in expected.items()}
