"""The known families: one row for each model_type, by which its config's fields become parts.

A row has only differences from Llama. tests/model/architecture/test_families.py compares each with transformers' model
of the same config, element by element, and test_vllm.py with the linears that vLLM builds. Comments name vLLM's files.

vLLM runs olmo, olmo2, smollm3 and starcoder2 through its Transformers backend, and by 0.30 olmo3 and hunyuan too. The
backend fuses and quantises the same linears (models/transformers/base.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
_V3: Final = Family(
    mixers=_MLA, moe=_DEEPSEEK_V3, own=("kv_lora_rank",), defaults={"first_k_dense_replace": 3}, missing=_NO_MLA_BIAS
)
_V32: Final = replace(
    _V3, kinds=lambda _, layers: ["indexed_attention"] * layers, mixers=_INDEXED, own=("kv_lora_rank", "index_topk")
)
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
_GEMMA3: Final = {  # fields that published configs of Gemma 3 leave to the config class
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_QWEN2: Final = Family(
    qkv_bias=True, o_bias=False, kinds=later, defaults={"use_sliding_window": False, "max_window_layers": 28}
)
_QWEN2_VL: Final = replace(_QWEN2, defaults={"use_sliding_window": False, "max_window_layers": 80})
_QWEN3_VL_MOE: Final = Family(qk_norm="head", moe=Moe(sparse=by_step))
_QWEN3_NEXT: Final = Family(
    kinds=_DELTA_KINDS,
    mixers=_DELTA,
    qk_norm="head",
    gated_attention="attn_output_gate",
    moe=_QWEN_MOE,
    defaults={"attn_output_gate": True},
    own=_DELTA_OWN,
)
_QWEN3_5: Final = replace(_QWEN3_NEXT, moe=None)
_GLM4_MOE: Final = Family(
    o_bias=False,
    qk_norm=("use_qk_norm", "head"),
    moe=_DEEPSEEK_V3,
    defaults={"first_k_dense_replace": 1},
    published={"head_dim": 128},
)
_GEMMA4: Final = Family(
    kinds=every(6, "sliding_window_pattern"),
    layer=special.gemma4_layer,
    by_number=True,
    qk_norm="head",
    norms=4,
    moe=Moe(router_scales=True),
    tied=True,
)
_ERNIE: Final = Family(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True)
_HUNYUAN: Final = Family(qk_norm=("use_qk_norm", "head"), defaults={"use_qk_norm": True})
_EXAONE: Final = Family(qkv_bias=False, o_bias=False, kinds=every(4, "sliding_window_pattern"), qk_norm="head")
_LFM2: Final = Family(
    qkv_bias=False,
    o_bias=False,
    kinds=special.at_indices("full_attn_idxs", "conv"),
    mixers=_CONV,
    qk_norm="head",
    tied=True,
)
_GRANITE_MOE: Final = Moe(inner="intermediate_size", shared="shared_intermediate_size", shared_stream=False)

FAMILIES: Final[Mapping[str, Family]] = {
    # the first six
    "qwen2": _QWEN2,
    "qwen3": Family(qk_norm="head", kinds=later, defaults={"use_sliding_window": False, "max_window_layers": 28}),
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(qkv_bias=False, o_bias=False, kinds=everywhere),
    # Qwen3 has no shared expert, but qwen3_moe.py reads its field.
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
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "qwen3_omni_moe_text": replace(_QWEN3_VL_MOE, published={"head_dim": 128}),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": _QWEN2,
    # DeepSeek, Kimi and others with latent attention
    "deepseek_v2": Family(
        mixers=_MLA, moe=_DEEPSEEK, own=("kv_lora_rank",), missing=_NO_MLA_BIAS, published={"num_experts_per_tok": 6}
    ),
    "deepseek_v3": _V3,
    "deepseek_v32": _V32,
    # vLLM reads its params.json as DeepSeek-V3 without a correction of the router's scores
    # (transformers_utils/configs/mistral.py). 0.30 does not run it in the layout of transformers.
    "mistral4": Family(mixers=_MLA, moe=_DEEPSEEK, own=("kv_lora_rank",), missing=_NO_MLA_BIAS),
    "longcat_flash": Family(
        mixers=_MLA,
        layer=special.longcat_layer,
        inner="ffn_hidden_size",
        moe=Moe(inner="expert_ffn_hidden_size", router_bias=True),
        own=("kv_lora_rank",),
        missing={**_NO_MLA_BIAS, "router_bias": "a bias in the router's matrix (router_bias)"},
    ),
    "kimi_linear": replace(
        _V3,
        kinds=special.kimi_kinds,
        mixers={"full_attention": special.latent, "linear_attention": special.kimi_delta},
        own=("kv_lora_rank", "linear_attn_config"),
        defaults={"first_k_dense_replace": 1},
    ),
    # GLM
    "glm": Family(o_bias=False, defaults={"attention_bias": True}),
    "glm4": Family(o_bias=False, norms=4, defaults={"attention_bias": True}),
    "glm4v_text": Family(o_bias=False, norms=4, defaults={"attention_bias": True}),
    "glm_ocr_text": Family(o_bias=False, norms=4),
    "glm4_moe": _GLM4_MOE,
    "glm4v_moe_text": replace(_GLM4_MOE, defaults={"attention_bias": True, "first_k_dense_replace": 1}),
    "glm4_moe_lite": replace(_V3, defaults={"first_k_dense_replace": 1}),
    "glm_moe_dsa": replace(_V32, layer=special.indexed_layer, by_number=True),
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
    "gemma4_text": replace(
        _GEMMA4, defaults={"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
    ),
    "gemma4_unified_text": _GEMMA4,
    # Llama's relatives
    "llama4_text": Family(
        kinds=special.llama4_kinds,
        mixers={"full_attention": attention, "chunked_attention": chunked},
        inner="intermediate_size_mlp",
        moe=Moe(inner="intermediate_size", shared="intermediate_size", sparse=special.llama4_sparse),
        own=("attention_chunk_size",),
    ),
    "arcee": Family(gated=False, mlp_bias="mlp_bias"),
    "apertus": Family(qk_norm="head", gated=False, mlp_bias="mlp_bias", defaults={"hidden_act": "xielu"}),
    "smollm3": Family(
        mlp_bias="mlp_bias",
        tied=True,
        missing={"use_sliding_window": "a sliding window in the layers without positions (use_sliding_window)"},
    ),
    "seed_oss": Family(o_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "internlm3": Family(
        mlp_bias="mlp_bias", missing={"bias": "biases by the field bias", "qkv_bias": "biases by the field qkv_bias"}
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
        layer=special.beside_mamba, mlp_bias="mlp_bias", defaults={"mamba_rms_norm": False}, own=("mamba_d_state",)
    ),
    # OLMo
    "olmo": Family(norm_vectors=0),
    "olmo2": Family(qk_norm="width"),
    "olmo3": Family(qk_norm="width", kinds=every(4, "sliding_window_pattern")),
    "olmoe": Family(qk_norm="width", moe=Moe(inner="intermediate_size")),
    "flex_olmo": Family(qk_norm="width", moe=Moe(inner="intermediate_size")),
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
    "ernie4_5": _ERNIE,
    "paddleocr_vl_text": _ERNIE,
    "ernie4_5_moe": Family(
        qkv_bias=False,
        o_bias=False,
        moe=Moe(shared_count=True, router_bias=True, sparse=special.ernie_sparse),
        tied=True,
        missing={"use_bias": "biases beside experts (use_bias)"},
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        moe=Moe(inner="intermediate_size", shared="intermediate_size"),
        missing={"use_cla": "attention that shares KV across layers (use_cla)"},
    ),
    "exaone4": _EXAONE,
    "exaone_moe": replace(_EXAONE, moe=_DEEPSEEK_V3, defaults={"first_k_dense_replace": 1}),
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
    "lfm2": replace(
        _LFM2,
        inner=special.lfm2_inner,
        defaults={"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "conv_L_cache": 3},
    ),
    "lfm2_moe": replace(
        _LFM2,
        moe=Moe(sparse=after_dense, router_bias="use_expert_bias"),
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

# Multimodal models that vLLM runs with a text model of FAMILIES -> the text model's type if the config has none. Each
# class in vllm/model_executor/models makes the text model by init_vllm_registered_model, or names its class.
WRAPPERS: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "paligemma": "gemma",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "idefics3": "llama",
    "smolvlm": "llama",
    "mistral3": "mistral",
    "voxtral": "llama",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "lighton_ocr": "qwen3",
    "qianfan_ocr": "qwen3",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_audio": "qwen2",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_asr": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "glmasr": "llama",
    "cohere2_vision": "cohere2",
    "exaone4_5": "exaone4",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hunyuan_vl": "hunyuan_vl_text",
    "kimi_vl": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "minicpmv4_6": "qwen3_5_text",
    "nemotron_h_omni": "nemotron_h",
    "paddleocr_vl": "paddleocr_vl_text",
}

# Families that users may ask for, with an unknown part, or without a class in vLLM 0.30. The last version that had the
# class is in models/registry.py, _PREVIOUSLY_SUPPORTED_MODELS.
_DROPPED: Final = "which vLLM has no class for since 0.24 (models/registry.py: supported until 0.23),"
REFUSED: Final[Mapping[str, str]] = {
    "bamba": f"bamba, {_DROPPED}",
    "deepseek_v4": "hyper-connections and compressed attention (deepseek_v4)",
    "dots1": f"dots1, {_DROPPED}",
    "gemma3n_text": "alternating updates of the residual (AltUp, gemma3n)",
    "jamba": "state-space layers of Mamba 1 (jamba)",
    "minimax": f"minimax, which has lightning attention and {_DROPPED}",
}
