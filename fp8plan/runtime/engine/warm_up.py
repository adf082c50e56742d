"""What a started engine runs once, so that nothing is compiled and no garbage collected during a rollout."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from fp8plan.errors import ConfigError
from fp8plan.model.cost.deep_gemm import rows_of_every_kernel
from fp8plan.model.setup import EngineSetup

# Token counts by the nearest of which vLLM picks the tiles of its MoE kernel (vllm/model_executor/layers/fused_moe).
MOE_TILES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def freeze_garbage() -> None:
    """Spare Python's garbage collector the objects that stay, as vLLM does in its server, engine and worker processes.

    It does not in the process that holds an `LLM`, where each full collection stops the front end for 0.35 to 0.6 s,
    about every 20,000 to 60,000 tokens (measured: steps/ of the H200's profile). Long tails hide that; when a large
    batch ends all at once the last tokens wait for it, 0.1 to 0.9 s.
    """
    gc.collect()
    gc.freeze()


def deep_gemm_rows(setup: EngineSetup, most: int) -> list[int]:
    """Numbers of tokens that together need every DeepGEMM kernel of a model; none without blockwise FP8 weights, and
    none of a model whose matrices fp8plan does not know: its kernels compile when they are met."""
    if setup.precision.weights != "fp8_block":
        return []
    try:
        linears = setup.shape.linears()
    except ConfigError:
        return []
    return rows_of_every_kernel([(x.n, x.k) for x in linears if x.quantised], most, setup.gpu.sm_count)


def ladder(longest: int, more: Sequence[int]) -> list[int]:
    """Prompt lengths that meet every kernel of a step: MOE_TILES, odd and even, and `more`, none above `longest`.

    Requests reach the engine one by one, so the first step of a rollout holds any number of tokens: a rollout as
    warm-up does not meet the kernels of every one.
    """
    tiles = {min(tokens + odd, longest) for tokens in MOE_TILES for odd in (0, 1)}
    return sorted(tiles | {tokens for tokens in more if tokens <= longest})


def compiled_files() -> int:
    """Entries in the caches of Triton, DeepGEMM and FlashInfer's own DeepGEMM: what a rollout adds was compiled in it.

    Each has a folder for every kernel; what is in them is not counted, as that takes tens of milliseconds.
    """
    home = Path.home()
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", home / ".cache" / "vllm"))
    flashinfer = Path(os.environ.get("TRTLLM_DG_CACHE_DIR", home / ".tensorrt_llm"))
    triton = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    folders = [vllm / "deep_gemm" / "cache", flashinfer / "cache", triton]
    return sum(_entries(str(folder), os.stat(folder).st_mtime_ns) for folder in folders if folder.is_dir())


@lru_cache(maxsize=16)
def _entries(folder: str, changed: int) -> int:
    """How many entries a folder has since it changed; it is read again only then."""
    return len(os.listdir(folder))
