"""The linears of families as vLLM itself builds them: the same sizes, fused alike, and FP8 in the same places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from family_configs import config_of, shape_of

from fp8plan.model.emit.ignored import ignored

SCRIPT = Path(__file__).with_name("vllm_linears.py")
# One with experts first (see the script). Those of the same code are left out: each takes seconds. Left out too is what
# vLLM has no CPU code for (sparse attention, experts without a gate: Nemotron-H), and where it wants a field that
# transformers' config class has dropped (LFM2, GLM-4 MoE Lite, MiniMax-M2, MiMo).
NAMES = (
    *("qwen3_moe", "qwen2", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "gemma3_text"),
    *("gemma4_text", "llama4_text", "nemotron", "granitemoehybrid", "falcon_h1", "olmo2", "olmoe", "phi", "phimoe"),
    *("gpt_oss", "cohere2", "starcoder2", "ernie4_5_moe", "exaone4", "mixtral", "hunyuan_v1_moe", "lfm2_moe"),
    *("granitemoe", "jais2"),
)


# Checkpoints name another class than transformers' own, and vLLM goes by the name.
ARCHITECTURES = {"phimoe": "PhiMoEForCausalLM"}


# Sizes that leave linears in BF16: what a family has beside COMMON_ODD.
COMMON_ODD = {"hidden_size": 960, "intermediate_size": 1472}
EVEN_HEADS = {"num_attention_heads": 30, "num_key_value_heads": 10}
ODD: dict[str, dict[str, Any]] = {
    "qwen3_next": {"shared_expert_intermediate_size": 320},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "llama4_text": {"intermediate_size_mlp": 1088, "interleave_moe_layer_step": 2},
    "granitemoehybrid": {"shared_intermediate_size": 320, "mamba_expand": 2, "mamba_n_heads": 30},
    "falcon_h1": {"mamba_d_ssm": 960, "mamba_n_heads": 30, "mamba_d_head": 32, "mamba_n_groups": 1},
    "phi": {"intermediate_size": 3840},  # phi.py makes it four times the width, whatever the config says
    "cohere2": EVEN_HEADS,
    "jais2": EVEN_HEADS,
}


def padded(size: int) -> int:
    """FP8 experts are padded to whole blocks on both sides (fused_moe, maybe_roundup_sizes)."""
    return -(-size // 128) * 128


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("names", [NAMES[i : i + 9] for i in range(0, len(NAMES), 9)], ids=lambda x: x[0])
@pytest.mark.parametrize("odd", [False, True], ids=["published", "odd"])
def test_vllm_builds_the_same_linears(names: tuple[str, ...], odd: bool, tmp_path: Path) -> None:
    """odd: with sizes that leave most linears in BF16, by the patterns that a plan emits."""
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    names, expected = (NAMES[0], *names), []
    folders = []
    for name in names:
        config = config_of(name, COMMON_ODD | ODD.get(name, {}) if odd else {})
        own = AutoModelForCausalLM._model_mapping[type(config)].__name__
        config.architectures = [ARCHITECTURES.get(name, own)]
        folders.append(tmp_path / name)
        config.save_pretrained(folders[-1])
        shape, found = shape_of(config, name), Counter[tuple[int, int, bool]]()
        (folders[-1] / "ignored.json").write_text(json.dumps(ignored(shape, 1)))
        assert bool(shape.left_in_bf16()) or not odd
        for linear in (x for x in shape.linears() if x.name != "lm_head"):
            found[linear.n, linear.k, linear.quantised] += linear.layers
        if experts := shape.expert_linears():
            w13, w2 = experts
            found[w13.n // w2.k * padded(w2.k), padded(w13.k), w13.quantised] += w13.layers
            found[padded(w2.n), padded(w2.k), w2.quantised] += w2.layers
        expected.append(found)
    command = [sys.executable, str(SCRIPT), *map(str, folders)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    built = [
        Counter({(n, k, fp8): x for n, k, fp8, x in json.loads(line)})
        for line in done.stdout.splitlines()
        if line.startswith("[[")
    ]
    assert len(built) == len(names), done.stderr[-2000:]
    assert dict(zip(names, built, strict=True)) == dict(zip(names, expected, strict=True))
