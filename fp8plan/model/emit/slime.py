"""A planned engine as arguments of slime, as of 21 August 2026 (slime/utils/arguments.py), whose engine is SGLang.

SGLang's own arguments have the prefix --sglang (slime/backends/sglang_utils/arguments.py). FP8 weights are asked for by
an FP8 checkpoint: slime quantises each update as that checkpoint is (docs/en/advanced/low-precision.md).
"""

from __future__ import annotations

import shlex
from pathlib import PurePath
from typing import Any, Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.stock import Stock, common_settings, stock_words
from fp8plan.model.emit.trainers import SLIME

STOCK: Final = Stock(
    title="slime of 21 August 2026 (624b824a)",
    paste="the end of: python train.py ...",
    engine="SGLang 0.5.15, which nobody has measured",
    words={
        "model": "--hf-checkpoint",
        "tensor_parallel_size": "--rollout-num-gpus-per-engine",
        "expert_ranks": "--sglang-ep-size",
        "gpu_memory_utilization": "--sglang-mem-fraction-static",
        "max_model_len": "--rollout-max-context-len",
        "max_num_seqs": "--sglang-max-running-requests",
        "max_num_batched_tokens": "--sglang-chunked-prefill-size",
        "max_cudagraph_capture_size": "--sglang-cuda-graph-max-bs",
        "enforce_eager": "--sglang-disable-cuda-graph",
        "gpus": "--rollout-num-gpus",
        "prompts": "--rollout-batch-size",
        "samples": "--n-samples-per-prompt",
        "max_prompt_tokens": "--rollout-max-prompt-len",
        "max_response_tokens": "--rollout-max-response-len",
    },
    replicas="--rollout-num-gpus",
    passed=None,
    # Its words for the cache and the precision; arguments of vLLM's kernels say nothing to SGLang.
    omitted=(
        *("quantization", "quantization_config", "kv_cache_dtype", "enable_prefix_caching"),
        *("attention_backend", "moe_backend", "scheduler_reserve_full_isl", "async_scheduling"),
    ),
    trainer=SLIME,
    keeps=False,
)
# Requests that slime sends to a server, unless --sglang-server-concurrency says another number.
_CONCURRENT: Final = 512


def emit_slime(job: Job) -> str:
    """The settings as shell words."""
    setup, limits = job.setup, job.setup.limits
    settings: dict[str, Any] = {
        **common_settings(job, STOCK),
        "--sglang-disable-radix-cache": not limits.enable_prefix_caching,
        "--use-tis": job.constant_tis is not None,
    }
    if limits.max_num_seqs > _CONCURRENT:
        settings.setdefault("--sglang-server-concurrency", int(limits.max_num_seqs))
    if setup.precision.kv == "fp8":
        settings["--sglang-kv-cache-dtype"] = "fp8_e4m3"
    if job.constant_tis is not None:
        settings["--tis-clip"] = float(job.constant_tis)
    share = "--sglang-mem-fraction-static leaves out activations and CUDA graphs, which vLLM's share includes"
    more = [f"{share}: lower it if SGLang has too little memory"]
    if setup.precision.in_blocks:
        blocks = f"{PurePath(setup.path).name}-FP8"
        settings["--hf-checkpoint"] = blocks
        convert = ["python", "tools/convert_hf_to_fp8.py", "--model-dir", setup.path, "--save-dir", blocks]
        more.append(
            "make the FP8 checkpoint first, from a local folder of the model: "
            f"{shlex.join(convert)} --strategy block --block-size 128 128"
        )
    return stock_words(job, STOCK, settings, *more)
