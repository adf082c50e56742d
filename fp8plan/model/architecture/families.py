"""The families that are known: one row for each model_type, saying how its config's fields become parts.

A row says only where the family differs from Llama. Two tests hold the rows: tests/model/architecture/test_families.py
against transformers' own model of the same config, element by element, and test_vllm.py against the linears that vLLM
builds. Where the comments name a file, it is vLLM's.

vLLM runs olmo, olmo2, smollm3 and starcoder2, and by 0.30 olmo3 and hunyuan too, through its Transformers backend. It
fuses and quantises the same linears there (models/transformers/base.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8plan.model.architecture import special
from fp8plan.model.architecture.family import (
    ATTENTIONS,
    Family,
    Moe,
    Readers,
    after_dense,
    attention,
    by_step,
    chunked,
    every,
    everywhere,
    later,
)

_QWEN_WINDOW: Final[Mapping[str, str]] = {
    "use_sliding_window": "a sliding window in experts' layers (use_sliding_window)"
}
_QWEN_MOE: Final = Moe(shared="shared_expert_intermediate_size", shared_gate=True, sparse=by_step)
_MLA: Final[Readers] = {"full_attention": special.latent}
_INDEXED: Final[Readers] = {"indexed_attention": special.indexed, "full_attention": special.indexed}
_DEEPSEEK: Final = Moe(shared_count=True, sparse=after_dense)
_DEEPSEEK_V3: Final = Moe(shared_count=True, sparse=after_dense, router_bias=True)
_NO_MLA_BIAS: Final[Mapping[str, str]] = {"attention_bias": "biases in latent attention (attention_bias)"}
_SPARSE_OWN: Final = ("kv_lora_rank", "index_topk")
_DELTA: Final[Readers] = {"full_attention": attention, "linear_attention": special.delta_net}
_DELTA_OWN: Final = ("linear_num_key_heads",)
_DELTA_KINDS: Final = every(4, "full_attention_interval", other="linear_attention")
_MAMBA: Final[Readers] = {
    "full_attention": attention,
    "attention": attention,
    "linear_attention": special.mamba2,
    "mamba": special.mamba2,
}
_CONV: Final[Readers] = {"full_attention": attention, "conv": special.short_conv}
_GEMMA3: Final = {  # what published configs of Gemma 3 leave to the config class
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_QWEN3_NEXT: Final = Family(
    kinds=_DELTA_KINDS,
    mixers=_DELTA,
    qk_norm="head",
    gated_attention="attn_output_gate",
    moe=_QWEN_MOE,
    defaults={"attn_output_gate": True},
    own=_DELTA_OWN,
)
_QWEN3_5: Final = Family(
    kinds=_DELTA_KINDS,
    mixers=_DELTA,
    qk_norm="head",
    gated_attention="attn_output_gate",
    defaults={"attn_output_gate": True},
    own=_DELTA_OWN,
)
_GRANITE_MOE: Final = Moe(inner="intermediate_size", shared="shared_intermediate_size", shared_stream=False)

FAMILIES: Final[Mapping[str, Family]] = {
    # the first six
    "qwen2": Family(
        qkv_bias=True, o_bias=False, kinds=later, defaults={"use_sliding_window": False, "max_window_layers": 28}
    ),
    "qwen3": Family(qk_norm="head", kinds=later, defaults={"use_sliding_window": False, "max_window_layers": 28}),
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(qkv_bias=False, o_bias=False, kinds=everywhere),
    # The shared expert is one that Qwen3 itself does not have. qwen3_moe.py reads its field all the same.
    "qwen3_moe": Family(qk_norm="head", moe=_QWEN_MOE, missing=_QWEN_WINDOW),
    "mixtral": Family(qkv_bias=False, o_bias=False, kinds=everywhere, moe=Moe(inner="intermediate_size")),
    # Qwen
    "qwen2_moe": Family(
        qkv_bias="qkv_bias", o_bias=False, moe=_QWEN_MOE, defaults={"qkv_bias": True}, missing=_QWEN_WINDOW
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_vl_text": Family(qk_norm="head"),
    "qwen3_vl_moe_text": Family(qk_norm="head", moe=Moe(sparse=by_step)),
    # DeepSeek, Kimi and others with latent attention
    "deepseek_v2": Family(mixers=_MLA, moe=_DEEPSEEK, own=("kv_lora_rank",), missing=_NO_MLA_BIAS),
    "deepseek_v3": Family(
        mixers=_MLA,
        moe=_DEEPSEEK_V3,
        own=("kv_lora_rank",),
        defaults={"first_k_dense_replace": 3},
        missing=_NO_MLA_BIAS,
    ),
    "deepseek_v32": Family(
        kinds=lambda _, layers: ["indexed_attention"] * layers,
        mixers=_INDEXED,
        moe=_DEEPSEEK_V3,
        own=_SPARSE_OWN,
        defaults={"first_k_dense_replace": 3},
        missing=_NO_MLA_BIAS,
    ),
    "kimi_linear": Family(
        kinds=special.kimi_kinds,
        mixers={"full_attention": special.latent, "linear_attention": special.kimi_delta},
        moe=_DEEPSEEK_V3,
        own=("kv_lora_rank", "linear_attn_config"),
        defaults={"first_k_dense_replace": 1},
        missing=_NO_MLA_BIAS,
    ),
    # GLM
    "glm": Family(o_bias=False, defaults={"attention_bias": True}),
    "glm4": Family(o_bias=False, norms=4, defaults={"attention_bias": True}),
    "glm4_moe": Family(
        o_bias=False, qk_norm=("use_qk_norm", "head"), moe=_DEEPSEEK_V3, defaults={"first_k_dense_replace": 1}
    ),
    "glm4_moe_lite": Family(
        mixers=_MLA,
        moe=_DEEPSEEK_V3,
        own=("kv_lora_rank",),
        defaults={"first_k_dense_replace": 1},
        missing=_NO_MLA_BIAS,
    ),
    "glm_moe_dsa": Family(
        kinds=lambda _, layers: ["indexed_attention"] * layers,
        mixers=_INDEXED,
        layer=special.indexed_layer,
        by_number=True,
        moe=_DEEPSEEK_V3,
        own=_SPARSE_OWN,
        defaults={"first_k_dense_replace": 3},
        missing=_NO_MLA_BIAS,
    ),
    # Gemma
    "gemma": Family(tied=True),
    "gemma2": Family(kinds=every(2, "sliding_window_pattern"), norms=4, tied=True),
    "gemma3_text": Family(
        kinds=every(6, "sliding_window_pattern", "_sliding_window_pattern"),
        qk_norm="head",
        norms=4,
        tied=True,
        defaults=_GEMMA3,
    ),
    "gemma4_text": Family(
        kinds=every(6, "sliding_window_pattern"),
        layer=special.gemma4_layer,
        by_number=True,
        qk_norm="head",
        norms=4,
        moe=Moe(router_scales=True),
        tied=True,
        missing={"hidden_size_per_layer_input": "per-layer embeddings (Gemma 4 E2B and E4B)"},
    ),
    # Llama's relatives
    "llama4_text": Family(
        kinds=special.llama4_kinds,
        mixers={"full_attention": attention, "chunked_attention": chunked},
        inner="intermediate_size_mlp",
        moe=Moe(inner="intermediate_size", shared="intermediate_size", sparse=special.llama4_sparse),
        own=("attention_chunk_size",),
    ),
    "arcee": Family(gated=False, mlp_bias="mlp_bias"),
    "apertus": Family(
        qk_norm="head",
        gated=False,
        mlp_bias="mlp_bias",
        defaults={"hidden_act": "xielu"},
    ),
    "smollm3": Family(
        mlp_bias="mlp_bias",
        tied=True,
        missing={"use_sliding_window": "a sliding window in the layers without positions (use_sliding_window)"},
    ),
    "seed_oss": Family(o_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "internlm3": Family(
        mlp_bias="mlp_bias",
        missing={"bias": "biases by the field bias", "qkv_bias": "biases by the field qkv_bias"},
    ),
    "ministral3": Family(qkv_bias=False, o_bias=False, kinds=everywhere),
    # NVIDIA and IBM
    "nemotron": Family(norm_vectors=2, gated=False, mlp_bias="mlp_bias"),
    "nemotron_h": Family(
        qkv_bias=False,
        o_bias=False,
        kinds=special.nemotron_kinds,
        mixers={
            "mamba": special.nemotron_mamba,
            "linear_attention": special.nemotron_mamba,
            "attention": attention,
            "full_attention": attention,
            "mlp": special.no_mixer,
            "moe": special.no_mixer,
        },
        layer=special.single_layer,
        gated=False,
        mlp_bias="mlp_bias",
        moe=Moe(shared="moe_shared_expert_intermediate_size", gated=False, shared_bias="mlp_bias", router_bias=True),
        own=("ssm_state_size", "hybrid_override_pattern"),
        missing={"moe_latent_size": "experts of a latent width (moe_latent_size)"},
    ),
    "granite": Family(mlp_bias="mlp_bias"),
    "granitemoe": Family(moe=Moe(inner="intermediate_size")),
    "granitemoeshared": Family(moe=_GRANITE_MOE),
    "granitemoehybrid": Family(
        kinds=lambda _, layers: ["mamba"] * layers,
        mixers=_MAMBA,
        layer=special.granite_layer,
        inner="shared_intermediate_size",
        moe=_GRANITE_MOE,
        own=("mamba_d_state",),
    ),
    "falcon_h1": Family(
        layer=special.beside_mamba,
        mlp_bias="mlp_bias",
        defaults={"mamba_rms_norm": False},
        own=("mamba_d_state",),
    ),
    # OLMo
    "olmo": Family(norm_vectors=0),
    "olmo2": Family(qk_norm="width"),
    "olmo3": Family(qk_norm="width", kinds=every(4, "sliding_window_pattern")),
    "olmoe": Family(qk_norm="width", moe=Moe(inner="intermediate_size")),
    # Phi
    "phi": Family(
        qkv_bias=True,
        o_bias=True,
        norms=1,
        norm_vectors=2,
        gated=False,
        mlp_bias=True,
        lm_head_bias=True,
        missing={"qk_layernorm": "LayerNorm with bias over each head (qk_layernorm)"},
    ),
    "phi3": Family(qkv_bias=False, o_bias=False, kinds=everywhere),
    "phimoe": Family(kinds=everywhere, norm_vectors=2, moe=Moe(inner="intermediate_size"), lm_head_bias="lm_head_bias"),
    # Others
    "gpt_oss": Family(
        kinds=every(2, "sliding_window_pattern"),
        sinks=True,
        moe=Moe(inner="intermediate_size", bias=True, router_bias=True),
        defaults={"attention_bias": True},
    ),
    "minimax_m2": Family(
        o_bias=False,
        qk_norm=("use_qk_norm", "width"),
        moe=Moe(inner="intermediate_size", router_bias=True),
        defaults={"use_qk_norm": True},
    ),
    "ernie4_5": Family(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True),
    "ernie4_5_moe": Family(
        qkv_bias=False,
        o_bias=False,
        moe=Moe(shared_count=True, router_bias=True, sparse=special.ernie_sparse),
        tied=True,
        missing={"use_bias": "biases beside experts (use_bias)"},
    ),
    "hunyuan_v1_dense": Family(qk_norm=("use_qk_norm", "head"), defaults={"use_qk_norm": True}),
    "hunyuan_v1_moe": Family(
        qk_norm=("use_qk_norm", "head"),
        moe=Moe(inner="intermediate_size", shared="intermediate_size"),
        defaults={"use_qk_norm": True},
        missing={"use_cla": "attention that shares KV across layers (use_cla)"},
    ),
    "exaone4": Family(qkv_bias=False, o_bias=False, kinds=every(4, "sliding_window_pattern"), qk_norm="head"),
    "exaone_moe": Family(
        qkv_bias=False,
        o_bias=False,
        kinds=every(4, "sliding_window_pattern"),
        qk_norm="head",
        moe=_DEEPSEEK_V3,
        defaults={"first_k_dense_replace": 1},
    ),
    "cohere": Family(qk_norm=("use_qk_norm", "width"), norms=1, tied=True),
    "cohere2": Family(kinds=every(4, "sliding_window_pattern"), norms=1, tied=True),
    "starcoder2": Family(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        kinds=everywhere,
        norm_vectors=2,
        gated=False,
        tied=True,
        defaults={"use_bias": True},
    ),
    "stablelm": Family(
        qkv_bias="use_qkv_bias",
        o_bias=False,
        qk_norm=("qk_layernorm", "width"),
        norm_vectors=2,
        missing={"use_parallel_residual": "attention and MLP in parallel (use_parallel_residual)"},
    ),
    "jais2": Family(
        norm_vectors=2, gated=False, mlp_bias="mlp_bias", defaults={"attention_bias": True, "mlp_bias": True}
    ),
    "lfm2": Family(
        qkv_bias=False,
        o_bias=False,
        kinds=special.at_indices("full_attn_idxs", "conv"),
        mixers=_CONV,
        qk_norm="head",
        inner=special.lfm2_inner,
        tied=True,
        defaults={"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3},
    ),
    "lfm2_moe": Family(
        qkv_bias=False,
        o_bias=False,
        kinds=special.at_indices("full_attn_idxs", "conv"),
        mixers=_CONV,
        qk_norm="head",
        moe=Moe(sparse=after_dense, router_bias="use_expert_bias"),
        tied=True,
        defaults={"num_dense_layers": 2, "use_expert_bias": True, "conv_L_cache": 3},
    ),
    "mimo_v2_flash": Family(
        o_bias=False,
        kinds=special.mimo_kinds,
        mixers={**ATTENTIONS, "sliding_attention": special.mimo_window},
        moe=Moe(sparse=after_dense, router_bias=True),
        own=("hybrid_layer_pattern",),
        defaults={"first_k_dense_replace": 1},
        missing={"add_full_attention_sink_bias": "sinks in full attention", "n_shared_experts": "shared experts"},
    ),
}

# Model types that vLLM reads as another (transformers_utils/config.py, _CONFIG_REGISTRY).
SAME_AS: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}

# Multimodal models that vLLM runs, whose text model is one of the above.
WRAPPERS: Final = tuple("gemma3 gemma3n gemma4 llama4 mistral3 qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe".split())

# Families that are looked for, with a part that nothing here describes yet, or that vLLM runs no more
# (models/registry.py, _PREVIOUSLY_SUPPORTED_MODELS).
REFUSED: Final[Mapping[str, str]] = {
    "bamba": "bamba, which vLLM runs no more since 0.23,",
    "deepseek_v4": "hyper-connections and compressed attention (deepseek_v4)",
    "dots1": "dots1, which vLLM runs no more since 0.23,",
    "gemma3n_text": "alternating updates of the residual (AltUp, gemma3n)",
    "jamba": "state-space layers of Mamba 1 (jamba)",
    "longcat_flash": "two attentions in a layer and experts without weights (longcat_flash)",
    "minimax": "lightning attention (minimax)",
}
