"""What an engine does before it is timed, so that nothing is compiled, and no garbage collected, while it is."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8plan.model.architecture import ModelShape
from fp8plan.model.deep_gemm import rows_of_every_kernel
from fp8plan.model.hardware import gpu
from fp8plan.model.precision import precision
from fp8plan.runtime.measure.timed_rollout import timed

# A short warm-up clips responses here: long enough to fill the batch, short enough to cost a few seconds.
SHORT_RESPONSE, RAMP_STEPS = 64, 128


def warm_up(llm: Any, prompts: Sequence[Any], responses: Sequence[int], kind: str) -> float:
    """Run what the timed run will run, so that no kernel is compiled inside it; seconds it took.

    full:  the whole workload
    short: its prompts with clipped responses, then a decode ramp through every batch size down to 1
    """
    if kind == "full":
        return float(timed(llm, prompts, responses)["seconds"])
    clipped = [min(tokens, SHORT_RESPONSE) for tokens in responses]
    ramp = [1 + RAMP_STEPS * i // len(responses) for i in range(len(responses))]
    lengths = (clipped, [min(pair) for pair in zip(ramp, responses, strict=True)])
    return sum(float(timed(llm, prompts, some)["seconds"]) for some in lengths)


def freeze_garbage() -> None:
    """Spare Python's garbage collector the objects that stay, as vLLM does in its server, engine and worker processes.

    It does not in the process that holds an `LLM`, where each full collection stops the front end for 0.35 to 0.6 s,
    about every 20,000 to 60,000 tokens (measured: steps/ of the H200's profile). Long tails hide that; when a large
    batch ends all at once the last tokens wait for it, 0.1 to 0.9 s.
    """
    gc.collect()
    gc.freeze()


def deep_gemm_rows(fields: Mapping[str, Any], most: int) -> list[int]:
    """Numbers of tokens that together need every DeepGEMM kernel of a model; none without blockwise FP8 weights."""
    if precision(fields["precision"]).weights != "fp8_block":
        return []
    shapes = [(x.n, x.k) for x in ModelShape.from_hf(fields["model"]).linears() if x.quantised]
    return rows_of_every_kernel(shapes, most, gpu(fields["gpu"]).sm_count)


def prefill_ladder(llm: Any, more: Sequence[int]) -> list[int]:
    """Run single prompts of the token counts at which vLLM's MoE kernel changes its tiles, odd and even, and of `more`
    counts; which ones.

    Requests reach the engine one by one, so the first step of a rollout holds any number of tokens: a warm-up run does
    not meet the kernels of every one (vllm/model_executor/layers/fused_moe: tiles by the nearest of these counts).
    """
    from vllm import SamplingParams

    longest = llm.llm_engine.model_config.max_model_len - 1
    steps = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
    lengths = sorted(
        {min(tokens + odd, longest) for tokens in steps for odd in (0, 1)} | {x for x in more if x <= longest}
    )
    for token, length in enumerate(lengths):  # a token of its own, so that no prompt finds a shorter one in the cache
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)
        llm.generate([{"prompt_token_ids": [token] * length}], params, use_tqdm=False)
    return lengths


def compiled_files() -> int:
    """Files in the caches of Triton, DeepGEMM and FlashInfer's own DeepGEMM: what a run adds was compiled inside it."""
    home = Path.home()
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", home / ".cache" / "vllm"))
    flashinfer = Path(os.environ.get("TRTLLM_DG_CACHE_DIR", home / ".tensorrt_llm"))
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    folders = [vllm / "deep_gemm", flashinfer / "cache", triton]
    return sum(len(files) for folder in folders for _, _, files in os.walk(folder))
