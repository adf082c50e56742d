"""The patterns of linears that stay in BF16, matched as vLLM matches them.

That they leave out the right modules of every family is tested on vLLM's own models (tests/model/architecture).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.kept import Kept
from fp8plan.model.architecture.parts import Mlp
from fp8plan.model.emit.vllm import ROUTER_PATTERN, ignored, vllm_kwargs
from fp8plan.model.limits import EngineLimits
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup

QWEN = ModelShape.from_hf("Qwen/Qwen3-8B")
GLM = ModelShape.from_hf("zai-org/GLM-4.5-Air")


OUTPUTS: Kept = (0, 0, "o_proj")


def matched(patterns: Sequence[str], name: str) -> bool:
    return any(re.match(pattern.removeprefix("re:"), name) for pattern in patterns)


def left_out(model: ModelShape | str, tensor_parallel_size: int = 1, keep_bf16: Kept = (0, 0)) -> list[str]:
    limits = EngineLimits(tensor_parallel_size=tensor_parallel_size)
    return ignored(EngineSetup(model, "h200", "fp8_block", limits, remedies=Remedies(keep_bf16=keep_bf16)))


def test_where_all_fits_only_routers_are_named() -> None:
    assert left_out(QWEN) == left_out("of/nothing-known", 4) == left_out("Qwen/Qwen3-30B-A3B", 4) == [ROUTER_PATTERN]


def test_another_layout_names_others() -> None:
    names = ("layers.0.mlp.down_proj", "layers.7.mlp.shared_experts.down_proj", "layers.7.self_attn.o_proj")
    found = {tp: [matched(left_out(GLM, tp), f"model.{name}") for name in names] for tp in (1, 2)}
    assert found == {1: [True, False, False], 2: [True, True, False]}
    limits = EngineLimits(tensor_parallel_size=2)
    kwargs = vllm_kwargs(EngineSetup(GLM, "h200", "fp8_block", limits))
    assert kwargs["quantization_config"]["ignore"] == left_out(GLM, 2)
    assert "quantization_config" not in vllm_kwargs(EngineSetup(GLM, "h200", "bf16", limits))


def test_layers_are_numbered_where_others_of_the_name_are_in_fp8() -> None:
    odd = tuple(replace(layer, mlp=Mlp(10944)) if i in (3, 30) else layer for i, layer in enumerate(QWEN.layers))
    patterns = left_out(replace(QWEN, layers=odd))
    assert len(patterns) == 2
    for prefix in ("model", "language_model.model"):
        left = [i for i in range(36) if matched(patterns, f"{prefix}.layers.{i}.mlp.down_proj")]
        assert left == [3, 30]
    assert not matched(patterns, "model.layers.3.mlp.gate_up_proj")


def test_kept_layers_are_one_pattern_beside_the_others() -> None:
    """GLM's first layer alone has a dense MLP."""
    patterns = left_out(GLM, 2, keep_bf16=(1, 2))
    assert patterns[:-1] == [x for x in left_out(GLM, 2) if "mlps" not in x]
    layers = range(GLM.num_layers)
    for module in ("self_attn.qkv_proj", "mlp.experts", "mlp.shared_experts.gate_up_proj"):
        assert [i for i in layers if matched(patterns, f"model.layers.{i}.{module}")] == [0, *layers[-2:]]
    with pytest.raises(ConfigError, match=r"keep_bf16 is \(40, 6\), and the model has 46 layers; allowed: fewer"):
        left_out(GLM, keep_bf16=(40, 6))
    with pytest.raises(ConfigError, match=r"keep_bf16 is \(1, 1\), and the checkpoint holds its weights in FP8 \(fp8"):
        vllm_kwargs(EngineSetup("Qwen/Qwen3-8B-FP8", "h200", "fp8_block", remedies=Remedies(keep_bf16=(1, 1))))


def test_attention_outputs_are_one_pattern_beside_the_others() -> None:
    """Inputs of 960 are no whole blocks: vLLM leaves these in BF16, whatever is kept."""
    narrow = replace(QWEN, hidden_size=960)
    patterns = left_out(narrow, keep_bf16=OUTPUTS)
    assert patterns[:-1] == left_out(narrow)
    for beside in (left_out(narrow, keep_bf16=(1, 1, "o_proj")), left_out("of/nothing-known", keep_bf16=OUTPUTS)):
        assert beside[-1] == patterns[-1]
    outputs = ("self_attn.o_proj", "attn.o_proj", "mixer.o_proj", "self_attn.dense", "self_attn.out_proj")
    others = ("self_attn.qkv_proj", "mlp.down_proj", "mlp.o_proj_norm", "linear_attn.out_proj", "conv.out_proj")
    found = [name for name in (*outputs, *others) if matched(patterns[-1:], f"model.layers.5.{name}")]
    assert found == list(outputs)


def test_layers_of_a_model_that_is_not_planned_are_counted_in_its_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config in ({"num_hidden_layers": 5}, {"text_config": {"num_hidden_layers": 5}}):
        file.write_text(json.dumps({"model_type": "unknown", **config}))
        assert left_out(str(tmp_path), keep_bf16=(1, 2))[-1] == r"re:.*\.layers\.(0|3|4)\..*"
    file.write_text(json.dumps({"model_type": "unknown"}))
    with pytest.raises(ConfigError, match=r"keep_bf16 is \(1, 2\), and config.json of .* has no num_hidden_layers"):
        left_out(str(tmp_path), keep_bf16=(1, 2))


@pytest.mark.vllm
@pytest.mark.parametrize("whole", [True, False], ids=["fused", "parts"])
def test_vllm_matches_a_fused_module_by_its_name_or_by_all_of_its_parts(whole: bool) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    narrow = replace(QWEN, hidden_size=960)
    patterns = left_out(narrow)
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for module, parts in fused.items():
        layer = f"model.layers.0.{'self_attn' if module == 'qkv_proj' else 'mlp'}"
        for name in [module] if whole else parts:
            assert should_ignore_layer(f"{layer}.{name}", patterns, fused, use_fnmatch=True)
    assert not should_ignore_layer("model.layers.0.mlp.down_proj", patterns, fused, use_fnmatch=True)
    assert not should_ignore_layer("model.layers.0.self_attn.o_proj", patterns, fused, use_fnmatch=True)
