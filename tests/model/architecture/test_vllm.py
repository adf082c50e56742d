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
from family_configs import INSIDE, config_of, shape_of

from fp8plan.model.architecture.families import FAMILIES
from fp8plan.model.emit.ignored import ignored

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


# Sizes that leave linears in BF16: what a family has beside COMMON_ODD.
COMMON_ODD = {"hidden_size": 960, "intermediate_size": 1472}
EVEN_HEADS = {"num_attention_heads": 30, "num_key_value_heads": 10}
ODD: dict[str, dict[str, Any]] = {
    "qwen3_next": {"shared_expert_intermediate_size": 320},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "longcat_flash": {"ffn_hidden_size": 1472, "expert_ffn_hidden_size": 320},
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


def folder_of(name: str, odd: bool, parent: Path) -> tuple[Path, Counter[tuple[int, int, bool]]]:
    """Write what the script reads of a family, and count its linears as fp8plan has them."""
    from transformers import AutoModelForCausalLM

    config = config_of(name, COMMON_ODD | ODD.get(name, {}) if odd else {})
    own = AutoModelForCausalLM._model_mapping[type(config)].__name__
    config.architectures = [ARCHITECTURES.get(name, own)]
    folder = parent / f"{name}{'_odd' * odd}"
    config.save_pretrained(folder)
    shape, found = shape_of(config, name), Counter[tuple[int, int, bool]]()
    (folder / "ignored.json").write_text(json.dumps(ignored(shape, 1)))
    assert bool(shape.left_in_bf16()) or not odd
    for linear in (x for x in shape.linears() if x.name != "lm_head"):
        found[linear.n, linear.k, linear.quantised] += linear.layers
    if experts := shape.expert_linears():
        w13, w2 = experts
        found[w13.n // w2.k * padded(w2.k), padded(w13.k), w13.quantised] += w13.layers
        found[padded(w2.n), padded(w2.k), w2.quantised] += w2.layers
    return folder, found


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_builds_the_same_linears(tmp_path: Path) -> None:
    """As published, and with sizes that leave most linears in BF16, by the patterns that a plan emits. In one process
    for all, as to import vLLM takes longer than to build them.
    """
    pytest.importorskip("vllm")
    expected = dict(folder_of(name, odd, tmp_path) for odd in (False, True) for name in NAMES)
    command = [sys.executable, str(SCRIPT), *map(str, expected)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    built = [
        Counter({(n, k, fp8): x for n, k, fp8, x in json.loads(line)})
        for line in done.stdout.splitlines()
        if line.startswith("[[")
    ]
    assert len(built) == len(expected), done.stderr[-2000:]
    assert {x.name: own for x, own in zip(expected, built, strict=True)} == {x.name: y for x, y in expected.items()}
