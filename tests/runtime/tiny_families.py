"""Tiny checkpoints of families that are unlike Qwen3, made by transformers' own classes: names and layouts are those of
the real ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from installed_vllm import VLLM
from tiny_models import SEEDS, VOCABULARY, folder, generate, started

from fp8plan.version import at_least

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}

DERIVED = "latent attention keeps matrices made of it"
LOADER = "its loader does more than copy"
WIDER = "vLLM keeps {} as torch.float32, and bfloat16 is sent"
SHARED = "parts of weight share blocks of 128 x 128"

# GLM-4.5's router is a plain Linear in FP32 up to 0.30. From 0.31 it is a GateLinear, which a CPU packs like any other.
ROUTER = {} if at_least(VLLM, (0, 31)) else {"Linear": WIDER.format("weight")}


@dataclass(frozen=True)
class Family:
    """One model type.

    config:     what its config has beside COMMON
    precisions: those that vLLM's CPU build runs it in
    reloaded:   classes of modules that vLLM must load on any device -> why; all others are written in place
    attention:  how many layers keep keys and values
    left:       modules that blockwise FP8 leaves in BF16, as their inputs are no whole blocks
    model_type: in its config; "": the family's name
    """

    config: dict[str, Any]
    precisions: tuple[str, ...] = ("bf16", "fp8_block+fp8_kv")
    reloaded: dict[str, str] = field(default_factory=dict)
    attention: int = 2
    left: tuple[str, ...] = ()
    model_type: str = ""


FAMILIES = {
    "gemma3_text": Family(WINDOWS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 64}),
    "phi3": Family({}),  # the checkpoint holds qkv and gate_up as one tensor each
    "cohere2": Family(WINDOWS | {"tie_word_embeddings": True}),
    "olmo3": Family(WINDOWS),
    "ernie4_5_moe": Family(
        {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
        | {"moe_intermediate_size": 128}
    ),
    "glm4_moe": Family(
        EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
        reloaded=ROUTER,
    ),
    # An MLP of other than whole blocks before the experts, as in DeepSeek-V2-Lite and GLM-4.5-Air.
    "dense_first": Family(
        EXPERTS
        | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
        | {"intermediate_size": 320},
        ("fp8_block+fp8_kv",),
        {**ROUTER, "MergedColumnParallelLinear": SHARED},
        left=("model.layers.0.mlp.down_proj",),
        model_type="glm4_moe",
    ),
    # Heads of other than whole blocks together, and experts of a width that vLLM pads.
    "odd_heads": Family(
        EXPERTS | {"num_attention_heads": 5, "num_key_value_heads": 1, "moe_intermediate_size": 192, "num_experts": 8},
        ("fp8_block",),
        {"QKVParallelLinear": SHARED, "RoutedExperts": SHARED.replace("weight", "w2_weight")},
        left=("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        model_type="qwen3_moe",
    ),
    "deepseek_v3": Family(
        EXPERTS
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,  # with 64 of RoPE the one size that vLLM's CPU kernel takes
            "q_lora_rank": 128,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        ("bf16", "fp8_block"),  # vLLM's CPU kernel of latent attention reads no FP8 cache
        {"ColumnParallelLinear": DERIVED, "GateLinear": WIDER.format("e_score_correction_bias")},
    ),
    # In FP8, vLLM 0.30 loses the experts of a BF16 checkpoint when it starts: no fresh engine has the right bits.
    "gpt_oss": Family(
        WINDOWS | {"num_local_experts": 8, "num_experts_per_tok": 2},
        ("bf16", "fp8_kv"),
        {"GptOssRoutedExperts": LOADER},
    ),
    "qwen3_next": Family(
        EXPERTS
        | {
            "num_experts": 8,
            "shared_expert_intermediate_size": 128,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        reloaded={"QwenGatedDeltaNetAttention": WIDER.format("A_log")},
        attention=1,
    ),
    "nemotron_h": Family(
        {
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 2,
        },
        reloaded={"MambaMixer2": LOADER},
        attention=1,
    ),
    "granitemoehybrid": Family(
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "position_embedding_type": None,
        },
        reloaded={"MambaMixer2": LOADER, "MergedColumnParallelLinear": SHARED},
        attention=1,
    ),
}


@cache
def checkpoint(family: str, which: str) -> Path:
    """Folder of a BF16 checkpoint; which: "a" or "b", two sets of random weights without a tensor in common."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(SEEDS[which])
    model_type = FAMILIES[family].model_type or family
    config_class = CONFIG_MAPPING[model_type]
    # vLLM renames a class for the last model that it has read (_register_config_class: Kimi-K2 has DeepSeek-V3's).
    config_class.model_type = model_type
    config = config_class(**COMMON | FAMILIES[family].config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("bias"))):
            if tensor.dim() == 1 or not tensor.std():  # what starts the same whatever the seed: norms, biases, decays
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
    path = folder() / f"{family}_{which}"
    model.save_pretrained(path)
    return path


def weights(family: str, which: str) -> dict[str, Any]:
    """The tensors that a trainer would send."""
    from safetensors.torch import load_file

    return load_file(checkpoint(family, which) / "model.safetensors")


def generate_at_width(family: str, hidden_size: str) -> None:
    """Start an engine with FP8 weights on a model of another width, and generate; say "ran" if it does."""
    FAMILIES[family] = replace(FAMILIES[family], config=FAMILIES[family].config | {"hidden_size": int(hidden_size)})
    with started(checkpoint(family, "a"), "a", "fp8_block") as engine:
        generate(engine)
        print("ran")
