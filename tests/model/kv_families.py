"""Configs of real families, and vLLM's own KV-cache specs of their layers: the models built on no device.

What the caches depend on is the real model's; vocabulary, experts and hidden sizes are small where they do not matter.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_KIMI_K3_GEMM_AR", "0")  # its kernel needs a package of CUDA's, from 0.32 on
os.environ.setdefault("VLLM_ENABLE_GEMM_RS", "0")

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
NAMES = {
    "s": "sliding_attention",
    "f": "full_attention",
    "l": "linear_attention",
    "c": "chunked_attention",
    "m": "mamba",
    "a": "attention",
    "v": "conv",
}


def _layers(letters: str) -> dict[str, list[str]]:
    return {"layer_types": [NAMES[letter] for letter in letters]}


def _of(architecture: str, model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, **other: Any):
    sizes = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return SMALL | sizes | other


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None}
DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
GEMMA = {"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR = {
    "full_attn_layers": KIMI_FULL,
    "kda_layers": [i for i in range(1, 28) if i not in KIMI_FULL],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _of("Qwen3ForCausalLM", "qwen3", 36, 32, 8, 128),
    "gpt-oss-20b": _of("GptOssForCausalLM", "gpt_oss", 24, 64, 8, 64, sliding_window=128, **_layers("sf" * 12)),
    "Gemma 3 12B": _of(
        "Gemma3ForCausalLM", "gemma3_text", 48, 16, 8, 256, sliding_window=1024, **_layers("sssssf" * 8), **GEMMA
    ),
    "Gemma 2 9B": _of(
        "Gemma2ForCausalLM", "gemma2", 42, 16, 8, 256, sliding_window=4096, **_layers("sf" * 21), **GEMMA
    ),
    "OLMo-3-7B": _of("Olmo3ForCausalLM", "olmo3", 32, 32, 32, 128, sliding_window=4096, **_layers("sssf" * 8)),
    "Llama-4-Scout": _of(
        *("Llama4ForCausalLM", "llama4_text", 48, 40, 8, 128),
        attention_chunk_size=8192,
        no_rope_layers=[int((i + 1) % 4 != 0) for i in range(48)],
        intermediate_size_mlp=256,
        interleave_moe_layer_step=1,
        **_layers("cccf" * 12),
    ),
    "Qwen3-Next-80B": _of("Qwen3NextForCausalLM", "qwen3_next", 48, 16, 2, 256, **_layers("lllf" * 12), **DELTA_NET),
    "DeepSeek-V2-Lite": _of(
        *("DeepseekV2ForCausalLM", "deepseek_v2", 27, 16, 16, 64),
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_routed_experts=4,
        n_shared_experts=2,
        **MLA,
    ),
    "Kimi-Linear-48B": _of(
        *("KimiLinearForCausalLM", "kimi_linear", 27, 32, 32, 72),
        first_k_dense_replace=1,
        moe_layer_freq=1,
        num_shared_experts=1,
        num_experts_per_token=2,
        mla_use_nope=True,
        linear_attn_config=KIMI_LINEAR,
        **MLA,
    ),
    "Nemotron-H-8B": _of(
        *("NemotronHForCausalLM", "nemotron_h", 52, 32, 8, 128),
        hybrid_override_pattern=NEMOTRON,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
        chunk_size=128,
        mlp_hidden_act="relu2",
        attention_head_dim=128,
    ),
    "Granite-4-H-Small": _of(
        *("GraniteMoeHybridForCausalLM", "granitemoehybrid", 40, 32, 8, 128),
        hidden_size=4096,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=256,
        shared_intermediate_size=256,
        **_layers("mmmmmammmm" * 4),
    ),
    "Falcon-H1-7B": _of(
        *("FalconH1ForCausalLM", "falcon_h1", 44, 12, 2, 128),
        mamba_d_ssm=3072,
        mamba_n_heads=24,
        mamba_d_head=128,
        mamba_d_state=256,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_chunk_size=256,
    ),
    "LFM2-1.2B": _of(
        *("Lfm2ForCausalLM", "lfm2", 16, 32, 8, 64),
        hidden_size=2048,
        conv_L_cache=3,
        conv_dim=2048,
        block_dim=2048,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        **_layers("vvfvvfvvfvfvfvfv"),
    ),
}


def _start_one_rank() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

    if not model_parallel_is_initialized():  # an engine that was shut down in this process takes its groups with it
        meeting = tempfile.mkdtemp(prefix="fp8plan-kv-")
        init_distributed_environment(1, 0, f"file://{meeting}/rank", 0, "gloo")
        initialize_model_parallel(1, 1)


def built(config: dict[str, Any], max_model_len: int, max_num_batched_tokens: int, prefix_caching: bool):
    """A VllmConfig for this model, the block size it had before it was fitted to the layers, and the spec of each layer
    that keeps a cache."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
    from vllm.config.vllm import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import transformers
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # an engine does it
    folder = tempfile.mkdtemp(prefix="fp8plan-kv-")
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=64,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=True,
    )
    whole = VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len, seed=0
        ),
        scheduler_config=scheduler,
        # By itself vLLM takes the model's dtype for a state, but for Nemotron-H, Qwen3.5 and some CPUs.
        cache_config=CacheConfig(enable_prefix_caching=prefix_caching, mamba_ssm_cache_dtype="float32"),
        device_config=DeviceConfig("cpu"),
    )
    before = torch.get_default_dtype()
    with set_current_vllm_config(whole):
        _start_one_rank()
        torch.set_default_dtype(torch.bfloat16)
        try:
            # vLLM runs OLMo by way of transformers, whose own class it would change for good.
            unchanged = mock.patch.object(transformers.base.Base, "_decorate_for_torch_compile")
            with torch.device("meta"), mock.patch("torch.cuda.Stream"), unchanged:
                initialize_model(whole)
        finally:
            torch.set_default_dtype(before)
        block_size = whole.cache_config.block_size
        with mock.patch.object(type(current_platform), "_check_aligned_block_size", create=True):  # refuses a CPU's MLA
            current_platform.update_block_size_for_backend(whole)
        layers = get_layers_from_vllm_config(whole, AttentionLayerBase)
        specs = {name: layer.get_kv_cache_spec(whole) for name, layer in layers.items()}
    whole.cache_config.kv_cache_layout = "LBHNC"  # the only one that a CPU's attention reads
    return whole, block_size, {name: spec for name, spec in specs.items() if spec is not None}
